"""A short run of the fuzzer of dumps; ``make fuzz`` runs a long one."""

from __future__ import annotations

from fuzz.dumps import fuzz


def test_damaged_dumps_end_in_a_run_or_in_one_line():
    assert fuzz(seed=0, n=60) == []
