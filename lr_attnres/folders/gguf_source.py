"""Read a pretrained model from a GGUF file, one dequantised tensor at a time, in float32."""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from ..data.tokenizers import vocabulary_size
from ..errors import LRAttnResError, one_line
from ..sources import REPO_ID, check_not_special, hub_source
from .clean_process import probe_logits


logger = logging.get_logger(__name__)

REMOTE_FILE = re.compile(rf"({REPO_ID.pattern}):(.+\.gguf)")
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3: divisors of the frequencies
# The values with which the other fields of RoPE change nothing; an unknown field has none.
NEUTRAL_ROPE = {
    "scale_linear": (0.0, 1.0),  # the name of `scaling.factor` in old files
    "scaling.factor": (0.0, 1.0),
    "scaling.finetuned": (False, True),  # a remark
    "scaling.attn_factor": (1.0,),
    "scaling.yarn_attn_factor": (1.0,),
    "scaling.yarn_beta_fast": (32.0,),
    "scaling.yarn_beta_slow": (1.0,),
    "scaling.yarn_log_multiplier": (0.0,),
}
READ_ROPE = {"dimension_count", "freq_base", "scaling.type", "scaling.original_context_length"}
# Raised by `gguf` and Transformers for damaged files.
UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, NotImplementedError, OverflowError)


def is_gguf(source: object) -> bool:
    return isinstance(source, str | os.PathLike) and os.fspath(source).endswith(".gguf")


def find_gguf(source: str | os.PathLike, revision: str | None, token: str | None) -> Path:
    """The file `source`, or `owner/name:file.gguf` from the Hub, which is downloaded into the Hub's cache."""
    path, name = Path(source), os.fspath(source)
    if path.exists():
        check_not_special(path)
        if not path.is_file():
            raise LRAttnResError(f"{source} is a folder; give a GGUF file.")
        if revision is not None:
            raise LRAttnResError(f"`revision` goes with a Hub repository; {source} is on this machine.")
        return path
    if (match := REMOTE_FILE.fullmatch(name)) is None:
        raise LRAttnResError(
            f"{name!r} is not on this machine, nor a file of the Hub of the form owner/name:file.gguf."
        )
    with hub_source(match[1], revision):
        return Path(hf_hub_download(match[1], match[2], revision=revision, token=token))


