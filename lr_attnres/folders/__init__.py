"""Model folders: convert released files, upgrade pretrained models, load, check and describe folders."""

from ..lazy_names import lazy_names


__getattr__, __all__ = lazy_names(
    __name__,
    {
        "adapter": (
            "copy_adapter",
            "is_adapter",
            "load_routing_adapter",
            "save_routing_adapter",
            "set_routing_adapter",
            "write_adapter",
        ),
        "card": ("GENERATED", "PIPELINE_TAGS", "PROVENANCE_FILE", "model_card", "read_provenance", "write_provenance"),
        "clean_process": ("check_code", "load_in_clean_process"),
        "convert": ("convert_released_checkpoint", "load_released_model"),
        "loading": (
            "check_generation_config",
            "check_weight_files",
            "load_causal_lm",
            "load_config",
            "read_config",
            "load_language_model",
            "use_depth_backend",
            "usable_device",
        ),
        "staging": ("check_absent", "code_files", "staged_folder", "sync_to_disk"),
        "upgrade": ("load_upgraded", "upgrade_model"),
    },
)
