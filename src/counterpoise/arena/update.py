"""The updates of one batch for all members: one forward and one backward of the stack each, the
project's own losses, AdamW and clipping per member.

A loss has one value per token and reads nothing beyond its own row and what was prepared for the
whole update, so the rows of all members with one method go through it together.

Axes: S members, N rows of a member, R rows of an update (the most that any member has), T response
    tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from counterpoise.arena.collect import Bench, Collected
from counterpoise.arena.member import Member
from counterpoise.arena.optimizer import Moments, adamw_, clip_
from counterpoise.arena.prepare import Prepared, UpdateWork, prepare_update, to_host
from counterpoise.arena.texts import Texts, pick, stack_logp
from counterpoise.catalogue.method import Method
from counterpoise.trainer.update import learning_rate
from counterpoise.types import Rows


class Whole(NamedTuple):
    """Columns of the batch that updates take rows of."""

    group_SN: Tensor
    reward_SN: Tensor
    advantage_SN: Tensor
    credit_SNT: Tensor


class Cut(NamedTuple):
    """The rows of one update: which, how many of them each member has, the scale of their tokens,
    and theirs in a mean over rollouts.
    """

    row_SR: Tensor
    num_S: list[int]
    scale_SRT: Tensor
    rollout_scale_SR: Tensor


def apply_updates(bench: Bench, members: Sequence[Member], collected: Collected) -> list[Tensor]:
    """All updates of a batch, ``optimizer.epochs`` times over, in place; the gradient's norm of
    each update and member, [S].

    A member whose plan has fewer updates rests in the last ones. A member whose log-probs or
    gradient are not finite stops: its weights stay.
    """
    prepared, (_, _, width) = collected.prepared, collected.texts.mask_SNT.shape
    device = collected.texts.mask_SNT.device
    whole = whole_batch(prepared, width, device)
    num_updates, epochs = max(len(one.row) for one in prepared), members[0].config.optimizer.epochs
    return [
        apply_update(bench, members, collected.texts, whole, cut_of(prepared, at, width, device))
        for at in [*range(num_updates)] * epochs
    ]


def whole_batch(prepared: Sequence[Prepared], width: int, device: torch.device) -> Whole:
    """The members' columns side by side; their groups stay apart."""
    num = max(len(one.reward_N) for one in prepared)
    columns = (
        np.stack([_fit(one.group_N + s * 2**32, num) for s, one in enumerate(prepared)]),
        np.stack([_fit(one.reward_N, num) for one in prepared]),
        np.stack([_fit(one.advantage_N, num) for one in prepared]),
        np.stack([_fit(one.credit_NT, num, width) for one in prepared]),
    )
    return Whole(*(torch.from_numpy(column).to(device, non_blocking=True) for column in columns))


def cut_of(prepared: Sequence[Prepared], at: int, width: int, device: torch.device) -> Cut:
    """Update number ``at`` of every member."""
    none = np.zeros(0, int), np.zeros((0, width), np.float32), np.zeros(0, np.float32)
    parts = [
        (one.row[at], one.scale[at], one.rollout_scale[at]) if at < len(one.row) else none
        for one in prepared
    ]
    nums = [len(row) for row, _, _ in parts]
    rows, scales, rollout_scales = zip(*parts)
    row_SR = np.stack([_fit(row, max(nums)) for row in rows])
    scale_SRT = np.stack([_fit(scale, max(nums), width) for scale in scales])
    rollout_scale_SR = np.stack([_fit(scale, max(nums)) for scale in rollout_scales])
    row_SR, scale_SRT, rollout_scale_SR = (
        torch.from_numpy(column).to(device) for column in (row_SR, scale_SRT, rollout_scale_SR)
    )
    return Cut(row_SR, nums, scale_SRT, rollout_scale_SR)


def apply_update(
    bench: Bench, members: Sequence[Member], texts: Texts, whole: Whole, cut: Cut
) -> Tensor:
    """One update of every member that has rows."""
    stack, temperature = bench.stack, members[0].config.rollouts.temperature
    runs = [num > 0 and not member.stopped for member, num in zip(members, cut.num_S)]
    picked = texts.select(cut.row_SR)
    stack.grad_SP.zero_()
    logp_SRT = stack_logp(stack, stack.weights, picked, temperature)
    is_finite = torch.isfinite(logp_SRT.detach()).flatten(1).all(1).tolist()
    runs = keep_finite(members, runs, is_finite, "the log-probs are not finite")
    logp_NT, rows = logp_SRT.flatten(0, 1), flat_rows(picked, whole, cut)
    rows = prepared_rows(bench, members, runs, cut, logp_NT.detach(), rows)
    total = torch.zeros((), device=logp_NT.device)
    for method, at_M in by_method(members, runs, cut):
        own = rows.select(at_M)
        total = total + (method.loss(logp_NT[at_M], own).loss_NT * own.scale_NT).sum()
    if total.requires_grad:
        total.backward()
    return step_members(bench, members, runs)


