"""What methods read of the weights themselves, for all members at once: log-probs and exact KL, as
``policy.measure`` has them for one model.

Axes: S members, P parameters of a member, N rollouts of a member, T response tokens, D hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.arena.member import Member
from counterpoise.arena.stack import Stack, restructure
from counterpoise.arena.texts import Texts, autocast, stack_states, states_logp
from counterpoise.catalogue.rows import moves_anchor
from counterpoise.maths.head import Head, head_kl
from counterpoise.sampling.decoder import Weights


class Reading(NamedTuple):
    """Weights, and the hidden states with which they predict the response tokens."""

    weights: Weights
    state_SNTD: Tensor


@torch.no_grad()
def measure_stack(
    stack: Stack, reference_P: Tensor, texts: Texts, needs: frozenset[str], temperature: float
) -> dict[str, Tensor]:
    """Those of ``trainer_logp_NT``, ``ref_logp_NT`` and ``ref_kl_NT`` that are needed, with a first
    axis S; one forward of each side.
    """

    @functools.cache
    def read(is_own: bool) -> Reading:
        theta_SP = stack.theta_SP if is_own else reference_P.expand_as(stack.theta_SP)
        weights = restructure(stack, theta_SP)
        return Reading(weights, stack_states(stack, weights, texts))

    columns = {}
    for name, is_own in (("trainer_logp_NT", True), ("ref_logp_NT", False)):
        if name in needs:
            columns[name] = states_logp(stack, *read(is_own), texts, temperature)
    if "ref_kl_NT" in needs:
        columns["ref_kl_NT"] = stack_kl(stack, read(True), read(False), texts, temperature)
    return columns


def stack_kl(
    stack: Stack, own: Reading, start: Reading, texts: Texts, temperature: float
) -> Tensor:
    """KL(own || start) over the vocabulary at each response token, [S, N, T]; member by member, so
    that no more logits are alive than for one.
    """
    kl_SNT = torch.zeros_like(texts.sampler_logp_SNT)
    for s, mask_NT in enumerate(texts.mask_SNT):
        pair = [
            (side.state_SNTD[s][mask_NT], Head(side.weights.head_DV[s].T)) for side in (own, start)
        ]
        with autocast(stack):
            kl_SNT[s][mask_NT] = head_kl(*pair[0], *pair[1], temperature=temperature)
    return kl_SNT


def ratio_anchors(
    members: Sequence[Member], texts: Texts, columns: dict[str, Tensor]
) -> Tensor | None:
    """Where each member's ratios start, [S, N, T]: the trainer's log-probs where a rule moves them
    there, else the sampler's; None where no rule does.
    """
    is_moved = [moves_anchor(member.method.rules) for member in members]
    if not any(is_moved):
        return None
    is_moved_S11 = torch.tensor(is_moved, device=texts.mask_SNT.device)[:, None, None]
    return torch.where(is_moved_S11, columns["trainer_logp_NT"], texts.sampler_logp_SNT)