class GGUFModel:
    """A GGUF file; `name` is that of its Hub repository or of the file."""

    architecture = None

    def __init__(self, source: str | os.PathLike, revision: str | None = None, token: str | None = None):
        try:
            import gguf
        except ImportError as error:
            install = 'pip install "lr-attnres[gguf]", or in a clone pip install ".[gguf]"'
            raise LRAttnResError(f"{source} needs the package gguf: {install}.") from error
        self.path = find_gguf(source, revision, token)
        match = REMOTE_FILE.fullmatch(os.fspath(source))
        self.name = match[1] if match and not Path(source).exists() else self.path.stem
        self.dequantize = gguf.dequantize
        try:
            reader = gguf.GGUFReader(self.path)
        except UNREADABLE as error:
            cause = "it is damaged, cut short or no GGUF file"
            raise LRAttnResError(f"{self.path} cannot be used, because {cause}: {one_line(error)}") from error
        try:
            self.fields = {name: field.contents() for name, field in reader.fields.items() if "tokenizer." not in name}
            if (parts := self.fields.get("split.count", 1)) > 1:
                advice = "merge them with `llama-gguf-split --merge` first"
                raise LRAttnResError(f"{self.path} is one of {parts} parts of a model: {advice}.")
            tokens = reader.fields.get("tokenizer.ggml.tokens")
            self.num_tokens = 0 if tokens is None else len(tokens.data)
            self.tensor_of = {tensor.name: tensor for tensor in reader.tensors}
            self.config = self._read_config()
            self.name_in_file = {} if self._is_other() else self._names()
        except LRAttnResError:
            raise
        except UNREADABLE as error:
            raise LRAttnResError(f"{self.path} cannot be used: {one_line(error)}") from error
        licence = self.fields.get("general.license")
        self.license = licence if isinstance(licence, str) else None

    def _read_config(self) -> PreTrainedConfig:
        """The config as Transformers reads it, with what it leaves out: sizes that the shapes say, and scaled RoPE."""
        config: Any = AutoConfig.from_pretrained(self.path.parent, gguf_file=self.path.name)
        if self._is_other():
            return config
        config.vocab_size, config.hidden_size = self._shape("token_embd.weight")
        config.head_dim = self._shape("blk.0.attn_q.weight")[0] // config.num_attention_heads
        config.num_key_value_heads = self._shape("blk.0.attn_k.weight")[0] // config.head_dim
        if (size := self._field("rope.dimension_count", config.head_dim)) != config.head_dim:
            raise LRAttnResError(
                f"`rope.dimension_count` is {size}; only {config.head_dim}, whole heads, can be upgraded."
            )
        config.sliding_window = self._field("attention.sliding_window")  # Transformers' default for Mistral is 4096
        config.rope_parameters = config.rope_parameters | self._scaled_rope(config.max_position_embeddings)
        return config

    def _is_other(self) -> bool:
        """Whether the layers are not Llama's; the upgrade refuses such a model by its type."""
        return self.fields["general.architecture"] not in LIKE_LLAMA

    def _field(self, name: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.fields['general.architecture']}.{name}", default)

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensor_of:
            raise LRAttnResError(f"{self.path} lacks the tensor {name}.")
        return tuple(int(size) for size in reversed(self.tensor_of[name].shape))

    def _scaled_rope(self, context: int) -> dict[str, Any]:
        kind, factor = self._field("rope.scaling.type", "none"), self._field("rope.scaling.factor") or 1.0
        if kind not in ("none", "linear", "yarn"):
            raise LRAttnResError(f"`rope.scaling.type` is {kind!r}; only none, linear and yarn can be upgraded.")
        self._check_rope_fields(READ_ROPE if kind == "none" else READ_ROPE | {"scaling.factor"})
        if kind != "none" and ROPE_FACTORS in self.tensor_of:
            both = f"`rope.scaling.type` is {kind!r} and the file has {ROPE_FACTORS}"
            raise LRAttnResError(f"{both}; only one of the two scalings of RoPE can be upgraded.")
        parameters: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = self._field("rope.scaling.original_context_length")
            if not original:
                missing = f"`rope.scaling.original_context_length` is {original}"
                raise LRAttnResError(f"{missing}; yarn can be upgraded only with this length, so add it to the file.")
            parameters["original_max_position_embeddings"] = original
        elif ROPE_FACTORS in self.tensor_of:
            factors = self._dequantize(ROPE_FACTORS).tolist()
            parameters = {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
            parameters |= {
                "short_factor": factors,
                "long_factor": factors,
                "original_max_position_embeddings": context,
            }
        elif kind == "none":
            return {}
        logger.warning(
            f"The RoPE of {self.path.name} is scaled, which Transformers ignores in a GGUF: kept as scaled."
        )
        return parameters

    def _check_rope_fields(self, read: set[str]) -> None:
        prefix = f"{self.fields['general.architecture']}.rope."
        for name, value in self.fields.items():
            field = name.removeprefix(prefix)
            if name.startswith(prefix) and field not in read and value not in NEUTRAL_ROPE.get(field, ()):
                raise LRAttnResError(
                    f"`rope.{field}` is {value!r}; a RoPE that this field changes cannot be upgraded: convert the"
                    " original model without it, or upgrade that model."
                )

    def _names(self) -> dict[str, str]:
        """The name in the file of each tensor; tensors that Transformers does not know keep that name."""
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config)
        sizes = {name: getattr(self.config, name) for name in ("num_attention_heads", "num_key_value_heads")}
        architecture = self.fields["general.architecture"]
        self.processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=sizes)
        names = get_gguf_hf_weights_map(model, self.processor, architecture)
        return {names.get(name, name): name for name in self.tensor_of if name != ROPE_FACTORS}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Meta tensors."""
        return {name: torch.empty(self._shape(inner), device="meta") for name, inner in self.name_in_file.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._dequantize(self.name_in_file[name])

    def _dequantize(self, name: str) -> torch.Tensor:
        tensor = self.tensor_of[name]
        weights = self.dequantize(tensor.data, tensor.tensor_type)
        if name != ROPE_FACTORS:  # Llama's q and k have their rows in another order
            weights = self.processor.process(weights=weights, name=name).weights
        return torch.from_numpy(weights.copy()).float()

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        if self.num_tokens == 0:
            return None
        try:
            # Alone in a folder: Transformers prefers a tokenizer.json that lies beside the file.
            with tempfile.TemporaryDirectory(prefix="lr-attnres-") as folder:
                (Path(folder) / self.path.name).symlink_to(self.path.resolve())
                tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=self.path.name, trust_remote_code=False)
            if vocabulary_size(tokenizer) > self.num_tokens:
                tokenizer = _without_added_tokens(tokenizer, self.num_tokens)
        except Exception as error:  # the Rust library raises plain exceptions
            raise LRAttnResError(f"the tokenizer of {self.path} cannot be used: {one_line(error)}") from error
        tokenizer.model_max_length = self.config.max_position_embeddings  # in no field of the file
        return tokenizer

    def copy_files(self, folder: Path) -> None:
        GenerationConfig.from_model_config(self.config).save_pretrained(folder)

    def probe_logits(self) -> torch.Tensor:
        """Of Transformers' own model with the dequantised weights."""
        model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        loaded = model.load_state_dict({name: self.read(name) for name in self.name_in_file}, strict=False)
        assert not loaded.unexpected_keys and set(loaded.missing_keys) <= {"lm_head.weight"}, loaded
        return probe_logits(model)


def _without_added_tokens(tokenizer: Any, num_tokens: int) -> PreTrainedTokenizerFast:
    """Transformers starts from the tokenizer of GPT-2 or Llama, whose special tokens the file may not have."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < num_tokens]
    named = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    known = {name: token for name, token in named.items() if token is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in known.items() if tokenizer.convert_tokens_to_ids(token) < num_tokens},
    )
