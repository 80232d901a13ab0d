"""Pretraining by the paper's recipe: one loop on Accelerate, from one CPU to many GPUs, that survives being killed."""

import hashlib
import json
import math
import os
import shutil
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.tracking import get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, set_seed
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase

from .batches import StepBatches, flatten_for_flash
from .checkpoints import Checkpoints, hold_run_folder, read_state, sync_to_disk, without_progress_bar
from .configuration_lr_attnres import LRAttnResConfig
from .data import PackedTokens, check_fits, load_data_tokenizer
from .errors import explain_field_error
from .evaluation import evaluate
from .held_out import check_same_tokens
from .loading import LoadingError, load_language_model
from .losses import num_targets, use_chunked_loss
from .metrics import METRICS_FILE, Metrics
from .model_card import ProvenanceError, read_provenance, write_provenance
from .modeling_lr_attnres import LRAttnResForCausalLM
from .optimizers import muon_adamw
from .training_arguments import TrainArguments


class TrainingError(ValueError):
    """The run cannot go on; the message names the step and the last good checkpoint."""


def train(args: TrainArguments) -> Path:
    """Train a model; returns its folder, `model` in the folder of the run.

    SIGTERM and Ctrl-C save a checkpoint after the current step and end the process with 128 + the signal's number.
    """
    args.check()
    accelerator = start_accelerator(args)
    with hold_run_folder(args.output_dir, accelerator):
        return run(args, accelerator)


def run(args: TrainArguments, accelerator: Accelerator) -> Path:
    data = PackedTokens(args.data, "train")
    validation = PackedTokens(args.data, "validation") if "validation" in data.manifest["splits"] else None
    tokenizer = load_data_tokenizer(args.data)  # goes into the model's folder; without it the run need not begin
    checkpoints = Checkpoints(args.output_dir, accelerator)
    checkpoint = checkpoints.find(args.resume)
    check_nothing_is_lost(args)
    checkpoints.clean()

    set_seed(args.seed)
    model, optimizer = prepare(accelerator, build_model(args, data), args)
    set_seed(args.seed, device_specific=True)  # the weights are the same in every process, dropout is not
    init_from = args.init_from and os.path.abspath(args.init_from)
    settings = args.bound() | {"data": data_hash(data.manifest), "init_from": init_from}
    done = checkpoints.load(checkpoint, settings) if checkpoint else 0
    validation_loss = read_state(checkpoint)["validation_loss"] if checkpoint else None
    step_batches = StepBatches(data, args, accelerator, done)
    batches = iter(step_batches)
    accelerator.print(describe(args, model, step_batches, checkpoint))

    if args.trackers:
        accelerator.init_trackers("lr-attnres", config={name: str(value) for name, value in args.bound().items()})
    metrics = Metrics(Path(args.output_dir) / METRICS_FILE, accelerator, done, args.steps, args.batch_tokens)
    with StopSignals() as signals, metrics:
        for step in range(done + 1, args.steps + 1):
            started = time.perf_counter()
            micro_batches = next(batches)
            rates = set_learning_rates(optimizer, learning_rate_factor(step, args))
            loss, grad_norm, stop = accumulate_gradients(accelerator, model, micro_batches, args, signals)
            if not math.isfinite(loss + grad_norm):
                raise TrainingError(not_finite(step, loss, grad_norm, checkpoints))
            optimizer.step()
            optimizer.zero_grad()

            record = {"step": step, "tokens": step * args.batch_tokens, "loss": loss, "grad_norm": grad_norm, **rates}
            metrics.advance(record, time.perf_counter() - started)
            last, save = step == args.steps, step % args.save_steps == 0
            extra: dict[str, Any] = {}
            if validation is not None and (last or save or step % args.eval_steps == 0):
                bare = accelerator.unwrap_model(model, keep_torch_compile=False)
                extra["validation_loss"] = evaluate(bare, validation, accelerator, args.micro_batch_size).loss
            if args.variant != "standard" and (last or step % args.entropy_steps == 0):
                extra["depth_entropy"] = depth_entropy(accelerator, model, validation or data)
            if extra or last or step % args.log_steps == 0:
                metrics.write(record | extra)
            if last or save or stop:
                validation_loss = extra.get("validation_loss")
                checkpoints.save(step, settings=settings, validation_loss=validation_loss)
                checkpoints.prune(args.keep_last)
            if stop and not last:
                stop_run(accelerator, signals, checkpoints.path(step))

    folder = export(accelerator, model, tokenizer, args, validation_loss)
    accelerator.end_training()
    return folder


