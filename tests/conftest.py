import os


# bf16 matmuls crash on virtual machines that advertise AMX without giving it; oneDNN reads this before torch loads.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# One thread per test process: the models are tiny and the processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

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
