"""What all runs of an arena share: task, workers, model, and which runs can share a stack."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from counterpoise.arena.crew import Crew
from counterpoise.arena.design import Design
from counterpoise.arena.live import Live
from counterpoise.arena.results import Run
from counterpoise.arena.runs import config_of
from counterpoise.arena.stack import why_not_stackable
from counterpoise.catalogue.method import Method
from counterpoise.catalogue.registry import method as make_method
from counterpoise.catalogue.temperature import check_temperature
from counterpoise.environments import is_environment
from counterpoise.policy import Policy, load_model
from counterpoise.tasks import task as make_task
from counterpoise.trainer.checks import check_forks, check_grader, check_moments, check_prompts
from counterpoise.trainer.config import Config
from counterpoise.trainer.importance import check_answers
from counterpoise.trainer.loop import device_of
from counterpoise.trainer.teacher import check_sources

# members of a stack: on a CPU it has no work to hide, and separate runs are faster
MEMBERS = {"cpu": 1, "cuda": 64}
MOST_JOBS = 8  # processes by default: each has the model and torch for itself
LARGE = 20_000_000  # parameters from which one member fills the device: the trainer is faster then


class Arena(NamedTuple):
    """What all stacks of a design share; ``config`` is that of the control's first run."""

    design: Design
    out: Path
    config: Config
    policy: Policy
    crew: Crew
    methods: dict[str, Method]
    size: int
    jobs: int
    live: Live
    starts: dict[str, dict[str, float]]


@contextmanager
def opened(
    design: Design,
    out: Path,
    live: Live,
    size: int | None,
    num_workers: int | None,
    jobs: int | None,
    memory: Path | None = None,
) -> Iterator[Arena]:
    """Task, workers, model: checked before the first run.

    Args:
        memory: where workers find large columns; shared memory by default.
    """
    config = config_of(design, Run(design.control, design.rates[0], design.seeds[0]))
    device, task = device_of(config), make_task(**config.task)
    spare = max(1, (os.cpu_count() or 1) - 2) if device.type == "cuda" else 0
    # the tokenizer first: workers are forked before the accelerator is used
    policy = load_model(config.model)
    crew = Crew(policy, task, config, spare if num_workers is None else num_workers, memory)
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
            check_sources(methods[arm.name], task, own)
        members = size or MEMBERS.get(device.type, MEMBERS["cpu"])
        cores = min(MOST_JOBS, os.cpu_count() or 1) if device.type == "cpu" else 1
        yield Arena(design, out, config, policy, crew, methods, members, jobs or cores, live, {})
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


def is_alone(arena: Arena, run: Run) -> bool:
    if arena.size == 1 or not shares_stack(arena.methods[run.arm]):
        return True
    return bool(why_alone(arena, config_of(arena.design, run)))


def shares_stack(method: Method) -> bool:
    """Whether a stack can train it: it samples as the others do and has no teacher."""
    return not method.collectors and not method.has_teacher
