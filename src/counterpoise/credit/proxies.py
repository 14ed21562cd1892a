"""Token-gradient proxies v of DelTA, never laid out as [tokens, D] or [tokens, V, D].

A proxy is three functions of the credited tokens of a rank: ``total`` (a weighted sum of v),
``dot`` (v . direction), ``squared``
(|v|^2).

    row    v = (1 - p(y)) h                      in R^D
    topk   v = W_y - sum_j p~_j W_j = W^T u      in R^D, u sparse
    head   v = (e_y - p) h^T   in R^{V x D}, the exact gradient of log p(y) by the head's weight

All walk over chunks of tokens; sums are kept in float64 (``head``: in the working dtype, the
accumulator is as large as the head).
Axes: M credited tokens, B tokens of a chunk, D hidden size, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.errors import check_choice, check_number, check_whole
from counterpoise.maths.head import CHUNK_LOGITS
from counterpoise.types import TokenBatch

CHUNK_NUMBERS = 2**22  # numbers of one chunk of hidden states or candidates: 16 MiB in float32

# proxy -> the columns it reads
PROXY_COLUMNS = {
    "row": frozenset({"hidden_NTD"}),
    "topk": frozenset({"topk_ids_NTK", "topk_logp_NTK", "head_VD"}),
    "head": frozenset({"hidden_NTD", "head_VD"}),
}


class Proxy(NamedTuple):
    """v of the credited tokens; ``part`` is a slice of them."""

    total: Callable[[Tensor, slice], Tensor]  # (weight_M, part) -> sum over the part of weight * v
    dot: Callable[[Tensor, slice], Tensor]  # (direction, part) -> v . direction, per token
    squared: Callable[[slice], Tensor]  # part -> |v|^2, one number per token


def check_proxy(proxy: str, topk: int | None, temperature: float) -> None:
    """Parameters of a proxy, without looking at a batch."""
    check_choice("delta", PROXY_COLUMNS, proxy=proxy)
    check_whole("delta", least=1, or_none=True, topk=topk)
    check_number("delta", above=0, temperature=temperature)
    if topk is not None and proxy != "topk":
        raise ValueError(f"delta: topk is read by proxy='topk' alone, got proxy={proxy!r}.")
    if temperature != 1 and proxy != "head":
        raise ValueError(
            "delta: temperature is read by proxy='head' alone (others take probabilities from the"
            f" batch), got proxy={proxy!r}."
        )


def token_proxy(
    name: str,
    batch: TokenBatch,
    index_M: Tensor,
    dtype: torch.dtype,
    topk: int | None,
    temperature: float,
) -> Proxy:
    """The proxy of the tokens at ``index_M`` of the flattened batch, computed in ``dtype``."""
    if name == "row":
        return _row(batch, index_M, dtype)
    if name == "topk":
        return _topk(batch, index_M, dtype, topk)
    return _head(batch, index_M, dtype, temperature)


def _row(batch: TokenBatch, index_M: Tensor, dtype: torch.dtype) -> Proxy:
    hidden_NTD = batch.column("hidden_NTD")
    # 1 - p; a log-prob that rounding pushed above 0 counts as p = 1
    gap_M = -torch.expm1(batch.sampler_logp_NT.flatten()[index_M].to(dtype).clamp(max=0))

    def chunks(part: slice) -> Iterator[tuple[slice, Tensor]]:
        for rows in _chunks(part, len(index_M), hidden_NTD.shape[2], CHUNK_NUMBERS):
            yield rows, _at(hidden_NTD, index_M[rows]).to(dtype)

    def total(weight_M: Tensor, part: slice) -> Tensor:
        out_D = torch.zeros(hidden_NTD.shape[2], dtype=torch.float64, device=hidden_NTD.device)
        for rows, hidden_BD in chunks(part):
            out_D += (weight_M[rows] * gap_M[rows]) @ hidden_BD
        return out_D.to(dtype)

    def dot(direction_D: Tensor, part: slice) -> Tensor:
        return gap_M[part] * _joined(
            [hidden_BD @ direction_D for _, hidden_BD in chunks(part)], gap_M
        )

    def squared(part: slice) -> Tensor:
        return gap_M[part].square() * _joined(
            [hidden_BD.square().sum(1) for _, hidden_BD in chunks(part)], gap_M
        )

    return Proxy(total, dot, squared)


def _topk(batch: TokenBatch, index_M: Tensor, dtype: torch.dtype, topk: int | None) -> Proxy:
    weight_VD, num_kept = batch.column("head_VD").to(dtype), _num_candidates(batch, topk)
    ids_NTK, logp_NTK = (
        batch.column("topk_ids_NTK")[..., :num_kept],
        batch.column("topk_logp_NTK")[..., :num_kept],
    )
    target_M = batch.token_ids_NT.flatten()[index_M]
    _check_ids(target_M, weight_VD, "token_ids_NT")

    def chunks(part: slice, width: int = num_kept) -> Iterator[tuple[slice, Tensor, Tensor]]:
        for rows in _chunks(part, len(index_M), width, CHUNK_NUMBERS):
            ids_BK = _at(ids_NTK, index_M[rows])
            _check_ids(ids_BK, weight_VD, "topk_ids_NTK")
            yield rows, ids_BK, torch.softmax(_at(logp_NTK, index_M[rows]).to(dtype), dim=1)

    def total(weight_M: Tensor, part: slice) -> Tensor:
        u_V = torch.zeros(len(weight_VD), dtype=torch.float64, device=weight_VD.device)
        u_V.index_add_(0, target_M[part], weight_M[part].double())
        for rows, ids_BK, prob_BK in chunks(part):
            u_V.index_add_(
                0, ids_BK.flatten(), (-weight_M[rows, None] * prob_BK).flatten().double()
            )
        return u_V.to(dtype) @ weight_VD

    def dot(direction_D: Tensor, part: slice) -> Tensor:
        z_V = weight_VD @ direction_D
        return z_V[target_M[part]] - _joined(
            [(prob_BK * z_V[ids_BK]).sum(1) for _, ids_BK, prob_BK in chunks(part)], z_V
        )

    def squared(part: slice) -> Tensor:
        parts = []
        for rows, ids_BK, prob_BK in chunks(part, num_kept * weight_VD.shape[1]):
            mean_BD = torch.einsum("bk,bkd->bd", prob_BK, weight_VD[ids_BK])
            parts.append((weight_VD[target_M[rows]] - mean_BD).square().sum(1))
        return _joined(parts, weight_VD)

    return Proxy(total, dot, squared)


def _head(batch: TokenBatch, index_M: Tensor, dtype: torch.dtype, temperature: float) -> Proxy:
    hidden_NTD, weight_VD = batch.column("hidden_NTD"), batch.column("head_VD").to(dtype)
    if hidden_NTD.shape[2] != weight_VD.shape[1]:
        raise ValueError(
            f"delta: hidden_NTD has hidden size {hidden_NTD.shape[2]}, head_VD has"
            f" {weight_VD.shape[1]}; expected the same."
        )
    target_M = batch.token_ids_NT.flatten()[index_M]
    _check_ids(target_M, weight_VD, "token_ids_NT")

    def chunks(part: slice) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(tokens, h, e_y - p)"""
        for rows in _chunks(part, len(index_M), len(weight_VD), CHUNK_LOGITS):
            hidden_BD = _at(hidden_NTD, index_M[rows]).to(dtype)
            residual_BV = torch.softmax((hidden_BD @ weight_VD.T).div_(temperature), dim=1).neg_()
            yield (
                rows,
                hidden_BD,
                residual_BV.scatter_add_(
                    1, target_M[rows, None], torch.ones_like(residual_BV[:, :1])
                ),
            )

    def total(weight_M: Tensor, part: slice) -> Tensor:
        out_VD = torch.zeros_like(weight_VD)
        for rows, hidden_BD, residual_BV in chunks(part):
            out_VD.addmm_(residual_BV.T, hidden_BD * weight_M[rows, None])
        return out_VD

    def dot(direction_VD: Tensor, part: slice) -> Tensor:
        parts = [
            torch.linalg.vecdot(residual_BV, hidden_BD @ direction_VD.T)
            for _, hidden_BD, residual_BV in chunks(part)
        ]
        return _joined(parts, weight_VD)

    def squared(part: slice) -> Tensor:
        parts = [
            residual_BV.square().sum(1) * hidden_BD.square().sum(1)
            for _, hidden_BD, residual_BV in chunks(part)
        ]
        return _joined(parts, weight_VD)

    return Proxy(total, dot, squared)


