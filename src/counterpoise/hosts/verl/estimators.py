"""Advantage estimators for verl: credit of every token from what verl hands over, or from what the
trainer lends besides.

verl calls an estimator with rewards, a mask and prompt ids. ``counterpoise.hosts.verl.trainer``
lends it the rest of the batch (``lending``) while it runs, so that verl's own code around it (KL in
the reward, rollout correction, writing back) stays verl's.
"""

# verl lives in an environment of its own
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from counterpoise.hosts.verl.method import (
    PREFIX,
    Setup,
    estimator_trouble,
    refuse,
    rollouts_per_prompt,
    settings_of,
    setup,
    trainer_trouble,
)
from counterpoise.hosts.verl.turns import with_token_rewards
from counterpoise.types import Credit, TokenBatch

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.trainer.config import AlgoConfig

PromptIds = Sequence[str] | np.ndarray


@dataclasses.dataclass
class Loan:
    """What the trainer lends to the estimator, and what it gets back.

    Attributes:
        columns: columns of a TokenBatch, [N, T] each; ``mask_NT`` is the mask before any rollout
            was rejected, ``score_NT`` the reward before a KL term. Empty for methods that read
            rewards alone.
        last_N: for each row, the row of its session's last output, which stands for the session.
        success_N: which rows the reward function called right; None leaves it to the threshold.
        lost_N: rows whose environment failed; None if there are none.
        state: the method's state after the last batch.
        batch_number: verl's global step, from which random draws are derived.
        credit: filled by the estimator.
    """

    columns: dict[str, Tensor]
    last_N: Tensor
    success_N: Tensor | None = None
    lost_N: Tensor | None = None
    state: dict[str, Any] | None = None
    batch_number: int = 0
    credit: Credit | None = None


_loan: contextvars.ContextVar[Loan | None] = contextvars.ContextVar("loan", default=None)


@contextlib.contextmanager
def lending(loan: Loan) -> Iterator[Loan]:
    """Estimators that run inside may use the loan."""
    token = _loan.set(loan)
    try:
        yield loan
    finally:
        _loan.reset(token)


