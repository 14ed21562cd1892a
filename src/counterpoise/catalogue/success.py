"""Watch over what counts as success: a threshold that all rewards lie on one side of teaches
nothing, and rewards of several kinds need one that was chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from counterpoise.maths.reduce import LOCAL, Reduce
from counterpoise.stage import SUCCESS
from counterpoise.types import TokenBatch

FIX = (
    "Set success to the reward of a right answer (method.success or task.success in a recipe), or"
    " name the reward that decides (success_reward inside TRL, success inside verl)."
)
# batches before a threshold is called wrong
NUM_BATCHES = 5
# distinct rewards that are remembered; more than two of them is what matters
NUM_VALUES = 8


class Watch(NamedTuple):
    """What was seen so far (JSON), the numbers to log, and the warning if it is new."""

    state: dict[str, Any] | None = None
    metrics: Mapping[str, float] = {}
    warning: str | None = None

    @property
    def kept(self) -> dict[str, Any]:
        """What of it belongs in a method's state."""
        return {} if self.state is None else {"success": self.state}


def watch_start() -> dict[str, Any]:
    """Nothing seen yet."""
    return {"num_batches": 0, "num_rollouts": 0, "num_successes": 0, "rewards": [], "said": False}


def watch_success(
    name: str, batch: TokenBatch, seen: dict[str, Any], reduce: Reduce = LOCAL
) -> Watch:
    """Look at the rewards of one more batch of a method that tells successes from failures.

    The warning comes once: when all rewards of ``NUM_BATCHES`` batches lie on one side, or when
    rewards have more than two values and nobody has said which of them is a success.

    Args:
        name: the method, for the message.
        batch: the whole batch of this rank.
        seen: what the last call returned as ``state``, or ``watch_start()``.
        reduce: pools over ranks.
    """
    num_rollouts = int(reduce.sum(batch.reward_N.new_tensor(batch.num_rollouts)))
    num_successes = int(reduce.sum(batch.is_success_N.sum()))
    values = reduce.cat(batch.reward_N.unique()).tolist()
    state = {
        "num_batches": seen["num_batches"] + 1,
        "num_rollouts": seen["num_rollouts"] + num_rollouts,
        "num_successes": seen["num_successes"] + num_successes,
        "rewards": _few(sorted({*seen["rewards"], *values})),
    }
    message = _one_sided(name, batch, state) or _many_valued(name, batch, state)
    return Watch(
        state={**state, "said": seen["said"] or message is not None},
        metrics={
            "success/frac": num_successes / num_rollouts,
            "success/is_suspect": float(message is not None),
        },
        warning=None if seen["said"] else message,
    )


def _one_sided(name: str, batch: TokenBatch, state: dict[str, Any]) -> str | None:
    num_successes, num_rollouts = state["num_successes"], state["num_rollouts"]
    if state["num_batches"] < NUM_BATCHES or 0 < num_successes < num_rollouts:
        return None
    side = "successes" if num_successes else "failures"
    low, high = state["rewards"][0], state["rewards"][-1]
    return (
        f"method {name!r} tells successes from failures, and all {num_rollouts} rewards of"
        f" {state['num_batches']} batches are {side}: {_rule(batch)}, rewards {low:g} to {high:g}."
        f" {FIX}"
    )


def _many_valued(name: str, batch: TokenBatch, state: dict[str, Any]) -> str | None:
    is_chosen = batch.success is not None or batch.success_N is not None
    if is_chosen or len(state["rewards"]) <= 2:
        return None
    values = ", ".join(f"{value:g}" for value in state["rewards"])
    return (
        f"method {name!r} tells successes from failures, and rewards have more than two values"
        f" ({values}): {_rule(batch)}, because nothing else was said. {FIX}"
    )


def _rule(batch: TokenBatch) -> str:
    if batch.success_N is not None:
        return "the column success_N decides"
    return f"success is reward >= {SUCCESS if batch.success is None else batch.success:g}"


def _few(values: list[float]) -> list[float]:
    """The lowest and highest ones, where there are many."""
    half = NUM_VALUES // 2
    return values if len(values) <= NUM_VALUES else values[:half] + values[-half:]
