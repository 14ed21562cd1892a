"""``python -m fuzz [N] [SEED]``: every fuzzer of this folder, ``N`` cases each.

A fuzzer is a module with ``fuzz(seed, n)``, which returns a report per failure.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main(n: int = 600, seed: int = 0) -> int:
    """How many cases failed."""
    num_failures = 0
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if file.stem.startswith(("__", "test_")):
            continue
        failures = importlib.import_module(f"fuzz.{file.stem}").fuzz(seed, n)
        print(f"{file.stem}: {n} cases, {len(failures)} failures", *failures, sep="\n")
        num_failures += len(failures)
    return num_failures


if __name__ == "__main__":
    sys.exit(min(1, main(*map(int, sys.argv[1:3]))))
