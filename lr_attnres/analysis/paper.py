"""The paper's published results: 0.5B parameters, 10B tokens of Ultra-FineWeb."""

from dataclasses import dataclass

from ..configuration_lr_attnres import LRAttnResConfig
from ..variants import variant_fields


@dataclass(frozen=True)
class PaperRow:
    """One trained model of the paper. Its size is the default of `LRAttnResConfig`."""

    variant: str
    validation_loss: float
    gradient_norm: float | None = None  # averaged over training; published only for full source sets

    @property
    def config(self) -> LRAttnResConfig:
        return LRAttnResConfig(**variant_fields(self.variant))

    @property
    def residual_type(self) -> str:
        return self.variant.split("-")[0]


PAPER_TABLE = [
    PaperRow("standard", 3.0009, 0.9775),
    PaperRow("attnres-full", 2.9752, 1.0030),
    PaperRow("attnres-n4", 2.9797),
    PaperRow("attnres-n8", 2.9778),
    PaperRow("attnres-n16", 2.9673),
    PaperRow("projected-full-r16", 2.9606, 0.8166),
    PaperRow("projected-full-r32", 2.9538, 0.7737),
    PaperRow("projected-full-r64", 2.9501, 0.7624),
    PaperRow("projected-n4-r32", 2.9488),
    PaperRow("projected-n8-r32", 2.9477),
    PaperRow("projected-n16-r32", 2.9543),
    PaperRow("sliced-full-r16", 2.9762, 0.7930),
    PaperRow("sliced-full-r32", 2.9682, 0.7911),
    PaperRow("sliced-full-r64", 2.9638, 0.8123),
    PaperRow("sliced-full-r128", 2.9630, 0.8577),
    PaperRow("sliced-full-r256", 2.9626, 0.8757),
    PaperRow("sliced-full-r512", 2.9617, 0.9084),
    PaperRow("sliced-n4-r64", 2.9533),
    PaperRow("sliced-n8-r64", 2.9480),
    PaperRow("sliced-n16-r64", 2.9494),
]

PAPER_VARIANTS = [row.variant for row in PAPER_TABLE]
