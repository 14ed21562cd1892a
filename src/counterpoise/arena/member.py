"""A member of a stack: one run of an arm, its method and what it carries from batch to batch."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from typing import Any

from counterpoise.catalogue.method import Method
from counterpoise.trainer.config import Config


@dataclasses.dataclass
class Member:
    """One training among many.

    Args:
        config: the recipe of this run: its seed, method and rate are its own, all else is shared by
            the members of a stack.
        state: the method's state after the last batch.
        num_prompts: prompts taken from the stream so far.
        num_updates: updates so far.
        rewards: mean reward of each batch since the last evaluation.
        stopped: why this run ended early, in one line; empty while it runs.
    """

    config: Config
    method: Method
    state: dict[str, Any] | None = None
    num_prompts: int = 0
    num_updates: int = 0
    rewards: list[float] = dataclasses.field(default_factory=list)
    stopped: str = ""

    @functools.cached_property
    def pickled(self) -> bytes:
        """The method as worker processes get it."""
        return pickle.dumps(self.method)

    @property
    def seed(self) -> int:
        return self.config.seed
