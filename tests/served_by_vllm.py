"""The engine of vLLM, on a CPU, gives the greedy tokens of `generate`. `make test-vllm` runs this file.

Not run by default: vLLM needs an environment of its own. It is imported inside the functions, so that
tests/compatibility.py can collect this file without it.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from common import VARIANTS, byte_tokenizer, save_text_model, small_model
from openai import OpenAI

from lr_attnres import LRAttnResForSequenceClassification, LRAttnResForTokenClassification, LRAttnResModel


SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # threads are left to torch
CACHE_BYTES = 2**26  # small: a process keeps the caches of all its engines
NEW_TOKENS = 8
HEAD_DIM = 32  # the smallest of vLLM's attention on a CPU
LENGTHS = (1, 2, 7, 1, 40, 100, 3, 1)  # one token, and more than CHUNK, which is prefilled in parts
CHUNK = 32  # tokens of a step, over all requests
# `vllm serve`, whose command line asks for the version of a package `vllm`; that for the CPU is called `vllm-cpu`.
SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts_of(LENGTHS)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Path, list[list[int]]]]:
    """Variant -> its folder, and what `generate` adds to each prompt. All of them before the first engine, which
    changes the model class of its process."""
    torch.manual_seed(0)
    saved = {}
    for variant in VARIANTS:
        folder = tmp_path_factory.mktemp(variant)
        model = save_text_model(folder, variant, head_dim=HEAD_DIM)
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
        tokens = [model.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in PROMPTS]
        saved[variant] = folder, [row[len(prompt) :] for row, prompt in zip(tokens, PROMPTS)]
    return saved


def in_this_process(monkeypatch) -> None:
    for name, value in (SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}).items():  # read when vLLM is imported
        monkeypatch.setenv(name, value)


def engine_tokens(engine, prompts: list[list[int]]) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.compatibility("vLLM: batches, chunked prefill, prefix cache")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_engine_gives_the_tokens_of_generate(variant, models, monkeypatch):
    in_this_process(monkeypatch)
    from vllm import LLM

    folder, expected = models[variant]
    engine = LLM(
        str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,  # fewer than there are prompts: some start while others decode
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=CACHE_BYTES,
    )
    assert engine_tokens(engine, PROMPTS) == expected
    assert engine_tokens(engine, PROMPTS) == expected, "with a warm prefix cache"
    assert engine_tokens(engine, PROMPTS[2:3]) == expected[2:3], "alone"
    assert engine_tokens(engine, PROMPTS[:1]) == expected[:1], "one token, alone"


# Embeddings and classification: without options, vLLM takes the last token, as Transformers does

HEADS = {  # name -> variant, and the class of the saved model; None: the language model
    "embed, of a language model": ("projected_full", None),
    "embed": ("attnres_full", LRAttnResModel),
    "classify": ("sliced_block", LRAttnResForSequenceClassification),
    "token_classify": ("projected_block", LRAttnResForTokenClassification),
}


@pytest.fixture(scope="module", autouse=True)  # before the first engine, as `models`
@torch.no_grad()
def heads(models, tmp_path_factory) -> dict[str, tuple[Path, list[torch.Tensor]]]:
    """Head -> its folder, and what Transformers computes for each prompt."""
    saved = {}
    for name, (variant, model_class) in HEADS.items():
        folder = models[variant][0]
        if model_class is None:
            model = LRAttnResModel.from_pretrained(folder)
        else:
            folder = tmp_path_factory.mktemp(model_class.__name__)
            sizes = {"vocab_size": 257, "max_position_embeddings": 256, "head_dim": HEAD_DIM, "pad_token_id": 256}
            model = small_model(variant, model_class, num_labels=3, **sizes)
            model.save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
        outputs = [model(torch.tensor([prompt])) for prompt in PROMPTS]
        if name.startswith("embed"):
            results = [torch.nn.functional.normalize(output.last_hidden_state[0, -1], dim=-1) for output in outputs]
        else:
            results = [output.logits[0].softmax(-1) for output in outputs]
        saved[name] = folder, results
    return saved


@pytest.mark.compatibility("vLLM: embeddings, classification", variants=[variant for variant, _ in HEADS.values()])
@pytest.mark.parametrize("name", HEADS)
def test_heads(name, heads, monkeypatch):
    in_this_process(monkeypatch)
    from vllm import LLM

    folder, expected = heads[name]
    options = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": CACHE_BYTES}
    engine = LLM(str(folder), runner="pooling", max_model_len=128, max_num_seqs=4, **options)
    prompts, task = [{"prompt_token_ids": prompt} for prompt in PROMPTS], name.split(",")[0]
    outputs = engine.encode(prompts, pooling_task=task, use_tqdm=False)
    for output, result in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output.outputs.data, result, atol=1e-5, rtol=1e-4)  # float32, in other products


# The server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(folder: Path, *options: str, plugins: str | None = None) -> tuple[subprocess.Popen, int]:
    """The server in a process group of its own: its workers are processes too."""
    port = free_port()
    command = [*SERVER, str(folder), "--dtype", "float32", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--max-model-len", "128", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(CACHE_BYTES), *options]
    environment = os.environ | SETTINGS | {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    log = (folder / "server.log").open("w")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    return process, port


def wait_until_healthy(process: subprocess.Popen, port: int, folder: Path, seconds: int = 300) -> None:
    for _ in range(seconds):
        assert process.poll() is None, (folder / "server.log").read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise AssertionError((folder / "server.log").read_text()[-4000:])


def stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()


# variant, options of the command, plugins of vLLM that may load (None: all, "": none)
EAGER = "--enforce-eager"
SERVERS = {
    "the package": ("sliced_block", [EAGER], None),
    "remote code": ("standard", [EAGER, "--trust-remote-code"], ""),
    "compiled": ("attnres_full", [], None),
    "two processes": ("projected_full", [EAGER, "--tensor-parallel-size", "2"], None),
    "two processes, sliced": ("sliced_block_weighted_norms", [EAGER, "--tensor-parallel-size", "2"], None),
}


@pytest.mark.compatibility("vLLM: OpenAI-compatible server", variants=[variant for variant, _, _ in SERVERS.values()])
@pytest.mark.parametrize("name", SERVERS)
def test_the_server_gives_the_tokens_of_generate(name, models):
    """Eight requests at once by the `openai` client, one of them streamed."""
    variant, options, plugins = SERVERS[name]
    folder, expected = models[variant]
    process, port = start_server(folder, *options, plugins=plugins)
    try:
        wait_until_healthy(process, port, folder)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        request = {"model": str(folder), "temperature": 0, "max_tokens": NEW_TOKENS}
        # Tokens, not text: random bytes are no text.
        request["extra_body"] = {"ignore_eos": True, "return_token_ids": True}

        def complete(prompt: list[int]) -> list[int]:
            return client.completions.create(prompt=prompt, **request).choices[0].token_ids

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(complete, PROMPTS)) == expected
        stream = client.completions.create(prompt=PROMPTS[4], stream=True, **request)
        assert [token for chunk in stream for token in chunk.choices[0].token_ids] == expected[4]
    finally:
        stop(process)


def test_pipeline_stages_are_refused_at_load(models):
    folder, _ = models["sliced_block"]
    process, _ = start_server(folder, EAGER, "--pipeline-parallel-size", "2")
    try:
        assert process.wait(timeout=180) != 0
    finally:
        stop(process)
    assert "cannot cut LR-AttnRes into pipeline stages" in (folder / "server.log").read_text()
