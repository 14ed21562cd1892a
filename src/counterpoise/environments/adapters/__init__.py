"""Environments of other packages: gem, TextArena, verifiers, OpenEnv.

An adapter holds names and settings alone, so that it can be sent to a worker; the package itself is
imported where an episode is played. The seed of an episode is in ``prompt.meta``: all rollouts of a
prompt play the same one.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from counterpoise.environments.games import SPLITS
from counterpoise.errors import nearest

MAX_SEED = 2**31


def check_package(name: str, package: str, install: str) -> None:
    """Raise unless a package is installed; ``install`` is what pip calls it."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{name} needs the package {package!r}: pip install {install}")


def episode_seed(name: str, split: str, seed: int, position: int) -> int:
    """The seed of the episode at a position of a split.

    >>> episode_seed("gem:x", "train", 0, 1) == episode_seed("gem:x", "test", 0, 1)
    False
    """
    if split not in SPLITS:
        raise ValueError(f"{name}: unknown split {split!r}. {nearest(split, SPLITS)}")
    return random.Random(f"{name}/{split}/{seed}/{position}").randrange(MAX_SEED)


class OwnRandom:
    """The state of the global generators that belongs to one episode.

    gem and TextArena seed ``random`` itself (and numpy's). Two episodes in one process would
    disturb each other and the caller.

    >>> own, before = OwnRandom(), random.getstate()
    >>> with own.swap():
    ...     random.seed(0)
    ...     first = random.random()
    >>> random.getstate() == before
    True
    >>> with own.swap():
    ...     second = random.random()
    >>> alone = random.Random(0)
    >>> (first, second) == (alone.random(), alone.random())
    True
    """

    def __init__(self) -> None:
        self._own = _states()

    @contextmanager
    def swap(self) -> Iterator[None]:
        """The episode's own state inside the block, the caller's again after it."""
        outside = _states()
        _restore(self._own)
        try:
            yield
        finally:
            self._own = _states()
            _restore(outside)


def _states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy and numpy.random.get_state()


def _restore(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
