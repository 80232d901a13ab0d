"""A model in stages is the model: losses and every gradient, wherever it is cut, under three schedules."""

import processes
import pytest
import torch
import torch.distributed as dist
from common import ONE_OF_EACH, SIZES, VARIANTS, random_tokens, small_config, small_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lr_attnres import LRAttnResForCausalLM, pipeline_stage, pipeline_stage_args, sum_tied_gradients, use_chunked_loss
from lr_attnres.depth_routing import DepthSite
from lr_attnres.errors import LRAttnResError
from lr_attnres.training.pipeline import boundary_elements, stage_layers


CLOSE = {"atol": 1e-5, "rtol": 1e-4}  # float32 sums in another order
CPU = torch.device("cpu")
LENGTH = 9


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    if model.config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def reference(variant: str, input_ids: torch.Tensor, **overrides) -> tuple[LRAttnResForCausalLM, torch.Tensor]:
    """A model with gradients of its loss."""
    torch.manual_seed(1)
    model = small_model(variant, **overrides)
    loss = model(input_ids, labels=input_ids).loss
    loss.backward()
    return model, loss.detach()


def same_model(model: LRAttnResForCausalLM) -> LRAttnResForCausalLM:
    copied = LRAttnResForCausalLM(model.config).to(model.dtype).eval()
    copied.load_state_dict(model.state_dict())
    return copied


@pytest.mark.law
@pytest.mark.parametrize("num_layers", [4, 7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_in_a_row_are_the_model(variant, num_layers):
    """Any number of stages, with documents in rows, and only what `boundary_elements` counts goes from one to the
    next: with N blocks N + 1 values at most."""
    input_ids = random_tokens(2, LENGTH)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 6, 7]])
    inputs = {"position_ids": position_ids, "labels": input_ids}
    model = small_model(variant, num_hidden_layers=num_layers).double()
    use_chunked_loss(model)  # that of Transformers is in float32
    loss = model(input_ids, **inputs, use_cache=False).loss
    loss.backward()
    expected = gradients(model)
    for num_stages in range(1, num_layers + 1):
        whole = same_model(model)
        passed: tuple[torch.Tensor, ...] = (input_ids,)
        for index in range(num_stages):
            output = pipeline_stage(whole, index, num_stages)(*passed, **inputs)
            passed = output if isinstance(output, tuple) else (output,)
            if index < num_stages - 1:
                check_boundary(whole.config, index, num_stages, passed)
        torch.testing.assert_close(passed[0], loss)
        passed[0].backward()
        torch.testing.assert_close(gradients(whole), expected)  # in float64


def check_boundary(config, index, num_stages, passed):
    values, logits, queries = boundary_elements(config, index, num_stages)
    assert sum(tensor.numel() for tensor in passed) == 2 * LENGTH * (values + logits) + queries
    if isinstance(config.num_depth_blocks, int):
        key = config.depth_key_rank if config.residual_type == "projected" else 0
        assert values <= (config.num_depth_blocks + 1) * config.hidden_size + key


