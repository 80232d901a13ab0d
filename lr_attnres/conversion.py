"""Released training checkpoints (`.pt`) become folders that `from_pretrained` loads.

A released file is a dict with `model` (the state dict) and `model_args` (the options of the author's code). Everything
that changes the maths is either translated into a config field or refused by name; nothing is converted half.
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
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .clean_process import probe_tokens
from .configuration_lr_attnres import LRAttnResConfig
from .errors import explain_field_error
from .loading import LoadingError, load_tokenizer
from .model_card import model_card, write_provenance
from .model_folder import DTYPES, check_absent, compare_logits, staged_folder
from .modeling_lr_attnres import LRAttnResForCausalLM
from .released_source import ConversionError, find_released_file
from .tokenizer import CL100K_VOCAB_SIZE, END_OF_TEXT, SPECIAL_TOKENS, TokenizerError, cl100k_tokenizer


logger = logging.get_logger(__name__)

REQUIRED = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")
# The other options that change the maths and can be expressed, with what a file that lacks them means.
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
# Options about speed, initialisation, or details of an option that is refused when it is on.
WITHOUT_EFFECT = {
    "attn_res_query_init",
    "attnres_block_alpha_scope",
    "attnres_block_beta_scope",
    "attnres_block_learned_scale_init",
    "attnres_fuse_read_norm",
    "attnres_training_cache_phase1",
    "attnres_training_torch_phase2",
    "flash_attention",
    "init_cutoff_factor",
    "init_std",
    "lrid_key_value_norm",
    "use_fused_attnres",
}


def load_released_checkpoint(path: str | os.PathLike) -> dict[str, Any]:
    """The contents of a released file, its tensors memory-mapped; no code in it is ever run."""
    path = Path(path)
    if not path.is_file():
        raise ConversionError(f"{path} is not a file.")
    try:
        if zipfile.is_zipfile(path) and (damaged := zipfile.ZipFile(path).testzip()):
            raise ConversionError(f"{path} is damaged: the checksum of {damaged} is wrong; get the file again.")
        # Files older than PyTorch 1.6 are not zip archives and cannot be mapped.
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        # torch's own message advises to read the file unsafely; only the name that it refused is of use.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        raise ConversionError(
            f"{path} is corrupt or holds more than tensors and plain values{f' ({refused[1]})' if refused else ''}: "
            "reading it would run code from the file."
        ) from error
    except ConversionError:
        raise
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConversionError(f"{path} cannot be read as a PyTorch checkpoint (truncated?): {error!r}") from error
    for name in ("model", "model_args"):
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(name), dict):
            raise ConversionError(f"{path} has no dict `{name}`; it is not a released LR-AttnRes training checkpoint.")
    return checkpoint


def released_config(model_args: dict[str, Any], intermediate_size: int) -> LRAttnResConfig:
    """The config that computes what the author's code computes with `model_args`."""
    for name in REQUIRED:
        if name not in model_args:
            raise ConversionError(f"`model_args` lacks {name}.")
    for name, value in model_args.items():
        if not isinstance(value, (bool, int, float, str, list, tuple, dict, type(None))):
            raise ConversionError(f"`model_args` has a {type(value).__name__} as {name}, not a plain value.")
        if value and name not in REQUIRED and name not in OPTIONAL and name not in WITHOUT_EFFECT:
            raise ConversionError(f"`model_args` has {name}={value!r}, which this model cannot express.")
    args = OPTIONAL | model_args
    _check_choice(args, "norm_pos", ("before",))
    _check_choice(args, "attnres_type", ("full", "block"))
    _check_choice(args, "lrid_num_heads", (1,))
    if not 0 < _number(args, "rope_theta") < math.inf:
        raise ConversionError(f"`model_args` has rope_theta={args['rope_theta']!r}; it must be positive and finite.")

    end_of_text = SPECIAL_TOKENS[END_OF_TEXT] if args["vocab_size"] == CL100K_VOCAB_SIZE else None
    fields = dict(
        vocab_size=args["vocab_size"],
        hidden_size=args["n_embd"],
        intermediate_size=args["mlp_hidden_dim"] or intermediate_size,
        num_hidden_layers=args["n_layer"],
        num_attention_heads=args["n_head"],
        max_position_embeddings=args["block_size"],
        rope_theta=float(args["rope_theta"]),
        tie_word_embeddings=args["weight_tying"],
        qk_norm=args["qk_norm"],
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        **_depth_fields(args),
    )
    try:
        return LRAttnResConfig(**fields)
    except StrictDataclassError as error:
        raise ConversionError(f"`model_args` gives no valid config: {explain_field_error(error)}") from error


