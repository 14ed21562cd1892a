"""Credit from a teacher that scores the sampled tokens after having read more: ``teacher`` (SDPO,
OPSD) and ``proximal_teacher`` (TOP-D).

The trainer measures ``teacher_logp_NT`` by the parameters ``source``, ``template``, ``model`` and
``rate`` of the rule; the rules themselves read the column alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from counterpoise.credit.hindsight import Sources, Template, check_teacher
from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce, groups, masked_mean
from counterpoise.stage import declare
from counterpoise.types import TokenBatch

LEAST_STD = 1e-6


def _asks_siblings(*, source: Sources) -> bool:
    return source == "sibling" or (isinstance(source, (list, tuple)) and "sibling" in source)


def _asks_siblings_alone(*, source: Sources) -> bool:
    return source in ("sibling", ["sibling"], ("sibling",))


def _taught(batch: TokenBatch) -> Tensor:
    """[N, T] model tokens of rollouts that have a teacher."""
    return batch.mask_NT & batch.column("has_teacher_N").bool()[:, None]


def _numbers(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    """Share of rollouts with a teacher; on their tokens the mean of teacher - sampler log-prob, and
    the share that the teacher likes better.
    """
    taught_NT = _taught(batch)
    gap_NT = batch.column("teacher_logp_NT") - batch.sampler_logp_NT
    has_N = batch.column("has_teacher_N").to(gap_NT.dtype)
    return {
        "taught_frac": masked_mean(has_N, batch.mask_NT.any(1), reduce),
        "gap": masked_mean(gap_NT, taught_NT, reduce),
        "liked_frac": masked_mean((after_NT > 0).to(gap_NT.dtype), taught_NT, reduce),
    }


@declare(
    needs=("teacher_logp_NT", "has_teacher_N", "trainer_logp_NT"),
    report=_numbers,
    replaces_credit=True,
    reads_success=_asks_siblings,
    needs_groups=_asks_siblings_alone,
)
def teacher(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    source: Sources = ("sibling", "feedback"),
    template: Template = None,
    model: str = "average",
    rate: float = 0.05,
) -> Tensor:
    """credit' = teacher - trainer log-prob of the sampled token, 0 without a teacher.

    In expectation over the sampled token, -credit' * log-prob has the gradient of
    KL(trainer, teacher) at that position. The incoming credit is not read: rollouts of a group with
    equal rewards have credit too.

    Args:
        credit_NT: [N, T], not read.
        source: what the teacher reads besides the prompt, or several in order of preference:
            ``sibling`` (the first success of the group, not itself), ``feedback`` (what the grader
            says of this attempt), ``solution`` (of the task), ``prompt`` (nothing).
        template: the prompt of the teacher, or one per source; None takes ``hindsight.TEMPLATES``.
        model: whose weights score: ``policy`` as it is, ``initial``, ``average`` of the policy over
            batches, or another model with the same tokenizer (a folder or a hub id).
        rate: of the average, once per batch: average += rate * (policy - average).

    Reference: SDPO, arXiv 2601.20802 (sampled form); OPSD, arXiv 2601.18734 (sampled form). Departs
        from SDPO's code in taking the trainer's log-prob once per batch.

    >>> batch = TokenBatch.from_lists(
    ...     [[1], [2]],
    ...     group=[0, 0],
    ...     reward=[1.0, 1.0],
    ...     sampler_logp=[[-1.0], [-1.0]],
    ...     trainer_logp=[[-1.0], [-1.0]],
    ...     teacher_logp=[[-0.5], [0.0]],
    ...     has_teacher_N=torch.tensor([True, False]),
    ... )
    >>> teacher(torch.zeros(2, 1), batch).tolist()
    [[0.5], [0.0]]
    """
    check_teacher("teacher", source, template, model, rate)
    gap_NT = batch.column("teacher_logp_NT") - batch.column("trainer_logp_NT")
    return torch.where(_taught(batch), gap_NT, 0).to(credit_NT.dtype)


@declare(
    needs=("teacher_logp_NT", "has_teacher_N"),
    report=_numbers,
    replaces_credit=True,
    reads_success=_asks_siblings,
    needs_groups=_asks_siblings_alone,
)
def proximal_teacher(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    alpha: float = 0.2,
    source: Sources = "prompt",
    template: Template = None,
    model: str = "policy",
    rate: float = 0.05,
) -> Tensor:
    """TOP-D: a teacher near the policy, alpha * teacher + (1 - alpha) * sampler.

    r_t = log(alpha * rho_t + 1 - alpha), rho = p_teacher / p_sampler, never below log(1 - alpha)
    return_t = r_t + mean of r over the rollout's later model tokens (0 after the last)
    credit' = (return - mean) / max(std, 1e-6) over all tokens of the group that have a teacher

    The std is unbiased, and one token alone gets 0. Rollouts without a teacher get 0 and are in no
    statistic. The incoming credit is not read.

    Args:
        credit_NT: [N, T], not read.
        alpha: how far the proximal teacher is from the policy, in (0, 1).
        source, template, model, rate: as for ``teacher``. The paper's teacher is another model that
            reads the prompt alone, and ``model`` has to name it.

    Reference: TOP-D, arXiv 2607.04751, read by PrimeIntellect-ai/prime-rl#2966; the authors' code
        was not found.

    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2]],
    ...     group=[0],
    ...     reward=[0.0],
    ...     sampler_logp=[[-1.0, -1.0]],
    ...     teacher_logp=[[-1.0 + math.log(2), -60.0]],
    ...     has_teacher_N=torch.tensor([True]),
    ... )
    >>> proximal_teacher(torch.zeros(1, 2), batch)
    tensor([[ 0.7071, -0.7071]])
    """
    check_teacher("proximal_teacher", source, template, model, rate)
    check_number("proximal_teacher", above=0, below=1, alpha=alpha)
    taught_NT = _taught(batch)
    log_rho_NT = batch.column("teacher_logp_NT") - batch.sampler_logp_NT
    reward_NT = torch.where(taught_NT, proximal_reward(log_rho_NT, alpha), 0)
    return_NT = reward_NT + _mean_of_later(reward_NT, taught_NT)
    return _group_zscore(return_NT, taught_NT, batch.group_N).to(credit_NT.dtype)


def proximal_reward(log_rho_NT: Tensor, alpha: float) -> Tensor:
    """log(alpha * rho + 1 - alpha), finite for every rho.

    >>> proximal_reward(torch.tensor([0.0, math.log(2), -1000.0]), 0.2)
    tensor([ 0.0000,  0.1823, -0.2231])
    """
    floor_NT = torch.full_like(log_rho_NT, math.log1p(-alpha))
    return torch.logaddexp(log_rho_NT + math.log(alpha), floor_NT)


def _mean_of_later(value_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """The mean of a row over the masked tokens after each token; 0 after the last."""
    sum_NT = value_NT.flip(1).cumsum(1).flip(1) - value_NT
    num_NT = mask_NT.flip(1).cumsum(1).flip(1) - mask_NT.to(torch.long)
    return torch.where(num_NT > 0, sum_NT / num_NT.clamp(min=1).to(value_NT.dtype), 0)


def _group_zscore(value_NT: Tensor, mask_NT: Tensor, group_N: Tensor) -> Tensor:
    """(value - mean) / max(std, 1e-6) over the masked tokens of each group, 0 elsewhere."""
    by_group = groups(group_N)
    num_P = by_group.sum(mask_NT.sum(1)).clamp(min=1).to(value_NT.dtype)
    mean_P = by_group.sum(torch.where(mask_NT, value_NT, 0).sum(1)) / num_P
    centred_NT = torch.where(mask_NT, value_NT - mean_P[by_group.index_N][:, None], 0)
    variance_P = by_group.sum(centred_NT.square().sum(1)) / (num_P - 1).clamp(min=1)
    std_P = variance_P.sqrt().clamp(min=LEAST_STD)
    return centred_NT / std_P[by_group.index_N][:, None]
