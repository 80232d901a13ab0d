"""A pretrained model to upgrade (a folder, a Hub repository, or a model in memory), read one tensor at a time."""

import json
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import yaml
from huggingface_hub import metadata_load, snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from .clean_process import probe_tokens
from .errors import REPO_ID, HubError, clear_hub_errors, one_line
from .loading import local_path, tokenizer_beside
from .model_card import read_provenance


logger = logging.get_logger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Not the other formats that some repositories hold beside safetensors.
DOWNLOADED = ("*.json", "model*.safetensors", "tokenizer*", "*.jinja", "merges.txt", "README.md", "LICENSE*")


class UpgradeError(ValueError):
    """A model that cannot be found or upgraded; the message names the field, tensor or file."""


@dataclass
class ModelInMemory:
    """A `PreTrainedModel`; its tokenizer is the one beside the weights that it was loaded from, if there is one."""

    model: PreTrainedModel

    @property
    def name(self) -> str:
        """A Hub name, or a folder's without those above it; the card, which shows it, is public."""
        place = self.model.name_or_path or ""
        return (
            place if REPO_ID.fullmatch(place) and not Path(place).exists() else Path(place).name or self.architecture
        )

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    @property
    def architecture(self) -> str:
        return type(self.model).__name__

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name].detach().cpu().contiguous()

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return tokenizer_beside(self.model)

    def copy_files(self, folder: Path) -> None:
        self.model.generation_config.save_pretrained(folder)

    def license(self) -> str | None:
        return None

    @torch.no_grad()
    def probe_logits(self) -> torch.Tensor:
        """Of `probe_tokens`, in float32."""
        twin = type(self.model)(self.config).float().eval()
        twin.load_state_dict(self.tensors)
        return _probe(twin)


@dataclass
class SavedModel:
    """A folder with config.json and safetensors; `name` is a Hub name or that of the folder."""

    folder: Path
    name: str

    @cached_property
    def config(self) -> PreTrainedConfig:
        if not (self.folder / "config.json").is_file():
            raise UpgradeError(f"{self.folder} has no config.json.")
        try:
            return AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UpgradeError(f"{self.folder / 'config.json'} cannot be used: {one_line(error)}") from error

    @property
    def architecture(self) -> str | None:
        return self.config.architectures[0] if self.config.architectures else None

    @cached_property
    def files(self) -> list[Path]:
        if (self.folder / WEIGHTS).is_file():
            return [self.folder / WEIGHTS]
        if not (self.folder / INDEX).is_file():
            raise UpgradeError(
                f"{self.folder} has no {WEIGHTS}: load the model with Transformers and save it again, which writes it."
            )
        try:
            names = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UpgradeError(f"{self.folder / INDEX} is not an index of safetensors files.") from error
        return [self.folder / name for name in sorted(set(names))]

    @cached_property
    def places(self) -> dict[str, Path]:
        return {name: path for path in self.files for name in _open(path).keys()}  # noqa: SIM118

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Shapes and dtypes alone: the files are mapped, not read."""
        return {name: self.read(name).to("meta") for name in self.places}

    def read(self, name: str) -> torch.Tensor:
        return _open(self.places[name]).get_tensor(name)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        if not any(self.folder.glob("tokenizer*")):
            return None
        try:
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        except Exception as error:  # `tokenizers` raises nothing more special
            raise UpgradeError(f"The tokenizer of {self.folder} cannot be loaded: {one_line(error)}") from error

    def copy_files(self, folder: Path) -> None:
        for path in (*self.folder.glob("generation_config.json"), *self.folder.glob("LICENSE*")):
            shutil.copyfile(path, folder / path.name)

    def license(self) -> str | None:
        card, name = self.folder / "README.md", None
        try:
            name = (metadata_load(card) or {}).get("license") if card.is_file() else None
        except (ValueError, yaml.YAMLError) as error:
            logger.warning(f"{card} cannot be read, so its licence is not carried over: {one_line(error)}")
        return name if isinstance(name, str) else read_provenance(self.folder).get("license")

    @torch.no_grad()
    def probe_logits(self) -> torch.Tensor:
        """Of `probe_tokens`, in float32."""
        return _probe(AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, trust_remote_code=False))


def open_source(
    source: str | os.PathLike | PreTrainedModel, revision: str | None = None, token: str | None = None
) -> ModelInMemory | SavedModel:
    """The model, downloaded into the Hub's cache if it is in a repository."""
    if isinstance(source, PreTrainedModel):
        return ModelInMemory(source)
    if isinstance(source, torch.nn.Module):
        raise UpgradeError(f"A {type(source).__name__} is not a Transformers model; merge an adapter into its model.")
    folder, name = local_path(source, revision, UpgradeError), str(source)
    if folder is not None:
        if not folder.is_dir():
            raise UpgradeError(f"{source} is a file; give the folder of the model.")
        return SavedModel(folder, folder.resolve().name)
    try:
        with clear_hub_errors(name, revision):
            snapshot = snapshot_download(name, revision=revision, token=token, allow_patterns=list(DOWNLOADED))
    except HubError as error:
        raise UpgradeError(f"{source} is not on this machine, and {error}") from error
    return SavedModel(Path(snapshot), name)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UpgradeError(f"{path} cannot be read: {error}") from error


def _probe(model: PreTrainedModel) -> torch.Tensor:
    return model(probe_tokens(model.config.vocab_size)[:, : max(1, model.config.max_position_embeddings - 1)]).logits
