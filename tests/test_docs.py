"""The pages claim no more than there is: links lead somewhere, and the compatibility matrix is what the tests try."""

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from common import SIZES, VARIANTS
from test_conversion import NAMES

import lr_attnres
from lr_attnres.variants import VARIANT, spell_variant


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
MATRIX = ROOT / "docs/compatibility.md"
KINDS = ["standard", "attnres", "projected", "sliced"]
MARKS = {"yes", "full", "blocks", "no", "n/a"}
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def rows() -> dict[str, tuple[list[str], list[tuple[str, str]]]]:
    """Feature -> its marks, one per residual type, and its links: (name of the test, path)."""
    found = {}
    for line in MATRIX.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 6 and cells[1] != "standard" and set(cells[0]) != {"-"}:
            assert cells[0] not in found, f"{cells[0]} has two rows"
            found[cells[0]] = (cells[1:5], LINK.findall(cells[5]))
    return found


def linked_test(name: str, path: str):
    """The function that a link of the matrix names."""
    file = (MATRIX.parent / path).resolve()
    assert file.is_file() and file.parent == ROOT / "tests", f"{path} is no file of tests/"
    return getattr(importlib.import_module(file.stem), name)


def tried_variants(function: Callable) -> set[str]:
    """What a test is parametrised over, goes through or names; if nothing, what the small models of tests are."""
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    values = [
        part for mark in marks for value in mark.args[1] for part in (value if isinstance(value, tuple) else [value])
    ]
    source, module = inspect.getsource(function), importlib.import_module(function.__module__)
    for text in (source, *((ROOT / name).read_text() for name in re.findall(r"tests/\w+\.py", source))):
        values += re.findall(r'"([\w-]+)"', text)
    if "folders" in inspect.signature(function).parameters:  # a saved model of each
        values += module.VARIANTS
    if "in NAMES" in source:
        values += module.NAMES
    return {name for value in values if (name := as_variant(value))} or {"sliced_block"}


def as_variant(value: object) -> str | None:
    """The variant that a parameter of a test stands for: a name, fields of a config, or a released checkpoint."""
    if isinstance(value, dict) and "residual_type" in value:
        return spell_variant(value["residual_type"], value.get("num_depth_blocks"), SIZES["depth_key_rank"])
    if not isinstance(value, str):
        return None
    if value in VARIANTS or VARIANT.fullmatch(value):
        return value
    released = {"baseline": "standard", "attnres": "attnres", "plr": "projected", "slr": "sliced"}
    return value.replace(value.split("_")[0], released[value.split("_")[0]]) if value in NAMES else None


def mark_of(kind: str, variants: set[str]) -> str:
    """`sliced_full` and `sliced-full-r8` are full, `sliced_block` and `sliced-n2-r8` are in blocks."""
    mine = [name for name in variants if name.startswith(kind)]
    full = [name for name in mine if "full" in name]
    if not mine:
        assert kind == "standard", f"{kind} was not tried"
        return "n/a"
    if kind == "standard" or 0 < len(full) < len(mine):
        return "yes"
    return "full" if full else "blocks"


def test_the_matrix_has_rows():
    assert len(rows()) >= 30


@pytest.mark.parametrize("feature", rows())
def test_every_cell_was_tried(feature):
    marks, links = rows()[feature]
    assert links and set(marks) <= MARKS
    functions = [linked_test(name.strip("`"), path) for name, path in links]
    assert all(function.__name__.startswith("test_") for function in functions)
    tried = set.union(*map(tried_variants, functions))
    for kind, mark in zip(KINDS, marks):
        assert mark == mark_of(kind, tried) or (mark == "no" and mark_of(kind, tried) != "n/a"), kind


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = {target.split("#")[0] for _, target in LINK.findall(text) if "://" not in target}
    assert [target for target in sorted(targets) if target and not (page.parent / target).exists()] == []


def test_the_citation_is_that_of_the_file():
    facts = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    entry = (ROOT / "README.md").read_text().split("```bibtex\n")[1].split("```")[0].replace("{", "").replace("}", "")
    fields = dict(re.findall(r"^  (\w+) += (.*?),?$", entry, re.MULTILINE))
    (author,) = facts["authors"]
    assert facts["version"] == lr_attnres.__version__
    assert fields == {name: facts[name] for name in ("title", "version", "license")} | {"author": author["name"]}
