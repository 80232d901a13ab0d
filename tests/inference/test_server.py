"""`serve` answers the `openai` client: each request as it asked, within bounds, while others are answered."""

import asyncio
import copy
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import uvicorn
from common import ONE_OF_EACH, byte_tokenizer, save_text_model, small_model
from openai import APIStatusError, APITimeoutError, BadRequestError, OpenAI
from safetensors.torch import load_file, save_file
from test_snippets import ROOT, snippets

from lr_attnres import LRAttnResError, cli
from lr_attnres.inference.bounded import Answer, cut_pieces, make_app
from lr_attnres.inference.server import batch_settings, check_address, check_generation


MESSAGES = [{"role": "user", "content": "What is the sea?"}]
CONTEXT = 256


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def printable(model: torch.nn.Module) -> torch.nn.Module:
    """Greedy text in printable ASCII: other tokens have the logit 0."""
    tokens = byte_tokenizer()([chr(code) for code in range(32, 127)])["input_ids"]
    others = torch.ones(len(model.lm_head.weight), dtype=torch.bool)
    others[[token for (token,) in tokens]] = False
    model.lm_head.weight.data[others] = 0
    return model


@contextmanager
def serving(model: torch.nn.Module, name: str = "m") -> Iterator[OpenAI]:
    app, state = make_app(name, model, byte_tokenizer(), CONTEXT, 24, batch_settings(CONTEXT, 4, None, 64))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        for _ in range(200):
            if server.started:
                break
            time.sleep(0.05)
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
    finally:
        server.should_exit = True
        thread.join(20)
        state.shutdown()


@pytest.fixture(scope="module", autouse=True)
def no_proxy():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        yield


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(1)
    model = printable(small_model(vocab_size=257, max_position_embeddings=CONTEXT))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 256
    return model


@pytest.fixture(scope="module")
def client(model):
    with serving(model) as client:
        yield client


@pytest.fixture
def served(request, tmp_path):
    """(client, model name, the same model in this process)"""
    model = save_text_model(tmp_path, request.param)
    with serving(model, str(tmp_path)) as client:
        yield client, str(tmp_path), model


def greedy(model, prompt: str, length: int) -> str:
    inputs = byte_tokenizer()(prompt, return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=length)
    return byte_tokenizer().decode(tokens[0, len(prompt) :], skip_special_tokens=True)


def expected_text(model, messages: list[dict], length: int) -> str:
    tokenizer = byte_tokenizer()
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=length)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.compatibility("OpenAI-compatible server", parameter="served")
@pytest.mark.parametrize("served", ONE_OF_EACH, indirect=True)
def test_chat_streaming_and_two_at_once(served, capsys):
    client, name, model = served
    options = {"model": name, "max_tokens": 12, "temperature": 0.0}

    answer = client.chat.completions.create(messages=MESSAGES, **options)
    expected = expected_text(model, MESSAGES, 12)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens == 12

    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **options))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    # The server does not send an incomplete character.
    assert "".join(pieces).rstrip("\ufffd") == expected.rstrip("\ufffd") and sum(map(bool, pieces)) > 1

    questions = [[{"role": "user", "content": text}] for text in ("One?", "Another, longer question?")]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda q: client.chat.completions.create(messages=q, **options), questions))
    assert [a.choices[0].message.content for a in answers] == [expected_text(model, q, 12) for q in questions]

    (example,) = [text for _, text in snippets(ROOT / "docs/serve.md") if "from openai import" in text]
    example = example.replace("http://localhost:8000/v1", str(client.base_url))
    example = example.replace("outputs/run/model", name).replace("max_tokens=40", "max_tokens=5")
    exec(example, {})
    assert capsys.readouterr().out == expected_text(model, [{"role": "user", "content": "Hello"}], 5) + "\n"


def complete(client, **options) -> str:
    answer = client.completions.create(model="m", **options)
    if not options.get("stream"):
        return answer.choices[0].text
    return "".join(chunk.choices[0].text for chunk in answer)


