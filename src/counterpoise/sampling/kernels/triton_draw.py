"""Triton kernels from logits to tokens: one a row drawn, and the likeliest ones of a row.

They compute what ``draw.draw`` and ``draw.candidates`` compute with torch, to rounding; the tests
hold them against each other.

Axes: B rows, V vocabulary, S pieces or blocks of the vocabulary, K candidates.
"""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportArgumentType=false, reportUnusedExpression=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VOCABULARY_PIECE = 4096  # tokens at most that one program of the first pass of ``draw`` reads
LEAST_BLOCK, MOST_BLOCKS = 64, 1024  # tokens of a block and blocks of a row in ``candidates``


def draw(logits_BV: Tensor, uniform_B: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """A token a row from ``softmax(logits / temperature)`` where its cumulative probability passes
    ``uniform_B``; log-prob; entropy.

    Two passes: maximum and sums of every piece of the vocabulary; then the piece that holds the
    token, and the token in it."""
    num_rows, num_tokens = logits_BV.shape
    piece = min(VOCABULARY_PIECE, triton.next_power_of_2(num_tokens))
    num_pieces, num_warps = triton.cdiv(num_tokens, piece), max(1, piece // 512)
    piece_3BS = torch.empty(3, num_rows, num_pieces, device=logits_BV.device)
    _pieces[(num_rows, num_pieces)](
        *(logits_BV, *piece_3BS.unbind(0), num_tokens, num_pieces, 1.0 / temperature, piece),
        num_warps=num_warps,
    )
    token_B = torch.empty(num_rows, dtype=torch.long, device=logits_BV.device)
    logp_B, entropy_B = torch.empty(2, num_rows, device=logits_BV.device).unbind(0)
    _pick[(num_rows,)](
        *(
            logits_BV,
            *piece_3BS.unbind(0),
            uniform_B,
            token_B,
            logp_B,
            entropy_B,
            num_tokens,
            num_pieces,
            1.0 / temperature,
        ),
        *(triton.next_power_of_2(num_pieces), piece),
        num_warps=num_warps,
    )
    return token_B, logp_B, entropy_B


@triton.jit
def _pieces(
    logits_ptr, top_ptr, mass_ptr, tilt_ptr, num_tokens, num_pieces, inverse, PIECE: tl.constexpr
):
    """Of a piece: its top logit m, the mass sum exp(z - m), and sum exp(z - m) (z - m)."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = piece * PIECE + tl.arange(0, PIECE)
    here = v < num_tokens
    z = (
        tl.load(logits_ptr + row * num_tokens + v, mask=here, other=float("-inf")).to(tl.float32)
        * inverse
    )
    top = tl.max(z, 0)
    below = tl.where(here, z - top, 0.0)
    mass = tl.where(here, tl.exp(below), 0.0)
    tl.store(top_ptr + row * num_pieces + piece, top)
    tl.store(mass_ptr + row * num_pieces + piece, tl.sum(mass, 0))
    tl.store(tilt_ptr + row * num_pieces + piece, tl.sum(mass * below, 0))


@triton.jit
def _pick(
    logits_ptr,
    top_ptr,
    mass_ptr,
    tilt_ptr,
    uniform_ptr,
    token_ptr,
    logp_ptr,
    entropy_ptr,
    num_tokens,
    num_pieces,
    inverse,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, PIECES)
    is_piece = s < num_pieces
    top_S = tl.load(top_ptr + row * num_pieces + s, mask=is_piece, other=float("-inf"))
    mass_S = tl.load(mass_ptr + row * num_pieces + s, mask=is_piece, other=0.0)
    tilt_S = tl.load(tilt_ptr + row * num_pieces + s, mask=is_piece, other=0.0)
    top = tl.max(top_S, 0)
    lower_S = tl.where(is_piece, top_S - top, 0.0)
    weight_S = tl.where(is_piece, tl.exp(lower_S), 0.0)
    mass_S *= weight_S
    total = tl.sum(mass_S, 0)
    log_total = tl.log(total)
    tilt = tl.sum(tilt_S * weight_S + lower_S * mass_S, 0)
    # the piece in which the cumulative mass passes the threshold, then the token in that piece
    target = tl.load(uniform_ptr + row) * total
    wide_S = mass_S.to(tl.float64)
    sum_S = tl.cumsum(wide_S, 0)
    piece = tl.sum(((sum_S <= target) & is_piece).to(tl.int32), 0)
    piece = tl.minimum(piece, num_pieces - 1)
    before = tl.sum(tl.where(s < piece, wide_S, 0.0), 0)
    v = piece * PIECE + tl.arange(0, PIECE)
    here = v < num_tokens
    z = (
        tl.load(logits_ptr + row * num_tokens + v, mask=here, other=float("-inf")).to(tl.float32)
        * inverse
    )
    mass_V = tl.where(here, tl.exp(z - top), 0.0)
    sum_V = tl.cumsum(mass_V, 0)
    # rounding may leave the threshold beyond the last sum: then the last token with any mass
    rest = tl.minimum((target - before).to(tl.float32), tl.max(sum_V, 0) * 0.9999999)
    place = tl.sum((sum_V <= rest).to(tl.int32), 0)
    token = tl.minimum(piece * PIECE + place, num_tokens - 1)
    chosen = tl.load(logits_ptr + row * num_tokens + token).to(tl.float32) * inverse
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logp_ptr + row, chosen - top - log_total)
    tl.store(entropy_ptr + row, log_total - tilt / total)


def candidates(logits_BV: Tensor, temperature: float, num: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs of the ``num`` likeliest tokens of ``softmax(logits / temperature)``,
    largest first; of equals the first comes first.

    Two passes: the largest logit of every block of the vocabulary; then ``num`` times the block
    with the largest one left, which alone is read again for its next.
    """
    num_rows, num_tokens = logits_BV.shape
    block = max(LEAST_BLOCK, triton.next_power_of_2(triton.cdiv(num_tokens, MOST_BLOCKS)))
    num_blocks, group = triton.cdiv(num_tokens, block), max(1, VOCABULARY_PIECE // block)
    top_BS, mass_BS = torch.empty(2, num_rows, num_blocks, device=logits_BV.device).unbind(0)
    place_BS = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits_BV.device)
    _blocks[(num_rows, triton.cdiv(num_blocks, group))](
        *(
            logits_BV,
            top_BS,
            mass_BS,
            place_BS,
            num_tokens,
            num_blocks,
            1.0 / temperature,
            group,
            block,
        ),
        num_warps=8,
    )
    ids_BK = torch.empty(num_rows, num, dtype=torch.long, device=logits_BV.device)
    logp_BK = torch.empty(num_rows, num, device=logits_BV.device)
    _take[(num_rows,)](
        *(
            logits_BV,
            top_BS,
            mass_BS,
            place_BS,
            ids_BK,
            logp_BK,
            num_tokens,
            num_blocks,
            num,
            1.0 / temperature,
        ),
        *(triton.next_power_of_2(num_blocks), block),
        num_warps=1,
    )
    return ids_BK, logp_BK


@triton.jit
def _blocks(
    logits_ptr,
    top_ptr,
    mass_ptr,
    place_ptr,
    num_tokens,
    num_blocks,
    inverse,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of a block: its top logit m, where it is, and the mass sum exp(z - m)."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    v = s[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    z = (
        tl.load(logits_ptr + row * num_tokens + v, mask=v < num_tokens, other=float("-inf")).to(
            tl.float32
        )
        * inverse
    )
    top, place = tl.max(z, 1, return_indices=True)  # pyright: ignore[reportGeneralTypeIssues]
    finite = tl.where(top == float("-inf"), 0.0, top)
    spot = row * num_blocks + s
    tl.store(top_ptr + spot, top, mask=s < num_blocks)
    tl.store(mass_ptr + spot, tl.sum(tl.exp(z - finite[:, None]), 1), mask=s < num_blocks)
    tl.store(place_ptr + spot, place, mask=s < num_blocks)


@triton.jit
def _take(
    logits_ptr,
    top_ptr,
    mass_ptr,
    place_ptr,
    ids_ptr,
    logp_ptr,
    num_tokens,
    num_blocks,
    num,
    inverse,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    s, v = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    spot = row * num_blocks + s
    top_S = tl.load(top_ptr + spot, mask=s < num_blocks, other=float("-inf"))
    mass_S = tl.load(mass_ptr + spot, mask=s < num_blocks, other=0.0)
    place_S = tl.load(place_ptr + spot, mask=s < num_blocks, other=0)
    top = tl.max(top_S, 0)
    log_total = top + tl.log(tl.sum(mass_S * tl.exp(top_S - top), 0))
    for k in range(num):
        best, block = tl.max(top_S, 0, return_indices=True)
        is_block = s == block
        place = tl.sum(tl.where(is_block, place_S, 0), 0)
        tl.store(ids_ptr + row * num + k, (block * BLOCK + place).to(tl.int64))
        tl.store(logp_ptr + row * num + k, best - log_total)
        at = block * BLOCK + v
        z = (
            tl.load(
                logits_ptr + row * num_tokens + at, mask=at < num_tokens, other=float("-inf")
            ).to(tl.float32)
            * inverse
        )
        # what was taken of the block comes before (best, place) in the order of (logit down, place
        # up)
        is_left = (z < best) | ((z == best) & (v > place))
        following, next_place = tl.max(tl.where(is_left, z, float("-inf")), 0, return_indices=True)
        top_S = tl.where(is_block, following, top_S)
        place_S = tl.where(is_block, next_place, place_S)
