"""Seeded fuzzing of everything that takes input from outside.

A fuzzer is ``fuzz(seed, num) -> {fault: example}``; an empty dict is the goal. ``make fuzz`` runs
them at length, ``test_fuzz.py`` a little of each.
"""

from __future__ import annotations

import importlib

# name -> (where, cases of a long run)
FUZZERS = {
    "recipes": ("fuzz.recipes:fuzz", 6000),
    "folders": ("fuzz.folders:fuzz", 620),
    "checkpoints": ("fuzz.folders:fuzz_checkpoints", 250),
    "dumps": ("fuzz.dumps:fuzz", 1200),
    "batches": ("fuzz.batches:fuzz", 2200),
    "kill_points": ("fuzz.kill_points:fuzz", 600),
}


def find(name: str, seed: int | str, num: int) -> dict[str, str]:
    """What one fuzzer finds."""
    module, _, function = FUZZERS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)(seed, num)
