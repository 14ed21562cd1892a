"""What a person should hear of while a run goes on: for the terminal and for ``warnings`` in
``metrics.jsonl`` and ``evals.jsonl``.

A warning follows from the numbers of its batch, so that a resumed run repeats it.
"""

from __future__ import annotations

import contextlib
import warnings as python_warnings
from collections.abc import Iterator, Mapping, Sequence

from counterpoise.catalogue.method import Method
from counterpoise.errors import MethodWarning
from counterpoise.rollouts import RolloutBatch
from counterpoise.text import number
from counterpoise.types import Credit

FLAT_BATCHES = 3  # so many batches in a row with nothing to learn are worth a line


def flat_batches(before: int, method: Method, collected: RolloutBatch, credit: Credit) -> int:
    """Batches in a row, up to this one, whose rewards are all equal or whose advantages are all 0;
    where a rule tells turns apart, those of all turns. A method without rewards, or with a teacher,
    learns from any, and none learns where no token has credit.

    ``before`` is the number of the batch before.
    """
    reward_N = collected.batch.reward_N
    is_flat = bool((reward_N == reward_N[0]).all() or (credit.advantage_N == 0).all())
    if method.advantage.has("ignores_rewards") or method.has_teacher:
        is_flat = False
    elif credit.advantage_NU is not None:
        is_flat = not bool(credit.advantage_NU.any())
    if not any(term.has("values_rollouts") for term in method.terms):
        is_flat = is_flat or not bool(credit.credit_NT.any())
    return before + 1 if is_flat else 0


@contextlib.contextmanager
def said_by_us() -> Iterator[None]:
    """Warnings of a method are lines of the run (``Credit.warnings``), not Python's."""
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("ignore", MethodWarning)
        yield


def batch_warnings(
    collected: RolloutBatch, credit: Credit, metrics: Mapping[str, float], success: float
) -> list[str]:
    """One line for each thing of a batch that is not as it should be."""
    return [
        *grader_warning(
            collected.grader_messages, collected.num_grader_failures, collected.batch.num_rollouts
        ),
        *flat_warning(metrics, success),
        *credit.warnings,
    ]


def listed(warnings: list[str]) -> dict[str, list[str]]:
    """The key ``warnings`` of a row; a row without any has no such key."""
    return {"warnings": warnings} if warnings else {}


def grader_warning(messages: Sequence[str], num_failures: int, num_rollouts: int) -> list[str]:
    """How many graders failed, and how the first one did."""
    if not num_failures:
        return []
    first = f". First, {messages[0]}" if messages else ""
    return [f"the grader failed on {num_failures} of {num_rollouts} rollouts{first}"]


def flat_warning(metrics: Mapping[str, float], success: float) -> list[str]:
    """Nothing to learn for several batches: said once for each such stretch."""
    if metrics["reward/flat_batches"] != FLAT_BATCHES:
        return []
    mean = metrics["reward/mean"]
    is_one = metrics["reward/min"] == metrics["reward/max"]
    what = f"every reward is {number(mean)}" if is_one else "the rewards of each prompt are equal"
    if metrics["reward/constant_group_frac"] < 1:
        return [
            f"nothing to learn for {FLAT_BATCHES} batches: rewards differ, and no token has credit."
            " The rules of the method took all of it: look at credit/... in the metrics."
        ]
    advice = (
        "The task is solved: take a harder one"
        if metrics["reward/min"] >= success
        else "The task is too hard for this model, its answers are cut off or the grader misreads"
        " them: look at some rollouts"
    )
    return [f"nothing to learn for {FLAT_BATCHES} batches: {what}. {advice}."]
