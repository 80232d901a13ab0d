"""The wheel in clean environments: with the oldest versions that setup.py claims, and with the newest that pip finds.

    python tests/bounds.py [oldest] [newest]

Each environment lies in outputs/bounds. The commands of the README run there, and then, on the installed wheel, the
tests that meet Transformers. torch is that of constraints.txt in both: the only one that is tested.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path


ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "outputs/bounds"
EXTRAS = ("train", "hub", "analysis", "finetune")  # `serve` needs a newer Transformers than the package
TEST_PACKAGES = ("pytest", "optimum-quanto")
TESTS = ("test_configuration_lr_attnres", "test_modeling_lr_attnres", "test_compilers")
TESTS += ("test_generation", "test_saving", "folders/test_upgrade", "test_trainer", "test_peft")
COMMANDS = (
    "--version",
    "cost --paper",
    "prepare sotu data --train-tokenizer 512 --sequence-length 64 --validation-fraction 0.05",
    "train tiny --data data --output-dir run --steps 3 --warmup-steps 1",
    "evaluate run/model data",
    "generate run/model --prompt 'The state of the Union' --max-new-tokens 8",
    "analyze run/model --data data --output analysis --max-tokens 2000",
    "push owner/name run/model --dry-run",
)
RELOAD = """
from lr_attnres import LRAttnResForCausalLM
from transformers import AutoTokenizer

model, tokenizer = LRAttnResForCausalLM.from_pretrained("run/model"), AutoTokenizer.from_pretrained("run/model")
print(tokenizer.decode(model.generate(**tokenizer("The state", return_tensors="pt"), max_new_tokens=8)[0]))
"""


def main(names: list[str]) -> None:
    wheel = build_wheel()
    pins = {"oldest": lower_bounds(wheel), "newest": []}
    for name in names:
        install(OUTPUT / name, wheel, pins[name])
        run_commands(OUTPUT / name)
        # `pytest`, not `python -m pytest`, which would put the repository before the wheel.
        run([OUTPUT / name / "bin/pytest", *(f"{ROOT}/tests/{module}.py" for module in TESTS)])


def build_wheel() -> Path:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # a module that is gone would live on in it
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", OUTPUT, ROOT])
    (wheel,) = OUTPUT.glob("*.whl")
    return wheel


def lower_bounds(wheel: Path) -> list[str]:
    """`name==version` for every lower bound of the package and of `EXTRAS`, but that of torch."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        requirements = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist")
    pins = []
    for requirement in requirements:
        extra = re.search(r'extra == "(\w+)"', requirement)
        bound = re.match(r"([\w-]+)[^;]*?>=([\d.]+)", requirement)
        if bound and (extra is None or extra[1] in EXTRAS) and not requirement.startswith("torch"):
            pins.append("{}=={}".format(*bound.groups()))
    return sorted(set(pins))


def install(folder: Path, wheel: Path, pins: list[str]) -> None:
    venv.create(folder, with_pip=True)
    pip = [folder / "bin/python", "-m", "pip"]
    run([*pip, "install", "--quiet", "--constraint", ROOT / "constraints.txt", "torch"])
    run([*pip, "install", "--quiet", f"{wheel}[{','.join(EXTRAS)}]", *TEST_PACKAGES, *pins])
    run([*pip, "list"])


def run_commands(folder: Path) -> None:
    work = folder / "commands"
    work.mkdir()
    for command in COMMANDS:
        run([folder / "bin/lr-attnres", *shlex.split(command)], cwd=work)
    run([folder / "bin/python", "-c", RELOAD], cwd=work)


def run(command: list, **options) -> None:
    print("$", shlex.join(map(str, command)), flush=True)
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": ""}, **options)


if __name__ == "__main__":
    main(sys.argv[1:] or ["oldest", "newest"])
