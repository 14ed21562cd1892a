"""What a TokenBatch must be: shapes, values, and where they are wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from counterpoise.errors import check_number

if TYPE_CHECKING:
    from counterpoise.types import TokenBatch

FLOAT_COLUMNS = ("sampler_logp_NT", "entropy_NT", "trainer_logp_NT", "ref_logp_NT")


def pad_rows(
    rows: Sequence[Sequence[float]], lengths: list[int], width: int, dtype: torch.dtype, name: str
) -> Tensor:
    """Ragged rows as one tensor, right-padded with 0; lengths other than those of the tokens are an
    error.
    """
    got = [len(row) for row in rows]
    if got != lengths:
        first = next(
            (i for i, (a, b) in enumerate(zip(got, lengths)) if a != b), min(len(got), len(lengths))
        )
        raise ValueError(
            f"from_lists: {name} and token_ids disagree at rollout {first}: "
            f"got lengths {got[first : first + 1]}, expected {lengths[first : first + 1]}."
        )
    out = torch.zeros(len(rows), width, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return out


def check_shapes(batch: TokenBatch) -> None:
    """Every column has the axes that its name says."""
    if batch.token_ids_NT.dim() != 2:
        raise ValueError(
            f"TokenBatch: token_ids_NT must be [N, T], got {list(batch.token_ids_NT.shape)}."
        )
    n, t = batch.token_ids_NT.shape
    if n == 0 or t == 0:
        raise ValueError(f"TokenBatch: no rollouts to work on, token_ids_NT is [{n}, {t}].")
    named = [
        (f.name, getattr(batch, f.name))
        for f in dataclasses.fields(batch)
        if f.name not in ("max_length", "success", "extra")
    ]
    for name, value in named:
        if value is None or name == "head_VD":
            continue
        axes = name.rsplit("_", 1)[1]
        expected = {"N": n, "T": t}
        if value.dim() != len(axes) or any(
            value.shape[k] != expected.get(a, value.shape[k]) for k, a in enumerate(axes)
        ):
            raise ValueError(
                f"TokenBatch: {name} has shape {list(value.shape)}, expected"
                f" {[expected.get(a, a) for a in axes]} (N={n} rollouts, T={t} padded response"
                " tokens from token_ids_NT)."
            )
    for name, value in batch.extra.items():
        if value.shape[:1] != (n,):
            raise ValueError(
                f"TokenBatch: extra column {name!r} has shape {list(value.shape)}, expected first"
                f" axis N={n}."
            )


def check_values(batch: TokenBatch) -> None:
    """Every rollout has a token; rewards and log-probs are finite."""
    check_number("TokenBatch", or_none=True, success=batch.success)
    empty_N = ~batch.mask_NT.any(1)
    if empty_N.any():
        raise ValueError(
            f"TokenBatch: rollouts {_which(empty_N)} have no response token (mask_NT is all False)."
            " Drop them, or count the stop token as part of the response."
        )
    if not torch.isfinite(batch.reward_N).all():
        raise ValueError(
            "TokenBatch: reward_N is not finite at rollouts"
            f" {_which(~torch.isfinite(batch.reward_N))}."
        )
    for name in FLOAT_COLUMNS:
        value = getattr(batch, name)
        if value is None:
            continue
        bad_N = (~torch.isfinite(value) & batch.mask_NT).any(1)
        if bad_N.any():
            raise ValueError(
                f"TokenBatch: {name} is not finite on response tokens of rollouts {_which(bad_N)}."
            )


def _which(bad_N: Tensor) -> str:
    rows = bad_N.nonzero().flatten().tolist()
    return str(rows[:8])[:-1] + (", ...]" if len(rows) > 8 else "]")
