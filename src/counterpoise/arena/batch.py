"""One batch of all members: sample, grade, assign credit, plan, update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.arena.collect import collect_stack
from counterpoise.arena.crew import Crew
from counterpoise.arena.member import Member
from counterpoise.arena.optimizer import Moments
from counterpoise.arena.sampling import StackSampler
from counterpoise.arena.stack import Stack, restructure
from counterpoise.arena.update import apply_updates, precision, stack_logp, texts_of
from counterpoise.trainer.warn import said_by_us
from counterpoise.types import Credit, Plan, RolloutBatch


class Outcome(NamedTuple):
    """What a batch was, per member."""

    batches: list[RolloutBatch]
    credits: list[Credit]
    norms: list[Tensor]


def train_batch(
    stack: Stack,
    moments: Moments,
    members: Sequence[Member],
    sampler: StackSampler,
    crew: Crew,
    reference_P: Tensor,
    batch_number: int,
) -> Outcome:
    """The straight line of the trainer's loop, for all members."""
    batches = collect_stack(members, sampler, crew, batch_number)
    batches = measure_stack(stack, members, batches, reference_P)
    credits, plans = assign_all(members, batches, batch_number)
    norms = apply_updates(stack, moments, members, batches, credits, plans)
    for member, credit in zip(members, credits):
        member.state = credit.state
        member.num_prompts += member.config.rollouts.prompts
    return Outcome(batches, credits, norms)


def assign_all(
    members: Sequence[Member], batches: Sequence[RolloutBatch], batch_number: int
) -> tuple[list[Credit], list[Plan]]:
    """Credit and plan of every member, by its own method."""
    credits, plans = [], []
    for member, rollouts in zip(members, batches):
        with said_by_us():
            credits.append(
                member.method.assign(
                    rollouts.batch, member.state, seed=member.seed, batch_number=batch_number
                )
            )
        plans.append(
            member.method.plan(
                rollouts.batch,
                member.config.optimizer.updates_per_batch,
                seed=member.seed,
                batch_number=batch_number,
            )
        )
    return credits, plans


@torch.no_grad()
def measure_stack(
    stack: Stack, members: Sequence[Member], batches: Sequence[RolloutBatch], reference_P: Tensor
) -> list[RolloutBatch]:
    """Batches with the columns that methods need and sampling does not give."""
    columns: list[dict[str, Tensor]] = [{} for _ in members]
    for s, member in enumerate(members):
        if "head_VD" in member.method.needs:
            columns[s]["head_VD"] = stack.head_VD(s)
    sources = {
        "trainer_logp_NT": stack.theta_SP,
        "ref_logp_NT": reference_P.expand_as(stack.theta_SP),
    }
    for name, theta_SP in sources.items():
        ask = [s for s, member in enumerate(members) if name in member.method.needs]
        if ask:
            logp_RNT = _logp(stack, theta_SP[ask], [batches[s] for s in ask], members[0])
            for s, logp_NT in zip(ask, logp_RNT):
                shape = batches[s].batch.mask_NT.shape
                columns[s][name] = logp_NT[: shape[0], : shape[1]]
    return [
        rollouts._replace(batch=rollouts.batch.replace(**own)) if own else rollouts
        for rollouts, own in zip(batches, columns)
    ]


def _logp(stack: Stack, theta_RP: Tensor, batches: list[RolloutBatch], member: Member) -> Tensor:
    config = member.config
    with precision(stack, config):
        return stack_logp(
            stack,
            restructure(stack, theta_RP),
            texts_of(batches, stack.theta_SP.device),
            config.rollouts.temperature,
        )
