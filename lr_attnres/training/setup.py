"""Before the first step: the accelerator, the model (new or from a folder) and the optimizer."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase

from ..configuration_lr_attnres import LRAttnResConfig
from ..data.held_out import check_same_tokens
from ..data.manifest import Manifest
from ..data.packed_tokens import PackedTokens
from ..errors import LRAttnResError, explain_field_error
from ..folders.loading import load_language_model, use_depth_backend
from ..modeling_lr_attnres import LRAttnResForCausalLM
from .arguments import TrainArguments
from .losses import use_chunked_loss
from .optimizers import MuonAdamW, muon_adamw


def start_accelerator(args: TrainArguments) -> Accelerator:
    automatic = "bf16" if torch.accelerator.is_available() else "no"
    for tracker in args.trackers:
        if tracker not in map(str, get_available_trackers()):
            raise LRAttnResError(f"`trackers` has {tracker!r}, which is not installed or not known to Accelerate.")
    accelerator = Accelerator(
        mixed_precision=automatic if args.mixed_precision == "auto" else args.mixed_precision,
        # The loop scales the loss itself. Without this, ACCELERATE_GRADIENT_ACCUMULATION_STEPS would scale it again.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_backend="inductor" if args.compile else None,
        log_with=args.trackers or None,
        project_dir=args.output_dir,
    )
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        raise LRAttnResError(
            f"{kind.value} flattens the weights, but Muon needs whole matrices: launch with FSDP2 (fsdp_version: 2)."
        )
    return accelerator


def build_model(args: TrainArguments, data: PackedTokens, tokenizer: PreTrainedTokenizerBase) -> LRAttnResForCausalLM:
    """The model in the folder `init_from`, or a new one."""
    if args.init_from is None:
        model = new_model(args, data.manifest, tokenizer)
    else:
        model = load_initial_model(args.init_from, args, data)
    if args.train == "queries":
        model.requires_grad_(False).model.depth_queries.requires_grad_(True)
    model.set_attn_implementation(args.attn_implementation)
    use_depth_backend(model, args.depth_backend)
    return model


def new_model(args: TrainArguments, manifest: Manifest, tokenizer: PreTrainedTokenizerBase) -> LRAttnResForCausalLM:
    """A model with random weights. Vocabulary and context length come from the data unless `model` sets them."""
    sizes = {"vocab_size": manifest.vocab_size, "max_position_embeddings": manifest.sequence_length}
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if special["pad_token_id"] is None:
        special["pad_token_id"] = special["eos_token_id"]
    fields = sizes | special | args.model_fields()
    # Check the sizes first: if `vocab_size` is too small, the config would complain about `eos_token_id` instead.
    manifest.check_fits(build_config({name: fields[name] for name in sizes}))
    config = build_config(fields)
    with torch.device("meta"):
        size = sum(parameter.nbytes for parameter in LRAttnResForCausalLM(config).parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:  # the system may kill a process that fills the memory
        raise LRAttnResError(f"`model` needs {size / 2**30:,.0f} GiB, this machine has {memory / 2**30:,.0f}.")
    return LRAttnResForCausalLM(config)


def load_initial_model(init_from: str, args: TrainArguments, data: PackedTokens) -> LRAttnResForCausalLM:
    """The model in the folder `init_from`, in float32. It must agree with `variant`, `model` and the data."""
    if not Path(init_from).is_dir():
        advice = "download a repository with `hf download` first"
        raise LRAttnResError(f"`init_from` is {init_from}, which is not a folder: {advice}.")
    try:
        model = load_language_model(init_from, "cpu", "float32")
    except LRAttnResError as error:
        raise LRAttnResError(f"`init_from`: {error}") from error
    fields = {"depth_heads": LRAttnResConfig.depth_heads} | args.model_fields()  # a name without heads means one
    wanted_config = build_config(model.config.to_dict() | fields)
    for name in fields:
        found, wanted = getattr(model.config, name), getattr(wanted_config, name)
        if found != wanted:
            conflict = f"whose `{name}` is {found}; `variant` and `model` set it to {wanted}"
            raise LRAttnResError(f"`init_from` is {init_from}, {conflict}.")
    data.manifest.check_fits(model.config)
    check_same_tokens(init_from, data)
    return model


def build_config(fields: dict[str, Any]) -> LRAttnResConfig:
    try:
        return LRAttnResConfig.from_dict(fields)
    except StrictDataclassError as error:
        raise LRAttnResError(f"`model` or `variant`: {explain_field_error(error)}") from error


def wrap_for_training(accelerator: Accelerator, model: LRAttnResForCausalLM, args: TrainArguments) -> tuple:
    """The model and its optimizer, wrapped by Accelerate for the processes and devices of this run."""
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    use_chunked_loss(model, args.z_loss)
    if accelerator.is_fsdp2:
        set_up_sharding(accelerator, model)
    model, optimizer = accelerator.prepare(model, new_optimizer(model, args))
    model.train()
    return model, optimizer


def new_optimizer(model: torch.nn.Module, args: TrainArguments) -> MuonAdamW:
    options = ("lr_muon", "lr_adamw", "lr_queries", "momentum", "weight_decay", "betas")
    optimizer = muon_adamw(model, **{name: getattr(args, name) for name in options})
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def set_up_sharding(accelerator: Accelerator, model: LRAttnResForCausalLM) -> None:
    """Settings of FSDP2 that the launcher must not change, and an FSDP group for the depth queries."""
    from torch.distributed.fsdp import fully_shard

    plugin = accelerator.state.fsdp_plugin
    plugin.cpu_ram_efficient_loading = False  # every process builds the weights from the seed
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type("SHARDED_STATE_DICT")  # for checkpoints; `export` gathers the weights
    if plugin.mixed_precision_policy is not None:
        # A layer takes and returns depth logits in float32 beside values in bfloat16: cast nothing at its border.
        policy = plugin.mixed_precision_policy
        plugin.mixed_precision_policy = replace(policy, cast_forward_inputs=False, output_dtype=None)
    if model.config.residual_type != "standard":
        mesh = accelerator.torch_device_mesh
        if mesh is not None:
            mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
        # Sharded before Accelerate applies its mixed precision, so that the queries compute in float32.
        fully_shard(model.model.depth_queries, mesh=mesh)
