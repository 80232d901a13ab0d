"""Low-Rank Attention Residuals: depth-routed decoders as a Hugging Face Transformers model.

Every public name can be imported from here. A name's module is imported when the name is first used.
"""

from .lazy_names import lazy_names
from .registration import register_when_imported


__version__ = "0.2.0"

__getattr__, __all__ = lazy_names(
    __name__,
    {
        "configuration_lr_attnres": ("LRAttnResConfig",),
        "modeling_lr_attnres": (
            "LRAttnResForCausalLM",
            "LRAttnResForQuestionAnswering",
            "LRAttnResForSequenceClassification",
            "LRAttnResForTokenClassification",
            "LRAttnResModel",
            "LRAttnResPreTrainedModel",
        ),
        "errors": ("HubError", "LRAttnResError"),
        "hub_upload": ("push",),
        "variants": ("variant_fields", "variant_name"),
        "data": ("PackedTokens", "cl100k_tokenizer", "prepare_data", "verify_data"),
        "training": (
            "TrainArguments",
            "evaluate",
            "evaluate_model",
            "load_arguments",
            "muon_adamw",
            "muon_adamw_factory",
            "train",
            "use_chunked_loss",
        ),
        "folders": (
            "convert_released_checkpoint",
            "load_released_model",
            "load_routing_adapter",
            "load_upgraded",
            "save_routing_adapter",
            "set_routing_adapter",
            "upgrade_model",
        ),
        "analysis": ("analyze", "analyze_model", "depth_cost", "effective_sources", "explore"),
        "inference": ("generate_text", "serve"),
    },
)

register_when_imported()
