"""Test ids must be the same in every worker process: functions are named, not printed with their address."""

from __future__ import annotations

from typing import Any

from counterpoise.build import base, bound


def pytest_make_parametrize_id(config: Any, val: Any, argname: str) -> str | None:
    if not callable(val) or isinstance(val, type):
        return None
    params = "-".join(f"{key}={value}" for key, value in bound(val).items() if isinstance(value, (str, int, float)))
    return f"{getattr(base(val), '__name__', type(val).__name__)}{f'({params})' if params else ''}"
