"""Read a pretrained model to upgrade (folder, Hub repository, GGUF file, or in memory), one tensor at a time."""

import os
import shutil
from functools import cached_property
from pathlib import Path

import torch
import yaml
from huggingface_hub import metadata_load, snapshot_download
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..data.tokenizers import find_tokenizer, load_tokenizer
from ..errors import LRAttnResError, one_line
from ..sources import check_not_special, hub_source, local_path, public_name
from .card import read_provenance
from .clean_process import probe_logits
from .gguf_source import GGUFModel, is_gguf
from .loading import check_generation_config, open_weights, read_config, weight_files


logger = logging.get_logger(__name__)

# Some repositories also hold the weights in other formats.
DOWNLOADED = ("*.json", "model*.safetensors", "tokenizer*", "*.jinja", "merges.txt", "README.md", "LICENSE*")


class ModelInMemory:
    def __init__(self, model: PreTrainedModel):
        self.model, self.config, self.architecture = model, model.config, type(model).__name__
        self.name = public_name(model.name_or_path or "") or self.architecture
        self.tensors = model.state_dict()
        self.license: str | None = None

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name].detach().cpu().contiguous()

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return find_tokenizer(self.model.name_or_path or "")

    def copy_files(self, folder: Path) -> None:
        self.model.generation_config.save_pretrained(folder)

    def probe_logits(self) -> torch.Tensor:
        """In float32, without casting the model itself."""
        copy = type(self.model)(self.config).float().eval()
        copy.load_state_dict(self.tensors)
        return probe_logits(copy)


class SavedModel:
    """A folder with config.json and safetensors; `name` is its Hub name or the name of the folder."""

    def __init__(self, folder: Path, name: str, config: PreTrainedConfig):
        self.folder, self.name, self.config = folder, name, config
        self.architecture = config.architectures[0] if config.architectures else None

    @cached_property
    def file_of(self) -> dict[str, Path]:
        """The file of each tensor."""
        return {name: path for path in weight_files(self.folder) for name in open_weights(path).keys()}  # noqa: SIM118

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Meta tensors. The files are memory-mapped, so this reads none of their contents."""
        return {name: self.read(name).to("meta") for name in self.file_of}

    def read(self, name: str) -> torch.Tensor:
        return open_weights(self.file_of[name]).get_tensor(name)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return load_tokenizer(self.folder) if (self.folder / "tokenizer_config.json").is_file() else None

    def copy_files(self, folder: Path) -> None:
        check_generation_config(self.folder)
        for path in (*self.folder.glob("generation_config.json"), *self.folder.glob("LICENSE*")):
            check_not_special(path)
            shutil.copyfile(path, folder / path.name)

    @property
    def license(self) -> str | None:
        """From the card, or else from the provenance, which a folder of this project has."""
        card, name = self.folder / "README.md", None
        try:
            name = (metadata_load(card) or {}).get("license") if card.is_file() else None
        except (ValueError, yaml.YAMLError) as error:
            logger.warning(f"{card} cannot be read, so its licence is not copied: {one_line(error)}")
        return name if isinstance(name, str) else read_provenance(self.folder).get("license")

    def probe_logits(self) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, trust_remote_code=False)
        return probe_logits(model)


PretrainedSource = ModelInMemory | SavedModel | GGUFModel


def open_source(
    source: str | os.PathLike | PreTrainedModel, revision: str | None = None, token: str | None = None
) -> PretrainedSource:
    """A Hub repository, or a GGUF file in one, is downloaded into the Hub's cache."""
    if isinstance(source, PreTrainedModel):
        return ModelInMemory(source)
    if isinstance(source, torch.nn.Module):
        kind = type(source).__name__
        raise LRAttnResError(f"A {kind} is not a Transformers model; merge an adapter into its model first.")
    if is_gguf(source):
        return GGUFModel(source, revision, token)
    config = read_config(source, revision, token)
    folder, name = local_path(source, revision), str(source)
    if folder is not None:
        return SavedModel(folder, folder.resolve().name, config)
    with hub_source(name, revision):
        snapshot = snapshot_download(name, revision=revision, token=token, allow_patterns=list(DOWNLOADED))
    return SavedModel(Path(snapshot), name, config)
