"""The sdist and the wheel hold the package, all of it and nothing else; every extra that is named exists."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
# extra -> the modules that its commands import; "" is the package without any
ENTRIES = {
    "": ["cli", "cost", "hub_upload", "text_generation", "training_arguments", "upgrade"],
    "train": ["data", "evaluation", "training"],
    "hub": ["conversion"],
    "serve": ["serving"],
    "analysis": ["analysis", "held_out", "plots"],
    "explore": ["explore"],
}
REQUIREMENTS = {"yaml": "PyYAML"}  # where the import is called otherwise


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built as an index would: from the sdist alone. Works on a copy, where nothing older lies about."""
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    without_data = shutil.ignore_patterns("__pycache__", "*.pt")
    for name in ("lr_attnres", "tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=without_data)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    sdist = build("build_sdist", source, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return zipfile.ZipFile(build("build_wheel", folder / sdist.name.removesuffix(".tar.gz"), folder))


def build(step: str, source: Path, output: Path) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.{step}({str(output)!r}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return output / result.stdout.splitlines()[-1]


def test_the_wheel_is_the_package(wheel):
    sources = [path for path in (ROOT / "lr_attnres").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {str(path.relative_to(ROOT)): path.read_bytes() for path in sources}
    assert {"lr_attnres/py.typed", "lr_attnres/presets/tiny.yaml"} < set(expected)
    found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected


def test_the_sdist_has_no_half_of_the_tests(wheel):
    folder = Path(wheel.filename).parent
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        top = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    assert top == {
        "LICENSE",
        "MANIFEST.in",
        "PKG-INFO",
        "README.md",
        "lr_attnres",
        "lr_attnres.egg-info",
        "pyproject.toml",
        "setup.cfg",
        "setup.py",
    }


def metadata(wheel: zipfile.ZipFile, field: str) -> list[str]:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_bytes(wheel.read(name)).get_all(field)


def imports_of(module: str) -> tuple[set[str], set[str]]:
    """Our modules, and packages of others, that importing a module imports: what stands at its top level, outside
    `try` and `if`."""
    ours, others = {"__init__"}, set()
    for node in ast.parse((ROOT / f"lr_attnres/{module}.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            ours |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            others |= {name.split(".")[0] for name in names}
    modules = {path.stem for path in (ROOT / "lr_attnres").glob("*.py")}
    return ours & modules, others - sys.stdlib_module_names


def test_every_package_that_is_imported_is_declared(wheel):
    reached = set()
    for extra, modules in ENTRIES.items():
        declared = set()
        for requirement in metadata(wheel, "Requires-Dist"):
            of_extra = re.search(r'extra == "(\w+)"', requirement)
            if of_extra is None or of_extra[1] == extra:
                declared.add(re.match(r"[\w-]+", requirement)[0])
        seen, left, imported = set(), set(modules), set()
        while left:
            module = left.pop()
            seen.add(module)
            ours, others = imports_of(module)
            left |= ours - seen
            imported |= others
        assert {REQUIREMENTS.get(name, name) for name in imported} <= declared, extra or "without an extra"
        reached |= seen
    assert reached == {path.stem for path in (ROOT / "lr_attnres").glob("*.py")}


def test_every_extra_that_is_named_exists(wheel):
    provided = set(metadata(wheel, "Provides-Extra"))
    named = set()
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md")]
    for path in [*pages, *(ROOT / "lr_attnres").glob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        text = path.read_text()
        for extras in re.findall(r"(?:lr-attnres|\.)\[([a-z,]+)\]", text) + re.findall(r'_extra\("(\w+)"\)', text):
            named |= set(extras.split(","))
    assert {"analysis", "explore", "hub", "serve", "train"} < named <= provided