def flat_rows(picked: Texts, whole: Whole, cut: Cut) -> Rows:
    """The rows of all members end to end, R of each; those that a member has not are never read."""
    group_SR, reward_SR, advantage_SR, credit_SRT = (pick(c, cut.row_SR) for c in whole)
    columns = (
        *(cut.row_SR, picked.mask_SNT, group_SR, reward_SR, advantage_SR, credit_SRT),
        *(picked.sampler_logp_SNT, cut.scale_SRT),
    )
    ref, anchor, kl = (
        None if column is None else column.flatten(0, 1)
        for column in (picked.ref_logp_SNT, picked.anchor_logp_SNT, picked.ref_kl_SNT)
    )
    return Rows(
        *(column.flatten(0, 1) for column in columns),
        ref_logp_NT=ref,
        anchor_logp_NT=anchor,
        ref_kl_NT=kl,
        rollout_scale_N=cut.rollout_scale_SR.flatten(),
    )


def prepared_rows(
    bench: Bench,
    members: Sequence[Member],
    runs: Sequence[bool],
    cut: Cut,
    logp_NT: Tensor,
    rows: Rows,
) -> Rows:
    """Rows with what some losses must know of a member's whole update."""
    if not any(member.method.needs_update_logp for member in members):
        return rows
    update_NT = torch.zeros_like(rows.credit_NT)
    for method, at_M in by_method(members, runs, cut):
        if not method.needs_update_logp:
            continue
        if prepares_by_prompt(method):  # groups of different members are different prompts
            own = method.prepare(logp_NT[at_M], rows.select(at_M)).update_NT
            assert own is not None
            update_NT[at_M] = own.to(update_NT.dtype)
        else:
            update_NT[at_M] = prepared_one_by_one(bench, members, runs, cut, method, logp_NT, rows)
    return rows._replace(update_NT=update_NT)


def prepares_by_prompt(method: Method) -> bool:
    """Whether ``prepare`` takes an update prompt by prompt, so that more prompts change nothing."""
    return all(term.has("prepares_by_prompt") for term in method.terms if term.prepare)


def prepared_one_by_one(
    bench: Bench,
    members: Sequence[Member],
    runs: Sequence[bool],
    cut: Cut,
    method: Method,
    logp_NT: Tensor,
    rows: Rows,
) -> Tensor:
    """What a loss must know of each member's update, by the crew; end to end as ``by_method``."""
    logp, columns = to_host(logp_NT, rows)
    works = []
    for s, member in enumerate(members):
        if member.method is method and runs[s]:
            start = s * cut.row_SR.shape[1]
            own = slice(start, start + cut.num_S[s])
            some = tuple(None if column is None else column[own] for column in columns)
            works.append(UpdateWork(member.pickled, logp[own], some))
    update = np.concatenate(bench.crew.call(prepare_update, works))
    return torch.from_numpy(update).to(rows.credit_NT)


def member_rows(cut: Cut, member: int) -> Tensor:
    """Where a member's rows stand among those of all."""
    start = member * cut.row_SR.shape[1]
    return torch.arange(start, start + cut.num_S[member], device=cut.row_SR.device)


def by_method(
    members: Sequence[Member], runs: Sequence[bool], cut: Cut
) -> Iterator[tuple[Method, Tensor]]:
    """Each method, and where the rows of its members stand."""
    for key in dict.fromkeys(id(member.method) for member in members):
        own = [s for s, m in enumerate(members) if id(m.method) == key and runs[s]]
        if own:
            yield members[own[0]].method, torch.cat([member_rows(cut, s) for s in own])


def keep_finite(
    members: Sequence[Member], runs: Sequence[bool], is_finite: Sequence[bool], reason: str
) -> list[bool]:
    """Who goes on; the others stop, with their reason."""
    for member, is_running, is_fine in zip(members, runs, is_finite):
        if is_running and not is_fine:
            member.stopped = reason
    return [is_running and is_fine for is_running, is_fine in zip(runs, is_finite)]


def step_members(bench: Bench, members: Sequence[Member], runs: Sequence[bool]) -> Tensor:
    """Clip and update every member that runs and has a finite gradient; the norms."""
    stack, settings = bench.stack, members[0].config.optimizer
    norm_S = clip_(stack.grad_SP, settings.clip_norm)
    is_finite = torch.isfinite(norm_S).tolist()
    runs = keep_finite(members, runs, is_finite, "the gradient's norm is not finite")
    lr_S = rates(members).to(norm_S.device)
    if all(runs):
        adamw_(stack.theta_SP, stack.grad_SP, bench.moments, lr_S, settings)
    elif any(runs):
        runs_S = torch.tensor(runs, device=norm_S.device)
        some = Moments(*(column[runs_S] for column in bench.moments))
        theta_RP = stack.theta_SP[runs_S]
        adamw_(theta_RP, stack.grad_SP[runs_S], some, lr_S[runs_S], settings)
        for kept, part in zip((stack.theta_SP, *bench.moments), (theta_RP, *some)):
            kept[runs_S] = part
    for member, is_running in zip(members, runs):
        member.num_updates += is_running
    return norm_S


def rates(members: Sequence[Member]) -> Tensor:
    """Each member's learning rate at its next update, [S] float64."""
    values = [
        learning_rate(m.config.optimizer, m.num_updates, m.config.num_updates) for m in members
    ]
    return torch.tensor(values, dtype=torch.float64)


def _fit(column: np.ndarray, *size: int) -> np.ndarray:
    """A column with more rows (and tokens), 0 there."""
    out = np.zeros(size + column.shape[len(size) :], column.dtype)
    out[tuple(slice(length) for length in column.shape[: len(size)])] = column
    return out
