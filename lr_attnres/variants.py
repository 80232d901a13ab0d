"""Names of variants such as `sliced-n8-r64-h8`, and the config fields that a name stands for."""

import re
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .configuration_lr_attnres import LRAttnResConfig


# As `ResidualType` in the config. That file travels to the Hub without this one, and this one must not import torch.
RESIDUAL_TYPES = ("standard", "attnres", "projected", "sliced")
RANKED = "|".join(name for name in RESIDUAL_TYPES if name not in ("standard", "attnres"))  # with a rank of their own
VARIANT = re.compile(rf"standard|(attnres-(full|n[1-9]\d*)|({RANKED})-(full|n[1-9]\d*)-r[1-9]\d*)(-h[1-9]\d*)?")
VARIANT_FIELDS = ("residual_type", "num_depth_blocks", "depth_key_rank", "depth_heads")


def variant_name(config: "LRAttnResConfig") -> str:
    """The variant of a config: residual type, blocks (`full` if there are as many as sub-layers), the rank if it is
    free, and the depth heads if there are several."""
    if config.residual_type == "standard":
        return config.residual_type
    blocks = "full" if config.has_full_sources else f"n{config.num_depth_blocks}"
    rank = "" if config.residual_type == "attnres" else f"-r{config.depth_key_rank}"
    heads = f"-h{config.depth_heads}" if config.depth_heads > 1 else ""
    return f"{config.residual_type}-{blocks}{rank}{heads}"


def variant_fields(variant: str) -> dict[str, Any]:
    """The fields of LRAttnResConfig that a name stands for. `full` is `num_depth_blocks=None`."""
    if not VARIANT.fullmatch(variant):
        raise ValueError(
            f"`variant` is {variant!r}; write standard, attnres-full, attnres-n8, projected-n8-r32, sliced-n8-r64-h8: "
            "residual type, blocks (n8 for 8 blocks; full, which is None in the config), rank (r32 for rank 32), "
            "depth heads (h8 for 8; none for 1)."
        )
    residual_type, *parts = variant.split("-")
    names = {"n": "num_depth_blocks", "r": "depth_key_rank", "h": "depth_heads"}
    numbers = {names[part[0]]: int(part[1:]) for part in parts if part != "full"}
    return {"residual_type": residual_type} | ({"num_depth_blocks": None} if "full" in parts else {}) | numbers
