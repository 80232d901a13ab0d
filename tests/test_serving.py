"""`serve` answers the real `openai` client, streaming and not, two requests at once."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from common import byte_tokenizer, save_text_model
from openai import OpenAI
from test_snippets import ROOT, snippets

from lr_attnres import cli
from lr_attnres.serving import check_address


MESSAGES = [{"role": "user", "content": "What is the sea?"}]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(process: subprocess.Popen, port: int) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server stopped"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    raise AssertionError("the server did not start in two minutes")


@pytest.fixture
def served(request, tmp_path):
    """(client, name of the model, the same model in this process)"""
    (variant, mode), port = request.param, free_port()
    model = save_text_model(tmp_path, variant)
    batching = ["--continuous-batching", "--cb-num-blocks", "16", "--cb-max-batch-tokens", "256"]
    command = [sys.executable, "-m", "lr_attnres.cli", "serve", str(tmp_path), "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", *(batching if mode == "continuous batching" else [])],
        env=os.environ | {"NO_PROXY": "127.0.0.1,localhost"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_healthy(process, port)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
        yield client, str(tmp_path), model
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def expected_text(model, messages: list[dict], length: int) -> str:
    tokenizer = byte_tokenizer()
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=length)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(
    "served",
    [
        ("standard", "one by one"),
        ("attnres_full", "one by one"),
        ("projected_block", "continuous batching"),
        ("sliced_block", "continuous batching"),
    ],
    ids=str,
    indirect=True,
)
def test_chat_streaming_and_two_at_once(served, capsys):
    client, name, model = served
    options = {"model": name, "max_tokens": 12, "temperature": 0.0}

    answer = client.chat.completions.create(messages=MESSAGES, **options)
    expected = expected_text(model, MESSAGES, 12)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens == 12

    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **options))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    # A character whose last bytes never come is not sent.
    assert "".join(pieces).rstrip("\ufffd") == expected.rstrip("\ufffd") and sum(map(bool, pieces)) > 1

    questions = [[{"role": "user", "content": text}] for text in ("One?", "Another, longer question?")]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda q: client.chat.completions.create(messages=q, **options), questions))
    assert [a.choices[0].message.content for a in answers] == [expected_text(model, q, 12) for q in questions]

    (example,) = [text for _, text in snippets(ROOT / "README.md") if "from openai import" in text]
    example = example.replace("http://localhost:8000/v1", str(client.base_url))
    exec(example.replace('model="outputs/run/model"', f'model="{name}", max_tokens=5'), {})
    assert capsys.readouterr().out == expected_text(model, [{"role": "user", "content": "Hello"}], 5) + "\n"


def test_folder_that_cannot_be_served(tmp_path, capsys):
    assert cli.main(["serve", str(tmp_path / "absent")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("Error: ") and "absent" in error


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setattr("lr_attnres.serving.is_serve_available", lambda: False)
    assert cli.main(["serve", "owner/name"]) == 1
    assert 'pip install "lr-attnres[serve]", or in a clone pip install ".[serve]"' in capsys.readouterr().err


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999])
def test_a_port_that_is_none(port):
    with pytest.raises(ValueError, match=f"`port` is {port}; it must lie in 1..65535"):
        check_address("127.0.0.1", port)


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"`port` {port} cannot be listened to \(.*in use.*\): choose another"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)
    with pytest.raises(ValueError, match="`host` no.such.host.invalid cannot be listened to"):
        check_address("no.such.host.invalid", None)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--device", "abacus"], "`device` abacus cannot be used"),
        (["--cb-num-blocks", "0"], "`cb_num_blocks` is 0; it must be at least 1."),
        (["--cb-num-blocks", "8"], "`cb_num_blocks` is 8; it is for `continuous_batching`: turn that on."),
    ],
    ids=str,
)
def test_options_that_cannot_be_served(options, message, tmp_path, capsys):
    save_text_model(tmp_path)
    assert cli.main(["serve", str(tmp_path), "--port", str(free_port()), *options]) == 1
    assert f"Error: {message}" in capsys.readouterr().err


def test_damaged_weights(tmp_path, capsys):
    save_text_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert cli.main(["serve", str(tmp_path), "--port", str(free_port()), "--device", "cpu"]) == 1
    assert f"Error: the weights of {tmp_path} cannot be loaded" in capsys.readouterr().err
