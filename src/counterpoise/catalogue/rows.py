"""The columns of one update: what the loss reads, over which rollouts it is reduced, and the
log-probs that its ratios start from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from counterpoise.catalogue.returned import check_returned, path
from counterpoise.maths.reduce import Reduce, check_finite
from counterpoise.maths.turns import token_advantage
from counterpoise.reductions import REDUCTIONS, constant_length
from counterpoise.stage import Stage, call
from counterpoise.types import Credit, Rows, TokenBatch


def update_rows(
    rules: Sequence[Stage],
    terms: Sequence[Stage],
    reduction: Stage,
    batch: TokenBatch,
    credit: Credit,
    row_R: Tensor,
    reduce: Reduce,
) -> Rows:
    """The columns of one update, with the reduction taken over the whole of it."""
    row_R = row_R.to(batch.mask_NT.device)
    mask_NT, credit_NT = batch.mask_NT[row_R], credit.credit_NT[row_R]
    advantage_N, by_turn_NT = credit.advantage_N[row_R], token_advantage(credit, batch)[row_R]
    kept_N, anchor_NT = kept_rollouts(rules, batch), ratio_anchor(rules, batch)
    kept_N = None if kept_N is None else kept_N[row_R]
    columns = (mask_NT, credit_NT, advantage_N, by_turn_NT)
    has_values = any(term.has("values_rollouts") for term in terms)
    return Rows(
        row_R=row_R,
        mask_NT=mask_NT,
        group_N=batch.group_N[row_R],
        reward_N=batch.reward_N[row_R],
        advantage_N=advantage_N,
        credit_NT=credit_NT,
        sampler_logp_NT=batch.sampler_logp_NT[row_R],
        scale_NT=scale_of_kept(
            reduction, kept_N, columns, reduce=reduce, max_length=batch.max_length
        ),
        ref_logp_NT=None if batch.ref_logp_NT is None else batch.ref_logp_NT[row_R],
        advantage_NT=None if credit.advantage_NU is None else by_turn_NT,
        anchor_logp_NT=None if anchor_NT is None else anchor_NT[row_R],
        ref_kl_NT=None if batch.ref_kl_NT is None else batch.ref_kl_NT[row_R],
        rollout_scale_N=rollout_scale(kept_N, columns, reduce) if has_values else None,
    )


def ratio_anchor(rules: Sequence[Stage], batch: TokenBatch) -> Tensor | None:
    """The log-probs that ratios of the loss start from, where they are not the sampler's."""
    return batch.column("trainer_logp_NT") if moves_anchor(rules) else None


def moves_anchor(rules: Sequence[Stage]) -> bool:
    """Whether ratios of the loss start from the trainer's log-probs."""
    return any(part.has("anchors_at_trainer") for rule in rules for part in (rule, *rule.nested))


def kept_rollouts(rules: Sequence[Stage], batch: TokenBatch) -> Tensor | None:
    """[N] the rollouts that no rule drops from the loss; None where no rule drops any."""
    parts = [part for rule in rules for part in (rule, *rule.nested) if part.keeps]
    every = [call(part.keeps, batch, **part.settings) for part in parts if part.keeps]
    kept_KN = [kept_N for kept_N in every if kept_N is not None]
    return torch.stack(kept_KN).all(0) if kept_KN else None


def rollout_scale(kept_N: Tensor | None, columns: Sequence[Tensor], reduce: Reduce) -> Tensor:
    """1 / (rollouts of the update that are kept, of all ranks), [N]; 0 for the others."""
    return scale_of_kept(constant_length(length=1), kept_N, columns, reduce=reduce).amax(1)


def scale_of_kept(
    reduction: Stage, kept_N: Tensor | None, columns: Sequence[Tensor], **offers: Any
) -> Tensor:
    """The reduction over the rollouts that are kept, 0 for the others; ``columns`` are mask_NT,
    credit_NT, advantage_N and advantage_NT.
    """
    *first, by_turn_NT = columns if kept_N is None else (column[kept_N] for column in columns)
    part_KT = call(reduction, *first, advantage_NT=by_turn_NT, **offers)
    where = f"reduction {path(REDUCTIONS, reduction)}"
    check_returned(where, part_KT, first[0].shape, "one number per token, 1 / denominator")
    if kept_N is None:
        return part_KT
    return part_KT.new_zeros(columns[0].shape).index_put((kept_N,), part_KT)


def check_trainer_logp(logp_NT: Tensor, rows: Rows) -> None:
    """Log-probs of these rows: one per token, and finite. Those above 0 pass: half precision may
    lift one there, and a training must not end by it.
    """
    if logp_NT.shape != rows.mask_NT.shape:
        raise ValueError(
            f"method.loss: trainer_logp_NT has shape {list(logp_NT.shape)}, expected"
            f" {list(rows.mask_NT.shape)}, that of the rows. Score the rollouts of rows.row_R, or"
            " take their rows of the whole batch: trainer_logp_NT[rows.row_R]."
        )
    check_finite("trainer_logp_NT", logp_NT, rows.mask_NT, rows.row_R)


def check_anchor(rules: Sequence[Stage], host: str) -> None:
    """TRL and verl anchor ratios at the trainer's log-probs and have corrections of their own."""
    for rule in rules:
        if any(part.has("anchors_at_trainer") for part in (rule, *rule.nested)):
            raise ValueError(
                f"{rule.name} corrects for the gap between sampler and trainer, which {host} does"
                " by itself: vllm_importance_sampling_mode in TRL, algorithm.rollout_correction in"
                " verl. Take the rule away and set that."
            )
