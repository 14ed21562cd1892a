"""Files written behind the caller's back: in order, and no error is lost."""

from __future__ import annotations

import threading

import pytest

from counterpoise.run.later import Later


def test_calls_are_made_in_order_by_another_thread():
    seen = []
    with Later() as later:
        for number in range(5):
            later.call(lambda n: seen.append((n, threading.current_thread().name)), number)
    assert [number for number, _ in seen] == list(range(5))
    assert threading.current_thread().name not in {name for _, name in seen}


def fail() -> None:
    raise OSError("disk full")


def test_an_error_comes_with_the_next_call():
    with Later() as later:
        later.call(fail)
        with pytest.raises(OSError, match="disk full"):
            later.call(print)


def test_an_error_of_the_last_call_comes_at_the_end():
    with pytest.raises(OSError, match="disk full"), Later() as later:
        later.call(fail)


def test_the_callers_own_error_comes_first():
    def both() -> None:
        with Later() as later:
            later.call(fail)
            raise KeyError

    with pytest.raises(KeyError):
        both()
