"""Every command and every Python snippet of the README and of docs/ runs, in the order in which a reader meets them.

Repositories that the commands name are on a Hub of the test's own: small models of the same kind.
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
from test_conversion import REFERENCES
from test_upgrade import save_source

from lr_attnres.tokenizer import CL100K_VOCAB_SIZE


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
# What a test cannot run as it stands, and why that is all right.
NOT_RUN = {
    "make ": "`make test` is what runs this; test_quickstart runs what `make demo` does",
    "pip install": "test_packaging.py looks at the wheel and its extras",
    "accelerate launch": "needs several GPUs; test_training_parallel.py launches two processes",
    "openbmb/Ultra-FineWeb": "10 billion tokens; test_documents.py streams a dataset",
    "lr-attnres serve": "runs until it is stopped; test_serving.py",
    "lr-attnres explore": "runs until it is stopped; test_explore.py",
    "python benchmarks/": "minutes each; test_benchmarks.py",
    "python examples/miniature/": "hours; test_miniature.py runs a smaller sweep",
    "from openai import": "needs the server; test_serving.py runs it",
}
# Training for as long as the README says would take minutes.
SHORTER = {"train": ["--steps", "2", "--warmup-steps", "1"]}


def snippets(page: Path) -> list[tuple[str, str]]:
    """("bash", one command) or ("python", a whole block)."""
    found = []
    for language, text in re.findall(r"```(bash|python)\n(.*?)```", page.read_text(), flags=re.DOTALL):
        text = text.replace("\\\n", " ")
        parts = text.splitlines() if language == "bash" else [text]
        found += [(language, part) for part in parts if part.strip() and not part.startswith("#")]
    return found


def is_run(text: str) -> bool:
    return not any(pattern in text for pattern in NOT_RUN)


def released_checkpoint() -> bytes:
    """A small one of the author's code, with as many tokens as the real ones have."""
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
    """The command line of someone who reads the pages in a folder of their own."""
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


def take_for_granted(folder: Path, token_data: Path) -> None:
    """Models and text, for the pages that look at them."""
    for name in ("run/model", "a", "b", "c"):
        save_text_model(folder / "outputs" / name)
    shutil.copytree(token_data, folder / "outputs/data")
    (folder / "book.txt").write_text("It was the best of times, it was the worst of times. " * 200)


RUN = [page for page in PAGES if any(is_run(text) for _, text in snippets(page))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_every_snippet_runs(page, reader, token_data):
    run, folder = reader
    if page.stem in ("diagnostics", "numerics"):
        take_for_granted(folder, token_data)
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


def test_what_is_not_run_is_there():
    """A pattern that no page has any more is removed."""
    texts = [text for page in PAGES for _, text in snippets(page)]
    assert [pattern for pattern in NOT_RUN if not any(pattern in text for text in texts)] == []


def test_what_the_pages_name_exists():
    """Tests, their files, and links to other pages."""
    tests = "".join(path.read_text() for path in ROOT.glob("tests/*.py"))
    for page in PAGES:
        text = page.read_text()
        missing = [name for name in re.findall(r"\btest_\w+(?!\w*\.py)\b", text) if f"def {name}(" not in tests]
        files = re.findall(r"\b(?:tests/)?(test_\w+\.py)", text)
        missing += [name for name in files if not (ROOT / "tests" / name).exists()]
        missing += [link for link in re.findall(r"\]\(([^)#:]+\.md)\)", text) if not (page.parent / link).exists()]
        assert missing == [], page


def test_the_file_map_is_complete():
    """Each file has its promise in the README, and no promise is left of one that is gone."""
    map_of_files = (ROOT / "README.md").read_text().split("\n## Files\n")[1].split("\n## ")[0]
    named = {Path(name).name for name in re.findall(r"`([^`\s]+)`", map_of_files)}
    folders = ("lr_attnres", "examples", "examples/miniature", "benchmarks", "docs", "tests")
    files = [path.name for folder in folders for path in (ROOT / folder).glob("*.py")]
    assert [name for name in files if not name.startswith("test_") and name not in named] == []
    listed = re.findall(r"^\| (`.*?`) \|", map_of_files, flags=re.MULTILINE)
    for row in listed:
        first, *others = re.findall(r"`(.*?)`", row)
        paths = [ROOT / first, *((ROOT / first).parent / other for other in others)]
        assert [path for path in paths if not (path.exists() or (ROOT / path.name).exists())] == [], row


def test_the_figure_of_the_architecture_is_drawn_from_the_code(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import make_architecture

    assert make_architecture.drawing() == (ROOT / "docs/architecture.svg").read_text(encoding="utf-8")
