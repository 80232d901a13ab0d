"""Public names of a package whose modules are imported when a name is first used."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str, modules: dict[str, tuple[str, ...]]) -> tuple[Callable[[str], Any], list[str]]:
    """`__getattr__` and `__all__` of a package; `modules` maps its modules to their public names."""
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return get, sorted(module_of)
