"""Public names resolve on first use, `import lr_attnres` is light, and the Auto classes find the model anyway."""

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest

import lr_attnres


ROOMS = sorted(module.name for module in iter_modules(lr_attnres.__path__) if module.ispkg)
PACKAGES = ["lr_attnres", *(f"lr_attnres.{room}" for room in ROOMS)]


def run(script: str) -> str:
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_the_rooms():
    assert ROOMS == ["analysis", "data", "folders", "inference", "training"]


def test_import_is_light():
    statements = "; ".join(f"import {package}" for package in PACKAGES)
    imported = set(json.loads(run(f"import json, sys; {statements}; print(json.dumps(list(sys.modules)))")))
    assert "lr_attnres.folders" in imported
    assert not {"torch", "transformers", "numpy", "huggingface_hub"} & imported


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_resolves(package):
    module = import_module(package)
    assert module.__all__ == sorted(set(module.__all__))
    for name in module.__all__:
        assert not isinstance(getattr(module, name), ModuleType), name
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_is_also_a_module(package):
    """Importing the module would set the attribute of the package to the module and hide the lazy name."""
    module = import_module(package)
    assert not {info.name for info in iter_modules(module.__path__)} & set(module.__all__)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(lr_attnres.__file__).with_suffix(".pyi").read_text())
    imports = [(node, alias) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(alias.asname for _, alias in imports) == lr_attnres.__all__
    for node, alias in imports:
        module = import_module(f"lr_attnres.{node.module}")
        assert alias.name == alias.asname
        assert getattr(module, alias.name) is getattr(lr_attnres, alias.name), alias.name


ORDERS = {
    "lr_attnres first": "import lr_attnres; import transformers",
    "transformers first": "import transformers; transformers.AutoModel, transformers.AutoConfig; import lr_attnres",
    # `transformers.modeling_layers` imports the Auto classes before it defines what our modeling file imports from it.
    "another model first": "import lr_attnres; from transformers import Qwen3ForCausalLM; import transformers",
    "modeling file first": "from lr_attnres.modeling_lr_attnres import LRAttnResModel; import transformers",
}
USE_AUTO_CLASSES = """
config = transformers.AutoConfig.for_model(
    "lr_attnres", vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    depth_key_rank=4,
)
for name in [name for name in config.auto_map if name != "AutoConfig"]:
    model = getattr(transformers, name).from_config(config)
    assert type(model) is getattr(lr_attnres, config.auto_map[name].split(".")[-1]), type(model)
    print(name)
"""


@pytest.mark.parametrize("order", ORDERS)
def test_auto_classes_find_the_model_in_every_import_order(order):
    found = run(f"{ORDERS[order]}\nimport lr_attnres\n{USE_AUTO_CLASSES}").split()
    assert {"AutoModel", "AutoModelForCausalLM"} < set(found) and len(found) == 5
