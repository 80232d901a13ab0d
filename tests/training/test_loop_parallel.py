"""Two processes on gloo, with DDP and FSDP2, give the results of one and save an ordinary folder."""

import json
import os
from pathlib import Path

import processes
import pytest
import torch
from processes import DEFAULT_VARIANT, arguments, losses
from safetensors.torch import load_file

from lr_attnres.folders.clean_process import load_in_clean_process
from lr_attnres.training.evaluation import evaluate
from lr_attnres.training.metrics import read_metrics


CLOSE = {"atol": 2e-5, "rtol": 2e-5}  # float32 sums in another order, through five steps


def fsdp_on_cpu() -> None:
    """Accelerate offers FSDP only on GPUs; behind that check the same code runs on gloo."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def train_sharded(arguments: dict, stop: tuple[str, int] | None = None) -> None:
    fsdp_on_cpu()
    processes.train(arguments, stop)


def train_in_bfloat16(arguments: dict) -> None:
    """The layers compute in bfloat16, queries and depth logits in float32; all master weights are float32."""
    from lr_attnres.depth_state import unflatten_depth
    from lr_attnres.modeling_lr_attnres import LRAttnResDecoderLayer, LRAttnResDepthQueries

    seen, state_dtypes = {}, set()
    for kind in (LRAttnResDecoderLayer, LRAttnResDepthQueries):

        def record(module, *args, kind=kind, forward=kind.forward, **kwargs):
            seen[kind] = {parameter.dtype for parameter in module.parameters()}
            if kind is LRAttnResDecoderLayer and module.training:
                state = unflatten_depth(args[1:], kwargs["depth_counts"])
                state_dtypes.update(
                    (name, tensor.dtype) for name in ("values", "logits") for tensor in getattr(state, name)
                )
                state_dtypes.add(("queries", state.queries.dtype))
            return forward(module, *args, **kwargs)

        kind.forward = record
    train_sharded(arguments | {"mixed_precision": "bf16"})
    assert seen == {LRAttnResDecoderLayer: {torch.bfloat16}, LRAttnResDepthQueries: {torch.float32}}
    assert state_dtypes == {("values", torch.bfloat16), ("logits", torch.float32), ("queries", torch.float32)}
    saved = load_file(Path(arguments["output_dir"], "model/model.safetensors"))
    assert {weight.dtype for weight in saved.values()} == {torch.float32}


def evaluate_together(folder: Path, data: Path) -> None:
    result = evaluate(folder, data, batch_size=2)
    Path(folder, f"evaluation_{os.environ['RANK']}.json").write_text(json.dumps([result.loss, result.tokens]))


@pytest.fixture(scope="module")
def alone(token_data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    assert processes.run(processes.train, arguments(token_data, folder, steps=5)) == [0]
    return folder


@pytest.mark.compatibility("`lr-attnres train` on DDP and FSDP2", variants=[DEFAULT_VARIANT])
@pytest.mark.parametrize("function", [processes.train, train_sharded], ids=["ddp", "fsdp2"])
def test_two_processes_are_one(function, alone, token_data, tmp_path):
    """SIGTERM to one of them stops both after the same step; resumed, they end where one process ends."""
    values = arguments(token_data, tmp_path, steps=5, micro_batch_size=2)
    assert processes.run(function, values, ("one of two terminated", 2), processes=2) == [143, 143]
    checkpoint, resumed = tmp_path / "checkpoints/step-00000002", values | {"resume": "last"}
    assert checkpoint.exists()
    if function is train_sharded:  # all processes refuse a shard of another one that is damaged
        shard = checkpoint / "pytorch_model_fsdp_0/__1_0.distcp"
        content = shard.read_bytes()
        shard.write_bytes(content[:-99] + bytes([content[-99] ^ 1]) + content[-98:])
        assert processes.run(function, resumed, processes=2) == [1, 1]
        shard.write_bytes(content)
    assert processes.run(function, resumed, processes=2) == [0, 0]

    records, expected = (read_metrics(folder / "metrics.jsonl") for folder in (tmp_path, alone))
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    torch.testing.assert_close(losses(records), losses(expected), **CLOSE)
    for name in ("validation_loss", "depth_entropy"):
        torch.testing.assert_close(records[-1][name], expected[-1][name], **CLOSE)
    weights, wanted = (load_file(folder / "model/model.safetensors") for folder in (tmp_path, alone))
    torch.testing.assert_close(weights, wanted, **CLOSE)
    if function is train_sharded:
        assert (tmp_path / "checkpoints/step-00000005/pytorch_model_fsdp_0").is_dir()
        found = load_in_clean_process(tmp_path / "model")
        assert not (found["missing_weights"] or found["unexpected_weights"] or found["bad_weights"])


@pytest.mark.compatibility("`lr-attnres train` on DDP and FSDP2")
@pytest.mark.parametrize("variant", ["standard", "attnres-full", "projected-n2-r8"])
def test_other_variants_in_two_processes(variant, token_data, tmp_path):
    functions = {"alone": processes.train, "ddp": processes.train, "fsdp2": train_sharded}
    weights = {}
    for name, function in functions.items():
        values = arguments(token_data, tmp_path / name, variant=variant, steps=2, micro_batch_size=2)
        num_processes = 1 if name == "alone" else 2
        assert processes.run(function, values, processes=num_processes) == [0] * num_processes
        weights[name] = load_file(tmp_path / name / "model/model.safetensors")
    for name in ("ddp", "fsdp2"):
        torch.testing.assert_close(weights[name], weights["alone"], **CLOSE)


def test_sharded_in_bfloat16(token_data, tmp_path):
    values = arguments(token_data, tmp_path, steps=1, warmup_steps=0)
    assert processes.run(train_in_bfloat16, values, processes=2) == [0, 0]


def test_evaluation_does_not_depend_on_the_processes(alone, token_data):
    folder = alone / "model"
    assert processes.run(evaluate_together, folder, token_data, processes=2) == [0, 0]
    one = evaluate(folder, token_data, batch_size=2)
    for rank in range(2):
        assert json.loads((folder / f"evaluation_{rank}.json").read_text()) == [one.loss, one.tokens]