def test_twenty_requests_at_once_get_what_each_asked_for(client, model):
    """The first of them samples: Transformers' batch would then sample for all."""
    prompts = ["The sea", "A ship is", "Rain"]
    expected = {prompt: greedy(model, prompt, 16) for prompt in prompts}
    stop = expected["The sea"][4:6]
    cut = expected["The sea"].split(stop)[0]
    requests = [{"prompt": "The sea", "temperature": 3.0}] * 4
    requests += [{"prompt": prompt, "temperature": 0, "stream": stream} for prompt in prompts for stream in (0, 1)]
    requests += [{"prompt": "The sea"}, {"prompt": "Rain", "temperature": 5, "top_p": 0.0}]
    requests += [{"prompt": "The sea", "temperature": 0, "stop": [stop, "never"], "stream": s} for s in (0, 1)]
    requests += [{"prompt": "The sea", "temperature": 3, "seed": seed} for seed in (5, 5, 6, 7)]
    requests += [{"prompt": "The sea", "top_p": 0.99}, {"prompt": "Rain", "max_tokens": 3, "temperature": 0}]
    assert len(requests) == 20
    with ThreadPoolExecutor(20) as pool:
        texts = list(pool.map(lambda r: complete(client, **({"max_tokens": 16} | r)), requests))
    assert len(set(texts[:4])) == 4  # sampled, each for itself
    assert texts[4:10] == [expected[prompt] for prompt in prompts for _ in range(2)]
    assert texts[10:12] == [expected["The sea"], expected["Rain"]]
    assert texts[12:14] == [cut, cut]
    assert texts[14] == texts[15] and len(set(texts[14:18])) == 3
    assert texts[18] != expected["The sea"]
    assert texts[19] == expected["Rain"][:3]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompt": "x" * CONTEXT}, "the prompt has 256 tokens, but the context of this server is 256: shorten it."),
        ({"prompt": "x" * 200_000}, "the prompt has 200,000 tokens, but the context"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": ["a", "b"]}, "prompt must be a string"),
        ({"n": 2}, "`n` is not supported: leave it out."),
        ({"extra_body": {"generation_config": "{}"}}, "`generation_config` is not supported"),
        ({"max_tokens": 0}, "`max_tokens` is 0; it must be a number in 1.."),
        ({"max_tokens": "many"}, "`max_tokens` is 'many'; it must be a number"),
        ({"temperature": -1}, "`temperature` is -1; it must be a number in 0..100."),
        ({"top_p": 2}, "`top_p` is 2; it must be a number in 0..1."),
        ({"seed": 1.5}, "`seed` is 1.5; it must be a number in"),
        ({"stop": [""]}, "`stop` must be a text or a list of at most 4 texts, each of 1 to 256 characters."),
        ({"stop": ["x"] * 5}, "`stop` must be a text or a list of at most 4 texts, each of 1 to 256 characters."),
        ({"stop": "x" * 257}, "`stop` must be a text or a list of at most 4 texts, each of 1 to 256 characters."),
        ({"model": "another"}, "another"),
    ],
    ids=str,
)
def test_requests_that_are_refused(options, message, client):
    start = time.monotonic()
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(**({"model": "m", "prompt": "The sea"} | options))
    assert message in str(caught.value) and time.monotonic() - start < 10


def test_malformed_messages(client):
    with pytest.raises(BadRequestError, match="the request cannot be used: KeyError: 'role'"):
        client.chat.completions.create(model="m", messages=[{"content": "x"}])
    options = {"chat_template": "{{ 1 }}"}
    with pytest.raises(BadRequestError, match="`chat_template_kwargs` is not supported"):
        client.chat.completions.create(model="m", messages=MESSAGES, extra_body={"chat_template_kwargs": options})


def test_lengths(client, model):
    """Prompt and answer fit in the context; without a length the server's own holds."""
    for name in ("max_tokens", "max_completion_tokens"):
        answer = client.chat.completions.create(model="m", messages=MESSAGES, temperature=0, **{name: 10**9})
        assert answer.usage.total_tokens == CONTEXT and answer.choices[0].finish_reason == "length"
    assert client.completions.create(model="m", prompt="The sea").usage.completion_tokens == 24
    assert client.completions.create(model="m", prompt="The sea", seed=1).usage.completion_tokens == 24
    response = client.responses.create(model="m", input="What is the sea?", max_output_tokens=5, temperature=0)
    assert response.output_text == expected_text(model, MESSAGES, 5)


def test_long_prompts_while_others_stream(client, model):
    """One that is read in several steps, and others that are refused."""
    options = {"model": "m", "prompt": "The sea", "temperature": 0, "max_tokens": 150, "stream": True}
    streams = [client.completions.create(**options) for _ in range(3)]
    begun = [next(iter(stream)).choices[0].text for stream in streams]
    assert complete(client, prompt="long " * 40, temperature=0, max_tokens=8) == greedy(model, "long " * 40, 8)
    start = time.monotonic()
    with pytest.raises(BadRequestError, match="200,000 tokens"):
        client.completions.create(model="m", prompt="x" * 200_000)
    with pytest.raises(APIStatusError, match="the body has 5,000,0.. bytes; the limit is 262,144") as caught:
        client.completions.create(model="m", prompt="x" * 5_000_000)
    assert caught.value.status_code == 413 and time.monotonic() - start < 10
    rest = ["".join(chunk.choices[0].text for chunk in stream) for stream in streams]
    assert [first + more for first, more in zip(begun, rest)] == [greedy(model, "The sea", 150)] * 3


