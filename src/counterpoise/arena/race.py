"""Run a design: is each method active, which rate suits it, how does it end; then the page.

Everything is in the folder: the same command goes on where it was stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from counterpoise.arena.activity import cosines, cosines_apart
from counterpoise.arena.at_once import each
from counterpoise.arena.batch import bench_of
from counterpoise.arena.design import Design
from counterpoise.arena.live import Live
from counterpoise.arena.member import Member
from counterpoise.arena.outcomes import tuned_rates
from counterpoise.arena.results import Run, finished, read_results
from counterpoise.arena.runs import config_of, final_runs, in_turns, shape_of, stacks, tuning_runs
from counterpoise.arena.serial import train_apart
from counterpoise.arena.shared import Arena, is_alone, opened, shares_stack, why_alone
from counterpoise.arena.stack import stack_of
from counterpoise.arena.stacked import train_stack
from counterpoise.run.files import write_json

LEAST_ARMS = 8  # of a part of the activity
APART_BATCHES = 5  # of the activity of runs that cannot be stacked


def race(
    design: Design,
    out: Path,
    live: Live,
    *,
    size: int | None = None,
    num_workers: int | None = None,
    jobs: int | None = None,
) -> None:
    """Every run of the design that has no result yet.

    Args:
        size: members of a stack; 1 trains every run by itself.
        jobs: stacks at a time, or runs that share none; by default one, on a CPU one per core.
    """
    with opened(design, out, live, size, num_workers, jobs) as arena:
        if (why := why_alone(arena, arena.config)) or arena.size == 1:
            one = "one after the other"
            order = one if arena.jobs == 1 else f"{arena.jobs} at a time, a process each"
            live.say(f"runs {order}: {why or 'no stack'}")
        if not (out / "activity.json").is_file():
            write_json(out / "activity.json", activity(arena))
        run_all(arena, "tuning", tuning_runs(design))
        rates = tuned_rates(design, read_results(out))
        run_all(arena, "final", final_runs(design, rates))


def run_all(arena: Arena, phase: str, runs: Sequence[Run]) -> None:
    """Train and evaluate these runs, stack by stack; those that share none, by themselves."""
    last = arena.design.last
    ended = finished(read_results(arena.out), last)
    left = [run for run in runs if run not in ended]
    arena.live.begin(phase, len(runs), len(runs) * last)
    arena.live.skip((len(runs) - len(left)) * last, len(runs) - len(left))
    together = [run for run in left if not is_alone(arena, run)]
    each(arena, train_stack, stacks(arena.design, together, arena.size))
    alone = in_turns(run for run in left if is_alone(arena, run))
    train_apart(arena.design, arena.out, alone, arena.live, arena.jobs)


def activity(arena: Arena) -> dict[str, Any]:
    """Cosines of every arm with its control, for those that sample as it does: along the whole way
    of one seed, since a method may begin to differ late; of runs that cannot be stacked along its
    first ``APART_BATCHES``, since every arm adds its updates.
    """
    design, arms = arena.design, {}
    pairs = [(arm.name, design.control_of(arm.name)) for arm in design.arms if not arm.repeats]
    pairs = [(name, control) for name, control in pairs if control is not None]
    seeds, num = (design.tuning_seeds or design.seeds)[:1], max(1, design.last)
    if why_alone(arena, arena.config):  # it holds copies: one process has more memory for them
        arena, num = arena._replace(jobs=1), min(num, APART_BATCHES)
    parts = [
        Part(control, tuple(some), tuple(seeds), num)
        for control in dict.fromkeys(control for _, control in pairs)
        for some in cut([name for name, own in pairs if own == control], len(pairs), arena.jobs)
    ]
    arena.live.begin("activity", len(seeds) * len(parts), len(seeds) * num * len(pairs))
    for part, cosines_of in zip(parts, each(arena, cosines_that_fit, parts)):
        for name, values in cosines_of.items():
            arms[name] = {"control": part.control, "cosine": values}
    return {"batches": num, "seeds": list(seeds), "arms": arms}


class Part(NamedTuple):
    """Arms whose activity is measured side by side: against which control, over which seeds and how
    many batches.
    """

    control: str
    names: tuple[str, ...]
    seeds: tuple[int, ...]
    num: int


def cut(names: Sequence[str], num_all: int, jobs: int) -> list[Sequence[str]]:
    """Arms of one control in parts, so that so many processes have about as many of all arms; each
    part has the control once more, so it has ``LEAST_ARMS`` at least.

    >>> cut("abcdefghij", 12, 2), cut("kl", 12, 2)
    (['abcdefgh', 'ij'], ['kl'])
    """
    size = max(LEAST_ARMS, -(-num_all // jobs))
    return [names[start : start + size] for start in range(0, len(names), size)]


def cosines_that_fit(arena: Arena, part: Part) -> dict[str, list[float]]:
    """``arm_cosines``; out of memory, of half the arms after the other half."""
    try:
        return arm_cosines(arena, *part)
    except torch.OutOfMemoryError:
        if len(part.names) == 1:
            raise
        half = len(part.names) // 2
        arena.live.say(f"no memory for {len(part.names)} arms at once: {half} at a time")
    torch.cuda.empty_cache()
    halves = part.names[:half], part.names[half:]
    first, second = (cosines_that_fit(arena, part._replace(names=some)) for some in halves)
    return first | second


def arm_cosines(
    arena: Arena, control: str, names: Sequence[str], seeds: Sequence[int], num: int
) -> dict[str, list[float]]:
    """The cosines of some arms with one control, over batches and seeds."""
    design = arena.design
    rate = design.equal_rate or sorted(design.rates)[len(design.rates) // 2]
    together = [control, *(n for n in names if fits(arena, control, n, rate))]
    out: dict[str, list[float]] = {name: [] for name in together[1:]}
    for seed in seeds if out else ():
        members = [
            Member(config_of(design, Run(name, rate, seed)), arena.methods[name])
            for name in together
        ]
        rows = member_cosines(arena, members, num, lambda: arena.live.step(len(names)))
        for at, name in enumerate(together[1:], 1):
            out[name] += [row[at] for row in rows if math.isfinite(row[at])]
        arena.live.finish(1)
    return out


def member_cosines(
    arena: Arena, members: Sequence[Member], num: int, note: Callable[[], None]
) -> list[list[float]]:
    """Per batch and member the cosine with the first one, in a stack or by turns."""
    if not why_alone(arena, members[0].config):
        bench = bench_of(stack_of(arena.policy.model, len(members)), arena.crew)
        return cosines(bench, members, 0, num, note)
    try:
        rows = cosines_apart(members, num, note)
    except torch.OutOfMemoryError:  # it holds copies that a run does not need
        arena.live.say("no memory to measure activity: the arms have no activity gate")
        rows = []
    torch.cuda.empty_cache()  # the runs may be other processes
    return rows


def fits(arena: Arena, control: str, name: str, rate: float) -> bool:
    """Whether an arm can take its control's rollouts: the same recipe, no sampling of its own, no
    teacher.
    """
    seed = arena.design.seeds[0]
    own, other = (config_of(arena.design, Run(arm, rate, seed)) for arm in (name, control))
    return shape_of(own) == shape_of(other) and shares_stack(arena.methods[name])
