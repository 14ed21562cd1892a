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
    """Log-probs of all response tokens, [S, N, T]."""
    states = stack_states(stack, weights, texts)
    return states_logp(stack, weights, states, texts, temperature)
