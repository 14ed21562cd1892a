"""Prompts -> rollouts -> rewards -> a batch per member, sampled for all members at once.

Axes: S members, N rollouts of a member, T response tokens, B = S x N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.arena.crew import Answers, Crew, Job, Questions, Stretch
from counterpoise.arena.member import Member
from counterpoise.arena.sampling import StackSampler
from counterpoise.maths.reduce import derived_seed
from counterpoise.sampling import SAMPLED
from counterpoise.sampling.draw import uniforms
from counterpoise.sampling.slots import Columns, Settings
from counterpoise.types import RolloutBatch, TokenBatch

TOPK = 20  # candidates per token where a method reads them, as ``sample`` takes them


class Sampled(NamedTuple):
    """One member's rows of what the stack sampled, as wide as its own longest row."""

    token_ids_NT: Tensor
    mask_NT: Tensor
    sampler_logp_NT: Tensor
    entropy_NT: Tensor
    length_N: Tensor
    extras: dict[str, Tensor]


def stretches(members: Sequence[Member]) -> list[Stretch]:
    """The prompts of each member's next batch."""
    return [Stretch("train", m.seed, m.num_prompts, m.config.rollouts.prompts) for m in members]


def settings_of(
    member: Member, stop_ids: tuple[int, ...], needs: frozenset[str], vocabulary: int
) -> Settings:
    """How the members of a stack sample: they share all of it."""
    rollouts, wants_top = member.config.rollouts, needs & {"topk_ids_NTK", "topk_logp_NTK"}
    return Settings(
        rollouts.max_new_tokens,
        rollouts.temperature,
        rollouts.top_p,
        rollouts.top_k,
        tuple(sorted(set(stop_ids))),
        False,
        "hidden_NTD" in needs,
        min(TOPK, vocabulary) if wants_top else 0,
    )


def collect_stack(
    members: Sequence[Member], sampler: StackSampler, crew: Crew, batch_number: int
) -> list[RolloutBatch]:
    """Every member's batch, graded; without texts."""
    first = members[0]
    questions = crew.questions(stretches(members))
    group_size, num = first.config.rollouts.group_size, first.config.rollouts.prompts
    needs = frozenset().union(*(m.method.needs for m in members))
    stop_ids, vocabulary = crew.host.policy.stop_ids, len(sampler.stack.like.embed_VD)
    settings = settings_of(first, stop_ids, needs, vocabulary)
    seeds = [derived_seed(m.seed, batch_number, "rollouts/0") for m in members]
    uniform_BT = member_uniforms(
        seeds, num * group_size, settings.max_new_tokens, sampler.stack.theta_SP.device
    )
    columns = sampler.fill([q.prompt_ids for q in questions], group_size, uniform_BT, settings)
    after = [m.num_prompts + num for m in members]
    crew.expect([s._replace(start=start) for s, start in zip(stretches(members), after)])
    answers = judged(columns, questions, group_size, crew, f"batch {batch_number}")
    pad_id = crew.host.policy.tokenizer.pad_token_id
    return [
        rollout_batch(m, cut(columns, s, num * group_size, m.method.needs, pad_id), q, a)
        for s, (m, q, a) in enumerate(zip(members, questions, answers))
    ]


def member_uniforms(
    seeds: Sequence[int], num_rows: int, num_tokens: int, device: torch.device
) -> Tensor:
    """Every row's random stream, members one after the other, [S * N, T]."""
    per_row = [seed for seed in seeds for _ in range(num_rows)]
    return uniforms(per_row, list(range(num_rows)) * len(seeds), num_tokens, device)


def judged(
    columns: Columns, questions: Sequence[Questions], group_size: int, crew: Crew, where: str
) -> list[Answers]:
    """Grades of all rollouts; the columns cross to the host once."""
    ids_BT = columns.token_ids_NT[:-1].to(torch.int32).cpu().numpy()
    length_B = columns.length_N[:-1].cpu().numpy()
    jobs, start = [], 0
    for question in questions:
        group_N = torch.arange(len(question.prompts)).repeat_interleave(group_size).numpy()
        end = start + len(group_N)
        jobs.append(Job(question.prompts, group_N, ids_BT[start:end], length_B[start:end]))
        start = end
    return crew.answers(jobs, where)


def cut(
    columns: Columns, member: int, num_rows: int, needs: frozenset[str], pad_id: int
) -> Sampled:
    """One member's rows, copied."""
    rows = slice(member * num_rows, (member + 1) * num_rows)
    length_N = columns.length_N[rows].clone()
    width = int(length_N.max())
    mask_NT = torch.arange(width, device=length_N.device) < length_N[:, None]

    def own(column: Tensor, fill: int = 0) -> Tensor:
        part = column[rows, :width]
        return part.masked_fill(~mask_NT.view(*mask_NT.shape, *[1] * (part.dim() - 2)), fill)

    extras = {name: own(getattr(columns, name)) for name in SAMPLED & needs}
    return Sampled(
        own(columns.token_ids_NT, pad_id),
        mask_NT,
        own(columns.sampler_logp_NT),
        own(columns.entropy_NT),
        length_N,
        {name: c.float() if c.is_floating_point() else c for name, c in extras.items()},
    )


def rollout_batch(
    member: Member, sampled: Sampled, questions: Questions, answers: Answers
) -> RolloutBatch:
    """The batch as the trainer has it; why a rollout ended is not kept."""
    device, rollouts = sampled.mask_NT.device, member.config.rollouts
    group_N = torch.arange(rollouts.prompts, device=device).repeat_interleave(rollouts.group_size)
    success = member.config.task.get("success")
    batch = TokenBatch(
        token_ids_NT=sampled.token_ids_NT,
        mask_NT=sampled.mask_NT,
        group_N=group_N,
        reward_N=torch.tensor(answers.grades.reward, dtype=torch.float32, device=device),
        sampler_logp_NT=sampled.sampler_logp_NT,
        entropy_NT=sampled.entropy_NT,
        max_length=rollouts.max_new_tokens,
        success=success if member.method.success is None else member.method.success,
    ).replace(**sampled.extras)
    row_ids = [ids for ids in questions.prompt_ids for _ in range(rollouts.group_size)]
    grades = answers.grades
    return RolloutBatch(
        questions.prompts, row_ids, answers.texts, [], batch, grades.num_faults, grades.messages
    )
