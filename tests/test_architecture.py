"""The shape of the package: few modules in few rooms, each room used through its door, a model that stands alone."""

import ast
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

import lr_attnres


pytestmark = pytest.mark.law
PACKAGE = Path(lr_attnres.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
# They travel to the Hub as remote code, where nothing else of the package exists.
MODEL_FILES = [
    PACKAGE / f"{name}.py"
    for name in (
        "configuration_lr_attnres",
        "modeling_lr_attnres",
        "depth_routing",
        "depth_state",
        "depth_routing_triton",
    )
]


class Import(NamedTuple):
    """One imported name. `module` is absolute; `is_optional` says that it stands in a `try`."""

    module: str
    name: str | None
    is_optional: bool


def imports_of(path: Path) -> Iterator[Import]:
    """Also those inside functions."""
    tree = ast.parse(path.read_text())
    optional = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    parts = ["lr_attnres", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, id(node) in optional) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = parts[: len(parts) + 1 - node.level] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            yield from (Import(module, alias.name, id(node) in optional) for alias in node.names)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "lr_attnres" and len(parts) > 1 and parts[1] in ROOMS else None


def test_few_modules_in_few_rooms():
    sizes = {room: len(list((PACKAGE / room).glob("*.py"))) for room in ROOMS}
    assert ROOMS == ["analysis", "data", "folders", "inference", "training"]
    assert len(list(PACKAGE.glob("*.py"))) <= 14
    assert {room: size for room, size in sizes.items() if size > 12} == {}
    assert len(MODULES) == len(list(PACKAGE.glob("*.py"))) + sum(sizes.values())  # rooms have no rooms


def test_the_package_is_small():
    """The house itself has fewer than 8,000 lines; what was built on it since (docs/reliability.md, docs/serve.md,
    docs/upgrade.md, docs/gpu.md, pipelines in docs/training_at_scale.md, depth heads) must earn its own."""
    assert sum(len(path.read_text().splitlines()) for path in MODULES) < 11_200


def test_no_long_functions():
    lengths = {
        f"{path.relative_to(PACKAGE)}: {node.name}": node.end_lineno - node.lineno + 1
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length >= 60} == {}


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.stem)
def test_the_model_stands_alone(path):
    """It imports the other model files, torch, transformers and huggingface_hub. In a `try`: triton, and, for
    `push_to_hub`, the upload of the installed package."""
    siblings = {f"lr_attnres.{file.stem}" for file in MODEL_FILES}
    foreign = []
    for module, _, is_optional in imports_of(path):
        top = module.split(".")[0]
        allowed = module in siblings or top in {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names
        if not allowed and not (is_optional and (top == "triton" or module == "lr_attnres.hub_upload")):
            foreign.append(module)
    assert foreign == []


def test_data_uses_no_other_room():
    rooms = {room_of(found.module) for path in (PACKAGE / "data").glob("*.py") for found in imports_of(path)}
    assert rooms <= {"data", None}


@pytest.mark.parametrize("room", ROOMS)
def test_others_use_the_door(room):
    """Another room, or the top of the package, imports the names that a room's `__init__` lists, no others."""
    door, private = import_module(f"lr_attnres.{room}").__all__, []
    for path in MODULES:
        if path.parent != PACKAGE / room:
            found = [imported for imported in imports_of(path) if room_of(imported.module) == room]
            private += [f"{path.relative_to(PACKAGE)}: {n.module}.{n.name}" for n in found if n.name not in door]
    assert private == []
