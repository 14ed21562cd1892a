"""The tables of docs/results/arena.md, from the summary of an arena.

python benchmarks/arena_table.py benchmarks/results/arena_long/summary.json
python benchmarks/arena_table.py benchmarks/results/arena_long/summary.json --table equal
python benchmarks/arena_table.py benchmarks/results/arena_rare/summary.json --seeds

Rows come by sampled accuracy; ``--seeds`` says how many of each, where they differ.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

HEAD = (
    "arm",
    "control",
    "rate",
    "sampled",
    "against its control",
    "greedy, against it",
    "greedy",
    "pass@k",
    "entropy",
    "length",
    "verdict",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("summary", type=Path)
    parser.add_argument("--table", default="final", choices=("final", "equal"))
    parser.add_argument("--seeds", action="store_true")
    args = parser.parse_args()
    table = json.loads(args.summary.read_text())[args.table]["rows"]
    rows = [row for row in table if row["metrics"]["sampled"][0] is not None]  # those that ran
    rows.sort(key=lambda row: row["metrics"]["sampled"][0], reverse=True)
    lines = [list(HEAD), ["---"] * len(HEAD), *map(cells, rows)]
    if args.seeds:
        seeds = ["seeds", "---", *(str(row["seeds"]) for row in rows)]
        lines = [[*line[:2], num, *line[2:]] for line, num in zip(lines, seeds)]
    for line in lines:
        print(f"| {' | '.join(line)} |")


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    means = {name: value[0] for name, value in row["metrics"].items()}
    return [
        f"`{row['arm']}`",
        row["control"] or "",
        f"{row['lr']:g}",
        f"{means['sampled']:.1%}",
        points(row["differences"].get("sampled")),
        points(row["differences"].get("greedy")),
        f"{means['greedy']:.1%}",
        " ".join(f"{value:.1%}" for name, value in means.items() if name.startswith("pass@")),
        f"{means['entropy']:.2f}",
        f"{means['length']:.0f}",
        row["verdict"]["words"],
    ]


def points(interval: list[float] | None) -> str:
    """A difference in points with its interval.

    >>> points([0.0123, -0.004, 0.028])
    '+1.2 [-0.4, +2.8]'
    """
    if not interval:
        return ""
    value, low, high = (100 * number for number in interval)
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]"


if __name__ == "__main__":
    main()
