"""How much the answer of a rollout leans on each token before it: one backward to the embeddings.

Axes: N rollouts, R of them with an answer, B of one forward, T response tokens, M answer tokens and
    K reasoning tokens of one forward laid end to end, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from counterpoise.maths.head import CHUNK_LOGITS, Head, head_logits
from counterpoise.maths.noise import normal_at
from counterpoise.policy.backbone import Backbone, backbone, evaluating
from counterpoise.policy.measure import TOKEN_BUDGET
from counterpoise.policy.pack import (
    Packed,
    Whole,
    hidden_of,
    kernels_without_plans,
    own_logits,
    pack_rows,
    response_lengths,
    row_buckets,
    shares_prompts,
)
from counterpoise.policy.prefix import flat_index

SIGMA = 1e-3
UNSCORED = -1.0


def measure_importance(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    token_ids_NT: Tensor,
    mask_NT: Tensor,
    answer_N: Tensor,
    *,
    seed: int,
    temperature: float = 1.0,
    sigma: float = SIGMA,
    token_budget: int = TOKEN_BUDGET,
) -> Tensor:
    """|<gradient, embedding>| of each reasoning token, [N, T]; -1 on other model tokens, 0 where
    ``mask_NT`` is False.

    The gradient is that of sum_m KL(p_m || q_m) by the token's input embedding: p_m is the
    distribution at answer token m, q_m the same after noise of standard deviation ``sigma`` on the
    embeddings of the reasoning tokens. Without noise the KL is at its least and has no gradient.
    Two forwards and one backward, dropout off, never in autocast: bfloat16 rounds by more than the
    noise moves. No gradient reaches the weights.

    Args:
        model: the causal LM being trained.
        prompt_ids: the prompt's token ids of every row (N lists).
        token_ids_NT: the responses, right-padded.
        mask_NT: True on tokens that the model wrote; others are read, not scored.
        answer_N: the position of the first answer token; model tokens before it are reasoning
            tokens. -1 where there is no answer: then no token is scored.
        seed: of the noise; every token has its own, so that batching does not change it.
        token_budget: tokens of one forward, prompt and padding included.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=16,
    ...     hidden_size=8,
    ...     intermediate_size=16,
    ...     num_hidden_layers=1,
    ...     num_attention_heads=2,
    ... )
    >>> ids_NT = torch.tensor([[4, 5, 6], [6, 7, 0]])
    >>> rows = [[1, 2], [3]], ids_NT, ids_NT > 0, torch.tensor([2, -1])
    >>> (measure_importance(LlamaForCausalLM(config), *rows, seed=0) < 0).tolist()
    [[False, False, True], [True, True, False]]
    """
    mask_NT = mask_NT.bool()
    is_scored_NT, is_answer_NT = spans(mask_NT, answer_N)
    embedding: nn.Embedding = model.get_input_embeddings()  # pyright: ignore[reportAssignmentType]
    dtype = torch.promote_types(embedding.weight.dtype, torch.float32)
    score_NT = torch.where(mask_NT, UNSCORED, 0.0).to(dtype)
    chosen = is_scored_NT.any(1).nonzero()[:, 0].tolist()
    if not chosen:
        return score_NT
    lengths = response_lengths(is_answer_NT)
    with (
        evaluating(model),
        torch.autocast(embedding.weight.device.type, enabled=False),
        kernels_without_plans(),
    ):
        parts = backbone(model)
        share = shares_prompts(parts)
        for picked in row_buckets(
            [prompt_ids[row] for row in chosen],
            [lengths[row] for row in chosen],
            token_budget,
            share=share,
        ):
            numbers = [chosen[k] for k in picked]
            row_B = torch.tensor(numbers, device=mask_NT.device)
            rows = pack_rows(
                [prompt_ids[row] for row in numbers],
                token_ids_NT[row_B],
                is_answer_NT[row_B],
                model.device,
                share=share,
            )
            row_K, column_K = is_scored_NT[row_B].nonzero(as_tuple=True)
            number_K, *here = (at.to(model.device) for at in (row_B[row_K], row_K, column_K))
            seed_K = torch.full_like(number_K, seed)
            unit_KD = normal_at(seed_K, number_K, here[1], embedding.embedding_dim)
            place_K, noise_KD = input_places(rows, *here), (sigma * unit_KD).to(embedding.weight)
            score_K = _scores(model, parts, rows, (place_K, noise_KD), temperature)
            score_NT[row_B[row_K], column_K] = score_K.to(score_NT)
    return score_NT


def spans(mask_NT: Tensor, answer_N: Tensor) -> tuple[Tensor, Tensor]:
    """(reasoning tokens, answer tokens), both empty in a rollout that lacks one of them.

    >>> [x.tolist() for x in spans(torch.tensor([[True] * 3] * 2), torch.tensor([1, 0]))]
    [[[True, False, False], [False, False, False]], [[False, True, True], [False, False, False]]]
    """
    place_T = torch.arange(mask_NT.shape[1], device=mask_NT.device)
    is_before_NT = place_T < answer_N[:, None]
    scored_NT, answer_NT = mask_NT & is_before_NT, mask_NT & ~is_before_NT
    has_both_N1 = scored_NT.any(1, keepdim=True) & answer_NT.any(1, keepdim=True)
    return scored_NT & has_both_N1, answer_NT & has_both_N1


def input_places(rows: Packed, row_K: Tensor, column_K: Tensor) -> Tensor:
    """Where response tokens are read among the flat tokens of a forward: there the next ones are
    predicted, [K].
    """
    layout = rows.layout
    if not isinstance(layout, Whole):
        return flat_index(layout, row_K, column_K + 1)
    # answer token 0 of each row tells where its response begins
    start_B = torch.zeros_like(row_K.new_empty(len(layout.ids_NL)))
    start_B[rows.row_M] = layout.position_M + 1 - rows.column_M
    return row_K * layout.ids_NL.shape[1] + start_B[row_K] + column_K


class _Read(NamedTuple):
    """What a model read: its embeddings with noise, and without at the places of the noise."""

    noisy: Tensor
    clean_KD: Tensor


@contextmanager
def reading_noise(embedding: nn.Module, place_K: Tensor, noise_KD: Tensor) -> Iterator[list[_Read]]:
    """Embeddings are read with noise inside the block, and what was read is listed: leaves of the
    graph.
    """
    reads: list[_Read] = []

    def disturb(module: nn.Module, args: object, out: Tensor) -> Tensor:
        clean_KD = out.detach().flatten(0, -2)[place_K]
        noisy = out.detach().flatten(0, -2).index_put((place_K,), clean_KD + noise_KD)
        reads.append(_Read(noisy.view_as(out).requires_grad_(), clean_KD))
        return reads[-1].noisy

    handle = embedding.register_forward_hook(disturb)
    try:
        yield reads
    finally:
        handle.remove()


def _scores(
    model: PreTrainedModel,
    parts: Backbone,
    rows: Packed,
    noise: tuple[Tensor, Tensor],
    temperature: float,
) -> Tensor:
    """|<gradient of the KL, embedding>| at the places of the noise, [K]."""

    def outputs() -> Tensor:
        """What is predicted at the answer tokens: hidden states, logits where the head is not
        known.
        """
        return own_logits(model, rows, temperature) if head is None else hidden_of(parts, rows)

    head = parts.head
    with torch.no_grad():
        clean = outputs()
    with torch.enable_grad(), reading_noise(model.get_input_embeddings(), *noise) as reads:
        noisy = outputs()
    pull = (
        noisy.softmax(-1).detach() - clean.softmax(-1)
        if head is None
        else hidden_pull(clean, noisy.detach(), head, temperature)
    )
    (gradient,) = torch.autograd.grad(noisy, reads[0].noisy, pull)
    return (gradient.flatten(0, -2)[noise[0]] * reads[0].clean_KD).sum(-1).abs()


def hidden_pull(clean_MD: Tensor, noisy_MD: Tensor, head: Head, temperature: float) -> Tensor:
    """The derivative of sum_m KL(p_m || q_m) by the hidden states of q, [M, D]: that by its logits
    is q - p, without the rounding of a KL near 0. A few tokens at a time.
    """
    size = max(1, CHUNK_LOGITS // head.weight_VD.shape[0])
    still = head._replace(weight_VD=head.weight_VD.detach())
    pulls = []
    for p_MD, q_MD in zip(clean_MD.split(size), noisy_MD.split(size)):
        with torch.enable_grad():
            leaf_MD = q_MD.detach().requires_grad_()
            logits_MV = head_logits(leaf_MD, still, temperature=temperature)
        gap_MV = logits_MV.detach().softmax(-1)
        gap_MV -= head_logits(p_MD, still, temperature=temperature).softmax(-1)
        pulls.append(torch.autograd.grad(logits_MV, leaf_MD, gap_MV)[0])
    return torch.cat(pulls)
