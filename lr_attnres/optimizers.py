"""The paper's optimizer: Muon for the matrices inside the layers, AdamW for everything else, as one object."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode


class _NoBfloat16(TorchFunctionMode):
    """Tensors that would become bfloat16 stay in float32 or better."""

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.bfloat16:
            return args[0].to(torch.promote_types(args[0].dtype, torch.float32), copy=True)
        return function(*args, **(kwargs or {}))


class MatrixMuon(Muon):
    """`torch.optim.Muon`, whose Newton-Schulz iteration runs in float32 on CPUs.

    It is written for bfloat16, which GPUs multiply fastest and most CPUs can only emulate.
    """

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        on_cpu = all(parameter.device.type == "cpu" for group in self.param_groups for parameter in group["params"])
        with _NoBfloat16() if on_cpu else nullcontext():
            return super().step(closure)


ALGORITHMS = {"muon": MatrixMuon, "adamw": AdamW}


class MuonAdamW(Optimizer):
    """`torch.optim.Muon` and `torch.optim.AdamW` behind one list of parameter groups and one state.

    Each group names its `algorithm`, `"muon"` or `"adamw"`, and may set any option of it. Learning-rate schedulers,
    gradient clipping, Accelerate, Trainer, FSDP2 and `state_dict` see an ordinary optimizer.
    """

    def __init__(self, param_groups: Iterable[dict]):
        param_groups = list(param_groups)
        for group in param_groups:
            _check_algorithm(group)
        self._inner = {}
        for algorithm, optimizer_class in ALGORITHMS.items():
            own = [dict(group) for group in param_groups if group["algorithm"] == algorithm]
            if own:
                self._inner[algorithm] = optimizer_class(own)  # checks the options, fills in the defaults
        # Inner optimizers keep the order of their groups, so that each group finds its filled-in self again.
        filled = {algorithm: iter(inner.param_groups) for algorithm, inner in self._inner.items()}
        super().__init__([next(filled[group["algorithm"]]) for group in param_groups], defaults={})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for algorithm, inner in self._inner.items():
            # Set anew each time: loading a state, sharding and schedulers replace what the outer optimizer holds.
            inner.param_groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            inner.state = self.state
            inner.step()
        return loss

    def add_param_group(self, param_group: dict) -> None:
        _check_algorithm(param_group)
        algorithm = param_group["algorithm"]
        # Groups of the constructor have their defaults already; a later one gets them here.
        if algorithm not in self._inner:
            self._inner[algorithm] = ALGORITHMS[algorithm]([dict(param_group)])
        for option, default in self._inner[algorithm].defaults.items():
            param_group.setdefault(option, default)
        super().add_param_group(param_group)

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"_inner": self._inner}


def muon_adamw(
    model: torch.nn.Module,
    lr_muon: float = 1e-3,
    lr_adamw: float = 3e-4,
    lr_queries: float | None = None,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
) -> MuonAdamW:
    """Every trainable parameter of `model` in one of up to three groups, called `name` in `param_groups`.

    `muon`: the 2-D weights inside the layers, with weight decay. `adamw`: embeddings, head, norms and the key of the
    embedding, without. `queries`: the depth queries, AdamW without decay at `lr_queries` (as `adamw` when None).
    """
    names = split_parameters(model)
    if not names["muon"]:
        raise ValueError(
            f"{type(model).__name__} has no trainable 2-D weight inside `layers` for Muon; use torch.optim.AdamW."
        )
    parameters = dict(model.named_parameters())
    adamw = {"algorithm": "adamw", "lr": lr_adamw, "betas": betas, "weight_decay": 0.0}
    options = {
        "muon": {"algorithm": "muon", "lr": lr_muon, "momentum": momentum, "weight_decay": weight_decay},
        "adamw": adamw,
        "queries": adamw if lr_queries is None else adamw | {"lr": lr_queries},
    }
    return MuonAdamW(
        {"name": group, "params": [parameters[name] for name in names[group]], **options[group]}
        for group in options
        if names[group]
    )


def muon_adamw_factory() -> Callable[..., MuonAdamW]:
    """For `Trainer(optimizer_cls_and_kwargs=(muon_adamw_factory, {"lr_muon": 1e-3}))`, which calls it first."""
    return muon_adamw


def split_parameters(model: torch.nn.Module) -> dict[str, list[str]]:
    """The names of the trainable parameters, by group."""
    names: dict[str, list[str]] = {"muon": [], "adamw": [], "queries": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        path = name.split(".")
        if "depth_queries" in path:
            names["queries"].append(name)
        else:
            names["muon" if parameter.ndim == 2 and "layers" in path else "adamw"].append(name)
    return names


def _check_algorithm(group: dict) -> None:
    if group.get("algorithm") not in ALGORITHMS:
        raise ValueError(f"`algorithm` of a group is {group.get('algorithm')!r}; it must be one of {[*ALGORITHMS]}.")
