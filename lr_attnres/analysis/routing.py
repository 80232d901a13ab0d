"""Statistics of depth routing over held-out text: one pass, memory independent of the number of tokens.

Shape letters: B batch, T tokens, S sources of a site, H depth heads, M = 2L sites and sub-layers.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from ..configuration_lr_attnres import LRAttnResConfig
from ..depth_routing import depth_block_ends
from ..folders.loading import load_config, load_language_model
from ..folders.staging import check_absent, staged_folder
from ..modeling_lr_attnres import LRAttnResForCausalLM
from ..training.losses import evaluation_mode, num_targets
from ..training.metrics import METRICS_FILE, read_metrics
from ..variants import variant_name
from .cost import depth_cost


@dataclass
class DepthAnalysis:
    """Routing statistics of one model. `tensors` has float64 means over tokens; those about routing are empty for
    `standard`:

    effective_sources [M]: exp(H) of the depth weights, for sites 1..M.
    entropy [M]: H in nats.
    depth_weights [M, S]: mean weight of each source, oldest first; NaN where a site has no such source. In a model
        with blocks, column i is block i: the completed block, or its partial for the sites inside it.
    shares [M, 3]: mean weight of the embedding, of all completed blocks together, and of the partial.
    entropy_by_position [M, T]: H by the token's position in its document; NaN at positions without tokens.
    output_magnitude [1 + M]: root mean square of the embedding and of each sub-layer's output.
    query_norms [M].
    head_effective_sources [M, H], head_depth_weights [M, H, S]: of each depth head, empty for one head. The statistics
        above are means over heads.
    """

    name: str
    loaded_from: str  # a folder or Hub repository
    residual_type: str
    num_layers: int
    block_ends: list[int]  # sites at which a block is complete
    tokens: int
    loss: float
    added_flops_percent: float
    gradient_norm: float | None = None  # averaged over training; None without metrics.jsonl
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write `analysis.json` (fields and short tensors) and `analysis.safetensors` (all tensors)."""
        folder.mkdir(parents=True)
        fields = asdict(self) | {"tensors": {name: list(tensor.shape) for name, tensor in self.tensors.items()}}
        for name in ("effective_sources", "shares", "output_magnitude", "query_norms"):
            fields[name] = self.tensors[name].tolist()
        (folder / "analysis.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        save_file(self.tensors, folder / "analysis.safetensors")


def effective_sources(depth_weights: torch.Tensor) -> torch.Tensor:
    """exp(entropy) of each read, in float64: [..., S] -> [...]. It is S for a plain mean and 1 for a single source."""
    return _entropy(depth_weights).exp()


def _entropy(depth_weights: torch.Tensor) -> torch.Tensor:
    weights = depth_weights.double()
    # Normalise again: float32 weights sum to 1 only within 1e-7.
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
    depth_backend: str = "torch",
    progress_bar: bool = True,
) -> list[DepthAnalysis]:
    """Analyze models over the same held-out text and draw their statistics side by side.

    Args:
        models: folders or Hub repositories.
        data: a folder written by `prepare` (its validation split is used), or any source that `prepare` accepts: text
            files, folders, a dataset. Each model tokenizes text with its own tokenizer.
        output_dir: folder to create; it gets the figures and one folder per model.
        sequence_length: tokens per row of text; default: the model's context, at most 2,048.
    """
    from ..data.held_out import check_batch_size, make_batches, open_rows, take_tokens
    from .plots import draw

    check_absent(Path(output_dir))
    check_batch_size(batch_size)
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"`max_tokens` is {max_tokens}; it must be at least 1.")
    analyses = []
    for folder_or_repo, name in zip(models, model_names(models)):
        model = load_language_model(folder_or_repo, device, dtype, depth_backend=depth_backend)
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
    """Analyze one model. `batches` are dicts of `input_ids`, `position_ids` and `labels`, each int64 [B, T]."""
    name = name or variant_name(model.config)
    gradient_norm = average_gradient_norm(loaded_from)  # first, so that a damaged metrics file fails early
    routing, loss, num_labels = _Routing(model.config), 0.0, 0
    with evaluation_mode(model), _summed_magnitudes(model) as magnitudes:
        for batch in batches:
            batch = {key: value.to(model.device) for key, value in batch.items()}
            outputs = model(**batch, output_depth_weights=True, use_cache=False, num_items_in_batch=1)
            loss += outputs.loss.double().item()
            num_labels += int(num_targets(batch["labels"]))
            routing.add(outputs.depth_weights, batch["position_ids"])
            if bar is not None:
                bar.update(batch["input_ids"].numel())
    if not routing.tokens:
        raise ValueError("`data` has no tokens.")
    if not math.isfinite(loss):
        raise ValueError(f"the loss of {name} is {loss}: the weights are damaged, or too large for `dtype`.")
    query_norms = torch.zeros(0, dtype=torch.float64)
    if model.config.residual_type != "standard":
        query_norms = model.model.depth_queries.weight.double().norm(dim=-1).cpu()
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
        tensors=routing.means() | {"output_magnitude": magnitudes / routing.tokens, "query_norms": query_norms},
    )