def start_accelerator(args: TrainArguments) -> Accelerator:
    precision = args.mixed_precision
    if precision == "auto":
        precision = "bf16" if torch.accelerator.is_available() else "no"
    available = [str(tracker) for tracker in get_available_trackers()]
    for tracker in args.trackers:
        if tracker not in available:
            raise ValueError(f"`trackers` has {tracker!r}, which is not installed or not known to Accelerate.")
    accelerator = Accelerator(
        mixed_precision=precision,
        # We scale the loss ourselves; a setting in the environment would do it once more.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        dynamo_backend="inductor" if args.compile else None,
        log_with=args.trackers or None,
        project_dir=args.output_dir,
    )
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        raise ValueError(
            f"{kind.value} flattens the weights, but Muon needs whole matrices: launch with FSDP2 (fsdp_version: 2)."
        )
    return accelerator


def check_nothing_is_lost(args: TrainArguments) -> None:
    """What stands in the folder of the run may be replaced if it is a resumed run's own."""
    metrics, model = Path(args.output_dir) / METRICS_FILE, Path(args.output_dir) / "model"
    if args.resume is None and metrics.exists() and metrics.stat().st_size:
        raise ValueError(
            f"{metrics} is of an earlier run: go on with --resume (without a checkpoint, from the start), or choose "
            "another --output-dir."
        )
    if not os.path.lexists(model):
        return
    try:
        own = args.resume is not None and read_provenance(model).get("recipe") == args.bound()
    except (ProvenanceError, OSError):
        own = False
    if not own:
        raise ValueError(f"{model} is not of this run, which would replace it: choose another --output-dir.")


def build_model(args: TrainArguments, data: PackedTokens) -> LRAttnResForCausalLM:
    """The model in `init_from`, or a new one."""
    model = new_model(args, data.manifest) if args.init_from is None else load_model(args, args.init_from, data)
    model.set_attn_implementation(args.attn_implementation)
    return model


def new_model(args: TrainArguments, manifest: dict) -> LRAttnResForCausalLM:
    """What `model` does not say about vocabulary and length, the data does."""
    tokenizer = manifest["tokenizer"]
    from_data = {
        "vocab_size": tokenizer["vocab_size"],
        "max_position_embeddings": manifest["settings"]["sequence_length"],
        "eos_token_id": tokenizer["eos_token_id"],
        "pad_token_id": tokenizer["eos_token_id"],
    }
    fields = from_data | args.model_fields()
    # Its sizes first: with too few tokens the special ones are outside too, which says less.
    sizes = build_config({name: fields[name] for name in ("vocab_size", "max_position_embeddings")})
    check_fits(sizes.vocab_size, sizes.max_position_embeddings, manifest)
    return LRAttnResForCausalLM(build_config(fields))


def build_config(fields: dict[str, Any]) -> LRAttnResConfig:
    try:
        return LRAttnResConfig.from_dict(fields)
    except StrictDataclassError as error:
        raise ValueError(f"`model` or `variant`: {explain_field_error(error)}") from error


