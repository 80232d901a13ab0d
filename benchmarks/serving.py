"""Many clients at once against `lr-attnres serve`: tokens per second, and the time to the first token.

Each model has a server in a process of its own. One is under load at a time, in another order each round; a row counts
with its best round. Qwen3 of the same shape, in the same server, is what the others are compared with.
"""

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

import torch
from harness import QWEN, VARIANTS, at_least_one, build, commit, interleave, machine, parser, write_report
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lr_attnres.inference.server import batch_settings, run_server


ROWS = ["sliced-n8-r64", QWEN]
PROMPT = "the sea " * 8


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Each token is a word, so that every generated token is a piece of the stream."""
    words = {"the": 0, "sea": 1, "[UNK]": 2} | {f"word{index}": index for index in range(3, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def serve_row(args: argparse.Namespace) -> None:
    sizes = {"vocab_size": args.vocabulary, "hidden_size": args.width, "intermediate_size": 2 * args.width}
    sizes |= {"num_attention_heads": 4, "num_hidden_layers": args.layers, "max_position_embeddings": args.context}
    model = build(args.serve, **sizes).eval()
    model.generation_config.eos_token_id = None  # every answer has the same length
    batching = batch_settings(args.context, args.clients, None, 512)
    run_server(
        args.serve, model, word_tokenizer(args.vocabulary), "127.0.0.1", args.port, args.context, args.tokens, batching
    )


class Server:
    """A process that serves one row until it is closed."""

    def __init__(self, row: str):
        self.row = row
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def __enter__(self) -> "Server":
        command = [sys.executable, *sys.argv, "--serve", self.row, "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if not self.process.stdout.readline():
            raise RuntimeError(f"the server of {self.row} has not started")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


async def one_client(client: AsyncOpenAI, row: str, tokens: int) -> float:
    """Seconds to the first token."""
    start, first = time.perf_counter(), None
    stream = await client.completions.create(
        model=row, prompt=PROMPT, max_tokens=tokens, temperature=0, stream=True, timeout=600
    )
    async for chunk in stream:
        if first is None and chunk.choices[0].text:
            first = time.perf_counter() - start
        usage = chunk.usage
    if first is None or usage is None or usage.completion_tokens != tokens:
        raise RuntimeError(f"{row} answered {usage}, not {tokens} tokens")
    return first


async def load(server: Server, clients: int, tokens: int) -> dict[str, float]:
    url = f"http://127.0.0.1:{server.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        start = time.perf_counter()
        firsts = await asyncio.gather(*(one_client(client, server.row, tokens) for _ in range(clients)))
        duration = time.perf_counter() - start
    p95 = statistics.quantiles(firsts, n=20, method="inclusive")[-1] if clients > 1 else firsts[0]
    return {"tokens_per_second": clients * tokens / duration, "seconds_to_first_token_p95": p95}


def main(args: argparse.Namespace) -> None:
    os.environ["NO_PROXY"] = "127.0.0.1"
    rounds: dict[str, list[dict[str, float]]] = {row: [] for row in args.rows}
    with ExitStack() as stack:
        servers = {row: stack.enter_context(Server(row)) for row in args.rows}

        def one_round(row: str) -> float:
            rounds[row].append(asyncio.run(load(servers[row], args.clients, args.tokens)))
            return rounds[row][-1]["seconds_to_first_token_p95"]

        interleave({row: lambda row=row: one_round(row) for row in args.rows}, args.repeats)
    best = {
        row: {
            "tokens_per_second": max(result["tokens_per_second"] for result in results[1:]),
            "seconds_to_first_token_p95": min(result["seconds_to_first_token_p95"] for result in results[1:]),
        }
        for row, results in rounds.items()
    }
    ratios = {row: {name: value / best[QWEN][name] for name, value in result.items()} for row, result in best.items()}
    settings = {
        name: getattr(args, name) for name in ("clients", "tokens", "layers", "width", "vocabulary", "repeats")
    }
    print(f"serving: {settings}\n{machine()}\n{'':20s}{'tokens/s':>10s}{'ratio':>8s}{'first, p95':>12s}{'ratio':>8s}")
    for row in args.rows:
        (speed, first), (speed_ratio, first_ratio) = best[row].values(), ratios[row].values()
        print(f"{row:20s}{speed:10.1f}{speed_ratio:8.3f}{first:12.3f}{first_ratio:8.3f}")
    content = {"settings": settings, "machine": machine(), "commit": commit(), "reference": QWEN}
    write_report("serving", args.output, content | {"rows": best, "ratios": ratios})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser(__doc__)
    options.set_defaults(rows=ROWS)
    defaults = {"clients": 50, "tokens": 32, "layers": 12, "width": 512, "vocabulary": 4096, "repeats": 16}
    for name, default in (defaults | {"context": 256}).items():
        options.add_argument(f"--{name}", type=at_least_one, default=default)
    options.add_argument("--serve", choices=[*VARIANTS, QWEN], help=argparse.SUPPRESS)
    options.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = options.parse_args(arguments)
    args.rows = list(dict.fromkeys([*args.rows, QWEN]))
    return args


if __name__ == "__main__":
    arguments = parse()
    torch.manual_seed(0)
    serve_row(arguments) if arguments.serve else main(arguments)
