"""``textarena:<id>``: a game of TextArena for one player, e.g. ``textarena:Wordle-v0``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import count
from typing import Any

from counterpoise.environments import Reply
from counterpoise.environments.adapters import OwnRandom, check_package, episode_seed
from counterpoise.errors import nearest
from counterpoise.types import Prompt


class TextArena:
    """A game of TextArena for one player, by its id.

    Args:
        name: as TextArena registers it.
        params: of the game itself.

    The model reads what is new since its last turn, without its own action, which TextArena
    repeats. The reward is TextArena's own, paid at the end.
    """

    def __init__(self, name: str, **params: Any) -> None:
        self.name, self.params = name, params
        check_package(f"textarena:{name}", "textarena", "textarena")
        from textarena.envs.registration import ENV_REGISTRY  # pyright: ignore[reportMissingImports]

        if name not in ENV_REGISTRY:
            raise ValueError(f"TextArena has no game {name!r}. {nearest(name, ENV_REGISTRY)}")

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The endless stream of a split, a seed per position."""
        seeds = (episode_seed(f"textarena:{self.name}", split, seed, at) for at in count(start))
        return (self._prompt(number) for number in seeds)

    def _prompt(self, seed: int) -> Prompt:
        text = _Episode(self, seed).first
        return Prompt(f"textarena:{self.name}/{seed}", text, meta={"seed": seed})

    def start(self, prompt: Prompt, seed: int) -> _Episode:
        return _Episode(self, prompt.meta["seed"])


class _Episode:
    def __init__(self, task: TextArena, seed: int) -> None:
        self.random = OwnRandom()
        with self.random.swap():
            self.env = importlib.import_module("textarena").make(task.name, **task.params)
            _reset(self.env, task.name, seed)
            self.first = self._news()

    def step(self, action: str) -> Reply:
        with self.random.swap():
            is_done, _ = self.env.step(action)
            text = self._news()
            rewards, _ = self.env.close() if is_done else (None, None)
        return Reply(text, float((rewards or {}).get(0, 0.0)), bool(is_done))

    def _news(self) -> str:
        """Messages since the last look, but for the player's own actions."""
        game = self.env
        while hasattr(game, "env"):  # below wrappers, which show the whole history each time
            game = game.env
        _, messages = game.get_observation()
        return "\n".join(text for _, text, kind in messages if kind.name != "PLAYER_ACTION")


def _reset(env: Any, name: str, seed: int) -> None:
    try:
        env.reset(num_players=1, seed=seed)
    except AssertionError as error:
        raise ValueError(
            f"textarena:{name} cannot be played by one player ({error}). Choose a game for one."
        ) from error
