"""Every command and every Python snippet of the README and of docs/ runs, page by page, from top to bottom.

The Hub repositories that the commands name are small models on a local server.
"""

import io
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from command_line import CommandLine, hub_environment
from common import save_text_model
from fetched import cl100k_ranks
from hub_server import HubServer, Repo
from test_convert import REFERENCES
from test_gguf_source import write_gguf
from test_upgrade import pretrained, save_source

from lr_attnres import cli
from lr_attnres.data.tokenizers import CL100K_VOCAB_SIZE


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
# Text of a snippet that this test does not run -> why, and which test covers it.
NOT_RUN = {
    "make ": "`make test` runs this test; test_examples.py runs what `make demo` runs",
    "pip install": "test_packaging.py checks the wheel and its extras",
    "accelerate launch": "needs several GPUs; test_loop_parallel.py launches two processes",
    "openbmb/Ultra-FineWeb": "10 billion tokens; test_documents.py streams a dataset",
    "lr-attnres serve": "runs until it is stopped; test_server.py",
    "--depth-backend triton": "needs a GPU; interpreted_depth_routing_triton.py runs the kernels",
    "lr-attnres explore": "runs until it is stopped; test_explorer.py",
    "python examples/miniature/": "hours; test_miniature.py runs a smaller sweep",
    "python examples/real_weights/": "days; test_real_weights_study.py runs a smaller study",
    "from openai import": "needs the server; test_server.py runs it",
    "vllm": "needs an environment of its own; served_by_vllm.py",
    "VLLM": "needs an environment of its own; served_by_vllm.py",
    "pip uninstall": "would change this environment; `make test-vllm` does it in its own",
}
# Training for as long as the pages say would take minutes.
SHORTER = {"train": ["--steps", "2", "--warmup-steps", "1"]}
# A fenced block, or a command in a table, which is never in the first column.
SNIPPET = re.compile(r"```(bash|python)\n(.*?)```|(?<=\S )\| `(lr-attnres [^`\n]+)` \|", flags=re.DOTALL)


def snippets(page: Path) -> list[tuple[str, str]]:
    """("bash", one command) or ("python", a whole block)."""
    found = []
    for language, block, cell in SNIPPET.findall(page.read_text()):
        if language == "python":
            found.append(("python", block))
            continue
        lines = [cell] if cell else block.replace("\\\n", " ").splitlines()
        found += [("bash", line) for line in lines if line.strip() and not line.startswith("#")]
    return found


def is_run(text: str) -> bool:
    return not any(pattern in text for pattern in NOT_RUN)


def released_checkpoint() -> bytes:
    """A small checkpoint of the author's code with the vocabulary of the real ones."""
    checkpoint = torch.load(REFERENCES / "plr_block3_r8.pt", weights_only=True)
    checkpoint["model_args"]["vocab_size"] = CL100K_VOCAB_SIZE
    for name in ("transformer.wte.weight", "lm_head.weight"):
        weight = checkpoint["model"][name]
        checkpoint["model"][name] = weight.repeat(CL100K_VOCAB_SIZE // len(weight) + 1, 1)[:CL100K_VOCAB_SIZE].clone()
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return file.getvalue()


@pytest.fixture
def reader(tmp_path):
    """A command line in an empty folder."""
    with HubServer() as hub:
        save_source(tmp_path / "qwen", "qwen3", hidden_size=64, max_position_embeddings=256)
        released = {"final_model.pt": hub.store(released_checkpoint(), lfs=True)}
        pretrained = {path.name: hub.store(path.read_bytes(), lfs=True) for path in (tmp_path / "qwen").iterdir()}
        for name, files in {"Jonnester/LR-AttnRes-LR-n8-r32": released, "Qwen/Qwen3-0.6B": pretrained}.items():
            hub.repos["model", name] = Repo()
            hub.repos["model", name].commit("main", files)
        hub.users["hf_owner"] = ("owner", True)
        environment = hub_environment(hub.url, tmp_path / "hf_home", HF_TOKEN="hf_owner")
        environment["TIKTOKEN_CACHE_DIR"] = str(cl100k_ranks().parent)
        folder = tmp_path / "reader"
        folder.mkdir()
        with CommandLine(environment, folder) as run:
            yield run, folder


def make_expected_files(folder: Path, token_data: Path) -> None:
    """The models and the text that a page expects from another one."""
    for name in ("run/model", "a", "b", "c"):
        save_text_model(folder / "outputs" / name)
    shutil.copytree(token_data, folder / "outputs/data")
    (folder / "book.txt").write_text("It was the best of times, it was the worst of times. " * 200)


RUN = [page for page in PAGES if any(is_run(text) for _, text in snippets(page))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_every_snippet_runs(page, reader, token_data):
    run, folder = reader
    if page.stem == "upgrade":
        small = pretrained(hidden_size=64, num_attention_heads=4)
        write_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", small, "llama")
    if page.stem in ("diagnostics", "numerics"):
        make_expected_files(folder, token_data)
    for language, text in snippets(page):
        if not is_run(text):
            continue
        if language == "python":
            result = run.script(text)
        else:
            program, command, *arguments = shlex.split(text, comments=True)
            assert program == "lr-attnres", f"{text!r} is neither run nor explained by NOT_RUN"
            result = run(command, *arguments, *SHORTER.get(command, []), HF_TOKEN="hf_owner")
        assert result.code == 0, f"{text}\n{result.err}"


def test_every_command_parses():
    """Also those that are not run."""
    commands = [text for page in PAGES for _, text in snippets(page) if text.startswith("lr-attnres ")]
    assert {command.split()[1] for command in commands} == set(cli.COMMANDS)
    for command in commands:
        cli.make_parser().parse_args(shlex.split(command, comments=True)[1:])


def test_every_exception_is_needed():
    texts = [text for page in PAGES for _, text in snippets(page)]
    assert [pattern for pattern in NOT_RUN if not any(pattern in text for text in texts)] == []


def test_what_the_pages_name_exists():
    """Tests, their files, and links to other pages."""
    files = {path.name: path.read_text() for path in ROOT.glob("tests/**/*.py")}
    tests = "".join(files.values())
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        missing = [name for name in re.findall(r"\btest_\w+(?!\w*\.py)\b", text) if f"def {name}(" not in tests]
        missing += [name for name in re.findall(r"\b(test_\w+\.py)", text) if name not in files]
        paths = re.findall(r"\b((?:tests|examples|benchmarks|docs)/[\w/]+\.(?:py|sh|yaml|jsonl|md))\b", text)
        missing += [path for path in paths if not any((folder / path).exists() for folder in (ROOT, page.parent))]
        missing += [link for link in re.findall(r"\]\(([^)#:]+\.md)", text) if not (page.parent / link).exists()]
        assert missing == [], page


def test_the_figure_of_the_architecture_is_drawn_from_the_code(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import make_architecture

    assert make_architecture.drawing() == (ROOT / "docs/architecture.svg").read_text(encoding="utf-8")
