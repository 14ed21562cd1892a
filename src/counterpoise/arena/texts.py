"""Prompts and responses of all members as tensors of one shape, and their log-probs.

Axes: S members, N rows of a member, P prompts of a member, T response tokens, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from counterpoise.arena.forward import hidden_states, response_logits, response_states, token_logp
from counterpoise.arena.stack import Stack
from counterpoise.sampling.decoder import Weights

# of an update's rows by length, see ``by_length``
MOST_PIECES, LEAST_SAVED, LEAST_ROWS = 4, 6, 8


class Texts(NamedTuple):
    """All rows of all members.

    Args:
        ids_SNL: prompt, response, padding.
        start_SN: length of the prompt.
        response_SNT, mask_SNT, sampler_logp_SNT: the response alone.
        ref_logp_SNT, ref_kl_SNT: log-probs under the weights all members started from and the KL
            to them, where a method asks.
        anchor_logp_SNT: where the ratios of each member start, if any member moves that.
    """

    ids_SNL: Tensor
    start_SN: Tensor
    response_SNT: Tensor
    mask_SNT: Tensor
    sampler_logp_SNT: Tensor
    ref_logp_SNT: Tensor | None = None
    ref_kl_SNT: Tensor | None = None
    anchor_logp_SNT: Tensor | None = None

    def select(self, row_SR: Tensor) -> Texts:
        """The chosen rows of each member."""
        columns = [None if column is None else pick(column, row_SR) for column in self]
        return Texts(*columns)  # pyright: ignore[reportArgumentType]

    def narrow(self, width: int, num_tokens: int) -> Texts:
        """The first so many tokens of rows, and of their responses."""
        ids_SNL, start_SN, *columns = self
        cut = (None if column is None else column[..., :num_tokens] for column in columns)
        return Texts(ids_SNL[..., :width], start_SN, *cut)  # pyright: ignore[reportArgumentType]

    def of_members(self, members: Sequence[int]) -> Texts:
        """The rows of some members."""
        columns = [None if column is None else column[list(members)] for column in self]
        return Texts(*columns)  # pyright: ignore[reportArgumentType]


def pick(column_SN: Tensor, row_SR: Tensor) -> Tensor:
    """``column[s, row[s, r]]`` for every member s; further axes stay."""
    member_S1 = torch.arange(len(row_SR), device=row_SR.device)[:, None]
    return column_SN[member_S1, row_SR]


class Asked(NamedTuple):
    """The prompts of all members, right-padded, and their lengths."""

    ids_SPW: Tensor
    length_SP: Tensor


def pad_questions(prompts_SP: Sequence[Sequence[Sequence[int]]], device: torch.device) -> Asked:
    """Prompts of all members as one tensor; every member has as many."""
    length_SP = np.array([[len(ids) for ids in prompts] for prompts in prompts_SP])
    ids_SPW = np.zeros((*length_SP.shape, length_SP.max()), np.int64)
    for s, prompts in enumerate(prompts_SP):
        for p, ids in enumerate(prompts):
            ids_SPW[s, p, : len(ids)] = ids
    return Asked(*(torch.from_numpy(column).to(device) for column in (ids_SPW, length_SP)))


def texts_of(
    asked: Asked, group_size: int, response_SNT: Tensor, length_SN: Tensor, sampler_logp_SNT: Tensor
) -> Texts:
    """Responses behind their prompts: row ``p * group_size + g`` of a member answers its prompt
    p.
    """
    device = response_SNT.device
    width = int(length_SN.max())
    mask_SNT = torch.arange(width, device=device) < length_SN[..., None]
    response_SNT = response_SNT[..., :width] * mask_SNT
    start_SN = asked.length_SP.repeat_interleave(group_size, 1)
    ids_SNL = pad(asked.ids_SPW, (0, width)).repeat_interleave(group_size, 1)
    at_SNT = start_SN[..., None] + torch.arange(width, device=device)
    ids_SNL.scatter_(2, at_SNT, response_SNT)
    logp_SNT = torch.where(mask_SNT, sampler_logp_SNT[..., :width], 0)
    return Texts(ids_SNL, start_SN, response_SNT, mask_SNT, logp_SNT)


def autocast(stack: Stack) -> AbstractContextManager[object]:
    """bfloat16 products on an accelerator, as the trainer has them."""
    device = stack.theta_SP.device.type
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def stack_states(stack: Stack, weights: Weights, texts: Texts) -> Tensor:
    """Hidden states that predict the response tokens, [S, N, T, D]."""
    with autocast(stack):
        hidden_SNLD = hidden_states(weights, stack.shape, texts.ids_SNL, stack.cos_LC, stack.sin_LC)
        return response_states(hidden_SNLD, texts.start_SN, texts.mask_SNT.shape[2])


def states_logp(
    stack: Stack, weights: Weights, state_SNTD: Tensor, texts: Texts, temperature: float
) -> Tensor:
    """Log-probs of all response tokens from their hidden states, [S, N, T]."""
    with autocast(stack):
        logits_SNTV = response_logits(weights, state_SNTD, temperature)
    return token_logp(logits_SNTV, texts.response_SNT, texts.mask_SNT)


def stack_logp(stack: Stack, weights: Weights, texts: Texts, temperature: float) -> Tensor:
    """Log-probs of all response tokens, [S, N, T]; rows of like length are read together, without
    the padding that the longest needs.
    """
    order_SN, pieces = by_length(texts)
    bare = texts._replace(ref_logp_SNT=None, ref_kl_SNT=None, anchor_logp_SNT=None)
    parts = []
    for rows, width, num_tokens in pieces:
        own = bare if len(pieces) == 1 else bare.select(order_SN[:, rows])
        own = own.narrow(width, num_tokens)
        states = stack_states(stack, weights, own)
        logp_SNT = states_logp(stack, weights, states, own, temperature)
        parts.append(pad(logp_SNT, (0, texts.mask_SNT.shape[2] - num_tokens)))
    return parts[0] if len(pieces) == 1 else pick(torch.cat(parts, 1), order_SN.argsort(1))


def by_length(texts: Texts) -> tuple[Tensor, list[tuple[slice, int, int]]]:
    """The rows of every member from short to long, [S, N], and pieces of that order: which rows,
    the tokens that the longest has, and those of its response. Neighbours that would save less than
    ``LEAST_SAVED`` tokens per row are one piece.
    """
    length_SN = texts.mask_SNT.sum(2)
    whole_SN = texts.start_SN + length_SN
    order_SN, num = whole_SN.argsort(1), whole_SN.shape[1]
    if num < LEAST_ROWS:
        return order_SN, [(slice(num), texts.ids_SNL.shape[2], texts.mask_SNT.shape[2])]
    ends = [num * k // MOST_PIECES for k in range(1, MOST_PIECES + 1)]
    longest_2N = torch.stack([pick(column, order_SN).amax(0) for column in (whole_SN, length_SN)])
    longest_2K = longest_2N.cummax(1)[0][:, [end - 1 for end in ends]]
    pieces: list[tuple[slice, int, int]] = []
    for end, width, num_tokens in zip(ends, *longest_2K.tolist()):
        start = pieces[-1][0].stop if pieces else 0
        if pieces and width - pieces[-1][1] < LEAST_SAVED:
            start = pieces.pop()[0].start
        pieces.append((slice(start, end), width, num_tokens))
    return order_SN, pieces