@functools.cache
def estimator(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """verl's estimator ``counterpoise/<name>``; always the same function, as verl's registry asks
    for.
    """

    def advantages(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: PromptIds | None = None,
        config: DictConfig | AlgoConfig | None = None,
        **others: object,
    ) -> tuple[Tensor, Tensor]:
        ours = setup(name, settings_of(config))
        if _loan.get() is None and index is not None:
            _check_outputs(ours, response_mask, index, rollouts_per_prompt(config))
        credit_NT = credit(ours, token_level_rewards, response_mask, index)
        return credit_NT, credit_NT

    advantages.__name__ = advantages.__qualname__ = f"{PREFIX}{name}"
    return advantages


def credit(
    setup: Setup, token_level_rewards: Tensor, response_mask: Tensor, index: PromptIds | None
) -> Tensor:
    """Credit of every token of a verl batch, [N, T]; 0 where ``response_mask`` is 0.

    The rows that verl appends to fill up a batch, and those whose environment failed, are left out
    of every statistic. Of a session with
    several outputs the last one counts, and all get its credit, as in verl's own grpo.
    """
    loan = _loan.get()
    _check(setup, loan, index)
    uid_N = np.asarray(index, dtype=str)
    _, group_N = np.unique(uid_N, return_inverse=True)
    group_N = torch.from_numpy(group_N.reshape(-1)).to(response_mask.device)
    reward_N = token_level_rewards.sum(-1)
    last_N = loan.last_N if loan else torch.arange(len(uid_N))
    columns = loan.columns if loan and not setup.method.reads_rewards_only else _one_token(reward_N)
    is_rollout_N = ~_is_filler(uid_N, response_mask) & (last_N == torch.arange(len(uid_N)))
    has_tokens_N = columns["mask_NT"].any(1).cpu()
    if loan is not None and loan.lost_N is not None:
        has_tokens_N &= ~loan.lost_N
    row_R = _live_rows(setup, is_rollout_N, has_tokens_N, group_N.cpu())
    if not len(row_R):
        return torch.zeros_like(token_level_rewards)
    if "score_NT" in columns:
        columns = with_token_rewards(columns, token_level_rewards)
    out = _assign(setup, loan, columns, reward_N, group_N, row_R)
    if loan is not None:
        loan.credit = out
    credit_NT = out.credit_NT.new_zeros(response_mask.shape)
    credit_NT[row_R] = out.credit_NT.expand(-1, response_mask.shape[1])
    return credit_NT[last_N] * response_mask


def _live_rows(setup: Setup, is_rollout_N: Tensor, has_tokens_N: Tensor, group_N: Tensor) -> Tensor:
    """The rollouts that count: those with a model token, and without those whose siblings all have
    none, where rollouts of a prompt are compared.
    """
    is_live_N = is_rollout_N & has_tokens_N
    sampled_G = group_N[is_rollout_N].bincount(minlength=len(group_N))
    live_G = group_N[is_live_N].bincount(minlength=len(group_N))
    if setup.method.needs_groups:
        is_live_N &= ~((sampled_G > 1) & (live_G == 1))[group_N]
    return is_live_N.nonzero().flatten()


def _is_filler(uid_N: np.ndarray, response_mask: Tensor) -> Tensor:
    """Rows that verl appended: a prompt id that starts with pad, and no token in the mask."""
    is_pad_N = torch.from_numpy(np.char.startswith(uid_N, "pad"))
    return is_pad_N & ~response_mask.bool().any(1).cpu()


def _check_outputs(
    setup: Setup, response_mask: Tensor, index: PromptIds, per_prompt: int | None
) -> None:
    """An error where a prompt has more rows than rollouts: verl does not say which rows are outputs
    of one session.
    """
    uid_N = np.asarray(index, dtype=str)
    prompts, counts = np.unique(
        uid_N[~_is_filler(uid_N, response_mask).numpy()], return_counts=True
    )
    if per_prompt is None or not len(counts) or counts.max() <= per_prompt:
        return
    raise ValueError(
        f"{PREFIX}{setup.method.name}: prompt {prompts[counts.argmax()]} has {counts.max()} rows"
        f" with actor_rollout_ref.rollout.n={per_prompt}. An agent loop returned several outputs"
        " per session, which would count as rollouts. Set"
        f" trainer.v1.trainer_mode={PREFIX}sync: it counts a session once, as verl's grpo does."
    )


def _check(setup: Setup, loan: Loan | None, index: PromptIds | None) -> None:
    refuse(trainer_trouble(setup), estimator_trouble(setup) if loan is None else None)
    if index is None:
        raise ValueError(
            f"{PREFIX}{setup.method.name}: verl gave no prompt ids (`uid`), so rollouts cannot be"
            " grouped."
        )
    if setup.has_own_plan and loan is None:
        warnings.warn(
            f"{PREFIX}{setup.method.name}: its plan is followed by"
            f" trainer.v1.trainer_mode={PREFIX}sync alone; here verl orders the rows.",
            stacklevel=3,
        )


def _one_token(reward_N: Tensor) -> dict[str, Tensor]:
    """Credit that is the same on all tokens is computed on one token per rollout."""
    one_N1 = torch.ones(len(reward_N), 1, device=reward_N.device)
    return {"token_ids_NT": one_N1.long(), "mask_NT": one_N1.bool(), "sampler_logp_NT": -one_N1}


def _assign(
    setup: Setup,
    loan: Loan | None,
    columns: dict[str, Tensor],
    reward_N: Tensor,
    group_N: Tensor,
    row_R: Tensor,
) -> Credit:
    """The method's credit of some rows; what tools said stays in them, as context."""
    success_N = loan.success_N if loan else None
    batch = TokenBatch(
        group_N=group_N[row_R],
        reward_N=reward_N[row_R],
        success_N=None if success_N is None else success_N[row_R],
        **{name: value[row_R] for name, value in columns.items()},  # pyright: ignore[reportArgumentType]
    )
    state, batch_number = (loan.state, loan.batch_number) if loan else (None, 0)
    out = setup.method.assign(batch, state, seed=setup.seed, batch_number=batch_number)
    return out