class _Routing:
    """Float64 sums over tokens of the statistics of the depth weights."""

    def __init__(self, config: LRAttnResConfig):
        self.tokens = 0
        routed = config.residual_type != "standard"
        self.num_sites = 2 * config.num_hidden_layers if routed else 0
        self.ends = depth_block_ends(2 * config.num_hidden_layers, config.num_depth_blocks)
        num_sources = depth_cost(config).retained_sources
        self.effective = torch.zeros(self.num_sites, config.depth_heads, dtype=torch.float64)
        self.weights = torch.full((*self.effective.shape, num_sources), float("nan"), dtype=torch.float64)
        self.by_position = torch.zeros(self.num_sites, 0, dtype=torch.float64)
        self.position_counts = torch.zeros(0, dtype=torch.float64)

    def add(self, depth_weights: tuple[torch.Tensor, ...], position_ids: torch.Tensor) -> None:
        """`depth_weights`: M tensors [B, T, S] or [B, T, H, S]; `position_ids`: [B, T]."""
        positions = position_ids.flatten().cpu()
        self.tokens += positions.numel()
        new_positions = max(int(positions.max()) + 1 - len(self.position_counts), 0)
        self.position_counts = nn.functional.pad(self.position_counts, (0, new_positions))
        self.by_position = nn.functional.pad(self.by_position, (0, new_positions))
        self.position_counts.index_add_(0, positions, torch.ones_like(positions, dtype=torch.float64))
        for site, weights in enumerate(depth_weights):
            weights = weights.view(len(positions), -1, weights.shape[-1]).cpu().double()  # [B T, H, S]
            entropy = _entropy(weights)
            self.effective[site] += entropy.exp().sum(0)
            self.by_position[site].index_add_(0, positions, entropy.mean(1))
            sums = self.weights[site, :, : weights.shape[-1]]
            sums.copy_(sums.nan_to_num(0.0) + weights.sum(0))

    def means(self) -> dict[str, torch.Tensor]:
        head_effective, head_weights = self.effective / self.tokens, self.weights / self.tokens
        weights, has_heads = head_weights.mean(1), self.effective.shape[1] > 1
        shares = torch.zeros(self.num_sites, 3, dtype=torch.float64)
        for site, row in enumerate(weights, start=1):
            row = row[~row.isnan()]
            partial_share = row[-1] * (site not in self.ends)  # inside a block, the last source is the partial
            shares[site - 1] = torch.stack([row[0], row[1:].sum() - partial_share, partial_share])
        return {
            "effective_sources": head_effective.mean(1),
            "entropy": self.by_position.sum(-1) / self.tokens,
            "depth_weights": weights,
            "shares": shares,
            "entropy_by_position": self.by_position / self.position_counts,
            "head_effective_sources": head_effective if has_heads else torch.zeros(0, dtype=torch.float64),
            "head_depth_weights": head_weights if has_heads else torch.zeros(0, dtype=torch.float64),
        }


@contextmanager
def _summed_magnitudes(model: LRAttnResForCausalLM) -> Iterator[torch.Tensor]:
    """Float64 sums [1 + M], to which every forward inside the context adds: the root mean squares of the embedding and
    of each sub-layer's output, summed over tokens."""
    base = model.model
    modules = [base.embed_tokens, *(part for layer in base.layers for part in (layer.self_attn, layer.mlp))]
    sums = torch.zeros(len(modules), dtype=torch.float64)

    def add(index: int, module: nn.Module, args: tuple, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        # Attention also returns its weights; a projected key follows the value in the last dimension.
        value = (output[0] if isinstance(output, tuple) else output)[..., : model.config.hidden_size]
        sums[index] += value.float().square().mean(-1).sqrt().double().sum().item()

    with ExitStack() as hooks:
        for index, module in enumerate(modules):
            hooks.enter_context(module.register_forward_hook(partial(add, index)))
        yield sums


def average_gradient_norm(loaded_from: str | os.PathLike) -> float | None:
    """The mean `grad_norm` over the logged steps of the model's training run; None without metrics.jsonl."""
    if not loaded_from:
        return None
    folder = Path(loaded_from)
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent
    for path in (folder / METRICS_FILE, run / METRICS_FILE):
        if path.is_file():
            norms = [step["grad_norm"] for step in read_metrics(path) if "grad_norm" in step]
            return sum(norms) / len(norms) if norms else None
    return None


def model_names(models: list[str]) -> list[str]:
    """The variant of each model; if two have the same variant, followed by as much of the path as tells them apart."""
    variants = [variant_name(load_config(model)) for model in models]
    paths = [Path(model).parts for model in models]
    for num_parts in range(max(map(len, paths)) + 1):
        names = variants
        if num_parts:
            names = [f"{variant} ({Path(*parts[-num_parts:])})" for variant, parts in zip(variants, paths)]
        if len({_file_name(name) for name in names}) == len(names):
            return names
    raise ValueError(f"the same model is given twice: {', '.join(models)}. Give each model once.")


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in name).strip("_").lower()
