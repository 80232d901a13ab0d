"""Read a released training checkpoint (`.pt`): a dict with `model` (the state dict) and `model_args` (options).

Every option that changes the maths becomes a config field or is refused by name.
"""

import math
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..configuration_lr_attnres import LRAttnResConfig
from ..data.tokenizers import CL100K_VOCAB_SIZE, END_OF_TEXT, SPECIAL_TOKENS
from ..errors import LRAttnResError, explain_field_error
from .staging import check_tensor


REQUIRED = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")
# The other supported options that change the maths, each with its value in a file that lacks it.
OPTIONAL = {
    "mlp_hidden_dim": None,
    "mlp_ratio": None,
    "rope_theta": 500_000.0,
    "weight_tying": False,
    "norm_pos": "before",
    "qk_norm": True,
    "use_attnres": False,
    "attnres_type": "full",
    "attnres_num_blocks": 8,
    "attnres_key_norm": True,
    "attn_res_query_norm": False,
    "attnres_block_average": False,
    "attnres_block_average_mode": "count",
    "attnres_block_count_prior": False,
    "attnres_block_alpha": "legacy",
    "attnres_block_beta": "legacy",
    "use_lrid": False,
    "lrid_rank": 64,
    "lrid_projection_rank": None,
    "lrid_key_from_output_tail": False,
    "lrid_num_heads": 1,
    "lrid_use_logit_scale": False,
    "lrid_logit_scale": None,
}
# Options about speed or initialisation, and details of options that are refused when they are on.
WITHOUT_EFFECT = (
    *("attn_res_query_init", "attnres_block_alpha_scope", "attnres_block_beta_scope", "lrid_key_value_norm"),
    *("attnres_block_learned_scale_init", "attnres_fuse_read_norm", "attnres_training_cache_phase1"),
    *("attnres_training_torch_phase2", "flash_attention", "init_cutoff_factor", "init_std", "use_fused_attnres"),
)


def read_released_file(path: str | os.PathLike) -> tuple[LRAttnResConfig, dict[str, torch.Tensor], dict[str, Any]]:
    """Config, state dict, and the other entries of the file (step, tokens); most tensors stay memory-mapped."""
    checkpoint = load_released_checkpoint(Path(path))
    tensors, model_args = _weights(checkpoint.pop("model")), checkpoint.pop("model_args")
    up_and_gate = tensors.get("transformer.layers.0.mlp.fc1.weight")
    if not isinstance(up_and_gate, torch.Tensor) or up_and_gate.dim() != 2:
        raise LRAttnResError("The checkpoint lacks the tensor transformer.layers.0.mlp.fc1.weight.")
    config = released_config(model_args, intermediate_size=up_and_gate.shape[0] // 2)
    state_dict = converted_state_dict(tensors, config, _projection_rank(model_args, config))
    config.dtype = state_dict["model.embed_tokens.weight"].dtype
    return config, state_dict, checkpoint


def load_released_checkpoint(path: Path) -> dict[str, Any]:
    """The contents of a released file; never runs code from it."""
    if not path.is_file():
        raise LRAttnResError(f"{path} is not a file.")
    try:
        is_zip = zipfile.is_zipfile(path)  # PyTorch before 1.6 wrote other files, which cannot be memory-mapped
        damaged = zipfile.ZipFile(path).testzip() if is_zip else None
        checkpoint: Any = None if damaged else torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        # torch's message advises an unsafe load; only the name of the refused object is useful.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        raise LRAttnResError(
            f"{path} is corrupt or holds more than tensors and plain values{f' ({refused[1]})' if refused else ''}: "
            "reading it would run code from the file."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise LRAttnResError(f"{path} cannot be read as a PyTorch checkpoint (truncated?): {error!r}") from error
    if damaged:
        raise LRAttnResError(f"{path} is damaged: the checksum of {damaged} is wrong; download the file again.")
    for name in ("model", "model_args"):
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(name), dict):
            raise LRAttnResError(f"{path} has no dict `{name}`; it is not a released LR-AttnRes training checkpoint.")
    return checkpoint


