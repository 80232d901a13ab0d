"""Pretraining by the paper's recipe: one loop on Accelerate, from one CPU to many GPUs; a killed run can resume."""

import math
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from ..data.packed_tokens import PackedTokens, load_data_tokenizer
from ..errors import LRAttnResError
from ..folders.adapter import write_adapter
from ..folders.card import read_provenance, write_provenance
from ..folders.staging import staged_folder
from ..modeling_lr_attnres import LRAttnResForCausalLM
from .arguments import TrainArguments
from .batches import Batch, StepBatches, flatten_for_flash, open_split
from .checkpoints import Checkpoints, check_same_settings, hold_run_folder, read_state, save_quietly
from .evaluation import evaluate_model
from .losses import num_targets
from .metrics import METRICS_FILE, Metrics
from .setup import build_model, start_accelerator, wrap_for_training


def train(args: TrainArguments) -> Path:
    """Train a model; returns its folder, `model` in the folder of the run.

    SIGTERM and Ctrl-C save a checkpoint after the current step and end the process with 128 + the signal's number.
    """
    from .pipeline_run import PipelinedRun  # imports this module

    args.check()
    accelerator = start_accelerator(args)
    with hold_run_folder(args.output_dir, accelerator):
        run_class = Run if args.pipeline_stages == 1 else PipelinedRun
        return run_class(args, accelerator).train()


