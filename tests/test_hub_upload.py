"""Push over HTTP to a local Hub and load the result without the package; check the message of every failure."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from command_line import CommandLine, hub_environment, run_without_package
from common import byte_tokenizer, save_text_model, small_model
from hub_server import DROP, HANG, HubServer, Repo
from safetensors.torch import load_file, save_file
from test_convert import NAMES, REFERENCES, expected_outputs

from lr_attnres import LRAttnResForSequenceClassification
from lr_attnres.errors import LRAttnResError
from lr_attnres.folders.clean_process import check_code
from lr_attnres.hub_upload import check_folder, code_files, copied_files, push, stage_folder


WRITER = ("--token", "hf_writer")


@pytest.fixture(scope="module")
def server():
    with HubServer() as server:
        yield server


@pytest.fixture
def hub(server):
    server.reset()
    return server


@pytest.fixture(scope="module")
def run(server, tmp_path_factory):
    with CommandLine(hub_environment(server.url, tmp_path_factory.mktemp("hf_home"))) as command_line:
        yield command_line


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    save_text_model(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def commits(hub: HubServer, repo_id: str) -> int:
    """The number of commits after the initial, empty one."""
    return len(hub.repo(repo_id).commits) - 1


# Push and load


LOAD = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
answers = []
for request in json.load(open(sys.argv[1])):
    repo_id = request.pop("repo_id")
    try:
        model = AutoModelForCausalLM.from_pretrained(repo_id, trust_remote_code=True, **request)
        tokenizer = AutoTokenizer.from_pretrained(repo_id, trust_remote_code=True, **request)
        inputs = tokenizer("The sea is", return_tensors="pt")
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=8)
        answers.append({"tokens": tokens.tolist(), "module": type(model).__module__})
    except Exception as error:
        answers.append({"error": f"{type(error).__name__}: {error}"})
print(json.dumps({"answers": answers, "imported": "lr_attnres" in sys.modules}))
"""


def load_from_hub(hub: HubServer, tmp_path: Path, requests: list[dict]) -> list[dict]:
    """Greedy tokens (or the error) of each repository, in one fresh process with an empty cache and no package."""
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    environment = hub_environment(hub.url, tmp_path / "reader_home")
    result = run_without_package(LOAD, environment, tmp_path, tmp_path / "requests.json")
    assert not result["imported"]
    assert all(a["module"].startswith("transformers_modules.") for a in result["answers"] if "module" in a)
    return result["answers"]


def greedy_tokens(model: torch.nn.Module) -> list:
    inputs = byte_tokenizer()("The sea is", return_tensors="pt")
    return model.generate(**inputs, do_sample=False, max_new_tokens=8).tolist()


def test_push_and_load_in_a_clean_process(hub, run, tmp_path):
    """Public, private, gated; pinned by commit, by the tag in the card, and unpinned."""
    old, new = (
        save_text_model(tmp_path / name, variant)
        for name, variant in (("old", "sliced_block"), ("new", "attnres_full"))
    )
    urls = {}
    for name in ("old", "new"):
        result = run("push", "writer/public", tmp_path / name, *WRITER)
        assert result.code == 0, result.err
        urls[name] = result.out.strip()
    assert run("push", "writer/private", tmp_path / "old", "--private", *WRITER).code == 0
    assert run("push", "writer/gated", tmp_path / "old", HF_TOKEN="hf_writer").code == 0
    assert hub.repo("writer/private").private and not hub.repo("writer/public").private
    hub.repo("writer/gated").gated = True
    hub.repo("writer/gated").readers = {"reader"}
    hub.users["hf_stranger"] = ("stranger", True)
    first, second = (urls[name].rsplit("/", 1)[1] for name in ("old", "new"))
    (tag,) = set(re.findall(r'revision="(.+?)"', hub.files("writer/public", first)["README.md"].decode()))

    hub.log.clear()
    answers = load_from_hub(
        hub,
        tmp_path,
        [
            {"repo_id": "writer/public"},
            {"repo_id": "writer/public", "revision": first},
            {"repo_id": "writer/public", "revision": tag},
            {"repo_id": "writer/public", "revision": second},
            {"repo_id": "writer/private", "token": "hf_writer"},
            {"repo_id": "writer/private", "token": False},
            {"repo_id": "writer/gated", "token": "hf_reader"},
            {"repo_id": "writer/gated", "token": "hf_stranger"},
        ],
    )
    old_tokens, new_tokens = greedy_tokens(old), greedy_tokens(new)
    assert old_tokens != new_tokens
    expected = [new_tokens, old_tokens, old_tokens, new_tokens, old_tokens, None, old_tokens, None]
    assert [answer.get("tokens") for answer in answers] == expected
    assert "not a valid model identifier" in answers[5]["error"] or "private" in answers[5]["error"]
    assert "gated" in answers[7]["error"]
    assert any(line.endswith("model.safetensors") for line in hub.log)  # not from some cache


