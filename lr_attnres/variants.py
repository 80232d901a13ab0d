"""Names of variants such as `sliced-n8-r64`, and the three config fields that a name stands for."""

import re
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .configuration_lr_attnres import LRAttnResConfig


# As `ResidualType` in the config. That file travels to the Hub without this one, and this one must not import torch.
RESIDUAL_TYPES = ("standard", "attnres", "projected", "sliced")
RANKED = "|".join(name for name in RESIDUAL_TYPES if name not in ("standard", "attnres"))  # with a rank of their own
VARIANT = re.compile(rf"standard|attnres-(full|n[1-9]\d*)|({RANKED})-(full|n[1-9]\d*)-r[1-9]\d*")
VARIANT_FIELDS = ("residual_type", "num_depth_blocks", "depth_key_rank")


def variant_name(config: "LRAttnResConfig") -> str:
    """The variant of a config: residual type, blocks (`full` if there are as many as sub-layers), and a free rank."""
    if config.residual_type == "standard":
        return config.residual_type
    blocks = "full" if config.has_full_sources else f"n{config.num_depth_blocks}"
    rank = "" if config.residual_type == "attnres" else f"-r{config.depth_key_rank}"
    return f"{config.residual_type}-{blocks}{rank}"


def variant_fields(variant: str) -> dict[str, Any]:
    """The fields of LRAttnResConfig that a name stands for. `full` is `num_depth_blocks=None`."""
    if not VARIANT.fullmatch(variant):
        raise ValueError(
            f"`variant` is {variant!r}; write standard, attnres-full, attnres-n8, projected-n8-r32, sliced-full-r64: "
            "residual type, blocks (n8 for 8 blocks; full, which is None in the config), rank (r32 for rank 32)."
        )
    residual_type, *numbers = variant.split("-")
    values = [None if number == "full" else int(number[1:]) for number in numbers]
    return dict(zip(VARIANT_FIELDS, [residual_type, *values]))