def status(url: str, data: bytes | Iterator[bytes] | None = None) -> int | None:
    """None if the server closed the connection while it was sent to."""
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError:
        return None


def test_endpoints(client):
    (entry,) = client.models.list().data
    assert entry.id == "m" and entry.object == "model"
    root = str(client.base_url).removesuffix("/v1/")
    assert status(f"{root}/health") == 200
    for path in ("/load_model", "/reset", "/v1/systemone", "/v1/audio/transcriptions"):
        assert status(f"{root}{path}", b'{"model": "gpt2"}') == 404
    assert status(f"{root}/v1/completions", iter([b" " * 1000] * 400)) in (411, None)  # of no announced length
    assert status(f"{root}/v1/completions", b"[" * 100_000) == 400
    assert client.completions.create(model="m", prompt="x", max_tokens=1).usage.completion_tokens == 1


def test_clients_with_one_request_id(client, model):
    def ask(prompt):
        return complete(client, prompt=prompt, temperature=0, max_tokens=12, extra_headers={"x-request-id": "same"})

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, ["One", "Two"])) == [greedy(model, "One", 12), greedy(model, "Two", 12)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_of_a_client_that_leaves_is_not_continued(stream, client, monkeypatch):
    lengths = []

    def slow(answer, tokens):
        time.sleep(0.05)
        lengths.append(len(tokens))
        return False

    monkeypatch.setattr(Answer, "is_over", slow)
    request = {"model": "m", "prompt": "a", "max_tokens": 100, "temperature": 0, "stream": stream}
    if stream:
        with client.completions.create(**request) as pieces:
            next(iter(pieces))
    else:
        with pytest.raises(APITimeoutError):
            client.with_options(timeout=0.5).completions.create(**request)
    time.sleep(1)  # until the server knows; the whole answer takes five seconds
    length = len(lengths)
    time.sleep(0.5)
    assert 0 < len(lengths) == length < 100


def test_the_generation_config_of_the_model_is_followed(model):
    """Also where it depends on the tokens so far."""
    changed = copy.deepcopy(model)
    changed.generation_config.update(repetition_penalty=1.5, no_repeat_ngram_size=3)
    expected = [greedy(changed, prompt, 24) for prompt in ("The sea", "Rain")]
    assert expected != [greedy(model, prompt, 24) for prompt in ("The sea", "Rain")]
    with serving(copy.deepcopy(changed)) as client, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda prompt: complete(client, prompt=prompt), ("The sea", "Rain"))) == expected


@pytest.mark.parametrize("setting", [{"num_beams": 4}, {"guidance_scale": 1.5}], ids=str)
def test_a_generation_config_that_cannot_be_served(model, setting):
    changed = copy.deepcopy(model)
    check_generation(changed)
    changed.generation_config.update(**setting)
    with pytest.raises(LRAttnResError, match="generation_config.json asks for .*: change it"):
        check_generation(changed)


def draw(model, scores: torch.Tensor, seed: int | None = None, **settings) -> torch.Tensor:
    """The tokens that an answer with these settings takes for each row of logits."""
    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=True, stop_strings=[], **settings)
    config.seed = seed
    return Answer(model, byte_tokenizer(), config, 1).process([1], scores).argmax(-1)


def test_sampling_is_that_of_generate(model):
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    rows = logits.expand(10_000, -1)
    for settings, expected in [
        ({}, logits),
        ({"temperature": 2.0}, logits / 2),
        ({"top_p": 0.8}, torch.tensor([[-math.inf, 1.0, 2.0, -math.inf]])),
        ({"top_k": 1}, torch.tensor([[-math.inf, -math.inf, 2.0, -math.inf]])),
    ]:
        shares = draw(model, rows, seed=0, **settings).bincount(minlength=4) / len(rows)
        torch.testing.assert_close(shares, expected.softmax(-1)[0], atol=0.02, rtol=0)  # 4 standard deviations
    assert draw(model, rows, seed=1).equal(draw(model, rows, seed=1))
    assert not draw(model, rows).equal(draw(model, rows))