LOGITS = """
import torch
from transformers import AutoModelForCausalLM
inputs, outputs, modules = torch.load(sys.argv[1], weights_only=True), {}, []
for name, input_ids in inputs.items():
    model = AutoModelForCausalLM.from_pretrained(f"writer/{name}", trust_remote_code=True)
    with torch.no_grad():
        outputs[name] = model(input_ids).logits
    modules.append(type(model).__module__)
torch.save(outputs, sys.argv[2])
print(json.dumps({"modules": modules, "imported": "lr_attnres" in sys.modules}))
"""


@pytest.mark.compatibility("Released checkpoints, pushed to a Hub and loaded", variants=NAMES)
def test_all_reference_checkpoints_travel(hub, run, tmp_path):
    for name in NAMES:
        converted = run("convert", REFERENCES / f"{name}.pt", tmp_path / name, "--verify")
        assert converted.code == 0, converted.err
        assert run("push", f"writer/{name}", tmp_path / name, *WRITER).code == 0
    torch.save({name: expected_outputs(name)["input_ids"] for name in NAMES}, tmp_path / "inputs.pt")
    environment = hub_environment(hub.url, tmp_path / "reader_home")
    result = run_without_package(LOGITS, environment, tmp_path, tmp_path / "inputs.pt", tmp_path / "outputs.pt")
    assert len(result["modules"]) == 14 and not result["imported"]
    assert all(module.startswith("transformers_modules.writer.") for module in result["modules"])
    for name, logits in torch.load(tmp_path / "outputs.pt", weights_only=True).items():
        expected = expected_outputs(name)["logits"]
        # Relative to the largest logit, as in tests/folders/test_convert.py.
        assert (logits - expected).abs().max() / expected.abs().max() < 2e-5, name


