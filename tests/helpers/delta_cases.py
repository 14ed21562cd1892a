"""Batches and variants for the tests of DelTA."""

from __future__ import annotations

import torch

from counterpoise.types import TokenBatch
from helpers import reference_delta as reference

VOCAB, HIDDEN, KEPT = 6, 3, 3
PROXIES = ("row", "topk", "head")
# every ablation of the paper, and where it is reached
VARIANTS = {
    "full": {},
    "count_credited": {"count_zero": False},
    "within_side": {"score": "within_side"},
    "hard": {"hard": True},
    "no_refinement": {"refinements": 0},
    "two_refinements": {"refinements": 2},
    "three_refinements": {"refinements": 3},
    "no_normaliser": {"normalise": False},
    "raw_alpha": {"low": 0.0, "high": 1.0},
    "fixed_temperature": {"gamma": 1.0},
    "top": {"select": "top"},
    "bottom": {"select": "bottom"},
    "top_fifth_unscaled": {"select": "top", "select_frac": 0.2, "normalise": False},
    "hard_within_side": {"score": "within_side", "hard": True},
    "wide": {"low": 0.5, "high": 2.0, "refinements": 2, "count_zero": False},
}


def with_columns(batch, seed=0, dtype=torch.float64):
    """The batch with hidden states, a head, and the log-probs and candidates that this head gives;
    noise on padding.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden_NTD = torch.randn(*batch.mask_NT.shape, HIDDEN, generator=generator, dtype=torch.float64)
    head_VD = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    logp_NTV = torch.log_softmax(hidden_NTD @ head_VD.T, -1)
    best = logp_NTV.topk(KEPT)
    return batch.replace(
        sampler_logp_NT=logp_NTV.gather(-1, batch.token_ids_NT[..., None]).squeeze(-1).to(dtype),
        hidden_NTD=hidden_NTD.to(dtype),
        head_VD=head_VD.to(dtype),
        topk_ids_NTK=best.indices,
        topk_logp_NTK=best.values.to(dtype),
    )


def example(seed=0, lengths=(4, 2, 5, 3, 1, 4, 2, 3), dtype=torch.float64):
    """Eight rollouts of four prompts; credit of both signs and different sizes, two rollouts with
    advantage 0.
    """
    generator = torch.Generator().manual_seed(100 + seed)
    ids = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
    batch = TokenBatch.from_lists(
        ids,
        group=[0, 0, 1, 1, 2, 2, 3, 3][: len(ids)],
        reward=[1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0][: len(ids)],
        sampler_logp=[[0.0] * n for n in lengths],
        dtype=dtype,
    )
    advantage_N = torch.tensor(
        [1.0, -0.5, 2.0, -1.5, 0.0, 0.0, -0.25, 0.75][: len(ids)], dtype=dtype
    )
    return with_columns(batch, seed, dtype), advantage_N[:, None] * batch.mask_NT


def ragged(value_NT, batch):
    return [row[:n] for row, n in zip(value_NT.tolist(), batch.length_N.tolist())]


def twin(credit_NT, batch, *, proxy="row", topk=None, temperature=1.0, **params):
    v = reference.vectors(batch, proxy, topk, temperature)
    rows = reference.weights(ragged(credit_NT, batch), v, **params)
    out_NT = torch.zeros(batch.mask_NT.shape, dtype=torch.float64)
    for i, row in enumerate(rows):
        out_NT[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return out_NT
