"""Where each site of a trained model reads, measured over held-out text in one pass and in bounded memory.

Shape letters: B batch, T tokens, S sources of a site, M = 2L sites and sub-layers.
"""

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from .configuration_lr_attnres import LRAttnResConfig
from .cost import depth_cost
from .depth_routing import depth_block_ends
from .loading import load_config, load_language_model
from .losses import evaluation_mode, num_targets
from .metrics import METRICS_FILE, read_metrics
from .model_folder import check_absent, staged_folder
from .modeling_lr_attnres import LRAttnResForCausalLM
from .variants import variant_name


@dataclass
class DepthAnalysis:
    """What one model does with depth. The tensors are float64 means over tokens, empty in `standard` where they are
    about routing:

    effective_sources [M]: exp(H) of the depth weights, of sites 1..M.
    entropy [M]: H itself, in nats.
    depth_weights [M, S]: mean weight of each source, oldest first; NaN where a site has no such source. In a model
        with blocks, column i is block i, completed or, in the sites inside it, partial.
    shares [M, 3]: mean weight of the embedding, of all completed blocks together, and of the partial.
    entropy_by_position [M, T]: H by the token's position in its document; NaN where no token was.
    output_magnitude [1 + M]: root mean square of the embedding and of each sub-layer's output.
    query_norms [M].
    """

    name: str
    loaded_from: str  # a folder or Hub repository
    residual_type: str
    num_layers: int
    block_ends: list[int]  # the sites at which a block is complete
    tokens: int
    loss: float
    added_flops_percent: float
    gradient_norm: float | None = None  # averaged over the training, if its metrics are there
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """`analysis.json` for people and scripts, `analysis.safetensors` for the tensors."""
        folder.mkdir(parents=True)
        fields = asdict(self) | {"tensors": {name: list(tensor.shape) for name, tensor in self.tensors.items()}}
        for name in ("effective_sources", "shares", "output_magnitude", "query_norms"):
            fields[name] = self.tensors[name].tolist()
        (folder / "analysis.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        save_file(self.tensors, folder / "analysis.safetensors")


def effective_sources(depth_weights: torch.Tensor) -> torch.Tensor:
    """exp(entropy) of each read, in float64: [..., S] -> [...]. S of them for a plain mean, 1 for a single source."""
    return _entropy(depth_weights).exp()


def _entropy(depth_weights: torch.Tensor) -> torch.Tensor:
    weights = depth_weights.double()
    # float32 weights add up to 1 within 1e-7 only
    return torch.special.entr(weights / weights.sum(-1, keepdim=True)).sum(-1)


def analyze(
    models: list[str],
    data: str | list[str],
    output_dir: str | os.PathLike,
    *,
    max_tokens: int | None = None,
    sequence_length: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
    dtype: str = "auto",
    progress_bar: bool = True,
) -> list[DepthAnalysis]:
    """Analyze models over the same held-out tokens, and draw them side by side.

    Args:
        models: folders or Hub repositories.
        data: a folder written by `prepare` (its validation split), or what `prepare` takes: text files, folders, a
            dataset. Text is tokenized by each model's own tokenizer.
        output_dir: folder to create, with one folder per model and the figures.
        sequence_length: tokens of a row of text; default: the model's context, at most 2,048.
    """
    from .held_out import make_batches, open_rows, take_tokens
    from .plots import draw

    check_absent(Path(output_dir))
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"`max_tokens` is {max_tokens}; it must be at least 1.")
    if batch_size < 1:
        raise ValueError(f"`batch_size` is {batch_size}; it must be at least 1.")
    names = _names(models)
    analyses = []
    for folder_or_repo, name in zip(models, names):
        model = load_language_model(folder_or_repo, device, dtype)
        rows = open_rows(data, folder_or_repo, model.config, sequence_length)
        batches = take_tokens(make_batches(rows, batch_size), max_tokens)
        with tqdm(total=max_tokens, unit=" tokens", unit_scale=True, desc=name, disable=not progress_bar) as bar:
            analyses.append(analyze_model(model, batches, name=name, loaded_from=folder_or_repo, bar=bar))
    with staged_folder(Path(output_dir)) as folder:
        for analysis in analyses:
            analysis.save(folder / _file_name(analysis.name))
        draw(analyses, folder)
    return analyses