def _chunks(part: slice, num_tokens: int, width: int, numbers: int) -> Iterator[slice]:
    """Slices of the part with about ``numbers`` numbers at ``width`` a token."""
    start, stop, _ = part.indices(num_tokens)
    size = max(1, numbers // width)
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def _at(column: Tensor, index_B: Tensor) -> Tensor:
    """Rows of a [N, T, ...] column at flattened positions, without copying the column where it is a
    strided view.
    """
    if column.is_contiguous():
        return column.flatten(0, 1).index_select(0, index_B)
    return column[index_B // column.shape[1], index_B % column.shape[1]]


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else like.new_zeros(0)


def _num_candidates(batch: TokenBatch, topk: int | None) -> int:
    ids, logp = batch.column("topk_ids_NTK"), batch.column("topk_logp_NTK")
    if ids.shape != logp.shape:
        raise ValueError(
            f"delta: topk_ids_NTK is {list(ids.shape)} and topk_logp_NTK {list(logp.shape)};"
            " expected the same shape."
        )
    if topk is not None and topk > ids.shape[-1]:
        raise ValueError(
            f"delta: topk={topk}, but topk_ids_NTK has K={ids.shape[-1]} candidates. Measure more,"
            " or lower topk."
        )
    return topk or ids.shape[-1]


def _check_ids(ids: Tensor, weight_VD: Tensor, name: str) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(weight_VD):
        raise ValueError(
            f"delta: {name} holds ids {int(ids.min())}..{int(ids.max())}, but head_VD has"
            f" {len(weight_VD)} rows."
        )
