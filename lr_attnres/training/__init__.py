"""Training by the paper's recipe: arguments, the loop, checkpoints, metrics, evaluation, losses and optimizers."""

from ..lazy_names import lazy_names


__getattr__, __all__ = lazy_names(
    __name__,
    {
        "arguments": ("TrainArguments", "add_flags", "load_arguments", "presets"),
        "evaluation": ("Evaluation", "evaluate", "evaluate_model"),
        "loop": ("train",),
        "losses": ("evaluation_mode", "num_targets", "use_chunked_loss"),
        "metrics": ("METRICS_FILE", "read_metrics"),
        "optimizers": ("MuonAdamW", "muon_adamw", "muon_adamw_factory"),
        "pipeline": ("boundary_elements", "pipeline_stage", "pipeline_stage_args", "sum_tied_gradients"),
    },
)
