"""The progress bar of a run, one JSON line per logged step, and the trackers of Accelerate."""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..errors import LRAttnResError


if TYPE_CHECKING:
    from accelerate import Accelerator  # `analyze` reads metrics without it


METRICS_FILE = "metrics.jsonl"


class Metrics(AbstractContextManager):
    """A context that shows a progress bar: call `advance` after every step and `write` for every logged one.

    A resumed run keeps the lines up to step `steps_done`, so that no step is missing or logged twice.
    """

    def __init__(self, file: Path, accelerator: "Accelerator", steps_done: int, steps: int, batch_tokens: int):
        self.file, self.accelerator, self.batch_tokens = file, accelerator, batch_tokens
        self.seconds, self.tokens = 0.0, 0
        self.bar = tqdm(total=steps, initial=steps_done, unit=" steps", disable=not accelerator.is_main_process)
        if accelerator.is_main_process:
            file.parent.mkdir(parents=True, exist_ok=True)
            kept = [json.dumps(record) + "\n" for record in read_metrics(file) if record["step"] <= steps_done]
            temporary = file.with_name(file.name + ".partial")
            temporary.write_text("".join(kept))
            os.replace(temporary, file)

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def advance(self, record: dict[str, Any], seconds: float) -> None:
        self.seconds, self.tokens = self.seconds + seconds, self.tokens + self.batch_tokens
        shown = {"loss": f"{record['loss']:.3f}", "grad": f"{record['grad_norm']:.2f}"}
        shown |= {"tok/s": f"{self.tokens / self.seconds:,.0f}"}
        shown |= {name: f"{value:.1e}" for name, value in record.items() if name.startswith("lr_")}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()

    def print(self, line: str) -> None:
        """Print a line above the progress bar, in the main process."""
        if self.accelerator.is_main_process:
            tqdm.write(line)

    def write(self, record: dict[str, Any]) -> None:
        """Append a line, with the speed since the previous line."""
        record = record | {"tokens_per_second": self.tokens / self.seconds}
        self.seconds, self.tokens = 0.0, 0
        if self.accelerator.is_main_process:
            with open(self.file, "a") as file:
                file.write(json.dumps(record) + "\n")
        values = {name: value for name, value in record.items() if name not in ("step", "depth_entropy")}
        sites = enumerate(record.get("depth_entropy", []), start=1)
        self.accelerator.log(values | {f"depth_entropy/site_{site}": value for site, value in sites}, record["step"])


def read_metrics(file: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a metrics file; an unfinished last line of a killed process is left out."""
    if not Path(file).exists():
        return []
    lines = Path(file).read_text().split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise LRAttnResError(f"{file}, line {number}: {line[:80]!r} is not JSON.") from error
        if not isinstance(records[-1], dict) or not isinstance(records[-1].get("step"), int):
            raise LRAttnResError(f"{file}, line {number}: {line[:80]!r} is not an object with a whole number `step`.")
    return records
