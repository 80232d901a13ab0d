"""Run `lr-attnres` commands in another process, with their own Hub.

Importing torch and transformers takes longer than most commands. So one process runs many commands, clean processes
are forks (`forked_clean_process`), and folders with the same contents are loaded in a clean process only once.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


TESTS = Path(__file__).parent
WORKER = """
import contextlib, hashlib, io, json, os, pathlib, sys, traceback
sys.path.append(sys.argv[1])
from forked_clean_process import FORKS
from lr_attnres import hub_upload
from lr_attnres.folders import clean_process, staging
from lr_attnres.cli import main

clean_process.subprocess = FORKS
found, names, load = {}, {}, clean_process.load_in_clean_process

def load_once(folder, dtype="auto"):
    contents = [(path.name, path.read_bytes()) for path in sorted(pathlib.Path(folder).glob("*.*"))]
    contents = [dtype, *(item for item in contents if item[0] not in ("README.md", staging.LOCK_FILE))]
    key = hashlib.sha256(repr(contents).encode()).hexdigest()
    if key not in found:
        found[key] = load(folder, dtype)
    return found[key]

staging.load_in_clean_process = hub_upload.load_in_clean_process = load_once
for line in sys.stdin:
    request, out, err = json.loads(line), io.StringIO(), io.StringIO()
    os.environ.pop("HF_TOKEN", None)
    os.environ.update(request["environment"])
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(request["arguments"]) if "arguments" in request else exec(request["script"], names) or 0
        except SystemExit as error:
            code = error.code
        except Exception:
            code = traceback.print_exc() or "traceback"
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


@dataclass
class Result:
    code: int
    out: str
    err: str


def hub_environment(url: str, home: Path, **more: str) -> dict[str, str]:
    """Environment variables for the Hub at `url` with an empty cache; the client reads them at import."""
    dropped = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_TOKEN", "PYTHONPATH")
    dropped += ("HF_HUB_DISABLE_PROGRESS_BARS",)
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    return environment | {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        **more,
    }


class CommandLine:
    """`with CommandLine(environment) as run: run("push", ...)`; `run.script` runs Python in the same process."""

    def __init__(self, environment: dict[str, str], folder: Path | None = None):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(TESTS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=folder,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.stdin.close()
        self.process.wait(timeout=30)

    def __call__(self, *arguments: object, **environment: str) -> Result:
        return self._send({"arguments": [str(argument) for argument in arguments], "environment": environment})

    def script(self, text: str) -> Result:
        """Scripts share their global names."""
        return self._send({"script": text, "environment": {}})

    def _send(self, request: dict) -> Result:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Result(*json.loads(self.process.stdout.readline()))


def run_without_package(script: str, environment: dict[str, str], folder: Path, *arguments: object) -> dict:
    """Run `script` where `lr_attnres` cannot be imported; returns the JSON of its last line of output."""
    blocker = (
        "import json, sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'lr_attnres':\n"
        "            raise ModuleNotFoundError('the package is hidden in this test')\n"
        "sys.meta_path.insert(0, Blocker())\n"
    )
    (folder / "script.py").write_text(blocker + script)
    command = [sys.executable, "script.py", *map(str, arguments)]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
