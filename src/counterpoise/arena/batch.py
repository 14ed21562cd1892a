"""One batch of all members: sample, grade, assign credit, plan, update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.arena.collect import Bench, Collected, collect_stack
from counterpoise.arena.crew import Crew
from counterpoise.arena.member import Member
from counterpoise.arena.optimizer import zero_moments
from counterpoise.arena.sampling import StackSampler
from counterpoise.arena.stack import Stack
from counterpoise.arena.update import apply_updates


class Outcome(NamedTuple):
    """What a batch was, per member; ``norms`` has the gradient's norm of each update."""

    collected: Collected
    norms: list[Tensor]


def bench_of(stack: Stack, crew: Crew) -> Bench:
    """A stack with what its batches share; members start from its present weights."""
    dtype = torch.bfloat16 if stack.theta_SP.is_cuda else torch.float32
    sampler, start_P = StackSampler(stack, dtype), stack.theta_SP[0].clone()
    return Bench(stack, zero_moments(stack.theta_SP), sampler, crew, start_P)


def train_batch(bench: Bench, members: Sequence[Member], batch_number: int) -> Outcome:
    """The straight line of the trainer's loop, for all members."""
    collected = collect_stack(bench, members, batch_number)
    norms = apply_updates(bench, members, collected)
    for member, prepared in zip(members, collected.prepared):
        if not member.stopped:
            member.state = prepared.state
            member.num_prompts += member.config.rollouts.prompts
            member.rewards.append(float(prepared.reward_N.mean()))
    return Outcome(collected, norms)
