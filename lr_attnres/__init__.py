"""Low-Rank Attention Residuals: depth-routed decoders as a Hugging Face Transformers model."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_lr_attnres import LRAttnResConfig
from .hub_upload import push_model
from .modeling_lr_attnres import (
    LRAttnResForCausalLM,
    LRAttnResForQuestionAnswering,
    LRAttnResForSequenceClassification,
    LRAttnResForTokenClassification,
    LRAttnResModel,
    LRAttnResPreTrainedModel,
)


__version__ = "0.1.0"

# Here and not in the modeling file, which travels to the Hub without the rest of the package.
LRAttnResPreTrainedModel.push_to_hub = push_model  # type: ignore[method-assign, assignment]

AutoConfig.register("lr_attnres", LRAttnResConfig)
AutoModel.register(LRAttnResConfig, LRAttnResModel)
AutoModelForCausalLM.register(LRAttnResConfig, LRAttnResForCausalLM)
AutoModelForSequenceClassification.register(LRAttnResConfig, LRAttnResForSequenceClassification)
AutoModelForTokenClassification.register(LRAttnResConfig, LRAttnResForTokenClassification)
AutoModelForQuestionAnswering.register(LRAttnResConfig, LRAttnResForQuestionAnswering)

__all__ = [
    "LRAttnResConfig",
    "LRAttnResForCausalLM",
    "LRAttnResForQuestionAnswering",
    "LRAttnResForSequenceClassification",
    "LRAttnResForTokenClassification",
    "LRAttnResModel",
    "LRAttnResPreTrainedModel",
]
