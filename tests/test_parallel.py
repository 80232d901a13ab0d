"""Two processes on gloo: tensor parallelism and FSDP2, by the plans of the model, and DDP equal one process."""

from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist
from common import ONE_OF_EACH, random_tokens, small_model
from common import VARIANTS as COMMON_VARIANTS
from compatibility import RESIDUAL_TYPES
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from lr_attnres import LRAttnResForCausalLM
from lr_attnres.training.losses import use_chunked_loss


VARIANTS = [*ONE_OF_EACH, "sliced_block_weighted_norms", "sliced_block_heads"]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}  # float32 sums in another order


def run_on_two(function, *arguments):
    assert processes.run(join, function, arguments, processes=2) == [0, 0]


def join(function, arguments):
    dist.init_process_group("gloo")
    function(*arguments)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_against_one_process(folder, dtype, input_ids, **parallel):
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**parallel), dtype=dtype)
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    reference = LRAttnResForCausalLM.from_pretrained(folder, dtype=dtype)
    expected, outputs = (m(input_ids, labels=input_ids) for m in (reference, model))
    if dtype == torch.bfloat16:  # what matters here is that one FSDP group never mixes dtypes
        assert outputs.logits.isfinite().all() and full(model.model.depth_queries.weight).dtype == torch.float32
        outputs.loss.backward()
        return
    torch.testing.assert_close(full(outputs.logits), expected.logits, **CLOSE)
    outputs.loss.backward()
    expected.loss.backward()
    gradients = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    for variant in VARIANTS:
        small_model(variant, num_hidden_layers=2, vocab_size=62).save_pretrained(tmp_path / variant)
    return [tmp_path / variant for variant in VARIANTS]


@pytest.mark.compatibility("Tensor parallelism", variants=VARIANTS)
def test_tensor_parallel(folders):
    run_on_two(tensor_parallel, folders, random_tokens(2, 9))


def tensor_parallel(folders, input_ids):
    for folder in folders:
        check_against_one_process(folder, torch.float32, input_ids, tp_size=2)


@pytest.mark.compatibility("FSDP2", variants=VARIANTS)
def test_fsdp(folders):
    run_on_two(fully_sharded, folders, random_tokens(2, 9))


def fully_sharded(folders, input_ids):
    for folder in folders:
        check_against_one_process(folder, torch.float32, input_ids, fsdp_size=2)
        if folder.name != "standard":
            check_against_one_process(folder, torch.bfloat16, input_ids, fsdp_size=2)


@pytest.mark.compatibility("DDP", variants=VARIANTS)
def test_ddp(folders):
    run_on_two(data_parallel, folders, random_tokens(2, 9))


def data_parallel(folders, input_ids):
    """Each process has one of two rows; both end with the gradients of the batch."""
    for folder in folders:
        reference = LRAttnResForCausalLM.from_pretrained(folder)
        reference(input_ids, labels=input_ids).loss.backward()
        model = DistributedDataParallel(LRAttnResForCausalLM.from_pretrained(folder))
        row = input_ids[dist.get_rank()][None]
        model(input_ids=row, labels=row).loss.backward()
        for ours, expected in zip(model.parameters(), reference.parameters()):
            torch.testing.assert_close(ours.grad, expected.grad, **CLOSE)


@pytest.mark.compatibility("Pipeline plan of Transformers and vLLM", refused=RESIDUAL_TYPES)
@pytest.mark.parametrize("variant", COMMON_VARIANTS)
def test_no_plan_for_pipeline_parallelism(variant):
    """Its stages pass on one tensor. Without a plan vLLM would cut the model anyway, so the question is refused."""
    model = small_model(variant)
    assert not model.pp_plan
    with pytest.raises(NotImplementedError, match="cannot cut LR-AttnRes.*--tensor-parallel-size"):
        model.supports_pp_plan  # noqa: B018


@pytest.mark.compatibility("Tensor parallelism with the chunked loss", variants=VARIANTS, refused=RESIDUAL_TYPES)
def test_chunked_loss(folders):
    run_on_two(chunked_loss, folders, random_tokens(2, 9))


def chunked_loss(folders, input_ids):
    for folder in folders:
        check_chunked_loss(folder, input_ids)


def check_chunked_loss(folder, input_ids):
    reference = LRAttnResForCausalLM.from_pretrained(folder)
    expected = reference(input_ids, labels=input_ids).loss
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    # the head in a group of its own, in one with the norm (as Accelerate has it), in that of the root; not sharded
    own_group = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))
    norm_group, root_group, plain = (LRAttnResForCausalLM.from_pretrained(folder) for _ in range(3))
    fully_shard([norm_group.model.norm, norm_group.lm_head], reshard_after_forward=False)
    fully_shard(norm_group)
    fully_shard(root_group)
    for model in (own_group, norm_group, root_group, DistributedDataParallel(plain)):
        use_chunked_loss(model, chunk_size=4)
        outputs = model(input_ids=input_ids, labels=input_ids)
        assert outputs.logits is None
        torch.testing.assert_close(outputs.loss, expected, **CLOSE)
        outputs.loss.backward()
        for name, parameter in model.named_parameters():
            expected_gradient = gradients[name.removeprefix("module.")]
            torch.testing.assert_close(full(parameter.grad), expected_gradient, **CLOSE, msg=lambda m, n=name: n + m)
    split_head = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    use_chunked_loss(split_head)
    with pytest.raises(ValueError, match="tensor parallelism"):
        split_head(input_ids, labels=input_ids)
