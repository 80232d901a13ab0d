"""The paper's published results: 0.5B parameters, 10B tokens of Ultra-FineWeb."""

from dataclasses import dataclass
from typing import Any

from ..configuration_lr_attnres import LRAttnResConfig, ResidualType
from ..variants import spell_variant


@dataclass(frozen=True)
class PaperRow:
    """One trained model of the paper. Its size is the default of `LRAttnResConfig`."""

    residual_type: ResidualType
    num_depth_blocks: int | None
    depth_key_rank: int | None  # None if the variant has no free rank
    validation_loss: float
    gradient_norm: float | None = None  # averaged over training; published only for full source sets

    @property
    def variant(self) -> str:
        return spell_variant(self.residual_type, self.num_depth_blocks, self.depth_key_rank)

    @property
    def config(self) -> LRAttnResConfig:
        rank: dict[str, Any] = {} if self.depth_key_rank is None else {"depth_key_rank": self.depth_key_rank}
        return LRAttnResConfig(residual_type=self.residual_type, num_depth_blocks=self.num_depth_blocks, **rank)


PAPER_TABLE = [
    PaperRow("standard", None, None, 3.0009, 0.9775),
    PaperRow("attnres", None, None, 2.9752, 1.0030),
    PaperRow("attnres", 4, None, 2.9797),
    PaperRow("attnres", 8, None, 2.9778),
    PaperRow("attnres", 16, None, 2.9673),
    PaperRow("projected", None, 16, 2.9606, 0.8166),
    PaperRow("projected", None, 32, 2.9538, 0.7737),
    PaperRow("projected", None, 64, 2.9501, 0.7624),
    PaperRow("projected", 4, 32, 2.9488),
    PaperRow("projected", 8, 32, 2.9477),
    PaperRow("projected", 16, 32, 2.9543),
    PaperRow("sliced", None, 16, 2.9762, 0.7930),
    PaperRow("sliced", None, 32, 2.9682, 0.7911),
    PaperRow("sliced", None, 64, 2.9638, 0.8123),
    PaperRow("sliced", None, 128, 2.9630, 0.8577),
    PaperRow("sliced", None, 256, 2.9626, 0.8757),
    PaperRow("sliced", None, 512, 2.9617, 0.9084),
    PaperRow("sliced", 4, 64, 2.9533),
    PaperRow("sliced", 8, 64, 2.9480),
    PaperRow("sliced", 16, 64, 2.9494),
]

PAPER_VARIANTS = [row.variant for row in PAPER_TABLE]
