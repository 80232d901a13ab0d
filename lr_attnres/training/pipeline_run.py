"""A training run whose processes hold the stages of a pipeline. Its checkpoints are those of one process."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import default_collate

from ..data.packed_tokens import PackedTokens
from ..errors import LRAttnResError
from ..modeling_lr_attnres import LRAttnResDepthRead, LRAttnResForCausalLM
from .arguments import TrainArguments
from .batches import Batch, StepBatches, flatten_for_flash
from .checkpoints import save_quietly
from .loop import Run
from .losses import evaluation_mode, num_targets, use_chunked_loss
from .optimizers import split_parameters
from .pipeline import pipeline_stage, sum_tied_gradients
from .setup import new_optimizer


OPTIMIZER_FILE = "optimizer.bin"  # as Accelerate names it


class PipelinedRun(Run):
    """Process `i` holds stage `i % pipeline_stages`; further processes are replicas that share the rows of a step."""

    def wrap(self, model: LRAttnResForCausalLM) -> tuple[Any, Any]:
        args, accelerator = self.args, self.accelerator
        check_processes(args, accelerator.num_processes, accelerator.distributed_type)
        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if args.compile:
            model.compile_layers()
        use_chunked_loss(model, args.z_loss)
        num_stages, number = args.pipeline_stages, accelerator.process_index % args.pipeline_stages
        module = pipeline_stage(model, number, num_stages).to(accelerator.device)
        if accelerator.mixed_precision == "bf16":
            module.autocast_dtype = torch.bfloat16
        module.train()
        shape = (accelerator.num_processes // num_stages, num_stages)
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("replica", "stage"))
        self.replicas, self.stages = mesh["replica"].get_group(), mesh["stage"].get_group()
        self.on_cpu = dist.new_group(backend="gloo")  # for gathered objects, which NCCL would put on the GPU
        self.is_first_replica = mesh["replica"].get_local_rank() == 0
        self.stage = PipelineStage(module, number, num_stages, accelerator.device, group=self.stages)
        self.num_micro_batches = StepBatches(self.data, args, accelerator, 0).accumulation
        keep_loss = lambda loss, labels: loss  # noqa: E731
        self.schedule = Schedule1F1B(self.stage, self.num_micro_batches, keep_loss, scale_grads=False)
        accelerator.register_save_state_pre_hook(self.save)
        accelerator.register_load_state_pre_hook(self.load)
        return module, new_optimizer(module, args)

    def backward(self, micro_batches: list[Batch], targets: torch.Tensor) -> torch.Tensor:
        losses = self.pass_through(self.schedule.step, micro_batches, int(targets))
        for parameter in self.model.parameters():
            if parameter.grad is not None:  # the same in all replicas
                dist.all_reduce(parameter.grad, group=self.replicas)
        sum_tied_gradients(self.stage)
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.accelerator.device)

    def pass_through(
        self, step: Any, micro_batches: list[Batch], num_items: int, **options: Any
    ) -> list[torch.Tensor]:
        """Send micro-batches of equal shape through the stages -> the loss of each, in the last stage."""
        device, losses = self.accelerator.device, []  # type: ignore[var-annotated]
        names = ("input_ids", "position_ids", "labels")
        input_ids, position_ids, labels = (torch.cat([b[name] for b in micro_batches]).to(device) for name in names)
        step(
            *[input_ids] * self.stage.is_first,
            target=labels if self.stage.is_last else None,
            losses=losses,
            return_outputs=False,
            position_ids=position_ids,
            labels=labels,
            num_items_in_batch=num_items,
            **options,
        )
        return [loss.detach() for loss in losses]

    def clip_gradients(self) -> torch.Tensor:
        parameters = list(self.model.parameters())
        named = self.model.named_parameters()
        counted = [p.grad for name, p in named if p.grad is not None and not self.is_tied_copy(name)]
        square = torch.nn.utils.get_total_norm(counted).square()
        dist.all_reduce(square, group=self.stages)
        torch.nn.utils.clip_grads_with_norm_(parameters, self.args.clip, square.sqrt())
        return square.sqrt()

    def is_tied_copy(self, name: str) -> bool:
        return self.config.tie_word_embeddings and name == "lm_head.weight"

    @torch.no_grad()
    def evaluate(self, data: PackedTokens) -> float:
        """The mean loss over all rows; rows beyond the last one have no labels. Every replica computes it."""
        size, losses, tokens = self.args.micro_batch_size, [], 0
        self.model.eval()
        with evaluation_mode(self.model) if self.stage.is_last else nullcontext():
            for start in range(0, len(data), size * self.num_micro_batches):
                batches = []
                for first in range(start, start + size * self.num_micro_batches, size):
                    batch = default_collate([data[min(row, len(data) - 1)] for row in range(first, first + size)])
                    batch["labels"][max(0, len(data) - first) :] = -100
                    batches.append(flatten_for_flash(batch, self.args.attn_implementation))
                    tokens += int(num_targets(batches[-1]["labels"]))
                losses += self.pass_through(self.schedule.eval, batches, 1)
        self.model.train()
        total = math.fsum(loss.item() for loss in losses)  # 0 except in the last stages
        parts = self.gather_objects(total if self.is_first_replica else 0.0)
        return math.fsum(parts) / tokens

    @torch.no_grad()
    def depth_entropy(self, data: PackedTokens) -> list[float]:
        """As `loop.depth_entropy`; each stage measures its own sites."""
        entropies: dict[int, float] = {}

        def record(read: LRAttnResDepthRead, args: Any, outputs: Any) -> None:
            entropies[read.site.index] = torch.special.entr(outputs[1].float()).sum(-1).mean().item()

        reads = [module for module in self.model.modules() if isinstance(module, LRAttnResDepthRead)]
        hooks = [read.register_forward_hook(record) for read in reads]
        self.model.eval()
        # As many rows as in `evaluate`: the schedule takes one shape until the next step of training.
        batch = flatten_for_flash(
            default_collate([data[0]] * self.args.micro_batch_size), self.args.attn_implementation
        )
        batches = [batch] * self.num_micro_batches
        self.pass_through(self.schedule.eval, batches, 1, output_depth_weights=True)
        self.model.train()
        for hook in hooks:
            hook.remove()
        everywhere = {index: value for part in self.gather_objects(entropies) for index, value in part.items()}
        return [everywhere[index] for index in sorted(everywhere)]

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.on_cpu)
        return values

    def collect(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values of all stages by name, in the main process."""
        parts: list[Any] | None = [None] * dist.get_world_size() if self.accelerator.is_main_process else None
        own = {name: value for name, value in values.items() if not self.is_tied_copy(name)}
        dist.gather_object(own if self.is_first_replica else {}, parts, group=self.on_cpu)
        return {name: value for part in parts or [] for name, value in part.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        return self.collect({name: tensor.cpu() for name, tensor in self.model.state_dict().items()})

    def whole_model(self) -> LRAttnResForCausalLM:
        with torch.device("meta"):
            return LRAttnResForCausalLM(self.config)

    def save(self, models: list, weights: list, folder: str) -> None:
        """The weights and the state of the optimizer as one process saves them."""
        everything = self.weights()
        own, names = self.optimizer.state_dict(), self.parameter_names(self.model)
        on_cpu = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, own["state"])
        states = self.collect({names[number]: state for number, state in on_cpu.items()})
        if not self.accelerator.is_main_process:
            return
        whole = self.whole_model()
        save_quietly(whole, folder, state_dict=everything, max_shard_size="1TB")
        numbers = {name: number for number, name in enumerate(self.parameter_names(whole))}
        grouped = split_parameters(whole)  # the first stage, which is here, has parameters of every group
        groups = [g | {"params": [numbers[name] for name in grouped[g["name"]]]} for g in own["param_groups"]]
        state = {numbers[name]: value for name, value in states.items()}
        torch.save({"state": state, "param_groups": groups}, Path(folder) / OPTIMIZER_FILE)

    def load(self, models: list, folder: str) -> None:
        saved = safetensors.torch.load_file(Path(folder) / "model.safetensors")
        own = self.model.state_dict()
        self.model.load_state_dict({name: saved[self.saved_name(name)] for name in own})
        whole = torch.load(Path(folder) / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
        numbers = {name: number for number, name in enumerate(self.parameter_names(self.whole_model()))}
        names, groups = self.parameter_names(self.model), self.optimizer.state_dict()["param_groups"]
        states = {i: whole["state"].get(numbers[self.saved_name(name)]) for i, name in enumerate(names)}
        by_name = {group["name"]: group for group in whole["param_groups"]}
        groups = [by_name[group["name"]] | {"params": group["params"]} for group in groups]
        state = {number: value for number, value in states.items() if value is not None}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def saved_name(self, name: str) -> str:
        return "model.embed_tokens.weight" if self.is_tied_copy(name) else name

    @staticmethod
    def parameter_names(model: torch.nn.Module) -> list[str]:
        """In the order of the optimizer's groups."""
        return [name for names in split_parameters(model).values() for name in names]


def check_processes(args: TrainArguments, num_processes: int, kind: DistributedType) -> None:
    if num_processes % args.pipeline_stages or num_processes == 1:
        found = f"`pipeline_stages` is {args.pipeline_stages}, the number of processes {num_processes}"
        advice = "launch a multiple of it with `torchrun --nproc-per-node` (on CPUs with ACCELERATE_USE_CPU=true)"
        raise LRAttnResError(f"{found}: {advice}.")
    if kind == DistributedType.FSDP:
        raise LRAttnResError("`pipeline_stages` does not go with FSDP in `train`: launch without it (DDP).")
