"""The paper's optimizer: Muon for the matrices inside the layers, AdamW for everything else, as one object."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer
from torch.overrides import TorchFunctionMode

from ..errors import LRAttnResError


class _NoBfloat16(TorchFunctionMode):
    """Within the context, `tensor.bfloat16()` returns at least float32.

    `torch.optim.Muon` calls it in its Newton-Schulz iteration and has no argument for another dtype; the only
    alternative is to copy Muon's code.
    """

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.bfloat16:
            return args[0].to(torch.promote_types(args[0].dtype, torch.float32), copy=True)
        return function(*args, **(kwargs or {}))


class MatrixMuon(Muon):
    """`torch.optim.Muon` with its Newton-Schulz iteration in float32 on CPUs, most of which only emulate bfloat16."""

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
        self._inner: dict[str, Optimizer] = {}
        super().__init__(param_groups, defaults={})  # calls `add_param_group`

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for algorithm, inner in self._inner.items():
            # Every time, because loading a state, sharding and schedulers replace groups and state of this optimizer.
            inner.param_groups = [group for group in self.param_groups if group["algorithm"] == algorithm]
            inner.state = self.state
            inner.step()
        return loss

    def add_param_group(self, param_group: dict) -> None:
        algorithm = param_group.get("algorithm")
        if algorithm not in ALGORITHMS:
            raise LRAttnResError(f"`algorithm` of a group is {algorithm!r}; it must be one of {[*ALGORITHMS]}.")
        self._inner[algorithm] = ALGORITHMS[algorithm]([dict(param_group)])  # checks the options, adds the defaults
        super().add_param_group(self._inner[algorithm].param_groups[0])

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
    """The paper's optimizer for all trainable parameters of `model`, in up to three groups (`name` in `param_groups`).

    - `muon`: the 2-D weights inside the layers, with weight decay
    - `adamw`: embeddings, head, norms and the key projection of the embedding, without weight decay
    - `queries`: the depth queries, AdamW without weight decay, at `lr_queries` (default: `lr_adamw`)
    """
    names = split_parameters(model)
    if not names["muon"] and not names["queries"]:
        kind = type(model).__name__
        raise LRAttnResError(f"{kind} has no trainable 2-D weight inside `layers` for Muon; use torch.optim.AdamW.")
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
    """For `Trainer(optimizer_cls_and_kwargs=(muon_adamw_factory, {"lr_muon": 1e-3}))`, which calls the factory."""
    return muon_adamw


def split_parameters(model: torch.nn.Module) -> dict[str, list[str]]:
    """The names of the trainable parameters, by group."""
    names: dict[str, list[str]] = {"muon": [], "adamw": [], "queries": []}
    for name, parameter in model.named_parameters():
        path = name.split(".")
        group = "muon" if parameter.ndim == 2 and "layers" in path else "adamw"
        if parameter.requires_grad:
            names["queries" if "depth_queries" in path else group].append(name)
    return names
