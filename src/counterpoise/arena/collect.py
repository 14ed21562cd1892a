"""Prompts -> rollouts -> rewards -> credit and plan of every member, sampled for all at once.

Axes: S members, N rollouts of a member, T response tokens, B = S x N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from counterpoise.arena.crew import Crew, Job, Questions, Stretch, judge
from counterpoise.arena.member import Member
from counterpoise.arena.optimizer import Moments
from counterpoise.arena.prepare import (
    NOTHING,
    Prepared,
    Work,
    prepare,
    prepare_sampled,
    settings_of,
)
from counterpoise.arena.sampling import StackSampler
from counterpoise.arena.stack import Stack, restructure
from counterpoise.arena.texts import Texts, stack_logp, texts_of
from counterpoise.maths.reduce import derived_seed
from counterpoise.sampling import SAMPLED
from counterpoise.sampling.draw import uniforms
from counterpoise.sampling.slots import Columns, Settings
from counterpoise.types import RolloutBatch, TokenBatch

TOPK = 20  # candidates per token where a method reads them, as ``sample`` takes them
GIVEN = frozenset({"entropy_NT"})  # optional columns that every batch has


class Collected(NamedTuple):
    """A batch of all members, ready for its updates."""

    texts: Texts
    prepared: list[Prepared]


class Bench(NamedTuple):
    """What all batches of a stack share.

    Args:
        reference_P: the weights all members started from.
    """

    stack: Stack
    moments: Moments
    sampler: StackSampler
    crew: Crew
    reference_P: Tensor


def collect_stack(bench: Bench, members: Sequence[Member], batch_number: int) -> Collected:
    """Sample, grade, assign credit and plan for every member."""
    rollouts = members[0].config.rollouts
    questions = bench.crew.questions(stretches(members))
    columns = sample_stack(bench, members, questions, batch_number)
    ahead = [s._replace(start=s.start + rollouts.prompts) for s in stretches(members)]
    bench.crew.expect(ahead)
    works = works_of(columns, members, questions, batch_number)
    stop_diverged(members, works)
    plain = [s for s, member in enumerate(members) if is_plain(member) and not member.stopped]
    prepared = dict(zip(plain, bench.crew.call(prepare_sampled, [works[s] for s in plain])))
    shape = len(members), rollouts.prompts * rollouts.group_size
    texts = texts_of(
        [question.prompt_ids for question in questions],
        rollouts.group_size,
        *(
            column[:-1].unflatten(0, shape)
            for column in (columns.token_ids_NT, columns.length_N, columns.sampler_logp_NT)
        ),
    )
    texts = with_reference(bench, members, texts)
    if len(plain) < sum(not member.stopped for member in members):
        prepared |= prepare_on_device(bench, members, columns, works, texts)
    return Collected(texts, [prepared.get(s, NOTHING) for s in range(len(members))])


def stop_diverged(members: Sequence[Member], works: Sequence[Work]) -> None:
    """Members whose logits are not finite stop before anything is learned from them."""
    for member, work in zip(members, works):
        if not np.isfinite(work.sampler_logp_NT).all():
            member.stopped = "the model's logits are not finite"


def is_plain(member: Member) -> bool:
    """Whether credit needs no more than what sampling and grading give."""
    return member.method.needs <= GIVEN


def stretches(members: Sequence[Member]) -> list[Stretch]:
    """The prompts of each member's next batch."""
    return [Stretch("train", m.seed, m.num_prompts, m.config.rollouts.prompts) for m in members]


def sample_stack(
    bench: Bench, members: Sequence[Member], questions: Sequence[Questions], batch_number: int
) -> Columns:
    """Rollouts of all members; the columns are the sampler's own."""
    rollouts = members[0].config.rollouts
    needs = frozenset().union(*(member.method.needs for member in members))
    wants_top = needs & {"topk_ids_NTK", "topk_logp_NTK"}
    settings = Settings(
        rollouts.max_new_tokens,
        rollouts.temperature,
        rollouts.top_p,
        rollouts.top_k,
        tuple(sorted(set(bench.crew.host.policy.stop_ids))),
        False,
        "hidden_NTD" in needs,
        min(TOPK, len(bench.stack.like.embed_VD)) if wants_top else 0,
    )
    seeds = [derived_seed(member.seed, batch_number, "rollouts/0") for member in members]
    num, device = rollouts.prompts * rollouts.group_size, bench.stack.theta_SP.device
    uniform_BT = member_uniforms(seeds, num, settings.max_new_tokens, device)
    prompts = [question.prompt_ids for question in questions]
    return bench.sampler.fill(prompts, rollouts.group_size, uniform_BT, settings)


def member_uniforms(
    seeds: Sequence[int], num_rows: int, num_tokens: int, device: torch.device
) -> Tensor:
    """Every row's random stream, members one after the other, [S * N, T]."""
    per_row = [seed for seed in seeds for _ in range(num_rows)]
    return uniforms(per_row, list(range(num_rows)) * len(seeds), num_tokens, device)


