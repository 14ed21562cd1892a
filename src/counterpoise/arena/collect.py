"""Prompts -> rollouts -> rewards -> credit and plan of every member, sampled for all at once.

Axes: S members, N rollouts of a member, T response tokens, B = S x N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from counterpoise.arena.crew import Crew, Job, Questions, Stretch, find_answers
from counterpoise.arena.importance import stack_importance
from counterpoise.arena.measure import measure_stack, ratio_anchors
from counterpoise.arena.member import Member
from counterpoise.arena.optimizer import Moments
from counterpoise.arena.prepare import NOTHING, Prepared, Work, prepare_sampled, settings_of
from counterpoise.arena.sampling import StackSampler
from counterpoise.arena.stack import Stack
from counterpoise.arena.texts import Asked, Texts, pad_questions, texts_of
from counterpoise.maths.reduce import derived_seed
from counterpoise.sampling import SAMPLED
from counterpoise.sampling.draw import share_openings, uniforms
from counterpoise.sampling.slots import Columns, Settings
from counterpoise.trainer.importance import COLUMN

TOPK = 20  # candidates per token where a method reads them, as ``sample`` takes them


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
    asked = pad_questions([q.prompt_ids for q in questions], bench.stack.theta_SP.device)
    columns = sample_stack(bench, members, asked, batch_number)
    ahead = [s._replace(start=s.start + rollouts.prompts) for s in stretches(members)]
    bench.crew.expect(ahead)
    shape = len(members), rollouts.prompts * rollouts.group_size
    texts = texts_of(
        asked,
        rollouts.group_size,
        *(
            column[:-1].unflatten(0, shape)
            for column in (columns.token_ids_NT, columns.length_N, columns.sampler_logp_NT)
        ),
    )
    works = works_of(columns, members, questions, batch_number)
    stop_diverged(members, works)
    temperature, needs = rollouts.temperature, needs_of(members)
    more = measure_stack(bench.stack, bench.reference_P, texts, needs, temperature)
    texts = texts._replace(
        ref_logp_SNT=more.get("ref_logp_NT"),
        ref_kl_SNT=more.get("ref_kl_NT"),
        anchor_logp_SNT=ratio_anchors(members, texts, more),
    )
    more |= score_stack(bench, members, works, texts, batch_number)
    works = shelve_columns(bench, members, works, columns, more)
    runs = [s for s, member in enumerate(members) if not member.stopped]
    prepared = dict(zip(runs, bench.crew.call(prepare_sampled, [works[s] for s in runs])))
    return Collected(texts, [prepared.get(s, NOTHING) for s in range(len(members))])


def needs_of(members: Sequence[Member]) -> frozenset[str]:
    """The optional columns that some member's method reads."""
    return frozenset[str]().union(*(member.method.needs for member in members))


def stop_diverged(members: Sequence[Member], works: Sequence[Work]) -> None:
    """Members whose logits are not finite stop before anything is learned from them."""
    for member, work in zip(members, works):
        if not np.isfinite(work.sampler_logp_NT).all():
            member.stopped = "the model's logits are not finite"


def stretches(members: Sequence[Member]) -> list[Stretch]:
    """The prompts of each member's next batch."""
    return [Stretch("train", m.seed, m.num_prompts, m.config.rollouts.prompts) for m in members]


def sample_stack(
    bench: Bench, members: Sequence[Member], asked: Asked, batch_number: int
) -> Columns:
    """Rollouts of all members; the columns are the sampler's own."""
    rollouts = members[0].config.rollouts
    needs = needs_of(members)
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
    uniform_BT = share_openings(uniform_BT, rollouts.group_size, rollouts.fork_tokens)
    return bench.sampler.fill(asked, rollouts.group_size, uniform_BT, settings)


def member_uniforms(
    seeds: Sequence[int], num_rows: int, num_tokens: int, device: torch.device
) -> Tensor:
    """Every row's random stream, members one after the other, [S * N, T]."""
    seed_B = torch.tensor(seeds, device=device).repeat_interleave(num_rows)
    row_B = torch.arange(num_rows, device=device).repeat(len(seeds))
    return uniforms(seed_B, row_B, num_tokens)


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
        works.append(Work(member.pickled, settings, job, logp_NT, entropy_NT, {}))
    return works


def score_stack(
    bench: Bench, members: Sequence[Member], works: Sequence[Work], texts: Texts, batch_number: int
) -> dict[str, Tensor]:
    """``importance_NT`` of the members whose method reads it, [S, N, T]; as many rollouts at a time
    as an update has.
    """
    own = [s for s, m in enumerate(members) if COLUMN in m.method.needs and not m.stopped]
    if not own:
        return {}
    answer_SN = np.stack(bench.crew.call(find_answers, [works[s].job for s in own]))
    config, num = members[0].config, texts.mask_SNT.shape[1]
    score_SNT = torch.zeros_like(texts.sampler_logp_SNT)
    score_SNT[own] = stack_importance(
        bench.stack,
        own,
        texts.of_members(own),
        torch.from_numpy(answer_SN).to(score_SNT.device),
        seeds=[derived_seed(members[s].seed, batch_number, "importance") for s in own],
        temperature=config.rollouts.temperature,
        num_rows=-(-num // config.optimizer.updates_per_batch),
    )
    return {COLUMN: score_SNT}


def shelve_columns(
    bench: Bench,
    members: Sequence[Member],
    works: Sequence[Work],
    columns: Columns,
    more: dict[str, Tensor],
) -> list[Work]:
    """Each member's work with the columns that its method reads besides those that every batch
    has: the sampler's, and those that were measured, [S, N, T].
    """
    needs, num = needs_of(members), len(works[0].job.length_N)
    whole = {name: getattr(columns, name)[:-1] for name in SAMPLED & needs}
    whole |= {name: column.flatten(0, 1) for name, column in more.items()}
    shelves = {name: bench.crew.shelve(name, column) for name, column in whole.items()}
    out = []
    for s, (member, work) in enumerate(zip(members, works)):
        rows = slice(s * num, (s + 1) * num)
        asked = {name: at(rows) for name, at in shelves.items() if name in member.method.needs}
        head = {"head_VD": bench.stack.head_VD(s).cpu()} if "head_VD" in needs else {}
        out.append(work._replace(columns=asked | head))
    return out
