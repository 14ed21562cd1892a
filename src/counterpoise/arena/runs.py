"""The runs of a design: which trainings there are, with which recipe, and which can share a
stack.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from counterpoise.arena.design import Design
from counterpoise.arena.results import Run
from counterpoise.trainer.config import Config, parse_config

OWN_KEYS = ("seed", "method", "run_dir")  # in which members of a stack may differ, and the rate


def tuning_runs(design: Design) -> list[Run]:
    """Every arm at every rate, where there is a choice."""
    arms = [arm.name for arm in design.arms if not arm.repeats]
    if len(design.rates) < 2:
        return []
    return [
        Run(arm, lr, seed) for arm in arms for lr in design.rates for seed in design.tuning_seeds
    ]


def final_runs(design: Design, rates: Mapping[str, float]) -> list[Run]:
    """Every arm at its own rate, then at the equal one."""
    equal = {arm.name: design.equal_rate for arm in design.arms}
    runs = [
        Run(arm.name, lr, seed)
        for table in (rates, equal)
        for arm in design.arms
        if (lr := table.get(arm.name)) is not None
        for seed in design.seeds_of(arm.name)
    ]
    return list(dict.fromkeys(runs))


def in_turns(runs: Iterable[Run]) -> list[Run]:
    """The first run of every arm and rate, then the second of each: what is cut off is cut off
    evenly.

    >>> [run.seed for run in in_turns([Run("a", 1e-4, 1), Run("a", 1e-4, 2), Run("b", 1e-4, 7)])]
    [1, 7, 2]
    """
    seen: Counter[tuple[str, float]] = Counter()
    turns = []
    for run in runs:
        turns.append((seen[run.arm, run.lr], run))
        seen[run.arm, run.lr] += 1
    return [run for _, run in sorted(turns, key=itemgetter(0))]


def config_of(design: Design, run: Run) -> Config:
    """The recipe of one run."""
    arm = design.arm(run.arm)
    own = design.arm(arm.repeats) if arm.repeats else arm
    raw = merge(dict(design.recipe), own.settings)
    raw = merge(raw, {"optimizer": {"lr": run.lr}, "seed": run.seed, "num_batches": design.last})
    return parse_config(raw)


def merge(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with other settings; a method or a task is replaced as a whole.

    >>> merge({"optimizer": {"lr": 1, "eps": 2}}, {"optimizer": {"lr": 3}, "seed": 4})
    {'optimizer': {'lr': 3, 'eps': 2}, 'seed': 4}
    """
    out = dict(raw)
    for key, value in settings.items():
        is_section = isinstance(value, Mapping) and key not in ("method", "task")
        out[key] = {**(out.get(key) or {}), **value} if is_section else value
    return out


def shape_of(config: Config) -> str:
    """What members of one stack share, as text."""
    value = config.model_dump(mode="json", exclude=set(OWN_KEYS))
    value["optimizer"].pop("lr")
    return json.dumps(value, sort_keys=True)


def stacks(design: Design, runs: Sequence[Run], size: int) -> list[list[Run]]:
    """Runs that train side by side, at most ``size`` of them."""
    shapes: dict[str, list[Run]] = {}
    for run in runs:
        shapes.setdefault(shape_of(config_of(design, run)), []).append(run)
    return [
        alike[start : start + size]
        for alike in shapes.values()
        for start in range(0, len(alike), size)
    ]
