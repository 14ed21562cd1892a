"""Run a design: is each method active, which rate suits it, how does it end; then the page.

Everything is in the folder: the same command goes on where it was stopped.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from counterpoise.arena import keep
from counterpoise.arena.activity import cosines, cosines_apart
from counterpoise.arena.batch import bench_of, train_batch
from counterpoise.arena.collect import Bench
from counterpoise.arena.crew import Crew
from counterpoise.arena.design import Design
from counterpoise.arena.evaluate import evaluate_stack
from counterpoise.arena.live import Live
from counterpoise.arena.member import Member
from counterpoise.arena.outcomes import tuned_rates
from counterpoise.arena.results import Run, append_result, finished, read_results
from counterpoise.arena.runs import config_of, final_runs, in_turns, shape_of, stacks, tuning_runs
from counterpoise.arena.serial import train_apart
from counterpoise.arena.stack import stack_of, why_not_stackable
from counterpoise.catalogue.method import Method
from counterpoise.catalogue.registry import method as make_method
from counterpoise.catalogue.temperature import check_temperature
from counterpoise.environments import is_environment
from counterpoise.policy import Policy, load_model
from counterpoise.run.files import write_json
from counterpoise.tasks import task as make_task
from counterpoise.trainer.checks import check_forks, check_grader, check_moments, check_prompts
from counterpoise.trainer.config import Config
from counterpoise.trainer.importance import check_answers
from counterpoise.trainer.loop import device_of

KEEP_S = 30.0  # seconds between two saved states of a stack
# members of a stack: on a CPU it has no work to hide, and separate runs are faster
MEMBERS = {"cpu": 1, "cuda": 64}
MOST_JOBS = 8  # processes by default: each has the model and torch for itself
LARGE = 20_000_000  # parameters from which one member fills the device: the trainer is faster then
APART_BATCHES = 5  # of the activity of runs that cannot be stacked


class Arena(NamedTuple):
    """What all stacks of a design share."""

    design: Design
    out: Path
    policy: Policy
    crew: Crew
    methods: dict[str, Method]
    size: int
    jobs: int
    live: Live
    starts: dict[str, dict[str, float]]


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
        jobs: runs at a time, of those that share no stack; by default one, on a CPU one per core.
    """
    config = config_of(design, Run(design.control, design.rates[0], design.seeds[0]))
    with opened(design, out, config, live, size, num_workers, jobs) as arena:
        if (why := why_alone(arena, config)) or arena.size == 1:
            one = "one after the other"
            order = one if arena.jobs == 1 else f"{arena.jobs} at a time, a process each"
            live.say(f"runs {order}: {why or 'no stack'}")
        if not (out / "activity.json").is_file():
            write_json(out / "activity.json", activity(arena))
        run_all(arena, "tuning", tuning_runs(design))
        rates = tuned_rates(design, read_results(out))
        run_all(arena, "final", final_runs(design, rates))


@contextmanager
def opened(
    design: Design,
    out: Path,
    config: Config,
    live: Live,
    size: int | None,
    num_workers: int | None,
    jobs: int | None,
) -> Iterator[Arena]:
    """Task, workers, model: checked before the first run."""
    device, task = device_of(config), make_task(**config.task)
    spare = max(1, (os.cpu_count() or 1) - 2) if device.type == "cuda" else 0
    # the tokenizer first: workers are forked before the accelerator is used
    policy = load_model(config.model)
    crew = Crew(policy, task, config, spare if num_workers is None else num_workers)
    try:
        check_prompts(policy, task, config)
        check_forks(config, is_environment(task))
        check_grader(task, config)
        policy.model.to(device)  # pyright: ignore[reportArgumentType]
        methods = {}
        for arm in design.arms:
            own = config_of(design, Run(arm.name, design.rates[0], design.seeds[0]))
            check_moments(own)
            methods[arm.name] = checked_method(own)
            check_answers(methods[arm.name], task, own.task["name"])
        members = size or MEMBERS.get(device.type, MEMBERS["cpu"])
        cores = min(MOST_JOBS, os.cpu_count() or 1) if device.type == "cpu" else 1
        yield Arena(design, out, policy, crew, methods, members, jobs or cores, live, {})
    finally:
        crew.close()