def summary(analyses: list[DepthAnalysis]) -> str:
    """One line per model."""
    width = max(len(analysis.name) for analysis in analyses)
    lines = []
    for analysis in analyses:
        line = f"{analysis.name:{width}}  {analysis.tokens:,} tokens  loss {analysis.loss:.4f}"
        if analysis.residual_type != "standard":
            effective = analysis.tensors["effective_sources"]
            line += f"  effective sources {effective.mean():.2f} (last site {effective[-1]:.2f})"
        if analysis.gradient_norm is not None:
            line += f"  gradient norm {analysis.gradient_norm:.4f}"
        lines.append(line)
    return "\n".join(lines)


@torch.inference_mode()
def analyze_model(
    model: LRAttnResForCausalLM,
    batches: Iterable[dict[str, torch.Tensor]],
    *,
    name: str | None = None,
    loaded_from: str = "",
    bar: tqdm | None = None,
) -> DepthAnalysis:
    """`batches` are dicts of `input_ids`, `position_ids` and `labels`, each int64 [B, T]."""
    name = name or variant_name(model.config)
    gradient_norm = average_gradient_norm(loaded_from)  # a damaged file is refused before the work
    routing, loss, num_labels = _Routing(model.config), 0.0, 0
    with evaluation_mode(model), _Magnitudes(model) as magnitudes:
        for batch in batches:
            batch = {key: value.to(model.device) for key, value in batch.items()}
            outputs = model(**batch, output_depth_weights=True, use_cache=False, num_items_in_batch=1)
            loss += outputs.loss.double().item()
            num_labels += int(num_targets(batch["labels"]))
            routing.add(outputs.depth_weights, batch["position_ids"])
            if bar is not None:
                bar.update(batch["input_ids"].numel())
    if not routing.tokens:
        raise ValueError("the data holds no tokens.")
    if not math.isfinite(loss):
        raise ValueError(f"the loss of {name} is {loss}: weights are damaged, or too large for `dtype`.")
    tensors = routing.means() | {"output_magnitude": magnitudes.means(), "query_norms": _query_norms(model)}
    return DepthAnalysis(
        name=name,
        loaded_from=loaded_from,
        residual_type=model.config.residual_type,
        num_layers=model.config.num_hidden_layers,
        block_ends=depth_block_ends(2 * model.config.num_hidden_layers, model.config.num_depth_blocks),
        tokens=routing.tokens,
        loss=loss / max(num_labels, 1),
        added_flops_percent=depth_cost(model.config).added_flops_percent,
        gradient_norm=gradient_norm,
        tensors=tensors,
    )


