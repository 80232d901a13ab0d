"""Documents have a fixed order and can be resumed at each of them; malformed sources are refused by name."""

import hashlib
import json
from itertools import islice

import pytest
from datasets import Dataset

from lr_attnres.data.documents import EMBEDDED_CORPUS, open_documents


TEXTS = [f"document {number}: " + "ä" * number for number in range(23)]


def jsonl(path, texts, column="text"):
    path.write_text("".join(json.dumps({column: text, "other": [1, 2]}) + "\n" for text in texts))
    return path


def source(kind, folder):
    """A source of the kind with TEXTS in it, and the column they are in."""
    folder.mkdir(exist_ok=True)
    if kind == "txt":
        for number, text in enumerate(TEXTS):
            (folder / f"{number:03d}.txt").write_text(text)
        return folder, "text"
    if kind == "jsonl":
        jsonl(folder / "a.jsonl", TEXTS[:9]), jsonl(folder / "b.jsonl", TEXTS[9:])
        return folder, "text"
    for number, part in enumerate((TEXTS[:9], TEXTS[9:])):  # two files, as the Hub stores a dataset
        rows = Dataset.from_dict({"content": part, "score": [0.5] * len(part)})
        rows.to_parquet(folder / f"train-{number:05d}-of-00002.parquet", batch_size=5)
    return folder, "content"


KINDS = ["txt", "jsonl", "dataset"]


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_at_every_document(kind, tmp_path):
    path, column = source(kind, tmp_path / "data")
    assert list(open_documents([path], column)) == TEXTS
    for num_read in (0, 1, 8, 9, 10, len(TEXTS)):
        documents = open_documents([path], column)
        assert list(islice(documents, num_read)) == TEXTS[:num_read]
        position = json.loads(json.dumps(documents.position))
        later = open_documents([path], column)
        later.resume(position)
        assert list(later) == TEXTS[num_read:]


def test_files_and_folders_together_in_the_given_order(tmp_path):
    folder, _ = source("txt", tmp_path / "folder")
    file = jsonl(tmp_path / "more.jsonl", ["first"])
    assert list(open_documents([file, folder])) == ["first", *TEXTS]


def test_newlines_byte_order_marks_and_nulls(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\r\n\r\n{"text": null}\n{"text": "last"}')
    assert list(open_documents([tmp_path])) == ["one\ntwo", "x", "", "last"]


def test_embedded_corpus():
    texts = list(open_documents(["sotu"]))
    assert len(texts) == 58 and 2_000_000 < sum(map(len, texts)) < 2_100_000
    assert texts[0].startswith("Fellow-Citizens of the Senate")
    assert "public domain" in EMBEDDED_CORPUS.with_name("LICENSE.md").read_text()


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"text": "good"}\n{"text": \n', "line 2 is not JSON"),
        ("[1]\n", "line 1 is not a JSON object"),
        ('{"txt": "x"}\n', "line 1 has no column 'text'; it has txt"),
        ('{"text": 5}\n', "'text' is a int, not a text"),
        (b'{"text": "\xff"}\n', "is not UTF-8"),
        ('{"text": "\\ud800"}\n', "line 1: 'text' is not Unicode text"),
    ],
)
def test_malformed_jsonl(content, message, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        list(open_documents([path]))


def test_malformed_sources(tmp_path):
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8"):
        list(open_documents([tmp_path / "latin.txt"]))
    with pytest.raises(FileNotFoundError, match="missing.txt"):
        open_documents([tmp_path / "missing.txt"])
    (tmp_path / "table.csv").write_text("text\nx\n")
    with pytest.raises(ValueError, match="table.csv is neither"):
        open_documents([tmp_path / "table.csv"])
    with pytest.raises(ValueError, match="`sources` is empty"):
        open_documents([])
    with pytest.raises(ValueError, match="`sources` has an empty name"):
        open_documents([tmp_path / "latin.txt", " "])
    with pytest.raises(ValueError, match=r"holds texts \(latin.txt\) and a dataset \(table.csv\): give one of them"):
        open_documents([tmp_path])
    for part in ({"name": "en"}, {"split": "test"}):
        with pytest.raises(ValueError, match="`name` and `split` choose a part of a dataset; text files have none"):
            open_documents([tmp_path / "latin.txt"], **part)


def test_files_are_identified_by_name_size_and_ends(tmp_path):
    file, content = tmp_path / "a.txt", bytearray(b"x" * 200_000)

    def identity(folder=tmp_path):
        return open_documents([folder / "a.txt"]).describe()

    file.write_bytes(content)
    before = identity()
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/a.txt").write_bytes(content)
    assert identity(tmp_path / "copy") == before
    for place in (0, 2**16 - 1, -(2**16), -1):
        edited = content.copy()
        edited[place] = ord("y")
        file.write_bytes(edited)
        assert identity() != before
    for size in (0, 1, 2**16, 2**16 + 1):  # the two ends meet or overlap: every byte is hashed once
        file.write_bytes(content[:size])
        assert identity()[0]["ends_sha256"] == hashlib.sha256(content[:size]).hexdigest()


def test_malformed_datasets(tmp_path):
    path, _ = source("dataset", tmp_path / "data")
    with pytest.raises(ValueError, match="has no column .text.; it has content, score: name one as `column` of"):
        open_documents([path])
    with pytest.raises(ValueError, match=r"\(split 'en'\) cannot be opened"):
        open_documents([path], "content", split="en")
    with pytest.raises(ValueError, match="the dataset 'owner/missing'.*cannot be opened"):
        open_documents(["owner/missing"])
    with pytest.raises(ValueError, match="must be the only source"):
        open_documents(["sotu", path])
