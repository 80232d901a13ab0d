import os


# bf16 matmuls crash on virtual machines that advertise AMX without giving it; oneDNN reads this before torch loads.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# One thread per test process: the models are tiny and the processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import json  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from transformers.utils import logging  # noqa: E402


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def nan_filled_empty():
    """Uninitialised memory is NaN, so that reading it cannot pass by luck."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def forked_clean_process(monkeypatch):
    """Clean processes are forks, see the module of this name."""
    from forked_clean_process import FORKS

    from lr_attnres.folders import clean_process

    monkeypatch.setattr(clean_process, "subprocess", FORKS)


@pytest.fixture(scope="session")
def token_data(tmp_path_factory) -> Path:
    """Documents of letters with a pattern, prepared in rows of 32 tokens."""
    from common import byte_tokenizer

    from lr_attnres.data.packing import prepare_data

    folder = tmp_path_factory.mktemp("tokens")
    texts = ["".join(chr(97 + (i * i * n + n) % 26) for i in range(20 + 7 * n % 90)) for n in range(60)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"sequence_length": 32, "validation_fraction": 0.2, "progress_bar": False}
    prepare_data(folder / "text.jsonl", folder / "data", tokenizer=byte_tokenizer(), **options)
    return folder / "data"
