"""The arguments of a training run: one dataclass, filled from a preset or YAML file and from flags, which win."""

import argparse
import dataclasses
import difflib
import math
import os
import types
import typing
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from .configuration_lr_attnres import LRAttnResConfig
from .variants import VARIANT_FIELDS, variant_fields


def argument(default: Any, text: str, free: bool = False, choices: list[str] | None = None) -> Any:
    """A field with its help. A `free` one may change when a run is resumed: it does not change what is learned, or, as
    places do, what is there is compared instead of its name."""
    metadata = {"help": text, "free": free, "choices": choices}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass
class TrainArguments:
    """A run of `lr-attnres train`. The defaults are the paper's recipe; `data`, `output_dir` and `steps` are asked."""

    data: str = argument(None, "folder written by `lr-attnres prepare`", free=True)
    output_dir: str = argument(None, "folder of the run: metrics, checkpoints and the model", free=True)
    steps: int = argument(None, "optimizer steps")

    variant: str = argument("sliced-n8-r64", "standard, attnres-n8, projected-full-r32, sliced-n8-r64, ...")
    model: dict = argument({}, "fields of LRAttnResConfig: hidden_size=256 num_hidden_layers=4 ...")
    init_from: str | None = argument(
        None, "a model folder to start from, of this `variant`; default: random weights", free=True
    )
    seed: int = argument(0, "of the weights and of the order of the data")

    batch_tokens: int = argument(262_144, "tokens of an optimizer step, over all processes")
    micro_batch_size: int = argument(
        8, "rows of one forward of one process; accumulation makes up the rest", free=True
    )
    lr_muon: float = argument(1e-3, "peak learning rate of the matrices inside the layers")
    lr_adamw: float = argument(3e-4, "peak learning rate of embeddings, head and norms")
    lr_queries: float | None = argument(None, "peak learning rate of the depth queries; default: that of AdamW")
    momentum: float = argument(0.95, "of Muon")
    weight_decay: float = argument(0.1, "of Muon; AdamW has none")
    betas: tuple[float, float] = argument((0.9, 0.95), "of AdamW")
    warmup_steps: int = argument(2000, "linear warm-up")
    warmdown_fraction: float = argument(0.2, "last part of the run, over which the learning rates fall linearly")
    final_lr_fraction: float = argument(0.1, "part of the peak that they fall to")
    clip: float = argument(1.0, "largest norm of the gradient")
    z_loss: float = argument(1e-5, "weight of the squared log-sum-exp of the logits")

    mixed_precision: str = argument("auto", "auto: bf16 on GPUs, no on CPUs", choices=["auto", "bf16", "no"])
    attn_implementation: str = argument("sdpa", "sdpa, eager, flash_attention_2, flex_attention, ...", free=True)
    gradient_checkpointing: bool = argument(False, "less memory for more compute", free=True)
    compile: bool = argument(False, "torch.compile the model", free=True)
    num_workers: int = argument(0, "processes that read data ahead", free=True)

    log_steps: int = argument(10, "steps between lines of metrics.jsonl", free=True)
    eval_steps: int = argument(500, "steps between validations", free=True)
    entropy_steps: int = argument(500, "steps between measurements of the routing entropy", free=True)
    save_steps: int = argument(1000, "steps between checkpoints", free=True)
    keep_last: int = argument(2, "checkpoints kept, beside the one with the lowest validation loss", free=True)
    trackers: list[str] = argument([], "trackers of Accelerate: tensorboard, trackio, wandb, ...", free=True)
    resume: str | None = argument(None, "a checkpoint, or `last`: the newest one of the run, if any", free=True)

    def check(self) -> None:
        """Raise for the first value that cannot be used."""
        for name in ("data", "output_dir", "steps"):
            if getattr(self, name) in (None, ""):
                raise ValueError(f"`{name}` is not set: give --{name.replace('_', '-')} or a line in the YAML file.")
        at_least_one = ["steps", "batch_tokens", "micro_batch_size", "keep_last", "log_steps"]
        at_least_one += ["eval_steps", "entropy_steps", "save_steps"]
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        for name in ("lr_muon", "lr_adamw", "lr_queries", "weight_decay", "warmup_steps", "z_loss", "num_workers"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"`{name}` is {value}; it must be finite and not negative.")
        for name in ("momentum", "warmdown_fraction", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must lie in [0, 1].")
        if not self.clip > 0:
            raise ValueError(f"`clip` is {self.clip}; it must be positive (inf does not clip).")
        if self.warmup_steps > self.steps:
            raise ValueError(f"`warmup_steps` is {self.warmup_steps}, more than `steps` = {self.steps}: lower it.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`betas` is {self.betas}; both must lie in [0, 1).")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"`seed` is {self.seed}; it must lie in 0..{2**31 - 1}.")
        most = max(16, os.cpu_count() or 1)
        if self.num_workers > most:
            raise ValueError(f"`num_workers` is {self.num_workers}; on this machine it must be at most {most}.")
        for field in dataclasses.fields(self):
            choices, value = field.metadata["choices"], getattr(self, field.name)
            if choices and value not in choices:
                raise ValueError(f"`{field.name}` is {value!r}; it must be one of {', '.join(choices)}.")
        self.model_fields()

    def model_fields(self) -> dict[str, Any]:
        """What the variant and `model` say about the architecture."""
        known = [field.name for field in dataclasses.fields(LRAttnResConfig)]
        for name in self.model:
            if name in VARIANT_FIELDS:
                raise ValueError(f"`model` sets {name}, which `variant` = {self.variant} decides: change `variant`.")
            if name not in known:
                raise ValueError(f"`model`: LRAttnResConfig has no field {name!r}{_similar(name, known)}.")
        return variant_fields(self.variant) | self.model

    def bound(self) -> dict[str, Any]:
        """The arguments that a resumed run must share, as JSON gives them back."""
        values = dataclasses.asdict(self) | {"betas": list(self.betas)}
        return {field.name: values[field.name] for field in dataclasses.fields(self) if not field.metadata["free"]}