def test_cuts_inside_a_block_and_inside_a_group():
    """The shapes above contain both."""
    sites = DepthSite.schedule(2 * SIZES["num_hidden_layers"], VARIANTS["sliced_block"]["num_depth_blocks"])
    cuts = [sites[2 * stage_layers(4, index, 4).stop - 1] for index in range(3)]
    assert any(not site.closes_block for site in cuts)
    assert any(site.num_mixed > 1 and not site.opens_group for site in cuts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_contiguous_where_they_are_sent(variant):
    """PyTorch makes the buffers that receive gradients from those of a first backward; gloo takes no others."""
    passed: tuple[torch.Tensor, ...] = (random_tokens(2, LENGTH),)
    model = small_model(variant, num_hidden_layers=5, num_depth_blocks=7)  # the last stage reads most sources once
    for index in range(5):
        inputs = [tensor.detach().requires_grad_(index > 0) for tensor in passed]
        output = pipeline_stage(model, index, 5)(*inputs)
        passed = output if isinstance(output, tuple) else (output,)
        if index > 0:
            gradients = torch.autograd.grad(sum(part.sum() for part in passed), inputs, allow_unused=True)
            assert all(gradient is None or gradient.is_contiguous() for gradient in gradients)


def test_the_chunked_loss_of_the_last_stage():
    input_ids = random_tokens(2, LENGTH)
    model = small_model()
    use_chunked_loss(model, z_loss=0.1, chunk_size=4)
    expected = model(input_ids, labels=input_ids, num_items_in_batch=7).loss
    state = pipeline_stage(model, 0, 2)(input_ids)
    loss = pipeline_stage(model, 1, 2)(*state, labels=input_ids, num_items_in_batch=7)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(("stages", "index"), [(0, 0), (5, 0), (2, 2), (2, -1)])
def test_what_cannot_be_cut(stages, index):
    with pytest.raises(LRAttnResError, match="`num_hidden_layers` is 4|it must lie in 0..1"):
        pipeline_stage(small_model(), index, stages)


def test_parameters_keep_their_names_and_are_shared():
    model = small_model("projected_block", tie_word_embeddings=True)
    parts = [dict(pipeline_stage(model, index, 3).named_parameters()) for index in range(3)]
    together = {name: parameter for part in parts for name, parameter in part.items()}
    head = together.pop("lm_head.weight")
    assert together == dict(model.named_parameters())
    assert head is not model.lm_head.weight and torch.equal(head, model.lm_head.weight)


SCHEDULES = {  # with two processes: 2 stages, 2 stages, and 4 stages, two in each process
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}


@pytest.mark.compatibility("Pipeline stages (`pipeline_stage`): GPipe, 1F1B, interleaved", variants=VARIANTS)
def test_schedules_are_one_process():
    assert processes.run(in_two_processes, processes=2) == [0, 0]


def in_two_processes():
    dist.init_process_group("gloo")
    for variant in VARIANTS:
        for schedule in SCHEDULES:
            tied = (schedule == "1f1b") != variant.endswith("full")
            check_schedule(variant, schedule, tied, range(dist.get_rank(), 2 * SCHEDULES[schedule][1], 2))


def test_four_processes_are_one():
    """Also four stages in a row; interleaved, two processes hold four above."""
    assert processes.run(in_four_processes, processes=4) == [0, 0, 0, 0]


def in_four_processes():
    dist.init_process_group("gloo")
    for variant in VARIANTS:
        tied = not variant.endswith("full")
        for schedule in ("1f1b", "gpipe"):
            check_schedule(variant, schedule, tied, range(dist.get_rank(), dist.get_rank() + 1), num_stages=4)


def check_schedule(variant, name, tied, numbers, num_stages=None, wrap=lambda module: module, rows=None, **options):
    """Run one step of the stages with these numbers; `rows` are those of this pipeline."""
    schedule_class, per_process = SCHEDULES[name]
    num_stages = num_stages or 2 * per_process
    torch.manual_seed(2)
    input_ids = random_tokens(8, LENGTH)
    expected, loss = reference(variant, input_ids, tie_word_embeddings=tied)
    model = same_model(expected)
    mine = input_ids if rows is None else input_ids[rows]
    num_items = len(mine) * (LENGTH - 1)

    def loss_of(logits, labels):
        return model.loss_function(logits, labels, model.config.vocab_size, num_items_in_batch=num_items)

    stages = []
    for number in numbers:
        module = wrap(pipeline_stage(model, number, num_stages))
        shapes = {}
        if isinstance(module, DistributedDataParallel):
            shapes = pipeline_stage_args(model.config, number, num_stages, (len(mine) // 4, LENGTH))
        stages.append(PipelineStage(module, number, num_stages, CPU, **shapes, **options))
    given = stages if name == "interleaved" else stages[0]
    schedule = schedule_class(given, 4, loss_fn=loss_of, scale_grads=False)
    for _ in range(2):  # the second step starts with the buffers of the first
        losses = []
        for stage in stages:
            stage.submod.zero_grad()
        labels = mine if stages[-1].is_last else None
        schedule.step(*[mine] * stages[0].is_first, target=labels, losses=losses, return_outputs=False)
        sum_tied_gradients(*stages)
    if rows is None and losses:
        torch.testing.assert_close(sum(losses), loss)
    wanted = gradients(expected)
    for stage in stages:
        for parameter_name, parameter in stage.submod.named_parameters():
            gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            where = f"{variant} {name} tied={tied} {parameter_name}"
            wanted_gradient = wanted[parameter_name.removeprefix("module.")]
            torch.testing.assert_close(gradient, wanted_gradient, **CLOSE, msg=lambda m, w=where: f"{w}: {m}")


@pytest.mark.compatibility("Pipeline stages in DDP and FSDP2", variants=ONE_OF_EACH)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_pipelines_are_one_process(kind):
    assert processes.run(two_pipelines, kind, processes=4) == [0, 0, 0, 0]


def two_pipelines(kind):
    """Two pipelines of two stages; equal stages share their gradients."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replica, number = mesh["replica"].get_local_rank(), mesh["stage"].get_local_rank()

    def wrap(module):
        if kind == "ddp":
            return DistributedDataParallel(module, process_group=mesh["replica"].get_group())
        for layer in module.model.layers.values():
            fully_shard(layer, mesh=mesh["replica"])
        return fully_shard(module, mesh=mesh["replica"])

    for variant in ONE_OF_EACH:
        rows, group = slice(4 * replica, 4 * replica + 4), mesh["stage"].get_group()
        check_schedule(variant, "1f1b", variant != "standard", [number], wrap=wrap, rows=rows, group=group)


def test_the_args_of_a_stage_are_what_it_takes_and_returns():
    config = small_config("projected_block")
    model = small_model("projected_block")
    passed = (random_tokens(2, LENGTH),)
    for index in range(3):
        shapes = pipeline_stage_args(config, index, 3, (2, LENGTH))
        assert [(each.shape, each.dtype) for each in shapes["input_args"]] == [(x.shape, x.dtype) for x in passed]
        output = pipeline_stage(model, index, 3)(*passed)
        passed = output if isinstance(output, tuple) else (output,)
        assert [(each.shape, each.requires_grad) for each in shapes["output_args"]] == [
            (x.shape, x.requires_grad) for x in passed
        ]
