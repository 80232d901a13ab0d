"""The arguments of a training run: one dataclass, filled from a preset or YAML file and changed by flags."""

import argparse
import dataclasses
import difflib
import math
import operator
import os
import types
import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ..variants import VARIANT_FIELDS, variant_fields


PRESETS = Path(__file__).parent / "presets"
# Defaults of a new model (the paper's recipe), and of one that `init_from` trains further.
PRETRAINING = {"lr_muon": 1e-3, "lr_adamw": 3e-4, "warmup_steps": 2000, "warmdown_fraction": 0.2}
FINE_TUNING = {"lr_muon": 2e-4, "lr_adamw": 5e-5, "lr_queries": 3e-3, "warmdown_fraction": 1.0}
FINE_TUNING_WARMUP = 0.1  # of the steps


def two_defaults(text: str, name: str, fine_tuning: str | None = None) -> Any:
    """A field that `__post_init__` fills."""
    tuned = fine_tuning or f"{FINE_TUNING[name]:g}"
    return argument(None, f"{text} (default: {PRETRAINING[name]:g}; with --init-from: {tuned})")


def argument(default: Any, text: str, free: bool = False) -> Any:
    """A field with its help text. A `free` one may differ in a resumed run (of the data, the contents may not)."""
    metadata = {"help": text, "free": free}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass
class TrainArguments:
    """A run of `lr-attnres train`. The defaults are the paper's recipe; `data`, `output_dir`, `steps` are required."""

    data: str = argument(None, "folder written by `lr-attnres prepare`", free=True)
    output_dir: str = argument(None, "folder for the metrics, the checkpoints and the model", free=True)
    steps: int = argument(None, "number of optimizer steps")

    variant: str = argument("sliced-n8-r64", "standard, attnres-n8, projected-full-r32, sliced-n8-r64, ...")
    model: dict = argument({}, "fields of LRAttnResConfig, e.g. hidden_size=256 num_hidden_layers=4")
    init_from: str | None = argument(None, "start from the model in this folder, of the same `variant`", free=True)
    train: str | None = argument(None, "`queries`: train the depth queries alone, as a routing adapter")
    seed: int = argument(0, "random seed of the weights and the order of the data")

    batch_tokens: int = argument(262_144, "tokens per optimizer step, over all processes")
    micro_batch_size: int = argument(8, "rows per forward; gradients add up to `batch_tokens`", free=True)
    lr_muon: float = two_defaults("peak learning rate of the matrices inside the layers", "lr_muon")
    lr_adamw: float = two_defaults("peak learning rate of embeddings, head and norms", "lr_adamw")
    lr_queries: float | None = argument(
        None,
        "peak learning rate of the depth queries (default: `lr_adamw`; with --init-from and no --lr-adamw: "
        f"{FINE_TUNING['lr_queries']:g})",
    )
    momentum: float = argument(0.95, "momentum of Muon")
    weight_decay: float = argument(0.1, "weight decay of Muon; AdamW has none")
    betas: tuple[float, float] = argument((0.9, 0.95), "betas of AdamW")
    warmup_steps: int = two_defaults("steps of linear warm-up", "warmup_steps", f"{FINE_TUNING_WARMUP:g} of the steps")
    warmdown_fraction: float = two_defaults(
        "the learning rates fall linearly over this last fraction of the steps", "warmdown_fraction"
    )
    final_lr_fraction: float = argument(0.1, "fraction of the peak learning rates at the last step")
    clip: float = argument(1.0, "clip the gradient to this norm")
    z_loss: float = argument(1e-5, "weight of the squared log-sum-exp of the logits")

    mixed_precision: str = argument("auto", "bf16, no, or auto: bf16 on GPUs, no on CPUs")
    attn_implementation: str = argument("sdpa", "sdpa, eager, flash_attention_2, flex_attention, ...", free=True)
    depth_backend: str = argument("torch", "torch, or the Triton kernels on a GPU: triton", free=True)
    gradient_checkpointing: bool = argument(False, "less memory for more compute", free=True)
    compile: bool = argument(False, "torch.compile the model", free=True)
    pipeline_stages: int = argument(1, "cut the layers into stages, one per process", free=True)
    num_workers: int = argument(0, "processes that load data in the background", free=True)

    log_steps: int = argument(10, "steps between lines of metrics.jsonl", free=True)
    eval_steps: int = argument(500, "steps between validations", free=True)
    entropy_steps: int = argument(500, "steps between measurements of the depth entropy", free=True)
    save_steps: int = argument(1000, "steps between checkpoints", free=True)
    keep_last: int = argument(2, "last checkpoints to keep, besides the best by validation loss", free=True)
    trackers: list[str] = argument([], "trackers of Accelerate: tensorboard, trackio, wandb, ...", free=True)
    resume: str | None = argument(None, "resume from this checkpoint (no value: the last of the run)", free=True)

    def __post_init__(self) -> None:
        defaults = PRETRAINING
        if self.init_from is not None:
            defaults = FINE_TUNING | {"warmup_steps": int(FINE_TUNING_WARMUP * (self.steps or 0))}
            if self.lr_adamw is not None:  # which is then also the default of `lr_queries`
                defaults.pop("lr_queries")
        for name, value in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def check(self) -> None:
        """Raise for the first value that cannot be used."""
        for name in ("data", "output_dir", "steps"):
            if getattr(self, name) in (None, ""):
                raise ValueError(f"`{name}` is not set: give --{name.replace('_', '-')} or a line in the YAML file.")
        workers = max(16, os.cpu_count() or 1)
        largest = {"steps": 10**9, "batch_tokens": 2**28, "micro_batch_size": 10_000}
        counts = ("pipeline_stages", "keep_last", "log_steps", "eval_steps", "entropy_steps", "save_steps")
        amounts = ("lr_muon", "lr_adamw", "lr_queries", "weight_decay", "warmup_steps", "z_loss", "num_workers")
        fractions = ("momentum", "warmdown_fraction", "final_lr_fraction")
        rules: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
            (
                (*largest, *counts),
                lambda value: value >= 1,
                "it must be at least 1",
            ),
            *(((name,), partial(operator.ge, most), f"it must be at most {most}") for name, most in largest.items()),
            (amounts, lambda value: 0 <= value < math.inf, "it must be finite and not negative"),
            (fractions, lambda value: 0 <= value <= 1, "it must lie in [0, 1]"),
            (("clip",), lambda value: value > 0, "it must be positive (inf does not clip)"),
            (("betas",), lambda value: [0 <= b < 1 for b in value] == [True] * 2, "it must be two numbers in [0, 1)"),
            (("seed",), lambda value: 0 <= value < 2**31, f"it must lie in 0..{2**31 - 1}"),
            (("num_workers",), lambda value: value <= workers, f"on this machine it must be at most {workers}"),
            (("depth_backend",), lambda value: value in ("torch", "triton"), "it must be one of torch, triton"),
            (("train",), lambda value: value == "queries", "it must be queries, or not set: everything is trained"),
            (("mixed_precision",), lambda value: value in ("auto", "bf16", "no"), "it must be one of auto, bf16, no"),
            (("warmup_steps",), lambda value: value <= self.steps, f"it must be at most `steps` = {self.steps}"),
        ]
        for names, is_valid, rule in rules:
            for name in names:
                value = getattr(self, name)
                if value is not None and not is_valid(value):
                    raise ValueError(f"`{name}` is {value!r}; {rule}.")
        if self.train == "queries" and self.model_fields()["residual_type"] == "standard":
            raise ValueError("`train` is 'queries'; `variant` is standard, which has none: choose another variant.")
        if self.train == "queries" and self.pipeline_stages > 1:
            rule = "the depth queries are all in the first stage, so the others would have nothing to train"
            raise ValueError(f"`pipeline_stages` is {self.pipeline_stages} with `train` = queries: {rule}.")
        if self.train == "queries" and self.init_from is None:
            raise ValueError("`train` is 'queries', which needs a trained model: give one as `init_from`.")
        self.model_fields()

    def model_fields(self) -> dict[str, Any]:
        """The fields of LRAttnResConfig that `variant` and `model` set."""
        from ..configuration_lr_attnres import LRAttnResConfig  # imports torch, which `--help` must not

        known = [field.name for field in dataclasses.fields(LRAttnResConfig)]
        for name in self.model:
            if name in VARIANT_FIELDS:
                raise ValueError(f"`model` sets {name}, which `variant` = {self.variant} sets already: use `variant`.")
            if name not in known:
                raise ValueError(f"`model`: LRAttnResConfig has no field {name!r}{_similar(name, known)}.")
        return variant_fields(self.variant) | self.model

    def bound(self) -> dict[str, Any]:
        """The arguments that must be the same in a resumed run, with the types that JSON returns."""
        values = dataclasses.asdict(self) | {"betas": list(self.betas)}
        return {field.name: values[field.name] for field in dataclasses.fields(self) if not field.metadata["free"]}


