"""The influence of tokens on the answer for many members at once: ``policy.importance`` on a stack.

Axes: S members, P parameters of a member, N rollouts of a member, R of them in one forward, L
tokens of a row, T response tokens, M answer tokens and K reasoning tokens end to end, D hidden
size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoise.arena.forward import embed_rows, hidden_of_embeddings, response_states
from counterpoise.arena.stack import Stack, restructure
from counterpoise.arena.texts import Texts, pick
from counterpoise.maths.head import CHUNK_LOGITS
from counterpoise.maths.noise import normal_at
from counterpoise.policy.importance import SIGMA, UNSCORED, spans
from counterpoise.sampling.decoder import Weights


def stack_importance(
    stack: Stack,
    members: Sequence[int],
    texts: Texts,
    answer_SN: Tensor,
    *,
    seeds: Sequence[int],
    temperature: float,
    num_rows: int,
) -> Tensor:
    """``measure_importance`` of these members on their own rollouts, [S, N, T].

    Args:
        members: their places in the stack; ``texts``, ``answer_SN`` and ``seeds`` are theirs alone.
        answer_SN: the position of the first answer token of each rollout, -1 without one.
        seeds: of the noise.
        num_rows: rollouts of a member in one forward.
    """
    weights = restructure(stack, stack.theta_SP[torch.tensor(members)])
    num_members, num = answer_SN.shape
    seed_S = torch.tensor(seeds, device=answer_SN.device)
    parts = []
    for row_R in torch.arange(num, device=answer_SN.device).split(num_rows):
        row_SR = row_R.expand(num_members, -1)
        some, answer_SR = texts.select(row_SR), pick(answer_SN, row_SR)
        is_scored_SRT, is_answer_SRT = (
            column.unflatten(0, answer_SR.shape)
            for column in spans(some.mask_SNT.flatten(0, 1), answer_SR.flatten())
        )
        s_K, r_K, t_K = is_scored_SRT.nonzero(as_tuple=True)
        unit_KD = normal_at(seed_S[s_K], row_R[r_K], t_K, weights.embed_VD.shape[-1])
        noise_KD = (SIGMA * unit_KD).to(weights.embed_VD.dtype)
        token_K = s_K, r_K, t_K
        parts.append(scores(stack, weights, some, token_K, noise_KD, is_answer_SRT, temperature))
    return torch.cat(parts, 1)


def scores(
    stack: Stack,
    weights: Weights,
    texts: Texts,
    token_K: tuple[Tensor, Tensor, Tensor],
    noise_KD: Tensor,
    is_answer_SRT: Tensor,
    temperature: float,
) -> Tensor:
    """|<gradient of the KL of the answer, embedding>| at the tokens that are scored, [S, R, T].

    Args:
        token_K: the tokens that are scored, by member, row and position.
    """
    s_K, r_K, t_K = token_K
    place_K = s_K, r_K, texts.start_SN[s_K, r_K] + t_K
    clean_SRLD = embed_rows(weights, texts.ids_SNL)
    clean_KD = clean_SRLD[place_K]
    noisy_SRLD = clean_SRLD.index_put(place_K, clean_KD + noise_KD).requires_grad_()

    def states(x_SRLD: Tensor) -> Tensor:
        hidden_SRLD = hidden_of_embeddings(weights, stack.shape, x_SRLD, stack.cos_LC, stack.sin_LC)
        return response_states(hidden_SRLD, texts.start_SN, is_answer_SRT.shape[2])

    with torch.no_grad():
        clean_SRTD = states(clean_SRLD)
    with torch.enable_grad():
        state_SRTD = states(noisy_SRLD)
    pull_SRTD = answer_pull(weights, clean_SRTD, state_SRTD.detach(), is_answer_SRT, temperature)
    (gradient_SRLD,) = torch.autograd.grad(state_SRTD, noisy_SRLD, pull_SRTD)
    score_SRT = torch.where(texts.mask_SNT, UNSCORED, 0.0)
    score_SRT[token_K] = (gradient_SRLD[place_K] * clean_KD).sum(-1).abs()
    return score_SRT


def answer_pull(
    weights: Weights,
    clean_SRTD: Tensor,
    noisy_SRTD: Tensor,
    is_answer_SRT: Tensor,
    temperature: float,
) -> Tensor:
    """What ``hidden_pull`` is for one model: the derivative of the KL of the answer by the noisy
    states, [S, R, T, D]; 0 elsewhere. Answer tokens of a member stand side by side, as many members
    at a time as ``CHUNK_LOGITS`` allow.
    """
    place_M = is_answer_SRT.nonzero(as_tuple=True)
    s_M, count_S = place_M[0], is_answer_SRT.flatten(1).sum(1)
    first_S, width = count_S.cumsum(0) - count_S, int(count_S.max())
    column_M = torch.arange(len(s_M), device=s_M.device) - first_S[s_M]

    def side_by_side(state_SRTD: Tensor) -> Tensor:
        out_SWD = state_SRTD.new_zeros(len(count_S), width, state_SRTD.shape[-1])
        out_SWD[s_M, column_M] = state_SRTD[place_M]
        return out_SWD

    columns = side_by_side(clean_SRTD), side_by_side(noisy_SRTD), weights.head_DV / temperature
    size = max(1, CHUNK_LOGITS // max(1, width * weights.head_DV.shape[-1]))
    pulls = []
    for clean_SWD, noisy_SWD, head_SDV in zip(*(column.split(size) for column in columns)):
        gap_SWV = (noisy_SWD @ head_SDV).softmax(-1) - (clean_SWD @ head_SDV).softmax(-1)
        pulls.append(gap_SWV @ head_SDV.mT)
    pull_SRTD = torch.zeros_like(clean_SRTD)
    pull_SRTD[place_M] = torch.cat(pulls)[s_M, column_M]
    return pull_SRTD
