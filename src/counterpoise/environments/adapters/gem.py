"""``gem:<id>``: an environment of gem, e.g. ``gem:game:GuessTheNumber-v0-easy``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import count
from typing import Any

from counterpoise.environments import Reply
from counterpoise.environments.adapters import OwnRandom, check_package, episode_seed
from counterpoise.errors import nearest
from counterpoise.types import Prompt


class Gem:
    """An environment of gem by its id.

    Args:
        name: as gem registers it.
        params: of the environment itself.

    The model reads the first observation as its prompt and then each further one, with gem's suffix
    (``Enter your next guess.``) below it. Rewards are gem's, paid where its ``step`` pays them.
    """

    def __init__(self, name: str, **params: Any) -> None:
        self.name, self.params = name, params
        check_package(f"gem:{name}", "gem", "gem-llm")
        from gem.envs.registration import ENV_REGISTRY  # pyright: ignore[reportMissingImports]

        if name not in ENV_REGISTRY:
            raise ValueError(f"gem has no environment {name!r}. {nearest(name, ENV_REGISTRY)}")

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The endless stream of a split, a seed per position."""
        seeds = (episode_seed(f"gem:{self.name}", split, seed, at) for at in count(start))
        return (self._prompt(number) for number in seeds)

    def _prompt(self, seed: int) -> Prompt:
        text = _Episode(self, seed).first
        return Prompt(f"gem:{self.name}/{seed}", text, meta={"seed": seed})

    def start(self, prompt: Prompt, seed: int) -> _Episode:
        return _Episode(self, prompt.meta["seed"])


class _Episode:
    def __init__(self, task: Gem, seed: int) -> None:
        self.random = OwnRandom()
        with self.random.swap():
            self.env = importlib.import_module("gem").make(task.name, **task.params)
            self.first = _text(*self.env.reset(seed=seed))

    def step(self, action: str) -> Reply:
        with self.random.swap():
            text, reward, is_terminated, is_truncated, info = self.env.step(action)
        return Reply(_text(text, info), float(reward), bool(is_terminated or is_truncated))


def _text(observation: str, info: dict[str, Any]) -> str:
    suffix = info.get("suffix")
    return f"{observation}\n{suffix}" if suffix else str(observation)
