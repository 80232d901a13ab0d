"""Names of variants such as `sliced-n8-r64-h8`, and the config fields that a name stands for."""

import re
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .configuration_lr_attnres import LRAttnResConfig


# Those of `ResidualType` in the config, whose file travels to the Hub and imports torch.
RESIDUAL_TYPES = ("standard", "attnres", "projected", "sliced")
RANKED = "|".join(name for name in RESIDUAL_TYPES if name not in ("standard", "attnres"))  # with a rank of their own
VARIANT = re.compile(rf"standard|(attnres-(full|n[1-9]\d*)|({RANKED})-(full|n[1-9]\d*)-r[1-9]\d*)(-h[1-9]\d*)?")
VARIANT_FIELDS = ("residual_type", "num_depth_blocks", "depth_key_rank", "depth_heads")


def spell_variant(
    residual_type: str, num_depth_blocks: int | str | None, depth_key_rank: int | None, depth_heads: int = 1
) -> str:
    """`standard`, `attnres-full`, `sliced-n8-r64-h8`: residual type, blocks, the rank if it is free, and the depth
    heads if there are several."""
    if residual_type == "standard":
        return residual_type
    blocks = f"n{num_depth_blocks}" if isinstance(num_depth_blocks, int) else "full"
    rank = "" if residual_type == "attnres" else f"-r{depth_key_rank}"
    return f"{residual_type}-{blocks}{rank}" + (f"-h{depth_heads}" if depth_heads > 1 else "")


def variant_name(config: "LRAttnResConfig") -> str:
    """The variant of a config. It is full if there are as many blocks as sub-layers."""
    blocks = "full" if config.has_full_sources else config.num_depth_blocks
    return spell_variant(config.residual_type, blocks, config.depth_key_rank, config.depth_heads)


def variant_fields(variant: str) -> dict[str, Any]:
    """The fields of LRAttnResConfig that a name stands for. `full` is `num_depth_blocks=None`."""
    if not VARIANT.fullmatch(variant):
        raise ValueError(
            f"`variant` is {variant!r}; write standard, attnres-full, attnres-n8, projected-n8-r32, sliced-n8-r64-h8: "
            "residual type, blocks (n8 for 8 blocks; full, which is None in the config), rank (r32 for rank 32), "
            "depth heads (h8 for 8; none for 1)."
        )
    residual_type, *rest = variant.split("-")
    fields: dict[str, Any] = {"residual_type": residual_type}
    for part in rest:
        if part.startswith("r"):
            fields["depth_key_rank"] = int(part[1:])
        elif part.startswith("h"):
            fields["depth_heads"] = int(part[1:])
        else:
            fields["num_depth_blocks"] = None if part == "full" else int(part[1:])
    return fields