def presets() -> list[str]:
    """The names that stand for a YAML file of this package."""
    files = (resources.files(__package__) / "presets").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_arguments(config: str | None = None, **flags: Any) -> TrainArguments:
    """Arguments of a preset or YAML file, changed by `flags`; `model` is changed field by field."""
    values = {} if config is None else _read_yaml(config)
    fields = {field.name: field for field in dataclasses.fields(TrainArguments)}
    for name in [*values, *flags]:
        if name not in fields:
            place = f"{config}: " if name in values else ""
            raise ValueError(f"{place}the key {name!r} does not exist{_similar(name, [*fields])}.")
    of_file, of_flags = ({} if m is None else _convert("model", m) for m in (values.get("model"), flags.get("model")))
    merged = values | flags | {"model": of_file | of_flags}
    return TrainArguments(**{name: _convert(name, value) for name, value in merged.items()})


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field. A flag that is not given is absent, so that it does not hide the file's value."""
    hints = typing.get_type_hints(TrainArguments)
    for field in dataclasses.fields(TrainArguments):
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help_of(field)}
        if hints[field.name] is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif field.name == "model":
            options |= {"nargs": "+", "metavar": "FIELD=VALUE", "action": _FieldValues}
        elif field.name == "resume":
            options |= {"nargs": "?", "const": "last", "metavar": "CHECKPOINT"}
        elif field.name == "betas":
            options |= {"nargs": 2, "type": float, "metavar": "BETA"}
        elif field.name == "trackers":
            options |= {"nargs": "*", "metavar": "NAME"}
        else:
            scalar = _kinds(hints[field.name])[0]
            options |= {"type": scalar, "choices": field.metadata["choices"]}
            if field.metadata["choices"] is None:
                options["metavar"] = scalar.__name__.upper()
        parser.add_argument(f"--{field.name.replace('_', '-')}", **options)


class _FieldValues(argparse.Action):
    """`hidden_size=256 qk_norm=false` -> a mapping, each value read as YAML."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        mapping = {}
        for item in values:
            name, separator, value = item.partition("=")
            if not separator:
                parser.error(f"{option_string}: {item!r} is not FIELD=VALUE")
            try:
                mapping[name] = yaml.safe_load(value)
            except yaml.YAMLError:
                parser.error(f"{option_string}: the value of {item!r} is not YAML")
        setattr(namespace, self.dest, getattr(namespace, self.dest, {}) | mapping)


def _help_of(field: dataclasses.Field) -> str:
    default = field.default
    if default in (None, dataclasses.MISSING) or isinstance(default, bool):
        return field.metadata["help"]
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f"{field.metadata['help']} (default: {shown})"


def _read_yaml(config: str) -> dict[str, Any]:
    if config in presets():
        content = (resources.files(__package__) / "presets" / f"{config}.yaml").read_text()
    elif Path(config).is_file():
        try:
            content = Path(config).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{config} is not YAML: it is not UTF-8 text.") from error
    else:
        raise ValueError(f"{config} is neither a file nor a preset; the presets are {', '.join(presets())}.")
    try:
        values = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(f"{config} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{config} must hold `key: value` lines.")
    return values


def _convert(name: str, value: Any) -> Any:
    """The value as the field's type; YAML reads 1e-3 as text."""
    hint = typing.get_type_hints(TrainArguments)[name]
    kind = _kinds(hint)[0]
    default = {field.name: field.default for field in dataclasses.fields(TrainArguments)}[name]
    try:
        if value is None and default is None:
            return None
        if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
        if kind is int and (isinstance(value, str) or type(value) is int):
            return int(value)
        if typing.get_origin(kind) is tuple and isinstance(value, (list, tuple)):
            first, second = value
            return (float(first), float(second))
        if typing.get_origin(kind) is list and isinstance(value, (list, tuple)):
            return [str(item) for item in value]
        if name == "mixed_precision" and value is False:  # YAML's reading of a bare `no`
            return "no"
        if kind is str and isinstance(value, (str, Path)):
            return str(value)
        if kind is dict and isinstance(value, dict):
            return {key: _as_number(item) for key, item in value.items()}
        if kind is bool and isinstance(value, bool):
            return value
    except (TypeError, ValueError):
        pass
    expected = {float: "a number", int: "a whole number", bool: "true or false", str: "text", dict: "a mapping"}
    expected |= {tuple: "two numbers", list: "a list of names"}
    raise ValueError(f"`{name}` is {value!r}; expected {expected[typing.get_origin(kind) or kind]}.")


def _as_number(value: Any) -> Any:
    """What YAML reads as text, such as 1e-6, but is a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _kinds(hint: Any) -> tuple:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _similar(name: Any, known: list[str]) -> str:
    matches = difflib.get_close_matches(str(name), known, 1)
    return f" (did you mean {matches[0]}?)" if matches else ""
