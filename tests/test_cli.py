"""The command line: errors are one line, the printed examples run, and `--help` imports nothing heavy."""

import argparse
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lr_attnres
from lr_attnres import cli


ROOT = Path(__file__).parents[1]


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"lr-attnres {lr_attnres.__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_shows_an_example_that_parses(name, capsys, monkeypatch):
    command = cli.COMMANDS[name]
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"example:\n  {command.example}\n" in capsys.readouterr().out

    calls = []

    def parse_only(parser):
        command.add_arguments(parser)
        return lambda **options: calls.append(options)

    monkeypatch.setitem(cli.COMMANDS, name, command._replace(add_arguments=parse_only))
    assert cli.main(shlex.split(command.example)[1:]) == 0
    assert len(calls) == 1


def test_every_option_has_a_help_text():
    for command in cli.COMMANDS.values():
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        assert [action.dest for action in parser._actions if not action.help] == []


SHOW_EVERY_HELP = """
import sys
from lr_attnres import cli

for command in ([], *([name] for name in cli.COMMANDS)):
    try:
        cli.main([*command, "--help"])
    except SystemExit as stop:
        assert stop.code == 0
heavy = {"torch", "transformers", "huggingface_hub"} & sys.modules.keys()
assert not heavy, f"--help imports {heavy}"
"""


