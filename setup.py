import re
from pathlib import Path

from setuptools import find_packages, setup


ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "lr_attnres/__init__.py").read_text()).group(1)
GGUF = ["gguf>=0.19"]  # `upgrade` of a GGUF file
HUB = ["tiktoken>=0.14"]  # the ranks of cl100k_base; `push` needs nothing beyond huggingface_hub
# The others without a version: what Transformers asks for.
SERVE = ["transformers[serving]>=5.20", "fastapi", "jinja2", "uvicorn"]
EVAL = ["lm_eval[hf]>=0.4.13", "datasets>=5.0"]
# Without a version: what Transformers, the Hub client or `datasets` asks for.
DATA = ["datasets>=5.0", "filelock", "numpy", "pyarrow"]
FIGURES = ["matplotlib>=3.10", "numpy"]
ANALYSIS = [*FIGURES, *DATA]
EXPLORE = [*FIGURES, "gradio>=6.31,<7"]
TRAIN = ["accelerate>=1.15", *DATA]
FINETUNE = [*TRAIN, "peft>=0.21", "trl>=1.16"]
BACKENDS = ["bitsandbytes>=0.50", "deepspeed>=0.19", "executorch>=1.5", "onnxruntime>=1.31", "onnxscript>=0.7"]
BACKENDS += ["torchao>=0.18", *TRAIN]
BROWSER = ["playwright>=1.60"]
TEST = [
    "pytest>=8",
    "pytest-xdist>=3.6",
    "peft>=0.21",
    "optimum-quanto>=0.2.7",
    "setuptools>=77",
    "tensorboard>=2.20",
    *BROWSER,
]

setup(
    name="lr-attnres",
    version=VERSION,
    description="Low-Rank Attention Residuals: depth-routed decoders as a Hugging Face Transformers model",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    packages=find_packages(include=["lr_attnres", "lr_attnres.*"]),
    package_data={
        "lr_attnres": ["py.typed", "*.pyi"],
        "lr_attnres.data": ["corpora/*"],
        "lr_attnres.training": ["presets/*.yaml"],
    },
    entry_points={
        "console_scripts": ["lr-attnres = lr_attnres.cli:main"],
        # Called in each process of vLLM, which then serves the model without `--trust-remote-code`.
        "vllm.general_plugins": ["lr_attnres = lr_attnres.registration:register"],
    },
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.13",
        "transformers>=5.15,<6",
        "huggingface_hub>=1.5",
        "safetensors>=0.8",
        "PyYAML",
        "tokenizers",
        "tqdm",
    ],
    extras_require={
        "train": TRAIN,
        "finetune": FINETUNE,
        "peft": ["peft>=0.21"],
        "hub": HUB,
        "gguf": GGUF,
        "serve": SERVE,
        "eval": EVAL,
        "analysis": ANALYSIS,
        "explore": EXPLORE,
        "backends": BACKENDS,
        "dev": [
            *TEST,
            *HUB,
            *GGUF,
            *SERVE,
            *EVAL,
            *ANALYSIS,
            *EXPLORE,
            *FINETUNE,
            "mypy>=2.4",
            "ruff>=0.17",
            "triton>=3.7",
            "types-PyYAML",
            "types-tqdm",
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