def checked_method(config: Config) -> Method:
    """The method of an arm; one that does not fit the recipe is an error before anything runs."""
    method, rollouts = make_method(**config.method), config.rollouts
    method.check_group_size(rollouts.group_size, "rollouts.group_size is 1.")
    check_temperature(method.stages, rollouts.temperature, "rollouts.temperature")
    updates = config.optimizer.updates_per_batch
    method.check_plan(rollouts.prompts, rollouts.group_size, updates)
    return method


def why_alone(arena: Arena, config: Config) -> str:
    """Why runs of this recipe cannot share a stack; empty if they can."""
    if is_environment(make_task(**config.task)):
        return "conversations with an environment"
    if config.lora:
        return "adapters"
    if config.dtype == "bfloat16":
        return "weights in bfloat16"
    if config.optimizer.moments == "8bit":
        return "moments of 8 bits"
    if (num := sum(p.numel() for p in arena.policy.model.parameters())) >= LARGE:
        return f"a model of {num / 1e6:.0f} M parameters"
    return why_not_stackable(arena.policy.model) or ""


def run_all(arena: Arena, phase: str, runs: Sequence[Run]) -> None:
    """Train and evaluate these runs, stack by stack; those that share none, by themselves."""
    last = arena.design.last
    ended = finished(read_results(arena.out), last)
    left = [run for run in runs if run not in ended]
    arena.live.begin(phase, len(runs), len(runs) * last)
    arena.live.skip(len(runs) - len(left), (len(runs) - len(left)) * last)
    for some in stacks(arena.design, [run for run in left if not is_alone(arena, run)], arena.size):
        train_stack(arena, some)
    alone = in_turns(run for run in left if is_alone(arena, run))
    train_apart(arena.design, arena.out, alone, arena.live, arena.jobs)


def is_alone(arena: Arena, run: Run) -> bool:
    if arena.size == 1 or not shares_stack(arena.methods[run.arm]):
        return True
    return bool(why_alone(arena, config_of(arena.design, run)))


def shares_stack(method: Method) -> bool:
    """Whether a stack can train it: it samples as the others do and has no teacher."""
    return not method.collectors and not method.has_teacher


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
    arena.live.step(start * len(runs))
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


def activity(arena: Arena) -> dict[str, Any]:
    """Cosines of every arm with its control, for those that sample as it does: along the whole way
    of one seed, since a method may begin to differ late; of runs that cannot be stacked along its
    first ``APART_BATCHES``, since every arm adds its updates.
    """
    design, arms = arena.design, {}
    pairs = [(arm.name, design.control_of(arm.name)) for arm in design.arms if not arm.repeats]
    pairs = [(name, control) for name, control in pairs if control is not None]
    seeds, num = (design.tuning_seeds or design.seeds)[:1], max(1, design.last)
    config = config_of(design, Run(design.control, design.rates[0], design.seeds[0]))
    if why_alone(arena, config):
        num = min(num, APART_BATCHES)
    controls = dict.fromkeys(control for _, control in pairs)
    arena.live.begin("activity", len(seeds) * len(controls), len(seeds) * num * len(pairs))
    for control in controls:
        names = [name for name, own in pairs if own == control]
        for name, values in cosines_that_fit(arena, control, names, seeds, num).items():
            arms[name] = {"control": control, "cosine": values}
    return {"batches": num, "seeds": list(seeds), "arms": arms}


def cosines_that_fit(
    arena: Arena, control: str, names: Sequence[str], seeds: Sequence[int], num: int
) -> dict[str, list[float]]:
    """``arm_cosines``; out of memory, of half the arms after the other half."""
    try:
        return arm_cosines(arena, control, names, seeds, num)
    except torch.OutOfMemoryError:
        if len(names) == 1:
            raise
        arena.live.say(f"no memory for {len(names)} arms at once: {len(names) // 2} at a time")
    torch.cuda.empty_cache()
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    first, second = (cosines_that_fit(arena, control, some, seeds, num) for some in halves)
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
