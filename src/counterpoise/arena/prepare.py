"""What one member's updates read: credit, the rows of each update and their scale.

Small work on small tensors, once per member and batch: worker processes do it beside an
accelerator, which would spend its time on launches instead.

Axes: N rollouts of a member, T response tokens, R rows of an update.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from counterpoise.arena.crew import Host, Job, Shelf, judge
from counterpoise.arena.member import Member
from counterpoise.catalogue.method import Method
from counterpoise.rollouts import RolloutBatch
from counterpoise.stage import success_of
from counterpoise.trainer.warn import said_by_us
from counterpoise.types import Rows, TokenBatch


class Prepared(NamedTuple):
    """A batch of one member, ready for its updates.

    Args:
        row, scale, rollout_scale: of each update its rows [R], the scale of their tokens [R, T],
            and theirs in a mean over rollouts [R], 0 where no loss takes one.
        num_failures, message: rollouts whose grader failed, and the first one's message.
    """

    reward_N: np.ndarray
    group_N: np.ndarray
    advantage_N: np.ndarray
    credit_NT: np.ndarray
    row: list[np.ndarray]
    scale: list[np.ndarray]
    rollout_scale: list[np.ndarray]
    state: dict[str, Any] | None
    num_failures: int
    message: str


_NONE = np.zeros(0, np.float32)
# of a member that has stopped: no row, no update
NOTHING = Prepared(
    _NONE, np.zeros(0, int), _NONE, np.zeros((0, 0), np.float32), [], [], [], None, 0, ""
)


class Settings(NamedTuple):
    """How a member turns a batch into updates."""

    state: dict[str, Any] | None
    seed: int
    batch_number: int
    num_updates: int
    max_length: int
    success: float | None


class Work(NamedTuple):
    """One member's batch as it was sampled, on the host; its method is pickled, once for all
    batches.
    """

    pickled: bytes
    settings: Settings
    job: Job
    sampler_logp_NT: np.ndarray
    entropy_NT: np.ndarray
    columns: dict[str, Tensor | Shelf]


def settings_of(member: Member, batch_number: int) -> Settings:
    """What the member's next batch needs to know of it."""
    config = member.config
    return Settings(
        member.state,
        member.seed,
        batch_number,
        config.optimizer.updates_per_batch,
        config.rollouts.max_new_tokens,
        success_of(config.task),
    )


def prepare_sampled(host: Host, work: Work) -> Prepared:
    """Grade, then assign credit and plan."""
    grades = judge(host, work.job)
    job, settings = work.job, work.settings
    mask_NT = np.arange(job.token_ids_NT.shape[1]) < job.length_N[:, None]
    batch = TokenBatch(
        token_ids_NT=torch.from_numpy(job.token_ids_NT).long(),
        mask_NT=torch.from_numpy(mask_NT),
        group_N=torch.from_numpy(job.group_N),
        reward_N=torch.tensor(grades.reward, dtype=torch.float32),
        sampler_logp_NT=torch.from_numpy(work.sampler_logp_NT),
        entropy_NT=torch.from_numpy(work.entropy_NT),
        max_length=settings.max_length,
        success=settings.success,
    )
    batch = batch.replace(**{n: own_column(c, batch.mask_NT) for n, c in work.columns.items()})
    rollouts = RolloutBatch(job.prompts, [], [], [], batch, grades.num_faults, grades.messages)
    return prepare(method_of(work.pickled), settings, rollouts)


def own_column(column: Tensor | Shelf, mask_NT: Tensor) -> Tensor:
    """A column as rules read it: as wide as the batch, 0 on padding, float32."""
    column = column.load() if isinstance(column, Shelf) else column
    column = column.float() if column.is_floating_point() else column
    if column.dim() < 2 or column.shape[0] != len(mask_NT):  # the head's weight
        return column
    own = column[:, : mask_NT.shape[1]]
    return own * mask_NT.view(*mask_NT.shape, *[1] * (own.dim() - 2))


@functools.lru_cache(maxsize=256)
def method_of(pickled: bytes) -> Method:
    return pickle.loads(pickled)


def prepare(method: Method, settings: Settings, rollouts: RolloutBatch) -> Prepared:
    """Credit, plan and scale of one member's batch, by its own method."""
    batch, seed, number = rollouts.batch, settings.seed, settings.batch_number
    with said_by_us():
        credit = method.assign(batch, settings.state, seed=seed, batch_number=number, report=False)
    plan = method.plan(batch, settings.num_updates, seed=seed, batch_number=number)
    updates = [method.rows(batch, credit, row_R) for row_R in plan]
    return Prepared(
        batch.reward_N.numpy(force=True),
        batch.group_N.numpy(force=True),
        credit.advantage_N.numpy(force=True),
        credit.credit_NT.numpy(force=True),
        [rows.row_R.numpy(force=True) for rows in updates],
        [rows.scale_NT.numpy(force=True) for rows in updates],
        [scale_of_rollouts(rows) for rows in updates],
        credit.state,
        rollouts.num_grader_failures,
        next(iter(rollouts.grader_messages), ""),
    )


def scale_of_rollouts(rows: Rows) -> np.ndarray:
    scale_N = rows.rollout_scale_N
    return np.zeros(len(rows.row_R), np.float32) if scale_N is None else scale_N.numpy(force=True)


class UpdateWork(NamedTuple):
    """One member's rows of an update and their log-probs, on the host."""

    pickled: bytes
    logp_RT: np.ndarray
    columns: tuple[np.ndarray | None, ...]


def prepare_update(_: Host, work: UpdateWork) -> np.ndarray:
    """What a loss must know of a member's whole update, [R, T]."""
    rows = Rows(*(None if column is None else torch.from_numpy(column) for column in work.columns))  # pyright: ignore[reportArgumentType]
    ready = method_of(work.pickled).prepare(torch.from_numpy(work.logp_RT), rows)
    assert ready.update_NT is not None
    return ready.update_NT.numpy()


def to_host(logp_RT: Tensor, rows: Rows) -> tuple[np.ndarray, tuple[np.ndarray | None, ...]]:
    """Log-probs and rows as arrays."""
    columns = (None if column is None else column.numpy(force=True) for column in rows)
    return logp_RT.numpy(force=True), tuple(columns)
