"""Some of the points at which a run can be killed or meet a full disk; ``make fuzz`` tries all."""

from __future__ import annotations

from fuzz.kill_points import fuzz


def test_a_run_that_met_a_fault_at_a_write_is_resumed_bit_for_bit():
    assert fuzz("suite", 8) == {}
