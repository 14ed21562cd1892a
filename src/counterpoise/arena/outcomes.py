"""How an arm's runs at one learning rate ended, and which rate its tuning seeds choose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from counterpoise.arena.design import Design
from counterpoise.arena.results import Result
from counterpoise.maths.intervals import Interval, over_seeds, welch_p

DECIDES = "sampled"
SIGNIFICANT = 0.05
ByArm = Mapping[str, Sequence[Result]]


class Outcome(NamedTuple):
    """An arm at one rate: numbers of the last evaluation by seed, why seeds stopped, which seeds
    are not there yet.
    """

    values: dict[int, dict[str, float]]
    stopped: dict[int, str]
    missing: list[int]

    def column(self, metric: str) -> list[float]:
        return [own[metric] for own in self.values.values() if metric in own]


class Rate(NamedTuple):
    """A learning rate on the tuning seeds; ``seeds`` are those that finished."""

    lr: float
    seeds: int
    stopped: int
    sampled: Interval


class Tuning(NamedTuple):
    """The choice of an arm's rate.

    ``is_at_edge``: the best rate is the lowest or the highest, a better one may lie beyond.
    ``tied``: rates that the tuning seeds do not tell from the chosen one (Welch, 5%).
    """

    arm: str
    rates: list[Rate]
    chosen: float | None
    is_at_edge: bool
    tied: list[float]


def by_arm(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results of each arm."""
    out: dict[str, list[Result]] = {}
    for one in results:
        out.setdefault(one.run.arm, []).append(one)
    return out


def outcome(
    results: Sequence[Result], lr: float | None, seeds: Sequence[int], last: int
) -> Outcome:
    """Runs of one arm at a rate; a run that stopped and later got to the end counts as finished.

    Args:
        results: of the arm alone.
        last: the batch of the evaluation that decides.
    """
    own = at_rate(results, lr)
    ends = {one.run.seed: one.values for one in own if one.batch == last and DECIDES in one.values}
    stops = {one.run.seed: one.stopped for one in own if one.stopped}
    values = {seed: ends[seed] for seed in seeds if seed in ends}
    stopped = {seed: stops[seed] for seed in seeds if seed in stops and seed not in ends}
    missing = [seed for seed in seeds if seed not in values and seed not in stopped]
    return Outcome(values, stopped, missing)


def at_rate(results: Sequence[Result], lr: float | None) -> list[Result]:
    """Results at a learning rate; one that went through text or float32 is still the same."""
    return [r for r in results if lr is not None and math.isclose(r.run.lr, lr, rel_tol=1e-6)]


def tunings(design: Design, results: ByArm) -> list[Tuning]:
    """The choice of every arm but those that repeat another one."""
    arms = [arm.name for arm in design.arms if not arm.repeats]
    return [_tuning(design, results.get(name, []), name) for name in arms]


def tuned_rates(design: Design, results: Sequence[Result]) -> dict[str, float]:
    """arm -> the rate of its final runs, for arms whose tuning has results; an arm that repeats
    another one takes that one's.
    """
    return chosen_rates(design, tunings(design, by_arm(results)))


def chosen_rates(design: Design, choices: Sequence[Tuning]) -> dict[str, float]:
    """As ``tuned_rates``, from the choices."""
    chosen = {one.arm: one.chosen for one in choices}
    rates = {arm.name: chosen[arm.repeats or arm.name] for arm in design.arms}
    return {name: lr for name, lr in rates.items() if lr is not None}


def _tuning(design: Design, results: Sequence[Result], name: str) -> Tuning:
    """Most seeds that finished, then the highest mean: a rate at which runs stop is not chosen
    while there is another.
    """
    ends = {lr: outcome(results, lr, design.tuning_seeds, design.last) for lr in design.rates}
    sampled = {lr: one.column(DECIDES) for lr, one in ends.items()}
    rates = [
        Rate(lr, len(sampled[lr]), len(ends[lr].stopped), over_seeds(sampled[lr]))
        for lr in sorted(design.rates)
    ]
    known = [rate for rate in rates if rate.seeds]
    if len(rates) == 1 or not known:
        return Tuning(name, rates, rates[0].lr if len(rates) == 1 else None, False, [])
    best = max(known, key=lambda rate: (rate.seeds, rate.sampled.mean)).lr
    apart = [lr for lr in sampled if welch_p(sampled[best], sampled[lr]) < SIGNIFICANT]
    tied = [rate.lr for rate in known if rate.lr != best and rate.lr not in apart]
    return Tuning(name, rates, best, best in (rates[0].lr, rates[-1].lr), tied)
