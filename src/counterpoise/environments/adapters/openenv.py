"""``openenv:<url>``: an environment behind a server of OpenEnv."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from counterpoise.environments import Reply
from counterpoise.environments.adapters import check_package, episode_seed
from counterpoise.errors import check_text
from counterpoise.types import Prompt


class OpenEnv:
    """An environment of OpenEnv by the address of its server.

    Args:
        url: of the server, e.g. ``http://localhost:8000``.
        action: the field of an action that holds what the model wrote.
        observation: the field of an observation that the model reads; None takes the only text in
            it, or all of it as JSON.
        reset: further fields of every reset.

    Each episode is a session of its own. The server has to honour the seed of a reset: a first
    observation other than the prompt's ends the row.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        observation: str | None = None,
        reset: Mapping[str, object] | None = None,
    ) -> None:
        check_text("openenv", action=action)
        check_text("openenv", or_none=True, observation=observation)
        check_package(f"openenv:{url}", "openenv", "openenv-core")
        self.url, self.action, self.observation, self.reset = url, action, observation, reset or {}

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The endless stream of a split, a seed per position."""
        seeds = (episode_seed(f"openenv:{self.url}", split, seed, at) for at in count(start))
        return (self._prompt(number) for number in seeds)

    def _prompt(self, seed: int) -> Prompt:
        episode = _Episode(self, seed)
        episode.close()
        return Prompt(f"openenv:{self.url}/{seed}", episode.first, meta={"seed": seed})

    def start(self, prompt: Prompt, seed: int) -> _Episode:
        episode = _Episode(self, prompt.meta["seed"])
        if episode.first != prompt.text:
            episode.close()
            raise ValueError(
                f"openenv:{self.url}: two resets with the seed {prompt.meta['seed']} began"
                f" differently, {prompt.text[:40]!r} and {episode.first[:40]!r}. All rollouts of a"
                " prompt have to play one episode: make the server's reset use its seed."
            )
        return episode


class _Episode:
    def __init__(self, task: OpenEnv, seed: int) -> None:
        from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]

        self.task = task
        self.client: Any = GenericEnvClient(base_url=task.url).sync()
        self.first = readable(self.client.reset(seed=seed, **task.reset).observation, task)

    def step(self, action: str) -> Reply:
        result = self.client.step({self.task.action: action})
        if result.done:
            self.close()
        reward = 0.0 if result.reward is None else float(result.reward)
        return Reply(readable(result.observation, self.task), reward, bool(result.done))

    def close(self) -> None:
        self.client.close()

    def __del__(self) -> None:
        if hasattr(self, "client"):
            self.client.close()


def readable(observation: Mapping[str, object], task: OpenEnv) -> str:
    """What the model reads of an observation."""
    if task.observation is not None and task.observation not in observation:
        raise ValueError(
            f"openenv:{task.url}: an observation has no field {task.observation!r}, it has"
            f" {', '.join(observation)}. Set task.observation to one of them."
        )
    texts = [value for value in observation.values() if isinstance(value, str)]
    if task.observation is not None:
        return str(observation[task.observation])
    return texts[0] if len(texts) == 1 else json.dumps(observation)
