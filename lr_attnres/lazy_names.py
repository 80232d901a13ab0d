"""Public names of a package whose modules are imported when a name is first used."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def names_in_stub(package_file: str) -> dict[str, tuple[str, ...]]:
    """The public names of each module, from the `.pyi` beside an `__init__.py`, where type checkers find them too."""
    modules: dict[str, tuple[str, ...]] = {}
    for node in ast.parse(Path(package_file).with_suffix(".pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            modules[node.module] = (*modules.get(node.module, ()), *(alias.name for alias in node.names))
    return modules


def lazy_names(package: str, modules: dict[str, tuple[str, ...]]) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of a package; `modules` maps its modules to their public names."""
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return get, sorted(module_of)
