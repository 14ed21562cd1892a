"""An environment of ours as TRL's ``environment_factory``: one tool, ``act``, by TRL's own loop.

TRL has no end of an episode: the model goes on until it calls no tool. After the end ``act`` says
that it is over, so the last message of the model is a turn that earns nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import trl
from datasets import Dataset

from counterpoise.environments import Environment, Reply, is_environment
from counterpoise.environments.episodes import Episodes
from counterpoise.errors import ConfigError
from counterpoise.hosts.trl.told import Told
from counterpoise.maths.reduce import derived_seed
from counterpoise.sampling.play import FAILED, mean_metrics
from counterpoise.tasks import task as make_task
from counterpoise.tasks.workers import Fault
from counterpoise.trainer.prompts import prompts_from
from counterpoise.types import Prompt

OVER = "The episode is over."
BROKEN = "The environment failed. The episode is over."
FIRST_TRL = (1, 16)


def as_trl(
    environment: Environment | str | Mapping[str, Any],
    *,
    num_prompts: int = 1024,
    seed: int = 0,
    step_time_limit_s: float = 10.0,
    **params: Any,
) -> dict[str, Any]:
    """What ``GRPOTrainer`` takes to play an environment with tool calls: ``environment_factory``
    and ``train_dataset``. The environment pays the reward itself.

        CreditGRPOTrainer(model, args=args, **as_trl("guess", n=16, turns=4))

    Args:
        environment: an environment, or the name of one as in a recipe (``task:``).
        num_prompts: rows of the data set; all rollouts of a row play the same episode.
        seed: of prompts and episodes.
        step_time_limit_s: seconds that one action may take, where the environment is not trusted.
        params: the environment's parameters, where it is named.
    """
    if tuple(int(part) for part in trl.__version__.split(".")[:2]) < FIRST_TRL:
        raise ValueError(
            f"as_trl needs trl >= 1.16, where an environment pays its reward, got"
            f" {trl.__version__}. Use as_rollout_func, or pip install 'trl>=1.16'"
        )
    environment = environment_of(environment, params)
    prompts = prompts_from(environment, "train", seed, 0, num_prompts)  # pyright: ignore[reportArgumentType]
    table = Table(environment, prompts, seed, step_time_limit_s)
    rows = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    # TRL names the reward by the class
    own = type(type(environment).__name__, (PlayedByTools,), {})
    return {
        "environment_factory": lambda: own(table),
        "train_dataset": Dataset.from_dict({"prompt": rows, "episode": list(range(len(rows)))}),
    }


def environment_of(
    environment: Environment | str | Mapping[str, Any], params: Mapping[str, Any]
) -> Environment:
    """The environment, built if it was named."""
    is_named = isinstance(environment, str | Mapping)
    built = make_task(environment, **params) if is_named else environment
    if not is_environment(built) or (params and not is_named):
        problem = "parameters of an environment that is built already" if params else "no turns"
        raise ConfigError(
            f"environment {environment!r}: {problem}. Expected the name of an environment with its"
            " parameters, or an object with prompts(split, seed, start) and start(prompt, seed)."
        )
    return built


class Table:
    """The episodes of one generation, by the place of each rollout.

    TRL resets the environments of all rollouts before it plays any.
    """

    def __init__(
        self, environment: Environment, prompts: Sequence[Prompt], seed: int, time_limit_s: float
    ) -> None:
        self.environment, self.prompts, self.seed = environment, prompts, seed
        self.time_limit_s, self.num_places = time_limit_s, 0
        self.seats: dict[int, int] = {}
        self.episodes: Episodes | None = None

    def place(self) -> int:
        """A new place."""
        self.num_places += 1
        return self.num_places - 1

    def sit(self, place: int, episode: int) -> None:
        """An episode begins; the first one of a generation clears the table."""
        if self.episodes is not None or place in self.seats:
            self.close()
        self.seats[place] = episode

    def close(self) -> None:
        if self.episodes is not None:
            self.episodes.close()
        self.seats, self.episodes = {}, None

    def play(self, place: int, action: str) -> Reply | Fault:
        if self.episodes is None:
            seeds = [derived_seed(self.seed, e, "episode") for e in self.seats.values()]
            prompts = [self.prompts[e] for e in self.seats.values()]
            self.episodes = Episodes(self.environment, prompts, seeds, self.time_limit_s)
        self.episodes.send(list(self.seats).index(place), action)
        ((_, reply),) = self.episodes.poll(wait=True)
        return reply

    def first_state(self, episode: int) -> str:
        first = getattr(self.environment, "first_state", None)
        return first(self.prompts[episode]) if first else ""


class Call(NamedTuple):
    """One call of ``act``; no reply after the end."""

    action: str
    reply: Reply | None


class PlayedByTools:
    """One rollout's episode. TRL makes a tool of every public method but these three."""

    def __init__(self, table: Table) -> None:
        self._table, self._place = table, table.place()
        self._calls: list[Call] = []
        self._first_state = self._end = self._message = ""

    def reset(self, episode: int, **row: object) -> None:
        """Begin an episode; instances are used again and again."""
        self._calls, self._end, self._message = [], "", ""
        self._first_state = self._table.first_state(episode)
        self._table.sit(self._place, episode)

    def get_reward(self) -> float | None:
        """What all turns earned; None where the environment failed."""
        if self._end in FAILED:
            return None
        return sum(call.reply.reward for call in self._calls if call.reply is not None)

    def act(self, text: str) -> str:
        """Do something in the environment and read what it answers.

        Args:
            text: What you do, written as the task asks for it.

        Returns:
            str: The answer of the environment.
        """
        reply = None if self._end else self._step(str(text))
        self._calls.append(Call(str(text), reply))
        if reply is None:
            return BROKEN if self._end in FAILED else OVER
        return f"{reply.text}\n{OVER}" if reply.is_done else reply.text

    def _step(self, action: str) -> Reply | None:
        try:
            reply = self._table.play(self._place, action)
        except Exception as error:
            # TRL would tell it to the model and go on
            reply = Fault("failed", f"{type(error).__name__}: {error}")
        if isinstance(reply, Fault):
            self._end, self._message = reply
            return None
        self._end = "done" if reply.is_done else ""
        return reply