def load_model(args: TrainArguments, init_from: str, data: PackedTokens) -> LRAttnResForCausalLM:
    """The model in the folder `init_from`, in float32; it must be what `variant` and `model` say, and fit the data."""
    if not Path(init_from).is_dir():
        raise ValueError(f"`init_from` is {init_from}, which is no folder; get a repository with `hf download`.")
    try:
        model = load_language_model(init_from, "cpu", "float32")
    except LoadingError as error:
        raise ValueError(f"`init_from`: {error}") from error
    fields = args.model_fields()
    wanted = build_config(model.config.to_dict() | fields)
    for name in fields:
        there, here = getattr(model.config, name), getattr(wanted, name)
        if there != here:
            raise ValueError(
                f"`init_from` is {init_from}, whose `{name}` is {there}; `variant` and `model` want {here}."
            )
    check_fits(model.config.vocab_size, model.config.max_position_embeddings, data.manifest)
    check_same_tokens(init_from, data)
    return model


def prepare(accelerator: Accelerator, model: LRAttnResForCausalLM, args: TrainArguments) -> tuple:
    """Model and optimizer, ready for the processes and devices at hand."""
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    use_chunked_loss(model, args.z_loss)
    if accelerator.is_fsdp2:
        set_up_sharding(accelerator, model)
    optimizer = muon_adamw(
        model,
        lr_muon=args.lr_muon,
        lr_adamw=args.lr_adamw,
        lr_queries=args.lr_queries,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        betas=args.betas,
    )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    return model, optimizer


def set_up_sharding(accelerator: Accelerator, model: LRAttnResForCausalLM) -> None:
    """What is the run's and not the launcher's to decide; and the queries, which stay float32 in computation too, get
    a group of their own before Accelerate makes the others."""
    from torch.distributed.fsdp import fully_shard

    plugin = accelerator.state.fsdp_plugin
    plugin.cpu_ram_efficient_loading = False  # every process has the weights, from the seed
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type("SHARDED_STATE_DICT")  # of checkpoints; the model is put together at the end
    if model.config.residual_type != "standard":
        mesh = accelerator.torch_device_mesh
        if mesh is not None:
            mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
        fully_shard(model.model.depth_queries, mesh=mesh)


def learning_rate_factor(step: int, args: TrainArguments) -> float:
    """Of the peak, at step 1..steps: linear warm-up, constant, linear warm-down that ends at the last step."""
    warmup = step / args.warmup_steps if args.warmup_steps else 1.0
    warmdown_steps = args.warmdown_fraction * args.steps
    left = (args.steps - step) / warmdown_steps if warmdown_steps else 1.0
    return min(1.0, warmup, args.final_lr_fraction + (1 - args.final_lr_fraction) * left)


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> dict[str, float]:
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
    return {f"lr_{group['name']}": group["lr"] for group in optimizer.param_groups}


def accumulate_gradients(
    accelerator: Accelerator,
    model: torch.nn.Module,
    micro_batches: list[dict[str, torch.Tensor]],
    args: TrainArguments,
    signals: "StopSignals",
) -> tuple[float, float, bool]:
    """Clipped gradients of the mean loss over the whole batch -> loss, norm before clipping, whether to stop."""
    targets = torch.stack([num_targets(batch["labels"]) for batch in micro_batches]).sum()
    targets = accelerator.reduce(targets.to(accelerator.device))
    total = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(micro_batches, start=1):
        # Sharded gradients are small: there every micro-batch is reduced, and no process keeps them whole.
        wait = number < len(micro_batches) and not accelerator.is_fsdp2
        with accelerator.no_sync(model) if wait else nullcontext():
            inputs = flatten_for_flash(batch, args.attn_implementation)
            inputs = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in inputs.items()}
            loss = model(**inputs, use_cache=False, num_items_in_batch=targets).loss
            accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over the processes
        total += loss.detach()
    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.clip)
    asked = torch.tensor(float(signals.received is not None), device=accelerator.device)
    loss, stop = accelerator.reduce(torch.stack([total, asked])).tolist()
    return loss, float(grad_norm), stop > 0