def test_one_commit_and_nothing_when_nothing_changed(hub, run, folder):
    (folder / "optimizer.pt").write_bytes(b"a pickle")
    (folder / "checkpoint-10").mkdir()
    first = run("push", "writer/name", folder, "--commit-message", "Hello", *WRITER)
    sent = hub.files("writer/name")
    code = {path.name for path in code_files()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert set(sent) == code | tokenizer | {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert commits(hub, "writer/name") == 1
    assert "model.safetensors: 100%" in first.err  # a progress bar
    hub.log.clear()
    again = run("push", "writer/name", folder, *WRITER)
    assert (again.code, again.out) == (0, first.out)
    assert commits(hub, "writer/name") == 1 and not any(line.startswith("PUT") for line in hub.log)


def test_weights_of_an_earlier_push_are_removed(hub, run, folder):
    run("push", "writer/name", folder, *WRITER)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    model = small_model(vocab_size=257, max_position_embeddings=256)
    model.save_pretrained(folder, state_dict=weights, max_shard_size="50KB")
    assert run("push", "writer/name", folder, *WRITER).code == 0
    sent = hub.files("writer/name")
    assert "model.safetensors" not in sent and "model.safetensors.index.json" in sent
    assert commits(hub, "writer/name") == 2


def test_branch_and_pull_request(hub, run, folder):
    assert run("push", "writer/name", folder, "--revision", "trial", *WRITER).code == 0
    assert hub.files("writer/name", "main") == {} and "config.json" in hub.files("writer/name", "trial")
    result = run("push", "writer/name", folder, "--create-pr", *WRITER)
    assert (result.code, result.out.strip()) == (0, f"{hub.url}/writer/name/discussions/1")
    assert hub.files("writer/name", "main") == {} and "config.json" in hub.files("writer/name", "refs/pr/1")


def test_name_without_an_owner(hub, run, folder):
    assert run("push", "name", folder, *WRITER).code == 0
    assert '"writer/name", revision=' in hub.files("writer/name")["README.md"].decode()
    assert_refused(run("push", "name", folder, "--token", "hf_wrong"), "401", "token is missing or wrong")


def test_a_card_written_by_the_user_is_sent_unchanged(hub, run, folder):
    (folder / "README.md").write_text("# Mine\n")
    assert run("push", "writer/name", folder, *WRITER).code == 0
    assert hub.files("writer/name")["README.md"] == b"# Mine\n"
    assert set(hub.repo("writer/name").refs) == {"main"}


def test_dry_run_sends_nothing(hub, run, folder):
    (folder / "optimizer.pt").write_bytes(b"a pickle")
    result = run("push", "writer/name", folder, "--dry-run")
    size = (folder / "model.safetensors").stat().st_size
    assert result.code == 0 and hub.log == []
    assert re.search(rf"{size:,}  model.safetensors", result.out)
    assert "to writer/name (main)" in result.out and "Would leave out: optimizer.pt" in result.out


PUSH_TO_HUB = """
from lr_attnres import LRAttnResForCausalLM
model = LRAttnResForCausalLM.from_pretrained("{folder}")
print(model.push_to_hub("writer/name", token="hf_writer", tags=["mine"]))
"""


def test_push_to_hub_gives_the_same_repository(hub, run, folder):
    run("push", "writer/name", folder, *WRITER)
    by_command = hub.files("writer/name")
    del hub.repos["model", "writer/name"]
    result = run.script(PUSH_TO_HUB.format(folder=folder))
    assert result.code == 0, result.err
    by_method = hub.files("writer/name")
    assert result.out.strip().startswith(f"{hub.url}/writer/name/commit/")
    assert commits(hub, "writer/name") == 1
    # Transformers notes in a tokenizer that it was loaded from a folder, which also changes the tag of the contents.
    for files in (by_method, by_command):
        assert json.loads(files.pop("tokenizer_config.json"))["tokenizer_class"] == "TokenizersBackend"
    cards = [re.sub("contents-[0-9a-f]+", "", files.pop("README.md").decode()) for files in (by_method, by_command)]
    assert cards[0].replace("- mine\n", "") == cards[1]
    assert by_method == by_command


# Uploads that stop in the middle


def test_killed_upload_changes_nothing_and_a_second_run_completes_it(hub, run, saved, tmp_path):
    folder = tmp_path / "model"
    small_model().save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    hub.fail("PUT", "/lfs/", HANG, times=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "lr_attnres.cli", "push", "writer/name", str(folder), *WRITER],
        env=hub_environment(hub.url, tmp_path / "hf_home"),
        stderr=subprocess.DEVNULL,
    )
    assert hub.hanging.wait(timeout=120)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert hub.files("writer/name") == {} and commits(hub, "writer/name") == 0

    num_requests = -1
    while num_requests != len(hub.log):  # the server still reads what the killed process had sent
        num_requests = len(hub.log)
        time.sleep(1)
    stored = len(hub.objects)
    hub.log.clear()
    assert run("push", "writer/name", folder, *WRITER).code == 0
    assert {path.name for path in shards} <= set(hub.files("writer/name"))
    assert sum(line.startswith("PUT") for line in hub.log) == len(shards) - stored


def assert_refused(result, *parts: str) -> None:
    errors = [line for line in result.err.splitlines() if line.startswith("Error: ")]
    assert result.code == 1 and len(errors) == 1 and result.err.endswith(errors[0] + "\n"), result
    assert "Traceback" not in result.err
    for part in parts:
        assert part in errors[0]


def test_token_and_permission(hub, run, folder):
    assert_refused(run("push", "writer/name", folder), "there is no Hub token: run `hf auth login`")
    assert hub.log == []
    assert_refused(run("push", "writer/name", folder, "--token", "hf_wrong"), "401", "token is missing or wrong")
    assert_refused(run("push", "other/name", folder, *WRITER), "403", "your token may not write to other/name")
    hub.repos["model", "other/name"] = Repo()
    assert_refused(run("push", "other/name", folder, *WRITER), "403", "your token may not write to other/name")
    assert commits(hub, "other/name") == 0


def test_names_that_are_taken(hub, run, folder):
    hub.repos["dataset", "writer/corpus"] = Repo()
    assert_refused(run("push", "writer/corpus", folder, *WRITER), "writer/corpus is a repository of type dataset")
    hub.fail("POST", "/api/repos/create", 409, body=b'{"error": "taken"}')
    assert_refused(run("push", "writer/name", folder, *WRITER), "the name writer/name is taken")
    assert_refused(
        run("push", "datasets/writer/corpus", folder, *WRITER), "of type dataset; a model goes to owner/name"
    )
    assert_refused(run("push", "a b/c", folder, *WRITER), "'a b/c' is not a repository name")
    result = run("push", "writer/name", folder, "--create-pr", "--revision", "trial", *WRITER)
    assert_refused(result, "it cannot go with `revision` = trial")


def test_server_errors_and_dropped_connections(hub, run, folder):
    for path in ("/api/repos/create", "/commit/main"):
        hub.fail("POST", path, 503)
        assert_refused(run("push", "writer/name", folder, *WRITER), "503", "run the same command again later")
        hub.fail("POST", path, DROP)
        assert_refused(
            run("push", "writer/name", folder, *WRITER), "connection to the Hub failed", "again to continue"
        )
    assert commits(hub, "writer/name") == 0
    hub.fail("PUT", "/lfs/", 503)  # the client retries this one
    hub.fail("POST", "/tag/", 500)
    result = run("push", "writer/name", folder, *WRITER)
    assert result.code == 0 and commits(hub, "writer/name") == 1
    assert set(hub.repo("writer/name").refs) == {"main"}
    assert run("push", "writer/name", folder, *WRITER).code == 0
    assert len(hub.repo("writer/name").refs) == 2 and commits(hub, "writer/name") == 1


def test_nobody_answers(hub, run, folder):
    run.script("from huggingface_hub import constants; constants.ENDPOINT = 'http://127.0.0.1:9'")
    try:
        assert_refused(run("push", "writer/name", folder, *WRITER), "the connection to the Hub failed")
    finally:
        run.script(f"constants.ENDPOINT = {hub.url!r}")
    assert hub.log == []


def test_full_disk(folder, monkeypatch, capsys):
    from lr_attnres import cli

    def no_space(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "/scratch")

    monkeypatch.setattr("tempfile.mkdtemp", no_space)
    assert cli.main(["push", "writer/name", str(folder), *WRITER]) == 1
    assert capsys.readouterr().err == (
        "Error: the disk is full (/scratch): free some space and run the same command again.\n"
    )


# Folders that must not be sent


def edit_json(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_weights(folder: Path, edit) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def poison(weights):
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan


BAD_FOLDERS = [
    (shutil.rmtree, "is not a folder"),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json; give a folder saved with a model"),
    (
        lambda folder: (folder / "config.json").write_text("{"),
        "config.json of .* cannot be used: .* not a valid JSON file",
    ),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json of .* cannot be used: "),
    (
        lambda folder: edit_json(folder / "config.json", model_type="llama"),
        "holds a llama model, not an lr_attnres one",
    ),
    (lambda folder: edit_json(folder / "config.json", depth_key_rank=0), "model: `depth_key_rank` is 0; it must"),
    (lambda folder: edit_json(folder / "config.json", auto_map={}), "auto_map does not name the code"),
    (lambda folder: edit_json(folder / "config.json", architectures=["X"]), r"architectures is \['X'\]"),
    (lambda folder: (folder / "depth_routing.py").unlink(), "depth_routing.py is missing"),
    (lambda folder: (folder / "modeling_lr_attnres.py").write_text("x = 1"), "is not the code of the installed"),
    (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
    (lambda folder: edit_weights(folder, lambda w: w.pop("lm_head.weight")), "missing weights: lm_head.weight"),
    (lambda folder: edit_weights(folder, lambda w: w.update(x=torch.ones(1))), "unexpected weights: x"),
    (lambda folder: edit_weights(folder, poison), "NaN or infinite values: model.layers.1.mlp.up_proj.weight"),
    (lambda folder: edit_json(folder / "config.json", vocab_size=50), "does not load in a clean process"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"cut"), "model.safetensors cannot be read"),
    (
        lambda folder: edit_weights(folder, lambda w: w.update({"lm_head.weight": torch.ones(257, 32).int()})),
        "lm_head.weight has dtype I32",
    ),
    (lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config.json is not JSON: "),
    (lambda folder: (folder / "generation_config.json").write_text("[]"), "generation_config.json is not a JSON obj"),
    (lambda folder: (folder / "added_tokens.json").write_text("3"), "added_tokens.json is not a JSON object"),
    (lambda folder: (folder / "provenance.json").write_bytes(b"\xff"), "provenance.json is not JSON: "),
    (
        lambda folder: edit_json(folder / "generation_config.json", max_new_tokens=-1),
        "generation_config.json cannot be used: .*max_new_tokens",
    ),
    (lambda folder: link_out(folder, "config.json"), "config.json is a link to .*/elsewhere, outside the folder"),
    (lambda folder: link_out(folder, "model.safetensors"), "model.safetensors is a link to .*, outside the folder"),
    (lambda folder: link_out(folder, "LICENSE"), "LICENSE is a link to .*, outside the folder"),
    (lambda folder: os.mkfifo(folder / "LICENSE"), "LICENSE is a pipe, not a file or folder"),
    (lambda folder: os.mkfifo(folder / "events.log"), "events.log is a pipe, not a file or folder"),
    (
        lambda folder: index_elsewhere(folder, "../x.safetensors"),
        "names '../x.safetensors', which is not a safetensors",
    ),
    (lambda folder: index_elsewhere(folder, "/x.safetensors"), "names '/x.safetensors', which is not a safetensors"),
    (lambda folder: index_elsewhere(folder, "x.safetensors"), "names x.safetensors, which is not in the folder"),
]


def link_out(folder: Path, name: str) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(elsewhere)


def index_elsewhere(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / "x.safetensors")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.usefixtures("forked_clean_process")
@pytest.mark.parametrize("spoil, message", BAD_FOLDERS, ids=[row[1] for row in BAD_FOLDERS])
def test_folder_that_must_not_be_sent(spoil, message, folder):
    spoil(folder)
    with pytest.raises(LRAttnResError, match=message) as raised:
        check_folder(folder)
    assert "/lr-attnres-" not in str(raised.value) and "\n" not in str(raised.value)


CODE = {"AutoTokenizer": ["evil.Evil", None]}
FOREIGN_CODE = {
    "tokenizer": lambda folder: edit_json(folder / "tokenizer_config.json", auto_map=CODE, tokenizer_class="Evil"),
    "tokenizer, old form": lambda folder: edit_json(
        folder / "tokenizer_config.json", auto_map=["evil.Evil", None], tokenizer_class="Evil"
    ),
    "processor": lambda folder: (folder / "processor_config.json").write_text(
        json.dumps({"auto_map": {"AutoProcessor": "evil.Evil"}})
    ),
    "generation config": lambda folder: edit_json(folder / "generation_config.json", custom_generate="evil"),
    "pipeline": lambda folder: edit_json(folder / "config.json", custom_pipelines={"x": {"impl": "evil.Evil"}}),
    "nested": lambda folder: edit_json(folder / "config.json", text_config=[{"auto_map": {"AutoModel": "evil.Evil"}}]),
    "quantization": lambda folder: edit_json(
        folder / "config.json", quantization_config={"auto_map": {"AutoModel": "evil.Evil"}}
    ),
    "model": lambda folder: edit_json(folder / "config.json", auto_map={"AutoConfig": "evil.Evil"}),
    "kernel": lambda folder: edit_json(folder / "config.json", attn_implementation="owner/evil"),
    "generate": lambda folder: shutil.copytree(folder / "code", folder / "custom_generate"),
}


@pytest.mark.parametrize("vector", FOREIGN_CODE)
def test_foreign_code_is_refused_and_does_not_run(vector, folder, tmp_path, monkeypatch):
    """The checks start no process, so that nothing can run; `evil` tells if it did."""
    evil = f"open({str(tmp_path / 'was-run')!r}, 'w')\nclass Evil: pass\ndef generate(model, **options): pass\n"
    (folder / "code").mkdir()
    for path in (folder / "evil.py", folder / "code" / "generate.py"):
        path.write_text(evil)
    FOREIGN_CODE[vector](folder)
    processes = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: processes.append(args) or run(*args, **options))
    with pytest.raises(
        LRAttnResError, match="names code: remove it|would run as code: remove it|auto_map does not name"
    ):
        push(folder, "writer/name", dry_run=True)
    assert not processes and not (tmp_path / "was-run").exists()


def test_tokens_may_have_the_names_of_code_fields(folder):
    (folder / "vocab.json").write_text(json.dumps({"auto_map": 1}))
    check_code(folder)


def test_what_is_checked_is_what_is_sent(folder, forked_clean_process):
    (folder / "evil.py").write_text("")
    (folder / "checkpoint-10").mkdir()
    with copied_files(folder) as (copy, left_out):
        assert left_out == ["checkpoint-10", "evil.py"]
        assert {path.name for path in copy.iterdir()} == {path.name for path in folder.iterdir()} - set(left_out)
        staged = stage_folder(copy, left_out, check_folder(folder), "writer/name")
        (folder / "config.json").write_text("{}")
        sent = {operation.path_in_repo: operation.path_or_fileobj for operation in staged.operations}
        assert json.loads(Path(sent["config.json"]).read_text())["model_type"] == "lr_attnres"
        assert Path(sent["model.safetensors"]).samefile(folder / "model.safetensors")
    assert not copy.exists()


def test_only_what_a_user_needs_is_sent(folder, forked_clean_process):
    names = ["model_backup.safetensors", "model-old.safetensors", "LICENSE_key.pem", "tokenizer_secret.json"]
    for name in names:
        (folder / name).write_text("x")
    with copied_files(folder) as (copy, left_out):
        staged = stage_folder(copy, left_out, check_folder(folder), "writer/name")
    assert set(names) <= set(staged.left_out)
    sent = {operation.path_in_repo for operation in staged.operations}
    assert {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"} <= sent


def test_tokenizer_that_does_not_fit(tmp_path, forked_clean_process):
    small_model().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(LRAttnResError, match="the tokenizer has 257 tokens, the model's vocab_size is 61"):
        check_folder(tmp_path)


def test_other_heads_and_folders_without_a_tokenizer(tmp_path, capsys, forked_clean_process):
    small_model(model_class=LRAttnResForSequenceClassification, num_labels=3).save_pretrained(tmp_path)
    push(tmp_path, "writer/name", dry_run=True)
    assert "tokenizer" not in capsys.readouterr().out
