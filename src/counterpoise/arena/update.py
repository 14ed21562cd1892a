"""The updates of one batch for all members: one forward and one backward of the stack each, the
project's own losses, AdamW and clipping per member.

A loss has one value per token and reads nothing beyond its own row and what was prepared for the
whole update, so the rows of all members with one method go through it together.

Axes: S members, R rows of an update (the most that any member has), T response tokens, L tokens of
    a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from counterpoise.arena.forward import hidden_states, response_logits, token_logp
from counterpoise.arena.member import Member
from counterpoise.arena.optimizer import Moments, adamw_, clip_
from counterpoise.arena.stack import Stack
from counterpoise.catalogue.method import Method
from counterpoise.sampling.decoder import Weights
from counterpoise.trainer.config import Config
from counterpoise.trainer.update import learning_rate
from counterpoise.types import Credit, Plan, RolloutBatch, Rows, TokenBatch


class Texts(NamedTuple):
    """Prompts and responses of all members as one tensor.

    Args:
        ids_SNL: prompt, response, padding.
        start_SN: length of the prompt.
        response_SNT, mask_SNT: the response alone.
    """

    ids_SNL: Tensor
    start_SN: Tensor
    response_SNT: Tensor
    mask_SNT: Tensor

    def select(self, row_SR: Tensor) -> Texts:
        """The chosen rows of each member."""
        picked = (
            column.gather(
                1,
                row_SR.view(*row_SR.shape, *[1] * (column.dim() - 2)).expand(
                    *row_SR.shape, *column.shape[2:]
                ),
            )
            for column in self
        )
        return Texts(*picked)


def texts_of(batches: Sequence[RolloutBatch], device: torch.device) -> Texts:
    """The rollouts of all members, padded to the most rows and the longest row."""
    num = max(rollouts.batch.num_rollouts for rollouts in batches)
    width = max(rollouts.batch.mask_NT.shape[1] for rollouts in batches)
    prompts = [ids for rollouts in batches for ids in _padded(rollouts.prompt_ids, num)]
    start_B = torch.tensor([len(ids) for ids in prompts])
    longest = int(start_B.max())
    prompt_BW = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in prompts])
    start_B, prompt_BW = start_B.to(device), prompt_BW.to(device)
    response_SNT, mask_SNT = (
        torch.stack([_fit(getattr(r.batch, name), num, width) for r in batches])
        for name in ("token_ids_NT", "mask_NT")
    )
    ids_BL = torch.cat([prompt_BW, prompt_BW.new_zeros(len(prompts), width)], 1)
    at_BT = start_B[:, None] + torch.arange(width, device=device)
    ids_BL.scatter_(1, at_BT, response_SNT.flatten(0, 1))
    shape = len(batches), num
    return Texts(ids_BL.unflatten(0, shape), start_B.unflatten(0, shape), response_SNT, mask_SNT)


def _padded(rows: list[list[int]], num: int) -> list[list[int]]:
    return rows + [rows[0]] * (num - len(rows))


def _fit(column_NT: Tensor, num: int, width: int) -> Tensor:
    """A column with more rows and tokens, 0 (False) there."""
    return pad(column_NT, (0, width - column_NT.shape[1], 0, num - column_NT.shape[0]))


def stack_logp(stack: Stack, weights: Weights, texts: Texts, temperature: float) -> Tensor:
    """Log-probs of all response tokens, [S, N, T]."""
    hidden_SRLD = hidden_states(weights, stack.shape, texts.ids_SNL, stack.cos_LC, stack.sin_LC)
    logits_SRTV = response_logits(
        weights, hidden_SRLD, texts.start_SN, texts.mask_SNT.shape[2], temperature
    )
    return token_logp(logits_SRTV, texts.response_SNT, texts.mask_SNT)


def apply_updates(
    stack: Stack,
    moments: Moments,
    members: Sequence[Member],
    batches: Sequence[RolloutBatch],
    credits: Sequence[Credit],
    plans: Sequence[Plan],
) -> list[Tensor]:
    """All updates of a batch, in place; the gradient's norm of each update and member, [S].

    A member whose plan has fewer updates rests in the last ones. A member whose gradient is not
    finite stops: its weights stay.
    """
    texts = texts_of(batches, stack.theta_SP.device)
    width = texts.mask_SNT.shape[2]
    wide = [
        (widened(rollouts.batch, width), widened_credit(credit, width))
        for rollouts, credit in zip(batches, credits)
    ]
    norms = []
    for number in range(max(map(len, plans))):
        rows_S = [
            _update_rows(member, *columns, plan, number)
            for member, columns, plan in zip(members, wide, plans)
        ]
        norms.append(apply_update(stack, moments, members, rows_S, texts))
    return norms


def _update_rows(
    member: Member, batch: TokenBatch, credit: Credit, plan: Plan, number: int
) -> Rows | None:
    if member.stopped or number >= len(plan):
        return None
    return member.method.rows(batch, credit, plan.updates[number])


def apply_update(
    stack: Stack,
    moments: Moments,
    members: Sequence[Member],
    rows_S: list[Rows | None],
    texts: Texts,
) -> Tensor:
    """One update of every member that has rows."""
    config, device = members[0].config, stack.theta_SP.device
    num = max(len(rows.row_R) for rows in rows_S if rows is not None)
    row_SR = torch.stack([_row_index(rows, num, device) for rows in rows_S])
    picked = texts.select(row_SR)
    is_used_SR1 = torch.stack([_is_used(rows, num, device) for rows in rows_S])[..., None]
    picked = picked._replace(mask_SNT=picked.mask_SNT & is_used_SR1)
    prepare_rows(stack, members, rows_S, picked, config)
    stack.grad_SP.zero_()
    with precision(stack, config):
        logp_SRT = stack_logp(stack, stack.weights, picked, config.rollouts.temperature)
    stop_where_not_finite(members, rows_S, logp_SRT.detach())
    total = sum(
        (method.loss(logp_NT, rows).loss_NT * rows.scale_NT).sum()
        for method, logp_NT, rows in by_method(members, rows_S, logp_SRT)
    )
    if isinstance(total, Tensor):
        total.backward()
    return step_members(stack, moments, members, rows_S, config)


def precision(stack: Stack, config: Config) -> torch.autocast:
    """bfloat16 products on an accelerator, as the trainer has them."""
    device = stack.theta_SP.device.type
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def prepare_rows(
    stack: Stack,
    members: Sequence[Member],
    rows_S: list[Rows | None],
    picked: Texts,
    config: Config,
) -> None:
    """What some losses must know of a whole update, from a forward without gradient."""
    ask = [s for s, m in enumerate(members) if rows_S[s] and m.method.needs_update_logp]
    if not ask:
        return
    with torch.no_grad(), precision(stack, config):
        logp_SRT = stack_logp(stack, stack.weights, picked, config.rollouts.temperature)
    for s in ask:
        rows = rows_S[s]
        assert rows is not None
        rows_S[s] = members[s].method.prepare(logp_SRT[s, : len(rows.row_R)], rows)


def stop_where_not_finite(
    members: Sequence[Member], rows_S: list[Rows | None], logp_SRT: Tensor
) -> None:
    """Members whose log-probs are not finite stop, and take no part in this update."""
    is_finite = torch.isfinite(logp_SRT).flatten(1).all(1).tolist()
    for s, member in enumerate(members):
        if rows_S[s] is not None and not is_finite[s]:
            member.stopped, rows_S[s] = "the log-probs are not finite", None


def by_method(
    members: Sequence[Member], rows_S: Sequence[Rows | None], logp_SRT: Tensor
) -> Iterator[tuple[Method, Tensor, Rows]]:
    """The rows of all members with one method, laid end to end; their groups stay apart."""
    for method in dict.fromkeys(id(member.method) for member in members):
        own = [
            (logp_SRT[s, : len(rows.row_R)], apart(rows, s))
            for s, (member, rows) in enumerate(zip(members, rows_S))
            if id(member.method) == method and rows is not None
        ]
        if own:
            held = next(member.method for member in members if id(member.method) == method)
            yield held, torch.cat([logp for logp, _ in own]), join([rows for _, rows in own])


def apart(rows: Rows, member: int) -> Rows:
    """Rows whose group numbers no other member has."""
    return rows._replace(group_N=rows.group_N + member * 2**32)


def join(parts: Sequence[Rows]) -> Rows:
    """Rows laid end to end."""
    columns = [
        None if any(part is None for part in column) else torch.cat(list(column))
        for column in zip(*parts)
    ]
    return Rows(*columns)  # pyright: ignore[reportArgumentType]


def step_members(
    stack: Stack,
    moments: Moments,
    members: Sequence[Member],
    rows_S: Sequence[Rows | None],
    config: Config,
) -> Tensor:
    """Clip and update every member that has rows and a finite gradient; the norms."""
    norm_S = clip_(stack.grad_SP, config.optimizer.clip_norm)
    is_finite = torch.isfinite(norm_S).tolist()
    for s, member in enumerate(members):
        if rows_S[s] is not None and not is_finite[s]:
            member.stopped = f"the gradient's norm is {float(norm_S[s])}"
    runs_S = torch.tensor(
        [rows is not None and not m.stopped for m, rows in zip(members, rows_S)],
        device=norm_S.device,
    )
    if bool(runs_S.all()):
        adamw_(stack.theta_SP, stack.grad_SP, moments, rates(members, norm_S), config.optimizer)
    elif bool(runs_S.any()):
        _update_some(stack, moments, rates(members, norm_S), runs_S, config)
    for member, is_running in zip(members, runs_S.tolist()):
        member.num_updates += is_running
    return norm_S


def _update_some(
    stack: Stack, moments: Moments, lr_S: Tensor, runs_S: Tensor, config: Config
) -> None:
    theta, grad = stack.theta_SP[runs_S], stack.grad_SP[runs_S]
    some = Moments(*(column[runs_S] for column in moments))
    adamw_(theta, grad, some, lr_S[runs_S], config.optimizer)
    with torch.no_grad():
        stack.theta_SP[runs_S] = theta
        for whole, part in zip(moments, some):
            whole[runs_S] = part


def rates(members: Sequence[Member], like: Tensor) -> Tensor:
    """Each member's learning rate at its next update, [S] float64."""
    values = [
        learning_rate(
            m.config.optimizer,
            m.num_updates,
            m.config.num_batches * m.config.optimizer.updates_per_batch,
        )
        for m in members
    ]
    return torch.tensor(values, dtype=torch.float64, device=like.device)