def test_stop_across_pieces():
    async def shown(pieces, texts):
        queue = asyncio.Queue()
        for piece in [*pieces, None]:
            queue.put_nowait(piece)
        return [piece async for piece in cut_pieces(queue, texts)]

    assert asyncio.run(shown(["one t", "w", "o thr", "ee"], ["two"])) == ["one", " ", "", None]
    assert "".join(asyncio.run(shown(["one t", "w", "in thr", "ee tw"], ["two", "x"]))[:-1]) == "one twin three tw"
    assert asyncio.run(shown(["abcdef", "gh"], ["xyz"])) == ["abcd", "ef", "gh", None]


def start(folder) -> tuple[subprocess.Popen, int]:
    port = free_port()
    command = [sys.executable, "-m", "lr_attnres.cli", "serve", str(folder), "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"HF_HOME": str(folder / "no_cache")}
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background lets its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    return process, port


def test_the_command(tmp_path):
    """What it prints works as printed. SIGTERM and Ctrl-C end it in seconds, also while it streams."""
    save_text_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    running = {number: start(tmp_path) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number, (process, port) in running.items():
            line, curl = process.stdout.readline(), process.stdout.readline()
            url = f"http://127.0.0.1:{port}/v1"
            assert line == f"Serving {tmp_path} at {url} (context 8,192 tokens; Ctrl-C stops it). Try it:\n"
            assert curl.startswith(f"curl {url}/completions")
            if shutil.which("curl"):
                answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=60)
                assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 32
            client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
            assert [entry.id for entry in client.models.list()] == [str(tmp_path)]
            stream = client.completions.create(model=str(tmp_path), prompt="x", max_tokens=8000, stream=True)
            next(iter(stream))
            process.send_signal(number)
            assert process.wait(timeout=15) == (-signal.SIGTERM if number == signal.SIGTERM else 130)
            assert "Note: this model has no end-of-text token" in process.stderr.read()
    finally:
        for process, _ in running.values():
            process.kill()
            process.communicate()


def refused(folder, capsys) -> str:
    assert cli.main(["serve", str(folder), "--port", str(free_port()), "--device", "cpu"]) == 1
    return capsys.readouterr().err.splitlines()[-1]


def test_folders_that_cannot_be_served(tmp_path, capsys):
    assert "absent" in refused(tmp_path / "absent", capsys)
    save_text_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, weights)
    assert refused(tmp_path, capsys).endswith("lacks 1 weights that its config asks for, such as lm_head.weight.")
    save_file(tensors | {"lm_head.weight": torch.zeros(5, 32)}, weights)
    assert "the weight lm_head.weight" in refused(tmp_path, capsys)
    save_file(tensors | {"lm_head.weight": torch.full_like(tensors["lm_head.weight"], float("nan"))}, weights)
    assert "lm_head.weight" in refused(tmp_path, capsys)
    weights.write_bytes(b"")
    assert refused(tmp_path, capsys).startswith(f"Error: {weights} cannot be read: ")
    weights.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")  # a pickle
    assert "only pytorch_model.bin, which may run code when it is read" in refused(tmp_path, capsys)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert f"Error: {tmp_path} holds a gpt2 model, not an lr_attnres one" in refused(tmp_path, capsys)


def test_without_the_extra(monkeypatch, capsys):
    monkeypatch.setattr("lr_attnres.inference.server.is_serve_available", lambda: False)
    assert cli.main(["serve", "owner/name"]) == 1
    assert 'pip install "lr-attnres[serve]", or in a clone pip install ".[serve]"' in capsys.readouterr().err


def test_with_an_older_transformers(monkeypatch, capsys):
    monkeypatch.setattr("transformers.utils.versions.importlib.metadata.version", lambda name: "5.19.1")
    assert cli.main(["serve", "owner/name"]) == 1
    assert capsys.readouterr().err.startswith("Error: transformers>=5.20 is required")


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999])
def test_a_port_out_of_range(port):
    with pytest.raises(ValueError, match=f"`port` is {port}; it must lie in 1..65535"):
        check_address("127.0.0.1", port)


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"cannot listen on .*`port` {port} \(.*in use.*\): choose another"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)
    with pytest.raises(ValueError, match="cannot listen on `host` no.such.host.invalid"):
        check_address("no.such.host.invalid", None)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--device", "abacus"], "`device` abacus cannot be used"),
        (["--cb-num-blocks", "0"], "`cb_num_blocks` is 0; it must be at least 1."),
        (["--max-new-tokens", "0"], "`max_new_tokens` is 0; it must be at least 1."),
    ],
    ids=str,
)
def test_options_that_cannot_be_served(options, message, tmp_path, capsys):
    save_text_model(tmp_path)
    assert cli.main(["serve", str(tmp_path), "--port", str(free_port()), *options]) == 1
    assert f"Error: {message}" in capsys.readouterr().err
