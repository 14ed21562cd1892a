"""Solution drift: a frozen bank of verified, distinct solutions, and how the policy moves among
them.

A prompt of the bank has two solutions or more. With s_k the log-prob of solution k as a sequence,
the policy's taste is the distribution softmax(s) over them: its log-odds s_1 - s_2 and its entropy.
Learning that only removes wrong answers leaves both alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.policy import measure

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
    found: dict[str, Entry] = {}
    taken = {entry["prompt_id"] for entry in bank}
    for name, prompt, solution, is_good in zip(prompt_names, prompt_ids, solutions, is_verified):
        if not is_good or name in taken:
            continue
        entry = found.setdefault(
            name, {"prompt_id": name, "prompt_ids": list(prompt), "solutions": [], "start": None}
        )
        if list(solution) not in entry["solutions"] and len(entry["solutions"]) < MAX_SOLUTIONS:
            entry["solutions"].append(list(solution))
    whole = [entry for entry in found.values() if len(entry["solutions"]) > 1]
    return [*bank, *whole[: max(0, size - len(bank))]]


def drift(
    bank: list[Entry], score: Callable[[list[list[int]], list[list[int]]], Tensor]
) -> tuple[dict[str, float], list[Entry]]:
    """Where the policy stands among the bank's solutions, and the bank with start values for
    entries scored the first time.

    ``log_odds_change``: mean over prompts of |log-odds of the first two solutions - the same at the
    start|. ``entropy``: mean entropy of softmax(s), nats. ``entropy_change``: its mean change since
    the start.

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
    bank = [entry if entry["start"] else entry | {"start": now} for entry, now in zip(bank, scores)]
    starts = [entry["start"] for entry in bank]
    moved = [abs((now[0] - now[1]) - (start[0] - start[1])) for now, start in zip(scores, starts)]
    entropies, at_start = [_entropy(now) for now in scores], [_entropy(start) for start in starts]
    num = len(bank)
    return {
        "num_prompts": num,
        "log_odds_change": sum(moved) / num,
        "entropy": sum(entropies) / num,
        "entropy_change": (sum(entropies) - sum(at_start)) / num,
    }, bank


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


def _entropy(scores: list[float]) -> float:
    logp = torch.tensor(scores, dtype=torch.float64).log_softmax(0)
    return float(-(logp.exp() * logp).sum())
