"""The sdist and the wheel hold the package, all of it and nothing else; every extra that is named exists."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email import message_from_bytes
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import lr_attnres


ROOT = Path(__file__).parents[1]
# extra -> the modules that its commands import; "" is the package without any extra
ENTRIES = {
    "": ["cli", "hub_upload", "inference.generate", "folders.upgrade", "training.arguments", "analysis.cost"]
    + ["analysis.machine", "analysis.gpu_timings"],
    "train": ["data.packing", "training.loop", "training.evaluation", "training.pipeline_run"],
    "hub": ["folders.convert"],
    "serve": ["inference.server", "inference.bounded"],
    "analysis": ["analysis.routing", "data.held_out", "analysis.plots"],
    "explore": ["analysis.explorer"],
}
REQUIREMENTS = {"yaml": "PyYAML"}  # packages whose import has another name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from the sdist alone, of a copy without files of earlier builds."""
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
    data = {"lr_attnres/py.typed", "lr_attnres/training/presets/tiny.yaml"}
    assert data | {"lr_attnres/data/corpora/state_of_the_union.jsonl"} < set(expected)
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


def all_modules() -> set[str]:
    """`cli`, `training.loop`, `training` (a room's `__init__`), and `` (the package's own)."""
    paths = (path.relative_to(ROOT / "lr_attnres").with_suffix("") for path in (ROOT / "lr_attnres").rglob("*.py"))
    return {".".join(part for part in path.parts if part != "__init__") for path in paths}


def imports_of(module: str) -> tuple[set[str], set[str]]:
    """Our modules, and packages of others, that importing a module imports: at its top level, outside `try` and `if`,
    with the `__init__` of the packages that it lies in."""
    file = ROOT / "lr_attnres" / module.replace(".", "/")
    is_package = file.is_dir()
    package = module.split(".") if is_package and module else module.split(".")[:-1]
    ours, others = {".".join(package[:depth]) for depth in range(len(package) + 1)}, set()
    for node in ast.parse((file / "__init__.py" if is_package else file.with_suffix(".py")).read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            start = package[: len(package) + 1 - node.level]
            target = ".".join([*start, *([node.module] if node.module else [])])
            ours |= {target, *(f"{target}.{alias.name}".strip(".") for alias in node.names)}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            others |= {name.split(".")[0] for name in names}
    return ours & all_modules(), others - sys.stdlib_module_names - {"lr_attnres"}


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
    assert reached == all_modules()


def test_vllm_finds_the_plugin(wheel, monkeypatch):
    """vLLM calls it in each process and looks for classes in its registry, then by name in `transformers`."""
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    entry_points = ConfigParser()
    entry_points.read_string(wheel.read(name).decode())
    module, function = entry_points["vllm.general_plugins"]["lr_attnres"].split(":")
    modeling, transformers = import_module(lr_attnres.LRAttnResModel.__module__), import_module("transformers")
    for name in modeling.__all__:
        monkeypatch.setattr(transformers, name, None, raising=False)
    classes = {}
    registry = SimpleNamespace(register_model=classes.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    getattr(import_module(module), function)()
    assert {"LRAttnResModel", "LRAttnResForSequenceClassification"} < set(classes) < set(modeling.__all__)
    assert transformers.LRAttnResForCausalLM is lr_attnres.LRAttnResForCausalLM


def test_every_extra_that_is_named_exists(wheel):
    provided = set(metadata(wheel, "Provides-Extra"))
    named = set()
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md")]
    for path in [*pages, *(ROOT / "lr_attnres").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        text = path.read_text()
        for extras in re.findall(r"(?:lr-attnres|\.)\[([a-z,]+)\]", text) + re.findall(r'extra="(\w+)"', text):
            named |= set(extras.split(","))
    assert {"analysis", "explore", "hub", "serve", "train"} < named <= provided
