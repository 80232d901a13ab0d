"""Names of variants such as `sliced-n8-r64`, and the three config fields that a name stands for."""

import re
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .configuration_lr_attnres import LRAttnResConfig


# Those of `ResidualType` in the config, whose file travels to the Hub and imports torch.
RESIDUAL_TYPES = ("standard", "attnres", "projected", "sliced")
RANKED = "|".join(name for name in RESIDUAL_TYPES if name not in ("standard", "attnres"))  # with a rank of their own
VARIANT = re.compile(rf"standard|attnres-(full|n[1-9]\d*)|({RANKED})-(full|n[1-9]\d*)-r[1-9]\d*")
VARIANT_FIELDS = ("residual_type", "num_depth_blocks", "depth_key_rank")


def spell_variant(residual_type: str, num_depth_blocks: int | str | None, depth_key_rank: int | None) -> str:
    """`standard`, `attnres-full`, `sliced-n8-r64`: residual type, blocks, and the rank if it is free."""
    if residual_type == "standard":
        return residual_type
    blocks = f"n{num_depth_blocks}" if isinstance(num_depth_blocks, int) else "full"
    return f"{residual_type}-{blocks}" + ("" if residual_type == "attnres" else f"-r{depth_key_rank}")


def variant_name(config: "LRAttnResConfig") -> str:
    """The variant of a config. It is full if there are as many blocks as sub-layers."""
    blocks = "full" if config.has_full_sources else config.num_depth_blocks
    return spell_variant(config.residual_type, blocks, config.depth_key_rank)


def variant_fields(variant: str) -> dict[str, Any]:
    """The fields of LRAttnResConfig that a name stands for. `full` is `num_depth_blocks=None`."""
    if not VARIANT.fullmatch(variant):
        raise ValueError(
            f"`variant` is {variant!r}; write standard, attnres-full, attnres-n8, projected-n8-r32, sliced-full-r64: "
            "residual type, blocks (n8 for 8 blocks; full, which is None in the config), rank (r32 for rank 32)."
        )
    residual_type, *rest = variant.split("-")
    fields: dict[str, Any] = {"residual_type": residual_type}
    for part in rest:
        if part.startswith("r"):
            fields["depth_key_rank"] = int(part[1:])
        else:
            fields["num_depth_blocks"] = None if part == "full" else int(part[1:])
    return fields
