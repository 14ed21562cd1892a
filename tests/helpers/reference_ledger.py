"""Loops-only twins of the ledger in float64, and the small models its tests work on.

Written from the mathematics, token by token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from counterpoise.policy import token_logp
from counterpoise.types import Rows, TokenLoss
from helpers.tiny_models import tiny


def clean_gpt2(
    *, tied: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
) -> GPT2LMHeadModel:
    """A tiny GPT-2 that computes in its own dtype throughout (Llama's norm and rotary angles are
    float32 whatever the weights are).
    """
    return tiny(
        "gpt2", seed=seed, dtype=dtype, tie_word_embeddings=tied, n_embd=8, n_head=2, vocab_size=11
    )


def token_gradients(
    model, prompt_ids, token_ids_NT: Tensor, mask_NT: Tensor, names: list[str] | None = None
) -> dict[tuple[int, int], Tensor]:
    """The gradient of every response token's log-prob as one flat vector, one backward a token."""
    params = [p for name, p in model.named_parameters() if names is None or name in names]
    out = {}
    for n, t in mask_NT.nonzero().tolist():
        logp_NT = token_logp(model, [prompt_ids[n]], token_ids_NT[n : n + 1], mask_NT[n : n + 1])
        grads = torch.autograd.grad(logp_NT[0, t], params, allow_unused=True)
        out[n, t] = torch.cat(
            [
                torch.zeros_like(p).flatten() if g is None else g.flatten()
                for g, p in zip(grads, params)
            ]
        )
    return out


def phi(pi_j: list[float], pi_k: list[float], a_j: int, a_k: int) -> float:
    """<e_a - pi, e_b - pi'> summed over the vocabulary."""
    return sum(((v == a_j) - pi_j[v]) * ((v == a_k) - pi_k[v]) for v in range(len(pi_j)))


def prefixes(token_ids: list[list[int]], group: list[int]) -> dict[tuple, list[int]]:
    """(group, tokens up to and including this one) -> rollouts that have it."""
    out: dict[tuple, list[int]] = {}
    for n, ids in enumerate(token_ids):
        for t in range(len(ids)):
            out.setdefault((group[n], *ids[: t + 1]), []).append(n)
    return out


def sharing_of(
    token_ids: list[list[int]], group: list[int], advantage: list[float]
) -> dict[tuple[int, int], tuple[int, int, bool, bool]]:
    """(row, position) -> positive and negative rollouts at the node, whether the whole group is,
    whether its context is a fork.
    """
    nodes = prefixes(token_ids, group)
    out = {}
    for n, ids in enumerate(token_ids):
        for t in range(len(ids)):
            here = nodes[(group[n], *ids[: t + 1])]
            members = [m for m in range(len(group)) if group[m] == group[n]]
            at_context = [m for m in members if token_ids[m][:t] == ids[:t]] if t else members
            next_tokens = {token_ids[m][t] for m in at_context if len(token_ids[m]) > t}
            signs = {(advantage[m] > 0) - (advantage[m] < 0) for m in at_context}
            is_fork = {1, -1} <= signs and len(next_tokens) > 1
            positive, negative = (
                sum(advantage[m] > 0 for m in here),
                sum(advantage[m] < 0 for m in here),
            )
            out[n, t] = positive, negative, len(members) > 1 and len(here) == len(members), is_fork
    return out


def residual_mean(
    token_ids: list[list[int]], group: list[int], advantage: list[float], value: list[list[float]]
) -> float:
    """Mean over nodes with both signs of |sum value| / sum |value|."""
    found = []
    for node, rows in prefixes(token_ids, group).items():
        t = len(node) - 2
        if {1, -1} <= {(advantage[n] > 0) - (advantage[n] < 0) for n in rows}:
            total = sum(abs(value[n][t]) for n in rows)
            found.append(abs(sum(value[n][t] for n in rows)) / total if total else 0.0)
    return sum(found) / len(found)


def kl(after: list[float], before: list[float]) -> float:
    """sum p' log(p' / p)."""
    return sum(a * math.log(a / b) for a, b in zip(after, before))


def rows_of(batch, credit_NT: Tensor, advantage_N: Tensor, scale_NT: Tensor) -> Rows:
    """All rows of a batch as one update."""
    return Rows(
        torch.arange(batch.num_rollouts),
        batch.mask_NT,
        batch.group_N,
        batch.reward_N,
        advantage_N,
        credit_NT,
        batch.sampler_logp_NT,
        scale_NT,
    )


def loss_of(
    coef_NT: Tensor, ratio_NT: Tensor | None = None, clipped_NT: Tensor | None = None
) -> TokenLoss:
    """A loss with these coefficients."""
    ratio_NT = torch.ones_like(coef_NT) if ratio_NT is None else ratio_NT
    clipped_NT = torch.zeros_like(coef_NT, dtype=torch.bool) if clipped_NT is None else clipped_NT
    return TokenLoss(torch.zeros_like(coef_NT), ratio_NT, clipped_NT, coef_NT)
