"""What an arena compares, set before it runs: arms, rates, seeds, margin; ``design.json``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from counterpoise.errors import ConfigError, nearest
from counterpoise.run.files import write_json

SCHEMA = 1
FILE = "design.json"
Settings = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Arm:
    """A method under test, and what it is held against.

    Args:
        settings: keys of the recipe that the arm sets.
        control: the arm it is held against; the design's control by default.
        repeats: the arm whose method and rate this one has, at other seeds: the A/A arm.
        seeds: its own seeds; those of the design by default.
    """

    name: str
    settings: Settings = dataclasses.field(default_factory=dict)
    control: str | None = None
    repeats: str | None = None
    seeds: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Design:
    """Everything that is set before the first run; one that makes no sense is a ConfigError.

    Args:
        control: the arm that others are held against where they name none.
        rates: learning rates to choose from, with ``tuning_seeds``.
        equal_rate: the rate of the table in which all arms have one; None for no such table.
        margin: a difference below it does not matter, as a share (0.01 is one point).
        evaluations: after so many batches; the last one decides.
        eval: ``prompts`` and ``samples`` of an evaluation.
    """

    recipe: Settings
    arms: tuple[Arm, ...]
    control: str
    rates: tuple[float, ...]
    equal_rate: float | None
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    margin: float
    evaluations: tuple[int, ...]
    eval: Settings

    def __post_init__(self) -> None:
        _check_arms(self)
        _check_seeds(self)
        _check_numbers(self)

    @property
    def last(self) -> int:
        """Batches before the evaluation that decides."""
        return self.evaluations[-1]

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    def control_of(self, name: str) -> str | None:
        """What an arm is held against; None for the control itself."""
        arm = self.arm(name)
        control = arm.repeats or arm.control or self.control
        return None if control == name else control

    def seeds_of(self, name: str) -> tuple[int, ...]:
        """Seeds of an arm's runs; an arm that repeats another one has as many, and none of them
        taken.
        """
        arm = self.arm(name)
        if arm.seeds is not None:
            return arm.seeds
        if arm.repeats is None:
            return self.seeds
        repeats = [one.name for one in self.arms if one.repeats and one.seeds is None]
        own = [seed for one in self.arms for seed in one.seeds or ()]
        step = 1 + max(*self.seeds, *self.tuning_seeds, *own) - min(self.seeds)
        return tuple(seed + step * (1 + repeats.index(name)) for seed in self.seeds)


def write_design(out: Path, design: Design) -> None:
    """``design.json``."""
    value = dataclasses.asdict(design)
    value["arms"] = [
        {"name": arm.name, "settings": dict(arm.settings), "control": arm.control}
        | ({"repeats": arm.repeats} if arm.repeats else {})
        | ({"seeds": list(arm.seeds)} if arm.seeds is not None else {})
        for arm in design.arms
    ]
    write_json(out / FILE, {"schema": SCHEMA, **value})


def read_design(out: Path) -> Design:
    """The design of a folder; one that is missing or broken is a ConfigError."""
    file = out / FILE
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        arms = [Arm(**{**arm, "seeds": _tuple(arm.get("seeds"))}) for arm in value["arms"]]
        fields = {key: _tuple(value[key]) for key in _fields(Design) if key != "arms"}
        version = value.get("schema")
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing. Give the folder of a counterpoise arena.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is no design: {type(error).__name__}: {error}. Expected an object with"
            f" {', '.join(_fields(Design))}; write it with write_design."
        ) from None
    if version != SCHEMA:
        raise ConfigError(f"{file} has schema {version}, this program knows {SCHEMA}.")
    return Design(arms=tuple(arms), **fields)


def _fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _tuple(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_arms(design: Design) -> None:
    names = [arm.name for arm in design.arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"design: arms {twice} come twice. Give each arm a name of its own.")
    asked = [("control", design.control)]
    asked += [(f"control of {arm.name!r}", arm.control) for arm in design.arms if arm.control]
    asked += [(f"repeats of {arm.name!r}", arm.repeats) for arm in design.arms if arm.repeats]
    for where, name in asked:
        if name not in names:
            raise ConfigError(f"design: {where}: no arm is called {name!r}. {nearest(name, names)}")
    chain = [a.name for a in design.arms if a.repeats and design.arm(a.repeats).repeats]
    if chain:
        raise ConfigError(f"design: {chain[0]!r} repeats an arm that repeats another. Name that.")


def _check_seeds(design: Design) -> None:
    if len(set(design.seeds)) < 2 or len(set(design.seeds)) < len(design.seeds):
        raise ConfigError(
            f"design: seeds {_short(design.seeds)}: expected two different ones or more."
        )
    judges = {seed for arm in design.arms for seed in design.seeds_of(arm.name)}
    both = sorted({*design.seeds, *judges} & set(design.tuning_seeds))
    if both:
        raise ConfigError(
            f"design: seeds {_short(both)} are also tuning seeds: a rate chosen on them would be"
            " judged by them. Give other tuning_seeds."
        )
    if len(design.rates) > 1 and not design.tuning_seeds:
        raise ConfigError(
            f"design: {len(design.rates)} rates and no tuning_seeds to choose one. Give three."
        )
    for arm in design.arms:
        shared = set(design.seeds_of(arm.name)) & set(design.seeds_of(arm.repeats or arm.name))
        if arm.repeats and shared:
            raise ConfigError(
                f"design: {arm.name!r} repeats {arm.repeats!r} with the seeds"
                f" {_short(sorted(shared))}: the same runs again. Give it other seeds."
            )


def _check_numbers(design: Design) -> None:
    rates = [*design.rates, *([] if design.equal_rate is None else [design.equal_rate])]
    if not design.rates or not all(_is_positive(rate) for rate in rates):
        raise ConfigError(f"design: rates {_short(rates)}: expected one number above 0 or more.")
    if not _is_positive(design.margin):
        raise ConfigError(
            f"design: margin {design.margin!r}: expected a share above 0, for example 0.01."
        )
    batches = design.evaluations
    rising = all(type(at) is int for at in batches) and sorted({*batches}) == list(batches)
    if not rising or not batches or batches[0] < 0:
        raise ConfigError(
            f"design: evaluations {_short(batches)}: expected rising batches, for example 0, 30,"
            " 60."
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


def _short(values: Sequence[object]) -> str:
    more = f" and {len(values) - 8} more" if len(values) > 8 else ""
    return f"[{', '.join(map(str, values[:8]))}{more}]"
