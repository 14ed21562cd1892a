"""Seeded mutations of values, of texts and of bytes, and the rule for what a fault is."""

from __future__ import annotations

import contextlib
import copy
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import counterpoise

SRC = str(Path(counterpoise.__file__).parent)
TIME_LIMIT_S = 120

STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"),
    10**400, -(10**30), 2**63, "", " ", "0", "a", "grpo", "delta", "os:system", "a:b:c", ":", "x:",
    "../../etc", "nul\x00byte", "\x1b[31m", "é\u202e", "a" * 5000, "[", "(?P<x", "1e5", "auto",
    [], {}, [[]], [None], ["a", 1], {"name": None}, {"name": []}, {"name": "grpo", "x": 1},
    {1: 2}, {None: 1}, {"a": {"b": {"c": 1}}}, [{"name": "delta"}], (1, 2),
]  # fmt: skip


class Hang(BaseException):
    """The time limit of a case; no handler of ordinary errors may swallow it."""


def paths(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every part of a nested value stands, the whole first."""
    yield here
    if isinstance(value, dict):
        for key, child in value.items():
            yield from paths(child, (*here, key))
    elif isinstance(value, list):
        for at, child in enumerate(value):
            yield from paths(child, (*here, at))


def mutate_value(value: Any, rng: random.Random) -> Any:
    """A copy with one to three parts replaced, removed, doubled, renamed or wrapped."""
    box = {"": copy.deepcopy(value)}
    for _ in range(rng.choice((1, 1, 2, 3))):
        *parents, last = rng.choice(list(paths(box))[1:] or [("",)])
        node: Any = box
        for key in parents:
            node = node[key]
        action = rng.choice(("replace", "replace", "replace", "remove", "add", "rename", "wrap"))
        if action == "remove" and last != "":
            del node[last]
        elif action == "wrap":
            node[last] = rng.choice(([node[last]], {"x": node[last]}, str(node[last])))
        elif action == "rename" and isinstance(node, dict) and last != "":
            node[rng.choice([f"{last}x", 7, None, "", "name"])] = node.pop(last)
        elif action == "add" and isinstance(node[last], dict):
            node[last][rng.choice(["x", "name", 3, ""])] = rng.choice(STRANGE)
        elif action == "add" and isinstance(node[last], list):
            node[last].insert(0, rng.choice(STRANGE))
        else:
            node[last] = copy.deepcopy(rng.choice(STRANGE))
        if "" not in box:
            break
    return box.get("")


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """A copy cut, flipped, doubled, or with something strange in it."""
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 4, 64)))
    action = rng.choice(("cut", "flip", "insert", "double", "empty", "remove"))
    if action == "cut":
        return data[:at]
    if action == "flip" and data:
        spot = min(at, len(data) - 1)
        return data[:spot] + bytes([data[spot] ^ (1 << rng.randrange(8))]) + data[spot + 1 :]
    if action == "insert":
        strange = (b"\xff\xfe", b"\x00", b"\n\n", b"{", b"]", b"&a [*a]", b"\t", b"9" * 400)
        return data[:at] + rng.choice(strange) + data[at:]
    if action == "double":
        return data[:end] + data[at:]
    return b"" if action == "empty" else data[:at] + data[end:]


def fault(call: Callable[[], object]) -> str | None:
    """None if ``call`` works or fails as it should; else what went wrong, with its place.

    As it should: a ValueError that our own code raised, of one line; or an OSError that names its
    file. Anything else reaches a user as a traceback, or as a message without a place.
    """
    try:
        with _time_limit():
            call()
    except Hang:
        return f"hang: {_place(traceback.format_exc())}"
    except OSError as error:
        return None if error.filename or error.errno is None else _describe(error)
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)
        is_ours = frames[-1].filename.startswith(SRC) and type(error).__module__ in (
            "builtins",
            "counterpoise.errors",
        )
        is_typed = is_ours and type(error).__name__ in ("ValueError", "ConfigError")
        return None if is_typed and "\n" not in str(error) else _describe(error)
    except (Exception, SystemExit) as error:
        return _describe(error)
    return None


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{Path(f.filename).relative_to(SRC)}:{f.lineno}" for f in frames
            if f.filename.startswith(SRC)]  # fmt: skip
    return f"{type(error).__name__} at {ours[-1] if ours else '?'}: {str(error)[:160]!r}"


def _place(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if SRC in line]
    return lines[-1] if lines else "?"


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
