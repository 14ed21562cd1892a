"""A little of every fuzzer; ``make fuzz`` runs them at length."""

from __future__ import annotations

import pytest

from fuzz import FUZZERS, find

SHORT = {"recipes": 60, "folders": 6, "checkpoints": 4, "dumps": 60, "batches": 8, "kill_points": 3}


@pytest.mark.parametrize("name", FUZZERS)
def test_nothing_from_outside_ends_in_a_traceback(name):
    assert find(name, "suite", SHORT.get(name, 10)) == {}