class _Routing:
    """Sums over tokens, in float64, of everything that is read off the depth weights."""

    def __init__(self, config: LRAttnResConfig):
        self.tokens = 0
        routed = config.residual_type != "standard"
        self.num_sites = 2 * config.num_hidden_layers if routed else 0
        self.ends = depth_block_ends(2 * config.num_hidden_layers, config.num_depth_blocks)
        num_sources = depth_cost(config).retained_sources
        self.effective = torch.zeros(self.num_sites, dtype=torch.float64)
        self.weights = torch.full((self.num_sites, num_sources), float("nan"), dtype=torch.float64)
        self.by_position = torch.zeros(self.num_sites, 0, dtype=torch.float64)
        self.position_counts = torch.zeros(0, dtype=torch.float64)

    def add(self, depth_weights: tuple[torch.Tensor, ...], position_ids: torch.Tensor) -> None:
        """M tensors [B, T, S] and the positions [B, T] of their tokens."""
        positions = position_ids.flatten().cpu()
        self.tokens += positions.numel()
        self._grow(int(positions.max()) + 1)
        self.position_counts.index_add_(0, positions, torch.ones_like(positions, dtype=torch.float64))
        for site, weights in enumerate(depth_weights):
            weights = weights.flatten(0, 1).cpu().double()
            entropy = _entropy(weights)
            self.effective[site] += entropy.exp().sum()
            self.by_position[site].index_add_(0, positions, entropy)
            sums = self.weights[site, : weights.shape[-1]]
            sums.copy_(sums.nan_to_num(0.0) + weights.sum(0))

    def _grow(self, length: int) -> None:
        missing = length - self.position_counts.shape[0]
        if missing > 0:
            self.position_counts = nn.functional.pad(self.position_counts, (0, missing))
            self.by_position = nn.functional.pad(self.by_position, (0, missing))

    def means(self) -> dict[str, torch.Tensor]:
        weights = self.weights / self.tokens
        return {
            "effective_sources": self.effective / self.tokens,
            "entropy": self.by_position.sum(-1) / self.tokens,
            "depth_weights": weights,
            "shares": torch.stack([self._shares(site, row) for site, row in enumerate(weights, start=1)])
            if self.num_sites
            else torch.zeros(0, 3, dtype=torch.float64),
            "entropy_by_position": self.by_position / self.position_counts,
        }

    def _shares(self, site: int, weights: torch.Tensor) -> torch.Tensor:
        """The embedding comes first, the partial, where there is one, last."""
        weights = weights[~weights.isnan()]
        partial = weights[-1] if site not in self.ends else weights.new_zeros(())
        return torch.stack([weights[0], weights[1:].sum() - partial, partial])


class _Magnitudes:
    """The root mean square of the embedding and of every sub-layer's output, averaged over the tokens it sees."""

    def __init__(self, model: LRAttnResForCausalLM):
        base = model.model
        self.hidden_size = model.config.hidden_size
        self.modules = [base.embed_tokens, *(part for layer in base.layers for part in (layer.self_attn, layer.mlp))]
        self.sums = torch.zeros(len(self.modules), dtype=torch.float64)
        self.tokens = 0

    def __enter__(self) -> "_Magnitudes":
        self.hooks = [module.register_forward_hook(self._hook(i)) for i, module in enumerate(self.modules)]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _hook(self, index: int) -> Callable[..., None]:
        def add(module: nn.Module, args: tuple, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
            # Attention also returns its weights; a projected key stands behind the value.
            value = (output[0] if isinstance(output, tuple) else output)[..., : self.hidden_size]
            self.sums[index] += value.float().square().mean(-1).sqrt().double().sum().item()
            self.tokens += value.shape[:-1].numel() if index == 0 else 0

        return add

    def means(self) -> torch.Tensor:
        return self.sums / self.tokens


def _query_norms(model: LRAttnResForCausalLM) -> torch.Tensor:
    if model.config.residual_type == "standard":
        return torch.zeros(0, dtype=torch.float64)
    return model.model.depth_queries.weight.double().norm(dim=-1).cpu()


def average_gradient_norm(loaded_from: str | os.PathLike) -> float | None:
    """The mean of `grad_norm` over the logged steps of the run that a folder belongs to; None without its metrics."""
    folder = Path(loaded_from)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    for place in (folder, run):
        if loaded_from and (place / METRICS_FILE).is_file():
            norms = [step["grad_norm"] for step in read_metrics(place / METRICS_FILE) if "grad_norm" in step]
            return sum(norms) / len(norms) if norms else None
    return None


def _names(models: list[str]) -> list[str]:
    """The variants, told apart by their folders where several models have the same."""
    variants = [variant_name(load_config(model)) for model in models]
    for place in (lambda model: "", lambda model: f" ({Path(model).name})", lambda model: f" ({model})"):
        names = [variant + place(model) for variant, model in zip(variants, models)]
        if len({_file_name(name) for name in names}) == len(names):
            return names
    raise ValueError(f"the same model is given twice: {', '.join(models)}.")


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in name).strip("_").lower()