def told_by_calls(episode: PlayedByTools, messages: Sequence[Mapping[str, Any]]) -> Told:
    """What the assistant's messages earned, each by its calls of ``act``.

    A result that TRL took back because it was too long was paid for, since the call ran; the calls
    of the last message did not run where TRL had made its number of iterations.
    """
    calls, state = deque(episode._calls), episode._first_state
    rewards, states, scores = [], [], []
    spoken = [message for message in messages if message["role"] == "assistant"]
    for message in spoken:
        num = sum(map(_is_act, message.get("tool_calls") or []))
        replies = [calls.popleft().reply for _ in range(min(num, len(calls)))]
        heard = [reply for reply in replies if reply is not None]
        states.append(state)
        rewards.append(sum(reply.reward for reply in heard))
        known = [reply.score for reply in heard if reply.score is not None]
        scores.append(known[-1] if known else math.nan)
        state = heard[-1].state if heard else state
    is_cut = not episode._end and bool(spoken and spoken[-1].get("tool_calls"))
    return Told(
        rewards,
        states,
        scores,
        end_reason=episode._end or ("turns" if is_cut else "done"),
        failure=episode._message,
        metrics=mean_metrics([call.reply for call in episode._calls if call.reply is not None]),
    )


def _is_act(call: Mapping[str, Any]) -> bool:
    """Whether a call of the model got as far as ``act``."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    is_ours = call.get("type") == "function" and function.get("name") == "act"
    return is_ours and isinstance(arguments, Mapping) and set(arguments) == {"text"}