def released_config(model_args: dict[str, Any], intermediate_size: int) -> LRAttnResConfig:
    """The config that computes the same as the author's code with `model_args`.

    `intermediate_size` is that of the weights, for files that give only `mlp_ratio`.
    """
    if missing := [name for name in REQUIRED if name not in model_args]:
        raise LRAttnResError(f"`model_args` lacks {', '.join(missing)}.")
    for name, value in model_args.items():
        if not isinstance(value, (bool, int, float, str, list, tuple, dict, type(None))):
            raise LRAttnResError(f"`model_args` has a {type(value).__name__} as {name}, not a plain value.")
        if value and name not in REQUIRED and name not in OPTIONAL and name not in WITHOUT_EFFECT:
            raise LRAttnResError(f"`model_args` has {name}={value!r}, which this model cannot express.")
    args = OPTIONAL | model_args
    _check_choice(args, "norm_pos", ("before",))
    _check_choice(args, "attnres_type", ("full", "block"))
    if not 0 < _number(args, "rope_theta") < math.inf:
        raise LRAttnResError(f"`model_args` has rope_theta={args['rope_theta']!r}; it must be positive and finite.")

    end_of_text = SPECIAL_TOKENS[END_OF_TEXT] if args["vocab_size"] == CL100K_VOCAB_SIZE else None
    try:
        return LRAttnResConfig(
            vocab_size=args["vocab_size"],
            hidden_size=args["n_embd"],
            intermediate_size=args["mlp_hidden_dim"] or intermediate_size,
            num_hidden_layers=args["n_layer"],
            num_attention_heads=args["n_head"],
            max_position_embeddings=args["block_size"],
            rope_parameters={"rope_type": "default", "rope_theta": float(args["rope_theta"])},
            tie_word_embeddings=args["weight_tying"],
            qk_norm=args["qk_norm"],
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
            architectures=["LRAttnResForCausalLM"],
            **_depth_fields(args),
        )
    except StrictDataclassError as error:
        raise LRAttnResError(f"`model_args` gives no valid config: {explain_field_error(error)}") from error


def _depth_fields(args: dict[str, Any]) -> dict[str, Any]:
    if not (args["use_attnres"] or args["use_lrid"]):
        return {"residual_type": "standard"}
    residual_type, rank, heads, scale = "attnres", args["n_embd"], 1, 1.0
    if args["use_lrid"]:
        residual_type = "sliced" if args["lrid_key_from_output_tail"] else "projected"
        rank, heads = _positive_integer(args, "lrid_rank"), _positive_integer(args, "lrid_num_heads")
        if args["lrid_use_logit_scale"]:
            default = 1 / math.sqrt(rank / heads)
            scale = _number(args, "lrid_logit_scale") if args["lrid_logit_scale"] is not None else default
    if args["attnres_type"] == "block" and args["attnres_num_blocks"] is None:
        raise LRAttnResError("`model_args` has attnres_type='block' without attnres_num_blocks.")
    exponent = 0.0
    if args["attnres_block_average"]:
        _check_choice(args, "attnres_block_average_mode", ("count", "sqrt"))
        exponent = 1.0 if args["attnres_block_average_mode"] == "count" else 0.5
    prior = 1.0 if args["attnres_block_count_prior"] else 0.0
    return {
        "residual_type": residual_type,
        "num_depth_blocks": args["attnres_num_blocks"] if args["attnres_type"] == "block" else None,
        "depth_key_rank": rank,
        "depth_heads": heads,
        "depth_key_norm": args["attnres_key_norm"],
        "depth_query_norm": args["attn_res_query_norm"],
        "depth_logit_scale": scale,
        "depth_block_exponent": _number(args, "attnres_block_alpha", legacy=exponent),
        "depth_count_prior": _number(args, "attnres_block_beta", legacy=prior),
    }


def _projection_rank(model_args: dict[str, Any], config: LRAttnResConfig) -> int:
    """Rows of an output projection after the `hidden_size` rows of the value: the key and its padding."""
    if config.residual_type != "projected":
        return 0
    rank = model_args.get("lrid_projection_rank") or config.depth_key_rank
    if not isinstance(rank, int) or rank < config.depth_key_rank:
        rule = f"it must be an integer of at least lrid_rank = {config.depth_key_rank}"
        raise LRAttnResError(f"`model_args` has lrid_projection_rank={rank!r}; {rule}.")
    return rank


def _check_choice(args: dict[str, Any], name: str, choices: tuple) -> None:
    if args[name] not in choices:
        known = " or ".join(map(repr, choices))
        raise LRAttnResError(f"`model_args` has {name}={args[name]!r}; only {known} can be converted.")