def presets() -> list[str]:
    """The names of the YAML files in this package."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def load_arguments(config: str | None = None, **flags: Any) -> TrainArguments:
    """Arguments from a preset or YAML file, changed by `flags`; `model` is merged field by field."""
    values = {} if config is None else _read_yaml(config)
    fields = {field.name: field for field in dataclasses.fields(TrainArguments)}
    for name in [*values, *flags]:
        if name not in fields:
            origin = f"{config}: " if name in values else ""
            raise ValueError(f"{origin}the key {name!r} does not exist{_similar(name, [*fields])}.")
    model: dict[str, Any] = {}
    for fields_given in (values.get("model"), flags.get("model")):
        model |= {} if fields_given is None else _convert("model", fields_given)
    merged = values | flags | {"model": model}
    return TrainArguments(**{name: _convert(name, value) for name, value in merged.items()})


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field. A flag that is not given is absent from the namespace and keeps the file's value."""
    special: dict[str, dict[str, Any]] = {
        "model": {"nargs": "+", "metavar": "FIELD=VALUE", "type": _field_value, "action": "extend"},
        "betas": {"nargs": 2, "metavar": "BETA", "type": float},
        "trackers": {"nargs": "*", "metavar": "NAME"},
        "resume": {"nargs": "?", "metavar": "CHECKPOINT", "const": "last"},
    }
    for field in dataclasses.fields(TrainArguments):
        kind = _kind_of(field.name)
        options: dict[str, Any] = {"type": kind, "metavar": kind.__name__.upper()}
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        options = {"default": argparse.SUPPRESS, "help": _help_of(field)} | special.get(field.name, options)
        parser.add_argument(f"--{field.name.replace('_', '-')}", **options)


def _field_value(item: str) -> tuple[str, Any]:
    """`hidden_size=256` -> the name and the value, which is read as YAML."""
    name, separator, value = item.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{item!r} is not FIELD=VALUE")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"the value of {item!r} is not YAML") from error


def _help_of(field: dataclasses.Field) -> str:
    default = field.default
    if default in (None, dataclasses.MISSING) or isinstance(default, bool):
        return field.metadata["help"]
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{field.metadata['help']} (default: {shown})"


def _read_yaml(config: str) -> dict[str, Any]:
    file = PRESETS / f"{config}.yaml" if config in presets() else Path(config)
    if not file.is_file():
        raise ValueError(f"{config} is neither a file nor a preset; the presets are {', '.join(presets())}.")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{config} is not YAML: it is not UTF-8 text.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{config} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{config} must hold `key: value` lines.")
    return values


def _kind_of(name: str) -> type:
    """The type of a field, without `| None` and without the types of its items."""
    hint = typing.get_type_hints(TrainArguments)[name]
    kind = typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint
    return typing.get_origin(kind) or kind


def _convert(name: str, value: Any) -> Any:
    """The value as the type of the field."""
    kind = _kind_of(name)
    if value is None and getattr(TrainArguments, name, dataclasses.MISSING) is None:
        return None
    if name == "mixed_precision" and value is False:  # YAML reads a bare `no` as false
        return "no"
    accepted, convert, expected = _CONVERSIONS[kind]
    try:
        if isinstance(value, accepted) and isinstance(value, bool) == (kind is bool):
            return convert(value)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"`{name}` is {value!r}; expected {expected}.")


def _as_number(value: Any) -> Any:
    """YAML reads numbers such as 1e-6 as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# The type of a field -> what is accepted for it, the conversion, and what an error says
_CONVERSIONS: dict[type, tuple[Any, Callable[[Any], Any], str]] = {
    bool: (bool, bool, "true or false"),
    int: ((int, str), int, "a whole number"),
    float: ((int, float, str), float, "a number"),
    str: ((str, Path), str, "text"),
    tuple: ((list, tuple), lambda numbers: tuple(map(float, numbers)), "two numbers"),
    list: ((list, tuple), lambda names: [str(name) for name in names], "a list of names"),
    dict: ((dict, list), lambda fields: {k: _as_number(v) for k, v in dict(fields).items()}, "a mapping"),
}


def _similar(name: Any, known: list[str]) -> str:
    matches = difflib.get_close_matches(str(name), known, 1)
    return f" (did you mean {matches[0]}?)" if matches else ""
