"""The command line parses and calls: its errors are one line, its examples parse, and `--help` shows them."""

import shlex
import sys

import pytest

import lr_attnres
from lr_attnres import cli


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"lr-attnres {lr_attnres.__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_shows_an_example_that_parses(name, capsys, monkeypatch):
    summary, example, add_arguments = cli.COMMANDS[name]
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"example:\n  {example}\n" in capsys.readouterr().out

    calls = []

    def parse_only(parser):
        add_arguments(parser)
        return lambda **options: calls.append(options)

    monkeypatch.setitem(cli.COMMANDS, name, (summary, example, parse_only))
    assert cli.main(shlex.split(example)[1:]) == 0
    assert len(calls) == 1


@pytest.mark.parametrize(
    "command, module, package, extra",
    [
        ("prepare sotu out", "data", "pyarrow", "train"),
        ("train tiny --data data --output-dir out", "training", "accelerate", "train"),
        ("evaluate model data", "evaluation", "accelerate", "train"),
        ("analyze model --data sotu --output out", "plots", "matplotlib", "analysis"),
        ("cost --paper --figure out.png", "plots", "matplotlib", "analysis"),
        ("explore model", "explore", "gradio", "explore"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(command, module, package, extra, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"lr_attnres.{module}", raising=False)
    assert cli.main(command.split()) == 1
    assert capsys.readouterr().err == f"Error: {package} is not installed: pip install 'lr-attnres[{extra}]'\n"


@pytest.mark.parametrize("arguments", [[], ["train-faster"], ["push", "owner/name"]], ids=str)
def test_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage: lr-attnres" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code, message",
    [
        (ValueError("two\nlines"), 1, "Error: two lines\n"),
        (FileNotFoundError(2, "No such file", "model.pt"), 1, "Error: No such file (model.pt).\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
    ],
    ids=["value", "file", "interrupt"],
)
def test_errors_are_one_line(error, code, message, capsys, monkeypatch):
    def fails(parser):
        def run():
            raise error

        return run

    monkeypatch.setitem(cli.COMMANDS, "fails", ("", "", fails))
    assert cli.main(["fails"]) == code
    assert capsys.readouterr().err == message