class Run:
    """A training run that is ready for its next step: new, or restored from a checkpoint."""

    def __init__(self, args: TrainArguments, accelerator: Accelerator):
        self.args, self.accelerator = args, accelerator
        self.data, self.validation = open_split(args.data, "train", accelerator), None
        if "validation" in self.data.manifest.splits:
            self.validation = open_split(args.data, "validation", accelerator)
        self.tokenizer = load_data_tokenizer(args.data)  # saved with the model; if it is missing, fail now
        self.checkpoints = Checkpoints(args.output_dir, accelerator)
        self.checkpoint = self.checkpoints.find(args.resume)
        init_from = args.init_from and os.path.abspath(args.init_from)
        self.settings = args.bound() | {"data": self.data.manifest.training_hash(), "init_from": init_from}
        if self.checkpoint is not None:
            check_same_settings(self.checkpoint, read_state(self.checkpoint)["settings"], self.settings)
        check_nothing_is_lost(args)
        self.initial = {} if args.init_from is None else read_initial_provenance(args.init_from)
        self.checkpoints.delete_leftovers()

        set_seed(args.seed)
        model = build_model(args, self.data, self.tokenizer)
        self.config, self.num_parameters = model.config, model.num_parameters()
        self.num_trained = model.num_parameters(only_trainable=True)
        self.model, self.optimizer = self.wrap(model)
        set_seed(args.seed, device_specific=True)  # the weights are the same in every process, dropout is not
        self.steps_done, self.validation_loss, self.first_loss, self.has_warned = 0, None, None, False
        if self.checkpoint is not None:
            state = self.checkpoints.load(self.checkpoint)
            self.steps_done, self.validation_loss = state["step"], state["validation_loss"]
            self.first_loss = state.get("first_loss")  # older checkpoints have none

    def wrap(self, model: LRAttnResForCausalLM) -> tuple[Any, Any]:
        """The model and its optimizer, ready for the processes of this run."""
        return wrap_for_training(self.accelerator, model, self.args)

    def train(self) -> Path:
        args, accelerator = self.args, self.accelerator
        batches = StepBatches(self.data, args, accelerator, self.steps_done)
        accelerator.print(self.describe(batches))
        if args.trackers:
            accelerator.init_trackers("lr-attnres", config={name: str(value) for name, value in args.bound().items()})
        metrics_file = Path(args.output_dir) / METRICS_FILE
        metrics = Metrics(metrics_file, accelerator, self.steps_done, args.steps, args.batch_tokens)
        with StopSignals() as signals, metrics:
            if self.steps_done == 0 and self.validation is not None:
                self.first_loss = self.validate(0, metrics)
            steps = iter(batches)
            for step in range(self.steps_done + 1, args.steps + 1):
                started = time.perf_counter()
                record, stop = self.take_step(step, next(steps), signals)
                metrics.advance(record, time.perf_counter() - started)
                measured = self.measure(step, metrics)
                if measured or self.is_due(step, args.log_steps):
                    metrics.write(record | measured)
                if stop or self.is_due(step, args.save_steps):
                    self.validation_loss = measured.get("validation_loss")
                    losses = {"validation_loss": self.validation_loss, "first_loss": self.first_loss}
                    self.checkpoints.save(step, settings=self.settings, **losses)
                    self.checkpoints.prune(args.keep_last)
                if stop and step < args.steps:
                    accelerator.end_training()
                    number = signal.Signals(signals.received or signal.SIGTERM)  # None: another process received it
                    advice = f"{self.checkpoints.path(step)} is complete: resume with --resume"
                    accelerator.print(f"Stopped by {number.name}; {advice}.")
                    raise SystemExit(128 + number)
        folder = self.export()
        accelerator.end_training()
        return folder

    def take_step(self, step: int, micro_batches: list[Batch], signals: "StopSignals") -> tuple[dict[str, Any], bool]:
        """One optimizer step -> its line of metrics, and whether a signal asked the run to stop."""
        groups, factor = self.optimizer.param_groups, learning_rate_factor(step, self.args)
        for group in groups:
            group["lr"] = group["initial_lr"] * factor
        loss, grad_norm, stop = accumulate_gradients(self, micro_batches, signals)
        if not math.isfinite(loss + grad_norm):
            last = self.checkpoints.last()
            advice = f"The last good checkpoint is {last}" if last else "There is no checkpoint before it"
            problem = f"the loss is {loss} and the norm of its gradient {grad_norm} at step {step}"
            raise LRAttnResError(f"{problem}: training stopped. {advice}.")
        self.optimizer.step()
        self.optimizer.zero_grad()
        record = {"step": step, "tokens": step * self.args.batch_tokens, "loss": loss, "grad_norm": grad_norm}
        return record | {f"lr_{group['name']}": group["lr"] for group in groups}, stop

    def backward(self, micro_batches: list[Batch], targets: torch.Tensor) -> torch.Tensor:
        """Gradients of the micro-batches of this process -> its part of the loss, which is a mean over `targets`."""
        accelerator, model = self.accelerator, self.model
        total = torch.zeros((), device=accelerator.device)
        for number, batch in enumerate(micro_batches, start=1):
            # FSDP reduces after every micro-batch: otherwise each process would hold the unsharded gradients.
            skip_reduction = number < len(micro_batches) and not accelerator.is_fsdp2
            with accelerator.no_sync(model) if skip_reduction else nullcontext():
                inputs = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
                loss = model(**inputs, use_cache=False, num_items_in_batch=targets).loss
                accelerator.backward(loss * accelerator.num_processes)  # gradients are averaged over the processes
            total += loss.detach()
        return total

    def clip_gradients(self) -> torch.Tensor:
        """-> the norm before clipping."""
        return self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.clip)

    def is_due(self, step: int, every: int) -> bool:
        return step == self.args.steps or step % every == 0

    def measure(self, step: int, metrics: Metrics) -> dict[str, Any]:
        """The validation loss and the routing entropy, at the steps where they are due."""
        args = self.args
        measured: dict[str, Any] = {}
        if self.validation is not None and (self.is_due(step, args.eval_steps) or self.is_due(step, args.save_steps)):
            measured["validation_loss"] = self.validate(step, metrics)
        if args.variant != "standard" and self.is_due(step, args.entropy_steps):
            measured["depth_entropy"] = self.depth_entropy(self.validation or self.data)
        return measured

    def validate(self, step: int, metrics: Metrics) -> float:
        """The validation loss, which is printed; warns once when it has risen above that of the start."""
        assert self.validation is not None
        loss = self.evaluate(self.validation)
        metrics.print(f"step {step}: validation loss {loss:.4f}")
        if self.first_loss is not None and loss > self.first_loss and not self.has_warned:
            rates = ", ".join(f"lr_{group['name']} = {group['initial_lr']:g}" for group in self.optimizer.param_groups)
            risen = f"The validation loss has risen above the start ({self.first_loss:.4f})"
            metrics.print(f"{risen}: lower the learning rate ({rates}).")
            self.has_warned = True
        return loss

    def bare_model(self) -> LRAttnResForCausalLM:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def evaluate(self, data: PackedTokens) -> float:
        return evaluate_model(self.bare_model(), data, self.accelerator, self.args.micro_batch_size).loss

    def depth_entropy(self, data: PackedTokens) -> list[float]:
        return depth_entropy(self.bare_model(), data)

    def weights(self) -> dict[str, torch.Tensor] | None:
        """The whole weights, by name, in the main process. All processes take part in gathering sharded ones."""
        bare = self.bare_model()
        return self.accelerator.get_state_dict(bare) if self.accelerator.is_fsdp2 else bare.state_dict()

    def export(self) -> Path:
        """Save the trained model as an ordinary folder: weights, config, code, tokenizer and provenance."""
        args, accelerator, weights = self.args, self.accelerator, self.weights()
        folder = Path(args.output_dir) / "model"
        if accelerator.is_main_process:
            initial = self.initial
            if args.train == "queries":
                assert weights is not None
                base = initial.get("base_model") or Path(args.init_from or "").name or None
                with staged_folder(folder.with_name("adapter"), replace=True) as staging:
                    write_adapter(staging, self.config, weights, base, initial.get("license"))
            with torch.device("meta"):
                unsharded = LRAttnResForCausalLM(self.config)
            # An existing folder belongs to this run: `check_nothing_is_lost` has made sure of that.
            with staged_folder(folder, replace=True) as staging:
                save_quietly(unsharded, staging, state_dict=weights)
                self.tokenizer.model_max_length = self.config.max_position_embeddings
                self.tokenizer.save_pretrained(staging)
                loss = {"dataset": Path(args.data).name, "metric": "validation loss", "value": self.validation_loss}
                write_provenance(
                    staging,
                    step=args.steps,
                    tokens=args.steps * args.batch_tokens,
                    base_model=initial.get("base_model"),
                    license=initial.get("license"),
                    recipe=args.bound(),
                    evaluation=None if self.validation_loss is None else [loss],
                )
        accelerator.wait_for_everyone()
        return folder

    def describe(self, batches: StepBatches) -> str:
        args = self.args
        shape = f"{batches.num_replicas} x {batches.accumulation} x {batches.micro_batch_size} rows"
        steps = f"{args.steps} steps of {args.batch_tokens:,} tokens ({shape})"
        start = f"resumed from {self.checkpoint}" if self.checkpoint else "from the start"
        size = f"{self.num_trained:,} of {self.num_parameters:,} parameters"
        return f"{args.variant}, {size}, {steps}, {batches.epochs:.2f} epochs of the data, {start}"


