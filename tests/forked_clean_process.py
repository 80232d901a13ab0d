"""`load_in_clean_process` in a fork of a process that has imported torch and transformers, but not this package.

A new interpreter spends nearly all its time on these imports. `folders/test_clean_process.py` starts new ones.
"""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace


SERVER = """
import json, os, runpy, sys, traceback
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationMixin

assert "lr_attnres" not in sys.modules
for line in sys.stdin:
    arguments, errors = json.loads(line)
    child = os.fork()
    if child == 0:
        code, sys.argv = 1, arguments
        for descriptor in (0, 1):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        try:
            runpy.run_path(arguments[0], run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@cache
def start_server() -> tuple[subprocess.Popen, Path]:
    """The process to fork, and a folder for its files; both go when this process ends."""
    scratch = TemporaryDirectory(prefix="lr-attnres-forks-")
    environment = {name: value for name, value in os.environ.items() if name != "HF_MODULES_CACHE"}
    environment |= {"HF_HOME": scratch.name, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-P", "-c", SERVER]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stop() -> None:
        server.stdin.close()
        server.wait()
        scratch.cleanup()

    atexit.register(stop)
    return server, Path(scratch.name)


def run(command: list[str], **options) -> subprocess.CompletedProcess:
    """Like `subprocess.run` for the command of `load_in_clean_process`: interpreter, -P, script, its arguments."""
    server, scratch = start_server()
    errors = scratch / "stderr"
    errors.unlink(missing_ok=True)
    server.stdin.write(json.dumps([command[2:], str(errors)]) + "\n")
    server.stdin.flush()
    code = int(server.stdout.readline())
    return subprocess.CompletedProcess(command, code, "", errors.read_text())


# To put in the place of the module `subprocess` in `clean_process`.
FORKS = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL)
