"""What one member's updates read: credit, the rows of each update and their scale.

Small work on small tensors, once per member and batch: worker processes do it beside an
accelerator, which would spend its time on launches instead.

Axes: N rollouts of a member, T response tokens, R rows of an update.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from counterpoise.arena.crew import Host, Job, judge
from counterpoise.arena.member import Member
from counterpoise.trainer.warn import said_by_us
from counterpoise.types import RolloutBatch, TokenBatch


class Prepared(NamedTuple):
    """A batch of one member, ready for its updates.

    Args:
        row, scale: of each update its rows [R] and their scale [R, T].
        num_failures, message: rollouts whose grader failed, and the first one's message.
    """

    reward_N: np.ndarray
    group_N: np.ndarray
    advantage_N: np.ndarray
    credit_NT: np.ndarray
    row: list[np.ndarray]
    scale: list[np.ndarray]
    state: dict[str, Any] | None
    num_failures: int
    message: str


_NONE = np.zeros(0, np.float32)
# of a member that has stopped: no row, no update
NOTHING = Prepared(
    _NONE, np.zeros(0, int), _NONE, np.zeros((0, 0), np.float32), [], [], None, 0, ""
)


class Work(NamedTuple):
    """One member's batch as it was sampled, on the host."""

    member: Member
    job: Job
    sampler_logp_NT: np.ndarray
    entropy_NT: np.ndarray
    batch_number: int


def prepare_sampled(host: Host, work: Work) -> Prepared:
    """Grade, then assign credit and plan."""
    grades = judge(host, work.job)
    job, config = work.job, work.member.config
    mask_NT = np.arange(job.token_ids_NT.shape[1]) < job.length_N[:, None]
    batch = TokenBatch(
        token_ids_NT=torch.from_numpy(job.token_ids_NT).long(),
        mask_NT=torch.from_numpy(mask_NT),
        group_N=torch.from_numpy(job.group_N),
        reward_N=torch.tensor(grades.reward, dtype=torch.float32),
        sampler_logp_NT=torch.from_numpy(work.sampler_logp_NT),
        entropy_NT=torch.from_numpy(work.entropy_NT),
        max_length=config.rollouts.max_new_tokens,
        success=config.task.get("success"),
    )
    rollouts = RolloutBatch(job.prompts, [], [], [], batch, grades.num_faults, grades.messages)
    return prepare(work.member, rollouts, work.batch_number)


def prepare(member: Member, rollouts: RolloutBatch, batch_number: int) -> Prepared:
    """Credit, plan and scale of one member's batch, by its own method."""
    method, batch = member.method, rollouts.batch
    with said_by_us():
        credit = method.assign(batch, member.state, seed=member.seed, batch_number=batch_number)
    num_updates = member.config.optimizer.updates_per_batch
    plan = method.plan(batch, num_updates, seed=member.seed, batch_number=batch_number)
    updates = [method.rows(batch, credit, row_R) for row_R in plan]
    return Prepared(
        batch.reward_N.numpy(force=True),
        batch.group_N.numpy(force=True),
        credit.advantage_N.numpy(force=True),
        credit.credit_NT.numpy(force=True),
        [rows.row_R.numpy(force=True) for rows in updates],
        [rows.scale_NT.numpy(force=True) for rows in updates],
        credit.state,
        rollouts.num_grader_failures,
        next(iter(rollouts.grader_messages), ""),
    )
