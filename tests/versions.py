"""Saved folders in every minor version of Transformers, with the code that they carry and without this package.

    python tests/versions.py [5.10 5.23 ...]      (without versions: all, written to docs/compatibility.md)

Each version gets a small environment in outputs/versions, with the Hub client and tokenizers that it asks for and all
else from the environment that runs this script. One folder of each variant is loaded there with
`trust_remote_code=True`. Its logits, depth weights and greedy tokens are compared with those of this environment.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

import torch


ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "outputs/versions"
PAGE = ROOT / "docs/compatibility.md"
BEGIN, END = "<!-- versions: written by tests/versions.py -->", "<!-- end of versions -->"
OLDEST_SUPPORTED, NEWEST = 4, 23  # minors of 5
VERSIONS = ["4.57", *(f"5.{minor}" for minor in range(NEWEST + 1))]
HEADER = ("transformers", "huggingface_hub", "loads", "logits", "depth weights", "greedy tokens")
# The same torch runs the same operations. But a version may hand attention a mask where another says `is_causal`,
# and its kernel then adds in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def main(versions: list[str]) -> int:
    with tempfile.TemporaryDirectory() as work:
        folders = save_folders(Path(work))
        run_probe(Path(sys.executable), folders, Path(work) / "expected.pt")
        expected = torch.load(Path(work) / "expected.pt")
        rows, failures = [HEADER, tuple("---" for _ in HEADER)], 0
        for version in versions or VERSIONS:
            row, is_right = try_version(version, folders, expected)
            rows.append(row)
            failures += not is_right
            print("  ".join(row), flush=True)
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    print(f"\n{table}\n{failures} of {len(rows) - 2} versions are not as they should be")
    if not versions:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{rest.split(END)[1]}")
    return failures


def save_folders(work: Path) -> list[str]:
    from common import VARIANTS, small_model

    torch.manual_seed(0)
    for variant in VARIANTS:
        small_model(variant).save_pretrained(work / variant)
    return [str(work / variant) for variant in VARIANTS]


def try_version(version: str, folders: list[str], expected: dict) -> tuple[tuple[str, ...], bool]:
    """The row of the table, and whether it is as it should be: all equal, or one line that names the versions."""
    python = environment(version)
    result_file = OUTPUT / version / "result.pt"
    result_file.unlink(missing_ok=True)
    installed = subprocess.check_output([python, "-c", INSTALLED], text=True)
    is_supported = tuple(map(int, version.split("."))) >= (5, OLDEST_SUPPORTED)
    try:
        run_probe(python, folders, result_file)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[-1]
        is_clear = reason.startswith("ImportError: LR-AttnRes needs transformers 5.4 or newer")
        if is_supported or not is_clear:
            print(error.stderr, file=sys.stderr)
        return (*json.loads(installed), "no: refused" if is_clear else "no", "", "", ""), is_clear and not is_supported
    result = torch.load(result_file)
    equal = {"logits": True, "depth_weights": True, "tokens": True}
    for folder in folders:
        for name in equal:
            equal[name] &= is_close(result[folder][name], expected[folder][name])
    return (*json.loads(installed), "yes", *("equal" if same else "DIFFER" for same in equal.values())), all(
        equal.values()
    )


def is_close(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(ours) == len(expected) and all(
        one.shape == other.shape and torch.allclose(one, other, **CLOSE) for one, other in zip(ours, expected)
    )


INSTALLED = (
    "import json, transformers, huggingface_hub as hub; print(json.dumps([transformers.__version__, hub.__version__]))"
)


def environment(version: str) -> Path:
    """The Python of an environment with the newest patch of a minor version; it is kept for the next time."""
    folder = OUTPUT / version
    python = folder / "bin/python"
    if not (folder / "installed").exists():
        venv.create(folder, clear=True)
        (site_packages,) = folder.glob("lib/python*/site-packages")
        # pip counts what is installed here as present. A path file is not followed further: our package stays out.
        (site_packages / "parent.pth").write_text(sysconfig.get_path("purelib"))
        command = [python, "-m", "pip", "install", "--quiet", "--no-compile", f"transformers=={version}.*"]
        # Captured: it lists the packages of the parent that ask for other versions, which do not matter here.
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        (folder / "installed").touch()
    return python


def run_probe(python: Path, folders: list[str], result_file: Path) -> None:
    """Run `probe` in a process of its own, which imports nothing of ours and keeps no remote code."""
    with tempfile.TemporaryDirectory() as home:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_MODULES_CACHE")
        }
        environment |= {"HF_HOME": home, "HF_HUB_OFFLINE": "1"}
        command = [python, "-P", __file__, "--probe", result_file, *folders]
        subprocess.run(command, check=True, env=environment, capture_output=True, text=True, timeout=600)


@torch.no_grad()
def probe(result_file: str, folders: list[str]) -> None:
    sys.modules["lr_attnres"] = None  # type: ignore[assignment]  # its import fails, as if it were not installed
    from transformers import AutoModelForCausalLM

    input_ids = torch.arange(3, 27).view(2, 12) * 7 % 58 + 3
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, :4] = 0  # a padded row
    result = {}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        outputs = model(input_ids, attention_mask=attention_mask, output_depth_weights=True)
        kept = attention_mask.bool()
        tokens = model.generate(
            input_ids,
            attention_mask=attention_mask,
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=-1,
            pad_token_id=0,
        )
        result[folder] = {
            "logits": [outputs.logits[kept]],
            "depth_weights": [weights[kept] for weights in outputs.depth_weights or ()],
            "tokens": [tokens],
        }
    torch.save(result, result_file)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        probe(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main(sys.argv[1:]))