@torch.no_grad()
def depth_entropy(accelerator: Accelerator, model: torch.nn.Module, data: PackedTokens) -> list[float]:
    """Entropy in nats of the depth weights on one row, per site 1..2L: 0 reads one source, log S all S alike."""
    bare = accelerator.unwrap_model(model, keep_torch_compile=False)
    row = {name: data[0][name][None].to(accelerator.device) for name in ("input_ids", "position_ids")}
    bare.eval()
    weights = bare(**row, use_cache=False, logits_to_keep=1, output_depth_weights=True).depth_weights
    bare.train()
    return [torch.special.entr(site.float()).sum(-1).mean().item() for site in weights]


class StopSignals:
    """Inside, SIGTERM and Ctrl-C are remembered for the end of the step; a second one acts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self.before = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: object) -> None:
        self.received = number
        self.__exit__()


def stop_run(accelerator: Accelerator, signals: StopSignals, checkpoint: Path) -> None:
    number = signals.received or signal.SIGTERM  # of a process that was not signalled itself
    accelerator.end_training()
    accelerator.print(f"Stopped by {signal.Signals(number).name}; {checkpoint} is complete: go on with --resume.")
    raise SystemExit(128 + number)


def not_finite(step: int, loss: float, grad_norm: float, checkpoints: Checkpoints) -> str:
    last = checkpoints.last()
    advice = f"The last good checkpoint is {last}" if last else "There is no checkpoint before it"
    return f"the loss is {loss} and the norm of its gradient {grad_norm} at step {step}: training stopped. {advice}."


def export(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    args: TrainArguments,
    loss: float | None,
) -> Path:
    """The trained model as an ordinary folder: weights, config, code, tokenizer and where it comes from."""
    folder = Path(args.output_dir) / "model"
    bare = accelerator.unwrap_model(model, keep_torch_compile=False)
    # Sharded weights are put together, by all processes, on the first one.
    weights = accelerator.get_state_dict(bare) if accelerator.is_fsdp2 else bare.state_dict()
    if accelerator.is_main_process:
        temporary, replaced = folder.with_name(".model.partial"), folder.with_name(".model.deleted")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
        with torch.device("meta"):
            plain = LRAttnResForCausalLM(bare.config)
        try:
            with without_progress_bar():
                plain.save_pretrained(temporary, state_dict=weights)
            tokenizer.model_max_length = bare.config.max_position_embeddings
            tokenizer.save_pretrained(temporary)
            start = {} if args.init_from is None else read_provenance(args.init_from)
            evaluation = [{"dataset": Path(args.data).name, "metric": "validation loss", "value": loss}]
            write_provenance(
                temporary,
                step=args.steps,
                tokens=args.steps * args.batch_tokens,
                base_model=start.get("base_model"),
                license=start.get("license"),
                recipe=args.bound(),
                evaluation=None if loss is None else evaluation,
            )
            sync_to_disk(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        if folder.exists():  # of this run, as was seen at its start
            os.replace(folder, replaced)
        os.replace(temporary, folder)
        shutil.rmtree(replaced, ignore_errors=True)
    accelerator.wait_for_everyone()
    return folder


def data_hash(manifest: dict) -> str:
    """Of the tokens themselves: a folder may be moved."""
    shards = [shard["sha256"] for shard in manifest["splits"]["train"]["shards"]]
    return hashlib.sha256(json.dumps(shards).encode()).hexdigest()[:16]


def describe(args: TrainArguments, model: torch.nn.Module, batches: StepBatches, checkpoint: Path | None) -> str:
    shape = f"{batches.accelerator.num_processes} x {batches.accumulation} x {batches.micro_batch_size} rows"
    steps = f"{args.steps} steps of {args.batch_tokens:,} tokens ({shape})"
    size = sum(parameter.numel() for parameter in model.parameters())
    start = f"resumed from {checkpoint}" if checkpoint else "from the start"
    return f"{args.variant}, {size:,} parameters, {steps}, {batches.epochs:.2f} epochs of the data, {start}"
