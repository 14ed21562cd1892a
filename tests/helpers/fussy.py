"""A task whose grader says what is wrong, and one whose prompts have nothing but a text."""

from __future__ import annotations

import dataclasses
from itertools import count, islice

from counterpoise.tasks import Reward
from counterpoise.tasks.arithmetic import Arithmetic
from counterpoise.types import Prompt


@dataclasses.dataclass(frozen=True)
class Fussy:
    """Sums, graded with a line on every wrong answer."""

    is_trusted = True

    def prompts(self, split: str, seed: int, start: int = 0):
        return Arithmetic().prompts(split, seed, start)

    def reward(self, prompt: Prompt, text: str) -> Reward:
        right = Arithmetic().reward(prompt, text)
        return Reward(right, "" if right else f"not {len(text)}")


@dataclasses.dataclass(frozen=True)
class Bare:
    """Prompts without an answer."""

    is_trusted = True

    def prompts(self, split: str, seed: int, start: int = 0):
        return (Prompt(f"{split}/{k}", "What is 1 + 1?") for k in islice(count(), start, None))

    def reward(self, prompt: Prompt, text: str) -> float:
        return float("2" in text)
