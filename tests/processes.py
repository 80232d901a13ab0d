"""Training in separate processes, which can be killed at a chosen moment; two of them can train together.

They are forked from a server that has imported everything, so that each starts quickly.
"""

import multiprocessing
import os
import signal
import socket
import sys
import traceback
from functools import partial
from pathlib import Path

import torch

from lr_attnres.training.arguments import TrainArguments


LENGTH = 32  # tokens of a row
DEFAULT_VARIANT = "sliced-n2-r8"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["lr_attnres.training.loop", "torch.distributed.fsdp", "torch.distributed.checkpoint"])


def arguments(data: Path, output: Path, **overrides) -> dict:
    """Training arguments of a run that takes a second."""
    model = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    values = {
        "data": str(data),
        "output_dir": str(output),
        "variant": DEFAULT_VARIANT,
        "model": model | overrides.pop("model", {}),
        "steps": 8,
        "batch_tokens": 8 * LENGTH,
        "micro_batch_size": 4,
        "lr_muon": 0.02,
        "lr_adamw": 0.01,
        "lr_queries": 0.1,
        "warmup_steps": 2,
        "log_steps": 1,
        "eval_steps": 4,
        "entropy_steps": 4,
        "save_steps": 3,
    }
    return values | overrides


def losses(records: list[dict]) -> torch.Tensor:
    """Loss and norm of the gradient, step by step."""
    return torch.tensor([[record["loss"], record["grad_norm"]] for record in records], dtype=torch.float64)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def run(function, *arguments, processes: int = 1, **environment: str) -> list[int]:
    """Call a function in new processes, joined over gloo if they are several; returns their exit codes."""
    if processes > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(processes)}
        environment = address | {"ACCELERATE_USE_CPU": "true"} | environment
    started = []
    for rank in range(processes):
        mine = environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {})
        started.append(FORKS.Process(target=_enter, args=(mine, function, arguments)))
        started[-1].start()
    for process in started:
        process.join()
    return [process.exitcode for process in started]


def _enter(environment: dict[str, str], function, arguments) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        function(*arguments)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train(arguments: dict, stop: tuple[str, int] | None = None) -> None:
    """A whole run; `stop` is a name in MOMENTS, and at which of its occurrences the process is stopped."""
    from lr_attnres.training import loop

    if stop is not None:
        MOMENTS[stop[0]](stop[1])
    loop.train(TrainArguments(**arguments))


def command(arguments: list[str], stop: tuple[str, int] | None = None) -> None:
    """A command line of `lr-attnres`, with its exit code."""
    from lr_attnres import cli

    if stop is not None:
        MOMENTS[stop[0]](stop[1])
    sys.exit(cli.main(arguments))


def strike(owner, name: str, occurrence: int, blow, counts) -> None:
    """Replace `owner.name` by a function that calls `blow` before the nth call for which `counts` is true."""
    original, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        if counts(*args):
            calls.append(None)
            if len(calls) == occurrence:
                blow(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def kill(*args, **kwargs) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(*args, rank: str | None = None, **kwargs) -> None:
    if rank in (None, os.environ.get("RANK")):
        os.kill(os.getpid(), signal.SIGTERM)


def kill_within_a_line(metrics, record) -> None:
    with open(metrics.file, "a") as file:
        file.write('{"step": ')
    kill()


def is_old_checkpoint(path, *args) -> bool:
    """A checkpoint that is renamed already, and about to be deleted."""
    return Path(path).name.startswith(".step-") and Path(path).name.endswith(".deleted") and Path(path).exists()


def _moment(path: str, blow, counts=lambda *args: True):
    def install(occurrence: int) -> None:
        from lr_attnres.folders import staging
        from lr_attnres.training import checkpoints, loop, metrics

        *owners, name = path.split(".")
        owner = {"checkpoints": checkpoints, "metrics": metrics, "loop": loop, "staging": staging}[owners[0]]
        for attribute in owners[1:]:
            owner = getattr(owner, attribute)
        strike(owner, name, occurrence, blow, counts)

    return install


MOMENTS = {
    "killed in a step": _moment("loop.accumulate_gradients", kill),
    "killed before a checkpoint has its name": _moment("staging.sync_to_disk", kill),
    "killed before an old one is deleted": _moment("checkpoints.shutil.rmtree", kill, is_old_checkpoint),
    "killed within a line of metrics": _moment("metrics.Metrics.write", kill_within_a_line),
    "killed while the model is written": _moment("loop.write_provenance", kill),
    "terminated": _moment("loop.accumulate_gradients", terminate),
    "one of two terminated": _moment("loop.accumulate_gradients", partial(terminate, rank="1")),
}


def leftovers(run_folder: Path) -> list[str]:
    """The hidden files that a killed process has left."""
    return sorted(path.name for path in [*run_folder.glob("checkpoints/.*"), *run_folder.glob(".*")])
