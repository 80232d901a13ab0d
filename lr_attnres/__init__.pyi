"""The public names, also for type checkers and editors. `__init__.py` reads them from this file."""

from .analysis.cost import depth_cost as depth_cost
from .analysis.explorer import explore as explore
from .analysis.machine import doctor as doctor
from .analysis.routing import analyze as analyze
from .analysis.routing import analyze_model as analyze_model
from .analysis.routing import effective_sources as effective_sources
from .configuration_lr_attnres import LRAttnResConfig as LRAttnResConfig
from .data.packed_tokens import PackedTokens as PackedTokens
from .data.packed_tokens import verify_data as verify_data
from .data.packing import prepare_data as prepare_data
from .data.tokenizers import cl100k_tokenizer as cl100k_tokenizer
from .errors import HubError as HubError
from .errors import LRAttnResError as LRAttnResError
from .folders.adapter import load_routing_adapter as load_routing_adapter
from .folders.adapter import save_routing_adapter as save_routing_adapter
from .folders.adapter import set_routing_adapter as set_routing_adapter
from .folders.convert import convert_released_checkpoint as convert_released_checkpoint
from .folders.convert import load_released_model as load_released_model
from .folders.upgrade import load_upgraded as load_upgraded
from .folders.upgrade import upgrade_model as upgrade_model
from .hub_upload import push as push
from .inference.generate import generate_text as generate_text
from .inference.server import serve as serve
from .modeling_lr_attnres import LRAttnResForCausalLM as LRAttnResForCausalLM
from .modeling_lr_attnres import LRAttnResForQuestionAnswering as LRAttnResForQuestionAnswering
from .modeling_lr_attnres import LRAttnResForSequenceClassification as LRAttnResForSequenceClassification
from .modeling_lr_attnres import LRAttnResForTokenClassification as LRAttnResForTokenClassification
from .modeling_lr_attnres import LRAttnResModel as LRAttnResModel
from .modeling_lr_attnres import LRAttnResPreTrainedModel as LRAttnResPreTrainedModel
from .training.arguments import TrainArguments as TrainArguments
from .training.arguments import load_arguments as load_arguments
from .training.evaluation import evaluate as evaluate
from .training.evaluation import evaluate_model as evaluate_model
from .training.loop import train as train
from .training.losses import use_chunked_loss as use_chunked_loss
from .training.optimizers import muon_adamw as muon_adamw
from .training.optimizers import muon_adamw_factory as muon_adamw_factory
from .training.pipeline import pipeline_stage as pipeline_stage
from .training.pipeline import pipeline_stage_args as pipeline_stage_args
from .training.pipeline import sum_tied_gradients as sum_tied_gradients
from .variants import variant_fields as variant_fields
from .variants import variant_name as variant_name

__version__: str
