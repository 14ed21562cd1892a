"""Stacks of runs, from their first batch to their last evaluation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from counterpoise.arena import keep
from counterpoise.arena.batch import bench_of, train_batch
from counterpoise.arena.collect import Bench
from counterpoise.arena.design import Design
from counterpoise.arena.evaluate import evaluate_stack
from counterpoise.arena.member import Member
from counterpoise.arena.results import Run, append_result
from counterpoise.arena.runs import config_of, shape_of
from counterpoise.arena.shared import Arena
from counterpoise.arena.stack import stack_of

KEEP_S = 30.0  # seconds between two saved states of a stack


def train_stack(arena: Arena, runs: list[Run]) -> None:
    """Train runs side by side to the end; out of memory, as two stacks one after the other."""
    folder = keep.folder_of(arena.out, runs)
    try:
        train_members(arena, runs, folder)
    except torch.OutOfMemoryError:
        if len(runs) == 1:
            raise
        middle = len(runs) // 2
        arena.live.say(f"no memory for {len(runs)} members at once: {middle} at a time")
    else:
        keep.drop(folder)
        return
    torch.cuda.empty_cache()
    halves = [(runs[:middle], slice(0, middle)), (runs[middle:], slice(middle, None))]
    keep.cut_kept(folder, [(keep.folder_of(arena.out, some), rows) for some, rows in halves])
    for some, _ in halves:
        train_stack(arena, some)


def train_members(arena: Arena, runs: Sequence[Run], folder: Path) -> None:
    """The batches and evaluations of one stack; a member that stops rides along and learns no
    more.
    """
    design, saved = arena.design, time.monotonic()
    members = [Member(config_of(design, run), arena.methods[run.arm]) for run in runs]
    bench = bench_of(stack_of(arena.policy.model, len(members)), arena.crew)
    kept = keep.read_kept(folder)
    start = keep.restore(kept, bench, members) if kept else 0
    arena.live.skip(start * len(runs))
    for batch_number in range(start, design.last + 1):
        if is_due(design, runs, batch_number):
            evaluate(arena, bench, runs, members, batch_number)
        if batch_number == design.last:
            break
        train_members_once(arena, bench, runs, members, batch_number)
        if time.monotonic() - saved > KEEP_S:
            keep.keep(folder, bench, members, batch_number + 1)
            saved = time.monotonic()
    arena.live.finish(len(runs))


def is_due(design: Design, runs: Sequence[Run], batch_number: int) -> bool:
    """Whether this is an evaluation; runs that only choose a rate have the last one alone."""
    is_tuning = all(run.seed in design.tuning_seeds for run in runs)
    return batch_number in ((design.last,) if is_tuning else design.evaluations)


def train_members_once(
    arena: Arena, bench: Bench, runs: Sequence[Run], members: Sequence[Member], batch_number: int
) -> None:
    """One batch; a member that stops in it is reported."""
    before = [member.stopped for member in members]
    train_batch(bench, members, batch_number)
    for run, member, was in zip(runs, members, before):
        if member.stopped and not was:
            write_stop(arena, run, batch_number, member.stopped)
    arena.live.step(len(members))


def write_stop(arena: Arena, run: Run, batch_number: int, reason: str) -> None:
    append_result(arena.out, {**run._asdict(), "batch": batch_number, "stopped": reason})
    arena.live.say(f"{run.arm}, rate {run.lr:g}, seed {run.seed} stopped: {reason}")


def evaluate(
    arena: Arena, bench: Bench, runs: Sequence[Run], members: Sequence[Member], batch_number: int
) -> None:
    """Evaluate the members that run; one line of results each."""
    if all(member.stopped for member in members):
        return
    scores = scores_of(arena, bench, members, batch_number)
    for run, member, score in zip(runs, members, scores):
        if not member.stopped:
            mean = sum(member.rewards) / len(member.rewards) if member.rewards else None
            row = {**run._asdict(), "batch": batch_number, **score, "train_reward": mean}
            append_result(arena.out, {**row, "num_updates": member.num_updates})
        member.rewards = []


def scores_of(
    arena: Arena, bench: Bench, members: Sequence[Member], batch_number: int
) -> list[dict[str, float]]:
    """Every member's scores; before the first batch all have the same weights, and one does."""
    settings = arena.design.eval
    if batch_number or len(members) == 1:
        return evaluate_stack(bench, members, settings["prompts"], settings["samples"])
    shape = shape_of(members[0].config)
    if shape not in arena.starts:
        alone = bench_of(stack_of(arena.policy.model, 1), arena.crew)
        arena.starts[shape] = evaluate_stack(
            alone, members[:1], settings["prompts"], settings["samples"]
        )[0]
    return [arena.starts[shape]] * len(members)
