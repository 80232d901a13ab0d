"""The model card of a saved folder: its variant, cost, origin, and how to load it."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..analysis.cost import cost_report
from ..configuration_lr_attnres import LRAttnResConfig
from ..errors import LRAttnResError
from ..sources import REPO_ID, read_json_object
from ..variants import variant_name


PROVENANCE_FILE = "provenance.json"
# The origin of a model, as the card shows it. Every field is optional.
PROVENANCE_FIELDS = {
    "source": str,  # the released file or repository that was converted
    "step": int,
    "tokens": int,
    "base_model": str,  # the pretrained model that was upgraded
    "license": str,
    "language": list,  # codes such as "en"
    "datasets": list,  # Hub names
    "recipe": dict,  # setting -> value
    "evaluation": list,  # {"dataset": ..., "metric": ..., "value": ...}
}
ORIGIN_LABELS = {
    "source": "converted from",
    "base_model": "upgraded from",
    "step": "training step",
    "tokens": "training tokens",
    "datasets": "training data",
}
# The next push rewrites a card with this line; it keeps a card without it, which is the user's own.
GENERATED = "<!-- Written by lr-attnres. Remove this line to keep your own changes. -->"
PIPELINE_TAGS = {
    "LRAttnResModel": "feature-extraction",
    "LRAttnResForCausalLM": "text-generation",
    "LRAttnResForSequenceClassification": "text-classification",
    "LRAttnResForTokenClassification": "token-classification",
    "LRAttnResForQuestionAnswering": "question-answering",
}
DESCRIPTIONS = {
    "standard": "the ordinary residual sum (the baseline, without depth routing)",
    "attnres": "attention residuals: each read attends over earlier sub-layers, with whole values as routing keys",
    "projected": "low-rank attention residuals with projected keys (P-LR): the output projections emit the routing "
    "keys beside the values",
    "sliced": "low-rank attention residuals with sliced keys (S-LR): the last coordinates of a value are its routing "
    "key",
}
COST_NOTE = """The core is the projections of the decoder layers. The source cache lives only while the layers run, so
generation keeps none of it."""


def read_provenance(folder: str | os.PathLike) -> dict[str, Any]:
    """The validated contents of `provenance.json`, or an empty dict without the file."""
    path = Path(folder) / PROVENANCE_FILE
    if not path.is_file():
        return {}
    provenance = read_json_object(path)
    for name, value in provenance.items():
        if name not in PROVENANCE_FIELDS:
            raise LRAttnResError(f"{path} has the unknown field {name!r}; known are {', '.join(PROVENANCE_FIELDS)}.")
        if not isinstance(value, PROVENANCE_FIELDS[name]) or isinstance(value, bool):
            raise LRAttnResError(f"{path}: {name} is {value!r}; expected {PROVENANCE_FIELDS[name].__name__}.")
    for result in provenance.get("evaluation", []):
        if not isinstance(result, dict) or set(result) != {"dataset", "metric", "value"}:
            raise LRAttnResError(f"{path}: evaluation has {result!r}; expected dataset, metric and value.")
    return provenance


def write_provenance(folder: str | os.PathLike, **fields: Any) -> None:
    """Write the fields that are not None to `provenance.json`."""
    known = {name: value for name, value in fields.items() if value is not None}
    (Path(folder) / PROVENANCE_FILE).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    read_provenance(folder)


def model_card(
    folder: str | os.PathLike,
    config: LRAttnResConfig,
    name: str,
    repo_id: str | None = None,
    revision: str | None = None,
    tags: Iterable[str] = (),
) -> ModelCard:
    """The card of the model in `folder`; its code example loads from `repo_id`, if given, or from a folder."""
    provenance, task = read_provenance(folder), PIPELINE_TAGS[_architecture(config)]
    has_tokenizer = (Path(folder) / "tokenizer_config.json").exists()
    results = [
        EvalResult(
            task_type=task,
            dataset_type=result["dataset"],
            dataset_name=result["dataset"],
            metric_type=result["metric"],
            metric_value=result["value"],
        )
        for result in provenance.get("evaluation", [])
    ]
    base_model = provenance.get("base_model", "")
    metadata = ModelCardData(
        base_model=base_model if REPO_ID.fullmatch(base_model) else None,  # the Hub refuses other names
        language=provenance.get("language"),
        license=provenance.get("license"),
        library_name="transformers",
        pipeline_tag=task,
        tags=["custom_code", "lr_attnres", config.residual_type, *tags],
        datasets=provenance.get("datasets"),
        model_name=name,
        eval_results=results or None,
    )
    sections = [
        f"# {name}",
        GENERATED,
        _variant_section(config),
        f"## Cost of depth routing\n\n{COST_NOTE}\n\n```\n{cost_report(config)}\n```",
        _origin_section(provenance),
        _evaluation_section(provenance),
        _usage_section(config, has_tokenizer, repo_id, revision),
    ]
    body = "\n\n".join(section for section in sections if section)
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}\n")


def _architecture(config: LRAttnResConfig) -> str:
    return (config.architectures or ["LRAttnResModel"])[0]  # only a config that was never saved has none


def _variant_section(config: LRAttnResConfig) -> str:
    rows: dict[str, object] = {
        "variant": f"`{variant_name(config)}`",
        "layers": config.num_hidden_layers,
        "hidden size, feed-forward size": f"{config.hidden_size:,}, {config.intermediate_size:,}",
        "attention heads, key-value heads": f"{config.num_attention_heads}, {config.num_key_value_heads}",
        "vocabulary, context": f"{config.vocab_size:,}, {config.max_position_embeddings:,}",
    }
    if config.residual_type != "standard":
        blocks = f"{config.num_depth_blocks} blocks of sub-layers"
        rows["sources"] = "one per sub-layer (full)" if config.has_full_sources else blocks
        rows["rank of the routing keys"] = config.depth_key_rank
        if config.depth_heads > 1:
            rows["depth heads"] = f"{config.depth_heads}, each with its slice of keys and values"
    return f"A decoder-only Transformer with {DESCRIPTIONS[config.residual_type]}.\n\n" + _table(rows.items())


def _origin_section(provenance: dict[str, Any]) -> str:
    rows = {label: provenance[field] for field, label in ORIGIN_LABELS.items() if field in provenance}
    rows |= provenance.get("recipe", {})
    return "## Training\n\n" + (_table(rows.items()) if rows else "Data and recipe are not recorded.")


def _evaluation_section(provenance: dict[str, Any]) -> str:
    results = provenance.get("evaluation", [])
    rows = [(f"{result['dataset']}, {result['metric']}", result["value"]) for result in results]
    return "## Evaluation\n\n" + _table(rows, "value") if rows else ""


def _usage_section(config: LRAttnResConfig, has_tokenizer: bool, repo_id: str | None, revision: str | None) -> str:
    auto_class = next(key for key, entry in config.auto_map.items() if entry.endswith(f".{_architecture(config)}"))
    pin = f', revision="{revision}"' if revision else ""
    # AutoTokenizer loads the config, which has remote code; the tokenizer has none.
    arguments = f'"{repo_id or "path/to/this/folder"}"{pin}, trust_remote_code=True'
    lines = [
        f"from transformers import {auto_class}{', AutoTokenizer' if has_tokenizer else ''}",
        "",
        f"model = {auto_class}.from_pretrained({arguments})",
    ]
    if has_tokenizer:
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({arguments})")
    if has_tokenizer and auto_class == "AutoModelForCausalLM":
        lines += [
            'inputs = tokenizer("The sea is", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))",
        ]
    text = "The model's code is in this repository: read it, then load it with `trust_remote_code=True`"
    text += " at the revision you have read." if revision else "."
    return f"## Use\n\n{text}\n\n```python\n" + "\n".join(lines) + "\n```"


def _table(rows: Iterable[tuple[str, object]], header: str = "") -> str:
    return "\n".join([f"| | {header} |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows)])


def _cell(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return f"{value:,}" if type(value) is int else str(value)
