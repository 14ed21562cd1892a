"""Jitter: the mean squared second difference of a series over the run so far.

JSON state of constant size.
"""

from __future__ import annotations

from typing import Any


def jitter(
    state: dict[str, Any] | None, numbers: dict[str, float]
) -> tuple[dict[str, float], dict[str, Any]]:
    """J = mean_t (x_t - 2 x_{t-1} + x_{t-2})^2 of every series, after one more value each; nothing
    before the third.

    Args:
        state: what the last call returned, None at the start.
        numbers: the newest value of each series.

    >>> state = None
    >>> for value in (1.0, 2.0, 4.0, 7.0):
    ...     means, state = jitter(state, {"reward": value})
    >>> means  # second differences 1 and 1
    {'reward': 1.0}
    """
    state, means, out = state or {}, {}, {}
    for name, value in numbers.items():
        last, total, count = state.get(name, ([], 0.0, 0))
        if len(last) == 2:
            total, count = total + (value - 2 * last[1] + last[0]) ** 2, count + 1
            means[name] = total / count
        out[name] = [[*last, value][-2:], total, count]
    return means, out
