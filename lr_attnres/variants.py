"""The name of a variant, as the command line, tables, figures and cards spell it, and the fields it stands for."""

import re
from typing import Any

from .configuration_lr_attnres import LRAttnResConfig


VARIANT = re.compile(r"standard|attnres-(full|n[1-9]\d*)|(projected|sliced)-(full|n[1-9]\d*)-r[1-9]\d*")
VARIANT_FIELDS = ("residual_type", "num_depth_blocks", "depth_key_rank")


def spell_variant(residual_type: str, num_depth_blocks: int | None, depth_key_rank: int | None) -> str:
    """`standard`, `attnres-full`, `sliced-n8-r64`: residual, blocks, and the rank where it is free."""
    if residual_type == "standard":
        return residual_type
    blocks = "full" if num_depth_blocks is None else f"n{num_depth_blocks}"
    return f"{residual_type}-{blocks}" + ("" if residual_type == "attnres" else f"-r{depth_key_rank}")


def variant_name(config: LRAttnResConfig) -> str:
    """The variant of a config. With as many blocks as sub-layers it is full, whatever their number."""
    blocks = None if config.has_full_sources else config.num_depth_blocks
    return spell_variant(config.residual_type, blocks, config.depth_key_rank)


def variant_fields(variant: str) -> dict[str, Any]:
    """`sliced-n8-r64` -> the three fields of LRAttnResConfig that it stands for."""
    if not VARIANT.fullmatch(variant):
        raise ValueError(
            f"`variant` is {variant!r}; write standard, attnres-full, attnres-n8, projected-n8-r32, sliced-full-r64 "
            "or the like: residual, blocks (full or n and their number), rank."
        )
    residual_type, *rest = variant.split("-")
    fields: dict[str, Any] = {"residual_type": residual_type}
    for part in rest:
        if part.startswith("r"):
            fields["depth_key_rank"] = int(part[1:])
        else:
            fields["num_depth_blocks"] = None if part == "full" else int(part[1:])
    return fields