def _positive_integer(args: dict[str, Any], name: str) -> int:
    if type(args[name]) is not int or args[name] < 1:
        raise LRAttnResError(f"`model_args` has {name}={args[name]!r}; it must be an integer of at least 1.")
    return args[name]


def _number(args: dict[str, Any], name: str, legacy: float | None = None) -> float:
    """An option that must be a number, or 'legacy' if the value `legacy` of older options applies."""
    if legacy is not None and args[name] == "legacy":
        return legacy
    try:
        if isinstance(args[name], bool):
            raise TypeError
        return float(args[name])
    except (TypeError, ValueError):
        raise LRAttnResError(f"`model_args` has {name}={args[name]!r}, which is not a number.") from None


def _weights(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict without the prefix of compiled modules and without RoPE buffers, which the model computes."""
    tensors: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        name = str(name).removeprefix("_orig_mod.")
        if name in tensors:
            raise LRAttnResError(f"The checkpoint has {name} twice, with and without the prefix `_orig_mod.`.")
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise LRAttnResError(f"The checkpoint has {name} without its contents (a meta tensor).")
        if not name.endswith((".attn.rope.sin", ".attn.rope.cos")):
            tensors[name] = tensor
    return tensors


def converted_state_dict(
    tensors: dict[str, Any], config: LRAttnResConfig, projection_rank: int
) -> dict[str, torch.Tensor]:
    """The state dict of `LRAttnResForCausalLM(config)`, mostly views of `tensors`, which is emptied."""

    def take(name: str, *shape: int) -> torch.Tensor:
        return check_tensor(name, tensors.pop(name, None), shape)

    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    vocab, rank, num_layers = config.vocab_size, config.depth_key_rank, config.num_hidden_layers
    suffix = "proj.weight" if config.residual_type in ("projected", "sliced") else "weight"
    released_rows = hidden + projection_rank
    rows = hidden + (rank if config.residual_type == "projected" else 0)  # without the padding after the key

    embedding = take("transformer.wte.weight", vocab, hidden)
    result = {"model.embed_tokens.weight": embedding}
    for layer in range(num_layers):
        old, new = f"transformer.layers.{layer}", f"model.layers.{layer}"
        query, key, value = take(f"{old}.attn.c_attn.weight", 3 * hidden, hidden).chunk(3)
        output = take(f"{old}.attn.c_proj.{suffix}", released_rows, hidden)
        up, gate = take(f"{old}.mlp.fc1.weight", 2 * inner, hidden).chunk(2)
        down = take(f"{old}.mlp.fc2.{suffix}", released_rows, inner)
        result |= {
            f"{new}.self_attn.q_proj.weight": _halves_from_pairs(query, heads),
            f"{new}.self_attn.k_proj.weight": _halves_from_pairs(key, heads),
            f"{new}.self_attn.v_proj.weight": value,
            f"{new}.self_attn.o_proj.weight": output[:rows],
            f"{new}.mlp.gate_proj.weight": gate,
            f"{new}.mlp.up_proj.weight": up,
            f"{new}.mlp.down_proj.weight": down[:rows],
        }
    if config.residual_type != "standard":
        is_attnres = config.residual_type == "attnres"
        query_shape = (hidden,) if is_attnres else (config.depth_heads, rank // config.depth_heads)
        name = "attn_residuals.{}.query" if is_attnres else "lrid_queries.{}"
        queries = [take(f"transformer.{name.format(j)}", *query_shape).view(rank) for j in range(2 * num_layers)]
        result["model.depth_queries.weight"] = torch.stack(queries).float()
    if config.residual_type == "projected":
        result["model.depth_embedding_key.weight"] = take("transformer.lrid_embedding_key.proj.weight", rank, hidden)
    if "lm_head.weight" in tensors or not config.tie_word_embeddings:
        result["lm_head.weight"] = take("lm_head.weight", vocab, hidden)
    if config.tie_word_embeddings:
        head = result.pop("lm_head.weight", embedding)
        if not torch.equal(head, embedding):
            raise LRAttnResError("`model_args` has weight_tying=True, but lm_head.weight is not the embedding.")
    if tensors:
        raise LRAttnResError(f"The checkpoint has tensors that the model does not use: {sorted(tensors)}.")
    return result


def _halves_from_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of a q or k projection: RoPE rotates pairs (2i, 2i + 1) in the released code and
    (i, i + head_dim / 2) in Transformers."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)