def widened(batch: TokenBatch, width: int) -> TokenBatch:
    """The columns that updates read, with more padding."""
    num, ref_NT = batch.num_rollouts, batch.ref_logp_NT
    return TokenBatch(
        token_ids_NT=_fit(batch.token_ids_NT, num, width),
        mask_NT=_fit(batch.mask_NT, num, width),
        group_N=batch.group_N,
        reward_N=batch.reward_N,
        sampler_logp_NT=_fit(batch.sampler_logp_NT, num, width),
        ref_logp_NT=None if ref_NT is None else _fit(ref_NT, num, width),
        max_length=batch.max_length,
        success=batch.success,
        success_N=batch.success_N,
    )


def widened_credit(credit: Credit, width: int) -> Credit:
    size = len(credit.advantage_N), width
    return credit._replace(
        credit_NT=_fit(credit.credit_NT, *size), weight_NT=_fit(credit.weight_NT, *size)
    )


def _row_index(rows: Rows | None, num: int, device: torch.device) -> Tensor:
    if rows is None:
        return torch.zeros(num, dtype=torch.long, device=device)
    return pad(rows.row_R.to(device), (0, num - len(rows.row_R)))


def _is_used(rows: Rows | None, num: int, device: torch.device) -> Tensor:
    return torch.arange(num, device=device) < (0 if rows is None else len(rows.row_R))
