"""Solution drift: a frozen bank of verified, distinct solutions, and how the policy moves among
them.

A prompt of the bank has two solutions or more. With s_k the log-prob of solution k as a sequence,
the policy's taste is the distribution softmax(s) over them: its log-odds s_1 - s_2 and its entropy.
Learning that only removes wrong answers leaves both alone. Two numbers say how they move: the mean
|change of the log-odds|, which a random walk raises too, and the slope of the change against the
log-odds at the start. Sharpening multiplies all log-odds by some a > 1: slope a - 1, the favourite
gains. A walk without direction has slope 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.maths.intervals import Interval, interval_of, ratios_by_cluster
from counterpoise.policy import measure

LEAST_PROMPTS = 3  # of a slope
MAX_SOLUTIONS = 4  # of one prompt: keeps the state small

# JSON: prompt_id, prompt_ids, solutions (token ids), start (log-probs when first scored, or None)
Entry = dict[str, Any]


def fill_bank(
    bank: list[Entry],
    size: int,
    prompt_names: Sequence[str],
    prompt_ids: Sequence[Sequence[int]],
    solutions: Sequence[Sequence[int]],
    is_verified: Sequence[bool],
) -> list[Entry]:
    """The bank with prompts of a batch that have two distinct verified solutions, up to ``size``
    prompts. What is in it stays as it is.

    Args:
        prompt_names, prompt_ids, solutions, is_verified: one per rollout.

    >>> bank = fill_bank(
    ...     [], 1, ["a", "a", "a"], [[1], [1], [1]], [[5], [5], [6]], [True, True, True]
    ... )
    >>> bank[0]["solutions"]
    [[5], [6]]
    """
    entries: dict[str, Entry] = {}
    taken = {entry["prompt_id"] for entry in bank}
    for name, prompt, solution, is_good in zip(prompt_names, prompt_ids, solutions, is_verified):
        if not is_good or name in taken:
            continue
        entry = entries.setdefault(
            name, {"prompt_id": name, "prompt_ids": list(prompt), "solutions": [], "start": None}
        )
        if list(solution) not in entry["solutions"] and len(entry["solutions"]) < MAX_SOLUTIONS:
            entry["solutions"].append(list(solution))
    whole = [entry for entry in entries.values() if len(entry["solutions"]) > 1]
    return [*bank, *whole[: max(0, size - len(bank))]]


def drift(
    bank: list[Entry], score: Callable[[list[list[int]], list[list[int]]], Tensor]
) -> tuple[dict[str, float], list[Entry]]:
    """Where the policy stands among the bank's solutions, and the bank with start values for
    entries scored the first time.

    ``log_odds_change``: mean over prompts of |log-odds of the first two solutions - the same at the
    start|. ``entropy``: mean entropy of softmax(s), nats. ``entropy_change``: its mean change since
    the start. ``slope``, ``slope_low``, ``slope_high``: see ``slope``; from prompts that were
    scored before, three at least.

    Args:
        score: (prompt ids, solution ids) -> log-prob of each solution as a sequence.
    """
    if not bank:
        return {}, bank
    prompts = [entry["prompt_ids"] for entry in bank for _ in entry["solutions"]]
    logp_S = score(prompts, [ids for entry in bank for ids in entry["solutions"]])
    scores = [
        part.tolist() for part in logp_S.double().split([len(entry["solutions"]) for entry in bank])
    ]
    is_known = [bool(entry["start"]) for entry in bank]
    bank = [entry if entry["start"] else entry | {"start": now} for entry, now in zip(bank, scores)]
    starts = [entry["start"] for entry in bank]
    start_P = np.array([log_odds(start) for start in starts])
    change_P = np.array([log_odds(now) for now in scores]) - start_P
    entropies, at_start = (
        [solution_entropy(now) for now in scores],
        [solution_entropy(start) for start in starts],
    )
    num = len(bank)
    return {
        "num_prompts": num,
        "log_odds_change": float(np.abs(change_P).mean()),
        **slope_numbers(start_P[is_known], change_P[is_known]),
        "entropy": sum(entropies) / num,
        "entropy_change": (sum(entropies) - sum(at_start)) / num,
    }, bank


def log_odds(scores: Sequence[float]) -> float:
    """Of the first solution against the second."""
    return scores[0] - scores[1]


def slope(start_P: np.ndarray, change_P: np.ndarray) -> Interval:
    """Least squares slope of the change of the log-odds against the log-odds at the start, with a
    95% interval over prompts.

    sum_p x_p y_p / sum_p x_p^2, without a constant: which of two solutions comes first is a matter
    of order, and swapping them turns the sign of both x and y.

    >>> slope(np.array([1.0, -2.0, 0.5]), np.array([0.5, -1.0, 0.25])).mean  # all log-odds x 1.5
    0.5
    """
    prompt_P = np.arange(len(start_P))
    ratio_B1 = ratios_by_cluster(
        [start_P * change_P], [start_P * start_P], prompt_P, least=LEAST_PROMPTS
    )
    return interval_of(ratio_B1[:, 0])


def slope_numbers(start_P: np.ndarray, change_P: np.ndarray) -> dict[str, float]:
    if len(start_P) < LEAST_PROMPTS or not np.any(start_P):
        return {}
    mean, low, high = slope(start_P, change_P)
    return {"slope": float(mean), "slope_low": float(low), "slope_high": float(high)}


def score_solutions(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    solutions: list[list[int]],
    *,
    temperature: float,
    token_budget: int,
) -> Tensor:
    """Log-prob of each solution as a sequence, in the parameters' own precision: sums of many
    tokens do not bear bfloat16 products.
    """
    width = max(map(len, solutions))
    ids_NT = torch.tensor([ids + [0] * (width - len(ids)) for ids in solutions])
    mask_NT = torch.tensor([[t < len(ids) for t in range(width)] for ids in solutions])
    rollouts = (prompt_ids, ids_NT.to(model.device), mask_NT.to(model.device))
    settings = {"temperature": temperature, "token_budget": token_budget}
    return measure(model, *rollouts, {"trainer_logp_NT"}, **settings)["trainer_logp_NT"].sum(1)


def solution_entropy(scores: list[float]) -> float:
    """Entropy of softmax(scores), nats."""
    logp = torch.tensor(scores, dtype=torch.float64).log_softmax(0)
    return float(-(logp.exp() * logp).sum())