def _depth_fields(args: dict[str, Any]) -> dict[str, Any]:
    if not (args["use_attnres"] or args["use_lrid"]):
        return {"residual_type": "standard"}
    residual_type, rank, scale = "attnres", args["n_embd"], 1.0
    if args["use_lrid"]:
        residual_type = "sliced" if args["lrid_key_from_output_tail"] else "projected"
        rank = args["lrid_rank"]
        if not isinstance(rank, int) or rank < 1:
            raise ConversionError(f"`model_args` has lrid_rank={rank!r}; it must be a whole number of at least 1.")
        if args["lrid_use_logit_scale"]:
            scale = _number(args, "lrid_logit_scale") if args["lrid_logit_scale"] is not None else 1 / math.sqrt(rank)
    if args["attnres_type"] == "block" and args["attnres_num_blocks"] is None:
        raise ConversionError("`model_args` has attnres_type='block' without attnres_num_blocks.")
    if args["attnres_block_alpha"] != "legacy":
        alpha = _number(args, "attnres_block_alpha")
    elif args["attnres_block_average"]:
        _check_choice(args, "attnres_block_average_mode", ("count", "sqrt"))
        alpha = 1.0 if args["attnres_block_average_mode"] == "count" else 0.5
    else:
        alpha = 0.0
    if args["attnres_block_beta"] != "legacy":
        beta = _number(args, "attnres_block_beta")
    else:
        beta = 1.0 if args["attnres_block_count_prior"] else 0.0
    return {
        "residual_type": residual_type,
        "num_depth_blocks": args["attnres_num_blocks"] if args["attnres_type"] == "block" else None,
        "depth_key_rank": rank,
        "depth_key_norm": args["attnres_key_norm"],
        "depth_query_norm": args["attn_res_query_norm"],
        "depth_logit_scale": scale,
        "depth_block_exponent": alpha,
        "depth_count_prior": beta,
    }


def _check_choice(args: dict[str, Any], name: str, choices: tuple) -> None:
    if args[name] not in choices:
        raise ConversionError(
            f"`model_args` has {name}={args[name]!r}; only {' or '.join(map(repr, choices))} converts."
        )


def _number(args: dict[str, Any], name: str) -> float:
    try:
        if isinstance(args[name], bool):
            raise TypeError
        return float(args[name])
    except (TypeError, ValueError):
        raise ConversionError(f"`model_args` has {name}={args[name]!r}, which is not a number.") from None