def read_initial_provenance(init_from: str) -> dict[str, Any]:
    try:
        return read_provenance(init_from)
    except LRAttnResError as error:
        raise LRAttnResError(f"`init_from`: {error}") from error


def check_nothing_is_lost(args: TrainArguments) -> None:
    """Refuse to replace metrics or a model in the run folder, unless the run that wrote them is resumed."""
    metrics, model, adapter = (Path(args.output_dir) / name for name in (METRICS_FILE, "model", "adapter"))
    if args.resume is None and metrics.exists() and metrics.stat().st_size:
        advice = "resume with --resume (without a checkpoint, it starts over), or choose another --output-dir"
        raise LRAttnResError(f"{metrics} belongs to an earlier run: {advice}.")
    if not os.path.lexists(model):
        # A run that was killed between writing its adapter and its model has metrics.
        has_metrics = metrics.exists() and metrics.stat().st_size > 0
        if args.train == "queries" and os.path.lexists(adapter) and not has_metrics:
            raise LRAttnResError(f"{adapter} already exists and would be replaced: choose another --output-dir.")
        return
    try:
        recipe = None if args.resume is None else read_provenance(model).get("recipe")
    except (LRAttnResError, OSError):
        recipe = None
    if not isinstance(recipe, dict):
        raise LRAttnResError(f"{model} is not from this run, which would replace it: choose another --output-dir.")
    check_same_settings(model, recipe, args.bound())


def learning_rate_factor(step: int, args: TrainArguments) -> float:
    """The fraction of the peak rate at step 1..steps: linear warm-up, constant, linear warm-down to the last step."""
    warmup = step / args.warmup_steps if args.warmup_steps else 1.0
    warmdown_steps = args.warmdown_fraction * args.steps
    remaining = (args.steps - step) / warmdown_steps if warmdown_steps else 1.0
    return min(1.0, warmup, args.final_lr_fraction + (1 - args.final_lr_fraction) * remaining)


def accumulate_gradients(run: Run, micro_batches: list[Batch], signals: "StopSignals") -> tuple[float, float, bool]:
    """Clipped gradients of the mean loss over the whole batch -> loss, norm before clipping, whether to stop."""
    accelerator = run.accelerator
    targets = torch.stack([num_targets(batch["labels"]) for batch in micro_batches]).sum()
    targets = accelerator.reduce(targets.to(accelerator.device)) // run.args.pipeline_stages
    inputs = [flatten_for_flash(batch, run.args.attn_implementation) for batch in micro_batches]
    total = run.backward(inputs, targets)
    grad_norm = run.clip_gradients()
    signalled = torch.tensor(float(signals.received is not None), device=accelerator.device)
    loss, stop = accelerator.reduce(torch.stack([total, signalled])).tolist()
    return loss, float(grad_norm), stop > 0


@torch.no_grad()
def depth_entropy(model: LRAttnResForCausalLM, data: PackedTokens) -> list[float]:
    """Entropy in nats of the depth weights on one row, per site 1..2L: 0 reads one source, log S all S equally."""
    row = {name: data[0][name][None].to(model.device) for name in ("input_ids", "position_ids")}
    model.eval()
    weights = model(**row, use_cache=False, logits_to_keep=1, output_depth_weights=True).depth_weights
    model.train()
    return [torch.special.entr(site.float()).sum(-1).mean().item() for site in weights]


class StopSignals:
    """Within the context, SIGTERM and Ctrl-C are recorded for the end of the step; a second signal acts at once."""

    def __enter__(self) -> "StopSignals":
        self.received: int | None = None
        is_main = threading.current_thread() is threading.main_thread()  # Python allows handlers in no other
        numbers = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        self.previous_handlers = {number: signal.signal(number, self._record) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: object) -> None:
        self.received = number
        self.__exit__()
