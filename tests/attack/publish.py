"""Writes the counts of `make attack` into docs/reliability.md."""

import json
from pathlib import Path


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reliability.md"
START, END = "<!-- attack: python tests/attack/publish.py -->\n", "<!-- end of attack -->\n"
KINDS = {
    "configs": "random configs",
    "folders": "damaged model folders",
    "tokens": "damaged prepared data",
    "checkpoints": "damaged checkpoints, resumed",
    "hostile": "folders that name code or lead elsewhere, pushed",
    "command_lines": "bad command lines",
}


def main() -> None:
    counts = json.loads((ROOT / "outputs/attack.json").read_text())
    columns = ("success", "refused", "bug")
    rows = ["| kind | cases | success | refused in one line | bugs |", "| --- | --- | --- | --- | --- |"]
    for kind, title in KINDS.items():
        numbers = [counts[kind].get(column, 0) for column in columns]
        rows.append(f"| {title} | {' | '.join(f'{number:,}' for number in (sum(numbers), *numbers))} |")
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + "\n" + "\n".join(rows) + "\n\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
