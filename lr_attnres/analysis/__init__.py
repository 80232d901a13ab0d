"""Analysis of depth routing: statistics over held-out text, exact costs, figures and an interactive page."""

from ..lazy_names import lazy_names


__getattr__, __all__ = lazy_names(
    __name__,
    {
        "cost": ("DepthCost", "cost_report", "depth_cost", "num_parameters", "paper_report"),
        "explorer": ("explore",),
        "machine": ("doctor",),
        "paper": ("PAPER_TABLE", "PAPER_VARIANTS", "PaperRow"),
        "plots": ("draw", "draw_paper"),
        "routing": ("DepthAnalysis", "analyze", "analyze_model", "effective_sources", "model_names", "summary"),
    },
)