def works_of(
    columns: Columns, members: Sequence[Member], questions: Sequence[Questions], batch_number: int
) -> list[Work]:
    """Each member's rows on the host, as wide as its own longest; all cross over at once."""
    length_B = columns.length_N[:-1].cpu().numpy()
    width = int(length_B.max())
    ids_BT, logp_BT, entropy_BT = (
        column[:-1, :width].to(dtype).cpu().numpy()
        for column, dtype in (
            (columns.token_ids_NT, torch.int32),
            (columns.sampler_logp_NT, torch.float32),
            (columns.entropy_NT, torch.float32),
        )
    )
    num = len(length_B) // len(members)
    works = []
    for s, (member, question) in enumerate(zip(members, questions)):
        rows = slice(s * num, (s + 1) * num)
        own = int(length_B[rows].max())
        is_token_NT = np.arange(own) < length_B[rows, None]
        ids_NT, logp_NT, entropy_NT = (
            np.where(is_token_NT, column[rows, :own], 0) for column in (ids_BT, logp_BT, entropy_BT)
        )
        group_N = np.repeat(np.arange(len(question.prompts)), num // len(question.prompts))
        where = f"batch {batch_number}"
        job = Job(question.prompts, group_N, ids_NT, length_B[rows], where)
        settings = settings_of(member, batch_number)
        works.append(Work(member.pickled, settings, job, logp_NT, entropy_NT))
    return works


def prepare_on_device(
    bench: Bench, members: Sequence[Member], columns: Columns, works: Sequence[Work], texts: Texts
) -> dict[int, Prepared]:
    """Members whose credit reads columns that are large or need a forward of their own."""
    asked = [s for s, m in enumerate(members) if not is_plain(m) and not m.stopped]
    grades = bench.crew.call(judge, [works[s].job for s in asked])
    measured = measure_columns(bench, members, columns, texts, works)
    prepared = {}
    for s, grade in zip(asked, grades):
        batch = device_batch(members[s], works[s], texts, s, grade.reward).replace(**measured[s])
        rollouts = RolloutBatch(
            works[s].job.prompts, [], [], [], batch, grade.num_faults, grade.messages
        )
        prepared[s] = prepare(members[s].method, works[s].settings, rollouts)
    return prepared


def device_batch(
    member: Member, work: Work, texts: Texts, s: int, reward: Sequence[float]
) -> TokenBatch:
    """One member's batch where the stack lives, as wide as its own longest row."""
    width, device = work.job.token_ids_NT.shape[1], texts.mask_SNT.device
    return TokenBatch(
        token_ids_NT=texts.response_SNT[s, :, :width],
        mask_NT=texts.mask_SNT[s, :, :width],
        group_N=torch.from_numpy(work.job.group_N).to(device),
        reward_N=torch.tensor(reward, dtype=torch.float32, device=device),
        sampler_logp_NT=texts.sampler_logp_SNT[s, :, :width],
        entropy_NT=torch.from_numpy(work.entropy_NT).to(device),
        max_length=member.config.rollouts.max_new_tokens,
        success=member.config.task.get("success"),
    )


@torch.no_grad()
def measure_columns(
    bench: Bench, members: Sequence[Member], columns: Columns, texts: Texts, works: Sequence[Work]
) -> list[dict[str, Tensor]]:
    """The columns that each member's method needs besides those that every batch has."""
    num, temperature = texts.mask_SNT.shape[1], members[0].config.rollouts.temperature
    whole = {"ref_logp_NT": texts.ref_logp_SNT}
    if any("trainer_logp_NT" in member.method.needs for member in members):
        own = restructure(bench.stack, bench.stack.theta_SP)
        whole["trainer_logp_NT"] = stack_logp(bench.stack, own, texts, temperature)
    out: list[dict[str, Tensor]] = []
    for s, (member, work) in enumerate(zip(members, works)):
        width, rows = work.job.token_ids_NT.shape[1], slice(s * num, (s + 1) * num)
        mask_NT1, needs = texts.mask_SNT[s, :, :width, None], member.method.needs
        own = {name: getattr(columns, name)[rows, :width] * mask_NT1 for name in SAMPLED & needs}
        own |= {n: c[s, :, :width] for n, c in whole.items() if n in needs and c is not None}
        own |= {"head_VD": bench.stack.head_VD(s)} if "head_VD" in needs else {}
        out.append({n: c.float() if c.is_floating_point() else c for n, c in own.items()})
    return out


@torch.no_grad()
def with_reference(bench: Bench, members: Sequence[Member], texts: Texts) -> Texts:
    """Texts with the log-probs of the weights all members started from, where a method asks."""
    if not any("ref_logp_NT" in member.method.needs for member in members):
        return texts
    theta_SP = bench.reference_P.expand_as(bench.stack.theta_SP)
    weights = restructure(bench.stack, theta_SP)
    temperature = members[0].config.rollouts.temperature
    return texts._replace(ref_logp_SNT=stack_logp(bench.stack, weights, texts, temperature))
