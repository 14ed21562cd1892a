"""``verifiers:<id>``: a multi-turn environment of verifiers, up to its version 0.3.

Its own loop is followed turn by turn: set up, answer (``env_response``), stop conditions, and at
the end its rubric. Its version 0.4 has no such environments: their harness samples by itself.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, TypeVar

from counterpoise.environments import Reply
from counterpoise.environments.adapters import check_package
from counterpoise.environments.games import draw
from counterpoise.types import Prompt

T = TypeVar("T")
INSTALL = "'verifiers[all]<0.4'"


class Verifiers:
    """A multi-turn environment of verifiers by its id.

    Args:
        name: as ``verifiers.load_environment`` takes it.
        params: of the environment itself.

    The model reads the contents of a row's messages, and then those of every answer. The reward is
    the rubric's, paid at the end. Tools that a model calls through its chat template are refused:
    an action is text here.
    """

    def __init__(self, name: str, **params: Any) -> None:
        check_package(f"verifiers:{name}", "verifiers", INSTALL)
        if importlib.util.find_spec("verifiers.envs") is None:
            raise ValueError(
                f"verifiers:{name} needs a version with multi-turn environments: pip install"
                f" {INSTALL}."
            )
        self.name, self.params = name, params
        if not hasattr(self._env, "env_response") or self._env.tool_defs:
            raise ValueError(
                f"verifiers:{name} is a {type(self._env).__name__}. Expected a MultiTurnEnv whose"
                " turns are text, without tool_defs."
            )

    def __getstate__(self) -> dict[str, Any]:
        # the environment is made again where it is needed: not all of them can be pickled
        return {key: value for key, value in self.__dict__.items() if key != "_env"}

    @cached_property
    def _env(self) -> Any:
        return importlib.import_module("verifiers").load_environment(self.name, **self.params)

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The endless stream of a split: the rows of its dataset, shuffled again each time."""
        rows = self._env.get_eval_dataset() if split == "test" else self._env.get_dataset()
        name = f"verifiers:{self.name}"
        places = (draw(name, len(rows), split, seed, position) for position in count(start))
        return (self._prompt(place, dict(rows[place])) for place in places)

    def _prompt(self, place: int, row: dict[str, Any]) -> Prompt:
        answer = row.get("answer")
        return Prompt(
            f"verifiers:{self.name}/{place}",
            contents(row["prompt"]),
            answer if isinstance(answer, str) else "",
            {"row": {"example_id": place, **row}},
        )

    def start(self, prompt: Prompt, seed: int) -> _Episode:
        return _Episode(self._env, prompt)


class _Episode:
    """One conversation; verifiers is asynchronous, so that it has a loop of its own."""

    def __init__(self, env: Any, prompt: Prompt) -> None:
        self.env, self.loop = env, asyncio.new_event_loop()
        self.state = self._run(env.init_state(prompt.meta["row"], _no_client(), "counterpoise"))
        changed = self._run(env.setup_state(self.state))
        self.state = self.state if changed is None else changed
        self.messages: list[Any] = list(self.state["prompt"])

    def step(self, action: str) -> Reply:
        return self._run(self._step(action))

    async def _step(self, action: str) -> Reply:
        env, state = self.env, self.state
        await env.add_trajectory_step(state, turn(self.messages, action, state))
        shown = ""
        if not await env.is_completed(state):
            messages = await env.get_prompt_messages(state)
            self._raise(state)
            # a final answer ends the game without a further prompt
            final = state.get("final_env_response")
            shown = contents(final or messages[len(self.messages) + 1 :])
            self.messages = list(messages)
        if not await env.is_completed(state):
            return Reply(shown)
        self._raise(state)
        await env.cleanup(state)
        await env.rubric.score_rollout(state)
        metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        return Reply(shown, float(state["reward"]), is_done=True, metrics=metrics)

    def _raise(self, state: Mapping[str, Any]) -> None:
        if state.get("error") is not None:
            raise RuntimeError(f"verifiers: {state['error']!r}")

    def _run(self, job: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(job)

    def __del__(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()


def contents(messages: str | Sequence[Any]) -> str:
    """What messages say, one below the other.

    >>> contents([{"role": "system", "content": "Play."}, {"role": "user", "content": "Go"}])
    'Play.\\n\\nGo'
    """
    if isinstance(messages, str):
        return messages
    texts = [one["content"] if isinstance(one, Mapping) else one.content for one in messages]
    return "\n\n".join(str(text) for text in texts if text)


def turn(messages: list[Any], action: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """A step of verifiers' trajectory: what the model read, and what it wrote."""
    assistant = importlib.import_module("verifiers.types").AssistantMessage
    return {
        "prompt": messages,
        "completion": [assistant(content=action)],
        "response": None,
        "tokens": None,
        "reward": None,
        "advantage": None,
        "is_truncated": False,
        "trajectory_id": state["trajectory_id"],
        "extras": {},
    }


def _no_client() -> Any:
    """Where to sample from: nowhere, our own engine does."""
    return importlib.import_module("verifiers.types").ClientConfig(api_base_url="http://localhost")
