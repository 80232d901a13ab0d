"""Register the model with Transformers' Auto classes as soon as Transformers is imported.

`import lr_attnres` must not import Transformers, which takes seconds. So a finder on `sys.meta_path` registers the
classes once the Auto classes have been imported.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


AUTO_CONFIG, AUTO_MODELS = "transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto"
CONFIG, MODELS = f"{__package__}.configuration_lr_attnres", f"{__package__}.modeling_lr_attnres"


def register_config() -> None:
    config_class = import_module(CONFIG).LRAttnResConfig
    import_module(AUTO_CONFIG).AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def register_models() -> None:
    configuration, modeling, auto = import_module(CONFIG), import_module(MODELS), import_module(AUTO_MODELS)
    for auto_class, entry in configuration.AUTO_MAP.items():
        if auto_class != "AutoConfig":
            model_class = getattr(modeling, entry.split(".")[-1])
            getattr(auto, auto_class).register(configuration.LRAttnResConfig, model_class, exist_ok=True)


def register() -> None:
    """vLLM's plugin, see setup.py. vLLM looks for a class by its name in `transformers` before it asks the Auto
    classes. May be called more than once."""
    register_config()
    register_models()
    modeling = import_module(MODELS)
    for name in modeling.__all__:
        setattr(sys.modules["transformers"], name, getattr(modeling, name))
    registry = import_module("vllm").ModelRegistry
    for name in ("LRAttnResModel", "LRAttnResForSequenceClassification", "LRAttnResForTokenClassification"):
        # vLLM puts its own heads on this class: by default it takes the first token, and another name of the head.
        registry.register_model(name, "vllm.model_executor.models.transformers:TransformersForCausalLM")


class RegisterAfterImport(MetaPathFinder):
    """Watches the imports of Transformers' modules and of our own two. Our modeling file imports half of Transformers:
    where the Auto classes are imported from inside another module, as `transformers.modeling_layers` does, that module
    must be complete first."""

    def __init__(self) -> None:
        self.running: set[str] = set()  # modules that are being executed now, one inside the other

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("transformers.") and fullname not in (CONFIG, MODELS):
            return None
        later_finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in later_finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            self.running.add(fullname)
            try:
                execute(module)
            finally:
                self.running.discard(fullname)
            self.register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec

    def register(self) -> None:
        if self.running or self not in sys.meta_path:
            return
        if AUTO_MODELS in sys.modules:
            sys.meta_path.remove(self)  # first, because registering imports our own modules
            register_config()
            register_models()
        elif AUTO_CONFIG in sys.modules:
            register_config()


def register_when_imported() -> None:
    finder = RegisterAfterImport()
    sys.meta_path.insert(0, finder)
    finder.register()
