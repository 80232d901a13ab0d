"""The pages claim no more than there is: links lead somewhere, and the compatibility matrix is what the tests try."""

import re
from pathlib import Path

import pytest
import yaml
from compatibility import MATRIX, RESIDUAL_TYPES, Trial, cells_of, collect_trials, mark_of

import lr_attnres


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
Rows = dict[str, tuple[list[str], set[tuple[str, Path]]]]  # feature -> cells by residual type, (test, file) by link


def read_matrix() -> Rows:
    rows: Rows = {}
    for cells in filter(None, map(cells_of, MATRIX.read_text().splitlines())):
        feature, *marks, tests = cells
        assert len(marks) == len(RESIDUAL_TYPES), f"{feature} has {len(marks)} cells"
        assert feature not in rows, f"{feature} has two rows"
        links = {(name.strip("`"), (MATRIX.parent / path).resolve()) for name, path in LINK.findall(tests)}
        rows[feature] = marks, links
    return rows


def problems(rows: Rows, trials: list[Trial]) -> list[str]:
    """Where the page and the marked tests disagree."""
    found = [
        f"{trial.feature}: {trial.test} tries it, but it has no row" for trial in trials if trial.feature not in rows
    ]
    for feature, (cells, links) in rows.items():
        own = [trial for trial in trials if trial.feature == feature]
        for residual_type, cell in zip(RESIDUAL_TYPES, cells):
            if cell != (tried := mark_of(residual_type, own)):
                found.append(f"{feature}: the page says {cell} of {residual_type}, the tests say {tried}")
        if links != (tests := {(trial.test, trial.path) for trial in own}):
            names = sorted(test for test, _ in tests)
            found.append(f"{feature}: the page links {sorted(test for test, _ in links)}, marked are {names}")
    return found


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    return collect_trials()


def test_the_matrix_is_what_the_tests_try(trials):
    rows = read_matrix()
    assert len(rows) >= 50
    assert problems(rows, trials) == []


def test_the_matrix_notices_what_is_missing(trials):
    """A variant that a test no longer runs, a test without its mark, and a mark without a row."""
    rows, feature = read_matrix(), "Dynamic cache"
    without_full = [t for t in trials if t.feature != feature or t.residual_type != "sliced" or not t.has_full_sources]
    assert problems(rows, without_full) == [f"{feature}: the page says yes of sliced, the tests say blocks"]
    unmarked = problems(rows, [trial for trial in trials if trial.feature != feature])
    assert f"{feature}: the page says yes of sliced, the tests say not tried" in unmarked
    assert f"{feature}: the page says yes of standard, the tests say n/a" in unmarked
    test = "test_cached_logits_equal_uncached"
    assert f"{feature}: the page links ['{test}'], marked are []" in unmarked
    without_row = {name: row for name, row in rows.items() if name != feature}
    assert set(problems(without_row, trials)) == {f"{feature}: {test} tries it, but it has no row"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = {target.split("#")[0] for _, target in LINK.findall(text) if "://" not in target}
    assert [target for target in sorted(targets) if target and not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_heading(page):
    targets = [target for _, target in LINK.findall(page.read_text()) if "#" in target and "://" not in target]
    for path, _, anchor in (target.partition("#") for target in targets):
        assert anchor in anchors((page.parent / path) if path else page), f"{page.name}: {path}#{anchor}"


def test_the_citation_is_that_of_the_file():
    facts = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    entry = (ROOT / "README.md").read_text().split("```bibtex\n")[1].split("```")[0].replace("{", "").replace("}", "")
    fields = dict(re.findall(r"^  (\w+) += (.*?),?$", entry, re.MULTILINE))
    (author,) = facts["authors"]
    assert facts["version"] == lr_attnres.__version__
    assert fields == {name: facts[name] for name in ("title", "version", "license")} | {"author": author["name"]}


def test_every_promise_has_its_test():
    rows = re.findall(r"^\| .* \| `([\w/]+\.py)::(\w+)` \|$", (ROOT / "docs/reliability.md").read_text(), re.MULTILINE)
    assert len(rows) >= 14
    for file, name in rows:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}::{name}"
