"""What the memory benchmarks share: time and peak memory of a step in a process of its own."""

import os
import shlex
import subprocess
import sys
import time


def measure(script: str, *arguments: str) -> dict[str, float]:
    """Seconds and peak resident GB (the kernel's count, mapped file pages included) of a process of its own."""
    start = time.perf_counter()
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        code = os.waitstatus_to_exitcode(status)
        raise SystemExit(f"a step failed with exit code {code}; to see why: {shlex.join(command)}")
    seconds = time.perf_counter() - start
    cpu = usage.ru_utime + usage.ru_stime
    return {"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "peak_gb": round(usage.ru_maxrss / 1e6, 3)}