class _ReleasedTensors:
    """The released state dict; each tensor is taken once, by name and exact shape."""

    def __init__(self, state_dict: dict[str, torch.Tensor]):
        self.tensors: dict[str, torch.Tensor] = {}
        for name, tensor in state_dict.items():
            name = str(name).removeprefix("_orig_mod.")
            if name in self.tensors:
                raise ConversionError(f"The checkpoint has {name} twice, with and without the prefix `_orig_mod.`.")
            if not name.endswith((".attn.rope.sin", ".attn.rope.cos")):  # buffers, computed anew
                self.tensors[name] = tensor

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self.tensors:
            raise ConversionError(f"The checkpoint lacks the tensor {name} of shape {list(shape)}.")
        tensor = self.tensors.pop(name)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in DTYPES or not _is_dense(tensor):
            raise ConversionError(f"{name} is not a dense tensor of floating-point numbers of 16 bits or more.")
        if tuple(tensor.shape) != shape:
            raise ConversionError(f"The tensor {name} has shape {list(tensor.shape)}; expected {list(shape)}.")
        return tensor

    def intermediate_size(self) -> int:
        """For files that give `mlp_ratio` alone: the first feed-forward weight holds an up and a gate half."""
        name = "transformer.layers.0.mlp.fc1.weight"
        if not isinstance(self.tensors.get(name), torch.Tensor) or self.tensors[name].dim() != 2:
            raise ConversionError(f"The checkpoint lacks the tensor {name}.")
        return self.tensors[name].shape[0] // 2


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def _halves_from_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a q or k projection: RoPE on interleaved pairs (2i, 2i + 1) -> RoPE on halves (i, i + head_dim / 2)."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def converted_state_dict(
    tensors: _ReleasedTensors, config: LRAttnResConfig, projection_rank: int
) -> dict[str, torch.Tensor]:
    """The state dict of `LRAttnResForCausalLM(config)`, from released tensors."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    vocab, rank, sites = config.vocab_size, config.depth_key_rank, range(2 * config.num_hidden_layers)
    low_rank = config.residual_type in ("projected", "sliced")
    suffix = "proj.weight" if low_rank else "weight"
    # Rows past the key are padding of the author's GEMM.
    released_rows = hidden + projection_rank
    rows = hidden + (rank if config.residual_type == "projected" else 0)

    result = {"model.embed_tokens.weight": tensors.take("transformer.wte.weight", vocab, hidden)}
    for layer in range(config.num_hidden_layers):
        old, new = f"transformer.layers.{layer}", f"model.layers.{layer}"
        query, key, value = tensors.take(f"{old}.attn.c_attn.weight", 3 * hidden, hidden).chunk(3)
        output = tensors.take(f"{old}.attn.c_proj.{suffix}", released_rows, hidden)
        up, gate = tensors.take(f"{old}.mlp.fc1.weight", 2 * inner, hidden).chunk(2)
        down = tensors.take(f"{old}.mlp.fc2.{suffix}", released_rows, inner)
        result |= {
            f"{new}.self_attn.q_proj.weight": _halves_from_pairs(query, heads),
            f"{new}.self_attn.k_proj.weight": _halves_from_pairs(key, heads),
            f"{new}.self_attn.v_proj.weight": value,
            f"{new}.self_attn.o_proj.weight": output[:rows],
            f"{new}.mlp.gate_proj.weight": gate,
            f"{new}.mlp.up_proj.weight": up,
            f"{new}.mlp.down_proj.weight": down[:rows],
        }
    if low_rank:
        queries = [tensors.take(f"transformer.lrid_queries.{site}", 1, rank).squeeze(0) for site in sites]
        result["model.depth_queries.weight"] = torch.stack(queries).float()
    elif config.residual_type == "attnres":
        queries = [tensors.take(f"transformer.attn_residuals.{site}.query", hidden) for site in sites]
        result["model.depth_queries.weight"] = torch.stack(queries).float()
    if config.residual_type == "projected":
        name = "transformer.lrid_embedding_key.proj.weight"
        result["model.depth_embedding_key.weight"] = tensors.take(name, rank, hidden)
    if config.tie_word_embeddings:
        head = tensors.tensors.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, result["model.embed_tokens.weight"]):
            raise ConversionError("`model_args` has weight_tying=True, but lm_head.weight is not the embedding.")
    else:
        result["lm_head.weight"] = tensors.take("lm_head.weight", vocab, hidden)
    if tensors.tensors:
        raise ConversionError(f"The checkpoint has tensors that belong nowhere: {sorted(tensors.tensors)}.")
    return result


def read_released_file(path: str | os.PathLike) -> tuple[LRAttnResConfig, dict[str, torch.Tensor], dict[str, Any]]:
    """Config, state dict and the rest (step, tokens) of a released file; most tensors still lie in the mapped file."""
    checkpoint = load_released_checkpoint(path)
    tensors = _ReleasedTensors(checkpoint.pop("model"))
    model_args = checkpoint.pop("model_args")
    config = released_config(model_args, tensors.intermediate_size())
    return config, converted_state_dict(tensors, config, _projection_rank(model_args, config)), checkpoint


def _projection_rank(model_args: dict[str, Any], config: LRAttnResConfig) -> int:
    """The rows behind a value in the output projections of `projected`."""
    if config.residual_type != "projected":
        return 0
    rank = model_args.get("lrid_projection_rank") or config.depth_key_rank
    if not isinstance(rank, int) or rank < config.depth_key_rank:
        raise ConversionError(
            f"`model_args` has lrid_projection_rank={rank!r}; it must be a number not below lrid_rank = "
            f"{config.depth_key_rank}."
        )
    return rank


def load_released_model(source: str | os.PathLike) -> LRAttnResForCausalLM:
    """The model of a released `.pt` file."""
    config, state_dict, _ = read_released_file(source)
    dtype = state_dict["model.embed_tokens.weight"].dtype
    return LRAttnResForCausalLM.from_pretrained(None, config=config, state_dict=state_dict, dtype=dtype)


def convert_released_checkpoint(
    source: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    filename: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str = "5GB",
    tokenizer: str | os.PathLike | None = None,
    verify: bool = False,
) -> Path:
    """Convert a released checkpoint into a folder that `from_pretrained` loads and `push` sends; returns the folder.

    The folder appears complete or not at all.

    Args:
        source: a `.pt` file, a folder of them, or a Hub repository (see `find_released_file` for the next three).
        dtype: of the weights, as in the file by default; the queries stay float32.
        max_shard_size: a model above this size is split into several files.
        tokenizer: a `cl100k_base.tiktoken` file, or a folder or Hub repository with a tokenizer. By default a model
            with the vocabulary of cl100k_base gets its ranks from tiktoken, and others get none.
        verify: load the result in a fresh process and compare its logits with those of the source.
    """
    output_dir = Path(output_dir)
    check_absent(output_dir)
    path = find_released_file(source, filename, revision, token)
    config, state_dict, rest = read_released_file(path)
    config.dtype = dtype or state_dict["model.embed_tokens.weight"].dtype
    with staged_folder(output_dir) as staging:
        _add_tokenizer(staging, config, tokenizer)
        expected = _probe_logits(config, state_dict) if verify else None
        _write_model(staging, config, state_dict, max_shard_size)
        _write_card(staging, config, output_dir.name, _describe_source(source, path), rest)
        if expected is not None:
            # Same weights, dtype and kernels: only the split of the work over threads may differ.
            half = config.dtype in (torch.float16, torch.bfloat16)
            compare_logits(staging, expected, tolerance=2e-2 if half else 2e-5)
    return output_dir


def _write_model(folder: Path, config: LRAttnResConfig, state_dict: dict[str, torch.Tensor], shard_size: str) -> None:
    """Weights go from the mapped file to the disk; at most one copy of the model is made on the way, in its dtype."""
    with torch.device("meta"):
        model = LRAttnResForCausalLM(config).to(config.dtype)  # type: ignore[arg-type]
    model.generation_config.pad_token_id = config.eos_token_id
    for name, tensor in state_dict.items():
        state_dict[name] = tensor.to(torch.float32 if "depth_queries" in name else config.dtype)
    try:
        model.save_pretrained(folder, state_dict=state_dict, max_shard_size=shard_size)
    except ValueError as error:
        raise ConversionError(f"`max_shard_size` {shard_size}: {error}") from error


def _add_tokenizer(folder: Path, config: LRAttnResConfig, source: str | os.PathLike | None) -> None:
    if source is None and config.vocab_size != CL100K_VOCAB_SIZE:
        logger.warning(
            f"No tokenizer was written: {config.vocab_size} tokens are not cl100k_base. Give one as `tokenizer`."
        )
        return
    try:
        tokenizer: PreTrainedTokenizerBase
        if source is None or Path(source).is_file():
            tokenizer = cl100k_tokenizer(source, model_max_length=config.max_position_embeddings)
        else:
            tokenizer = load_tokenizer(source)
    except TokenizerError as error:
        if source is not None:
            raise ConversionError(f"`tokenizer`: {error}") from error
        logger.warning(f"No tokenizer was written: {error}")
        return
    except LoadingError as error:
        raise ConversionError(f"`tokenizer` {source}: {error}") from error
    size = max(tokenizer.get_vocab().values()) + 1
    if size > config.vocab_size:
        raise ConversionError(f"`tokenizer` {source} has {size} tokens, the model {config.vocab_size}.")
    tokenizer.save_pretrained(folder)


def _describe_source(source: str | os.PathLike, path: Path) -> str:
    """For the card, which is public: a Hub name, or a file name without the folders of this machine."""
    if path == Path(source):
        return path.name
    return f"{Path(source).name if Path(source).is_dir() else source}, {path.name}"


def _write_card(folder: Path, config: LRAttnResConfig, name: str, source: str, rest: dict[str, Any]) -> None:
    step, tokens = rest.get("step"), rest.get("tokens_processed")
    step, tokens = (
        int(value) if isinstance(value, int | float) and math.isfinite(value) else None for value in (step, tokens)
    )
    write_provenance(folder, source=source, step=step, tokens=tokens)
    model_card(folder, config, name).save(folder / "README.md")


@torch.no_grad()
def _probe_logits(config: LRAttnResConfig, state_dict: dict[str, torch.Tensor]) -> torch.Tensor:
    model = LRAttnResForCausalLM.from_pretrained(None, config=config, state_dict=dict(state_dict), dtype=config.dtype)
    return model(probe_tokens(config.vocab_size)[:, : max(1, config.max_position_embeddings - 1)]).logits