def test_help_imports_nothing_heavy():
    result = subprocess.run([sys.executable, "-c", SHOW_EVERY_HELP], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("usage: lr-attnres") == 1 + len(cli.COMMANDS)


FUNCTIONS = {
    "prepare": lr_attnres.prepare_data,
    "evaluate": lr_attnres.evaluate,
    "convert": lr_attnres.convert_released_checkpoint,
    "upgrade": lr_attnres.upgrade_model,
    "push": lr_attnres.push,
    "generate": lr_attnres.generate_text,
    "serve": lr_attnres.serve,
    "analyze": lr_attnres.analyze,
    "explore": lr_attnres.explore,
    "doctor": lr_attnres.doctor,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_command_has_the_defaults_of_its_function(name):
    parser = argparse.ArgumentParser()
    cli.COMMANDS[name].add_arguments(parser)
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    options = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    defaults = {
        action.dest: action.default
        for action in options
        if not action.required and action.default is not argparse.SUPPRESS
    }
    assert defaults
    assert defaults == {name: parameters[name].default for name in defaults}


def test_the_examples_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    """As printed, except for shorter runs. `convert` and `upgrade` need the Hub; `serve` and `explore` do not end."""
    monkeypatch.chdir(tmp_path)
    shorter = {"train": "--steps 2 --warmup-steps 0", "analyze": "--max-tokens 600"}
    for name in ("prepare", "train", "evaluate", "generate", "push", "analyze", "cost"):
        arguments = shlex.split(f"{cli.COMMANDS[name].example} {shorter.get(name, '')}")[1:]
        assert cli.main(arguments) == 0, capsys.readouterr().err
        shown = capsys.readouterr()
        assert shown.out and "\x1b" not in shown.out + shown.err  # no colours: the output is not a terminal
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == ["analysis", "data", "run"]


PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_commands_of_the_pages_parse(page):
    text = page.read_text().replace("\\\n", " ")
    commands = re.findall(r"^(?:lr-attnres|accelerate launch .* -m lr_attnres\.cli) +(\S.*)$", text, re.MULTILINE)
    if page.name == "README.md":
        commands += re.findall(r"\| `lr-attnres +([^`]+)` \|", text)  # in its table
    assert commands or page.name != "README.md"
    for command in commands:
        cli.make_parser().parse_args(shlex.split(command, comments=True))


@pytest.mark.parametrize(
    "command, modules, package, extra",
    [
        ("prepare sotu out", "data.packing data.packer data.packed_tokens", "pyarrow", "train"),
        ("train tiny --data data --output-dir out", "training.loop", "accelerate", "train"),
        ("evaluate model data", "training.evaluation", "accelerate", "train"),
        ("analyze model --data sotu --output out", "analysis.plots", "matplotlib", "analysis"),
        ("cost --paper --figure out.png", "analysis.plots", "matplotlib", "analysis"),
        ("explore model", "analysis.explorer", "gradio", "explore"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(command, modules, package, extra, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    for module in modules.split():  # imported again by the command
        monkeypatch.delitem(sys.modules, f"lr_attnres.{module}", raising=False)
    assert cli.main(command.split()) == 1
    command = f'pip install "lr-attnres[{extra}]", or in a clone pip install ".[{extra}]"'
    assert capsys.readouterr().err == f"Error: {package} is not installed: {command}\n"


@pytest.mark.parametrize("message, is_explained", [("can't allocate memory: you tried", True), ("a bug", False)])
def test_full_memory_is_explained_in_one_line(message, is_explained, monkeypatch, capsys):
    def fail(*args, **options):
        raise RuntimeError(f"[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: {message}")

    monkeypatch.setattr("lr_attnres.inference.generate.generate_text", fail)
    arguments = ["generate", "model", "--prompt", "x"]
    if is_explained:
        assert cli.main(arguments) == 1
        assert capsys.readouterr().err.startswith("Error: the memory is full: ")
    else:
        with pytest.raises(RuntimeError, match="a bug"):
            cli.main(arguments)


def test_no_arguments_and_help_show_the_workflow(capsys):
    assert cli.main([]) == 2
    shown = capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert (shown.out, shown.err) == ("", text)
    names = ("prepare", "train", "evaluate", "generate", "push")
    positions = [text.index(cli.COMMANDS[name].example) for name in names]
    assert positions == sorted(positions)
    assert all(f"    {name} " in text for name in cli.COMMANDS)


@pytest.mark.parametrize(
    "command, message",
    [
        (
            "train-faster",
            "argument COMMAND: invalid choice: 'train-faster' (choose from .*) (see `lr-attnres --help`)",
        ),
        ("push owner/name", "the following arguments are required: FOLDER (see `lr-attnres push --help`)"),
        ("train tiny --stepz 3", "unrecognized arguments: --stepz 3 (see `lr-attnres train --help`)"),
        ("generate x --prompt y --dtype int8", "argument --dtype: invalid choice: 'int8' .*"),
        *(
            (
                f"{command} --num-depth-blocks {value}",
                f"argument --num-depth-blocks: '{value}' is neither a positive whole number nor `full` .*",
            )
            for command in ("cost", "upgrade in out")
            for value in ("x", "0", "-3", "1.5", "FULL")
        ),
    ],
)
def test_usage_errors_are_one_line(command, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(command.split())
    assert stop.value.code == 2
    pattern = re.escape(message).replace(r"\.\*", ".*")
    assert re.fullmatch(f"Error: {pattern}\n", capsys.readouterr().err)


@pytest.mark.parametrize("command", ["cost", "upgrade in out"])
def test_blocks_are_a_number_or_full_and_omitted_options_are_absent(command):
    parse = cli.make_parser().parse_args
    for full in ("full", "none", "None"):
        assert parse([*command.split(), "--num-depth-blocks", full]).num_depth_blocks is None
    assert parse([*command.split(), "--num-depth-blocks", "4"]).num_depth_blocks == 4
    assert not {"residual_type", "num_depth_blocks", "depth_key_rank"} & vars(parse(command.split())).keys()


def test_a_closed_pipe_is_no_error():
    """As in `lr-attnres cost --paper | head -1`, with a reader that closes the pipe before the first byte."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "lr_attnres.cli", "cost", "--paper"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize(
    "error, code, message",
    [
        (ValueError("two\nlines"), 1, "Error: two lines\n"),
        (FileNotFoundError(2, "No such file", "model.pt"), 1, "Error: No such file (model.pt).\n"),
        (torch.OutOfMemoryError("No memory."), 1, "Error: No memory. Take smaller batches, shorter rows or another"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
    ],
    ids=["value", "file", "memory", "interrupt"],
)
def test_errors_are_one_line(error, code, message, capsys, monkeypatch):
    def fails(parser):
        def run():
            raise error

        return run

    monkeypatch.setitem(cli.COMMANDS, "fails", cli.Command("", "", fails))
    assert cli.main(["fails"]) == code
    assert capsys.readouterr().err.startswith(message)
