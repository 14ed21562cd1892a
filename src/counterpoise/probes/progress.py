"""What do the updates of one batch buy, and what do they waste? Methods and plans side by side.

From one checkpoint every method makes all updates of the same fresh batches, with its own credit,
loss and plan; after each the model is put back. On held-out rollouts of other prompts, drawn before
the updates, the gain of the expected reward is

    gain = mean of (pi_after / pi_before - 1) (R - mean of the prompt's other rollouts).

It needs no sampling afterwards, and methods share its noise, so that their differences show.

Axes: N rollouts, T response tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.advantages import leave_one_out
from counterpoise.catalogue.method import Method
from counterpoise.ledger.account import Scores
from counterpoise.ledger.calculus.logprobs import Params, copy_params, trainable
from counterpoise.maths.intervals import median, over_seeds
from counterpoise.probes.fresh import fresh_batch, read_as_run, warm_states, with_columns
from counterpoise.probes.methods import methods_of
from counterpoise.probes.output import (
    Drawing,
    Frame,
    NumberDict,
    Output,
    Rows,
    interval_dict,
    join_frames,
)
from counterpoise.probes.scene import Scene
from counterpoise.probes.sheet import Sheet, rule_figure
from counterpoise.probes.tax import contexts
from counterpoise.probes.updates import before_last_update, scores_since, updated
from counterpoise.rollouts import RolloutBatch
from counterpoise.trainer.update import apply_update
from counterpoise.trainer.warn import said_by_us

METHODS = "dapo, {name: dapo, plan: query_preserved}, {name: dapo, plan: reward_balanced}"
LEAST_BATCHES = 2  # for an interval
ENOUGH = 0.5  # of the held-out rollouts: a gain that fewer carry rests on a few large ratios
SHARED, FORK = "shared", "discriminating"
MEASURES = {
    "gain": "gain",
    "difference": "- control",
    "first_order": "first order",
    "own": "own batch",
    "kl": "KL per token",
    "carried": "carried by",
    "tax": "tax",
    "brought": "brought",
    "kl_fork": "KL at forks",
}
SPENT = ("tax", "brought", "kl_fork")  # of tokens that all rollouts of a prompt share
PANELS = ("gain", "difference", "own", "kl")


def probe(
    scene: Scene,
    output: Output,
    *,
    methods: str = METHODS,
    batches: int = 16,
    rollouts: int = 0,
    held_out: int = 512,
    updates: int = 0,
    lr: float = 0.0,
    momentum: bool = True,
    seed: int = 0,
) -> None:
    """One row per method and batch; the first method is the control.

    Args:
        rollouts: per batch; 0, the default, for as many as the run has.
        updates: per batch; 0, the default, for as many as the run makes.
        lr: a constant learning rate; 0, the default, for the run's at this batch.
        momentum: False takes AdamW's first beta as 0.
    """
    chosen, scene = check_methods(methods, batches), at_rate(scene, lr) if lr else scene
    settings = scene.config
    size = rollouts or settings.rollouts.prompts * settings.rollouts.group_size
    num_updates = updates or settings.optimizer.updates_per_batch
    how = read_as_run(scene, chosen)
    needs = frozenset().union(*(method.needs for method in chosen.values()))
    states = functools.cache(lambda: warm_states(scene, chosen, how, size, seed))

    def rows_of(number: int) -> Rows:
        fresh = partial(fresh_batch, scene, seed=seed, number=number)
        batch = fresh("progress/batches", rollouts=size, needs=needs)
        batch = with_columns(scene.policy.model, batch, needs, how)
        others = fresh("progress/held_out", rollouts=held_out)
        rows = []
        with using_momentum(scene.optimizer, momentum):
            for label, method in chosen.items():
                state = states().get(label)
                one = scene_of(scene, method, batch, state, number, num_updates)
                rows.append({"batch": number, "method": label, **outcome(one, others)})
        return rows

    for number in output.track(range(batches), "batches"):
        output.table(f"batch_{number:04d}", partial(rows_of, number))


def check_methods(methods: str, batches: int) -> dict[str, Method]:
    """The methods by label; those that a batch of this probe cannot serve are an error."""
    chosen = methods_of(methods)
    for label, method in chosen.items():
        missing = "a teacher" if method.has_teacher else ""
        missing = "importance_NT" if "importance_NT" in method.needs else missing
        if missing:
            raise ValueError(
                f"progress: {label} reads {missing}, which this probe does not measure in the"
                " batches that it samples. Take other methods."
            )
    if batches < LEAST_BATCHES:
        raise ValueError(
            f"progress: got {batches} batch; expected {LEAST_BATCHES} or more for an interval."
        )
    return chosen


def at_rate(scene: Scene, lr: float) -> Scene:
    """The scene with a constant learning rate."""
    own = {"lr": lr, "warmup": 0, "schedule": "constant"}
    optimizer = scene.config.optimizer.model_copy(update=own)
    return scene._replace(config=scene.config.model_copy(update={"optimizer": optimizer}))


@contextmanager
def using_momentum(optimizer: torch.optim.Optimizer, momentum: bool) -> Iterator[None]:
    """The optimizer with its own first beta, or with 0, for the block."""
    before = [group["betas"] for group in optimizer.param_groups]
    try:
        for group, betas in zip(optimizer.param_groups, before):
            group["betas"] = betas if momentum else (0.0, betas[1])
        yield
    finally:
        for group, betas in zip(optimizer.param_groups, before):
            group["betas"] = betas


def scene_of(
    scene: Scene, method: Method, collected: RolloutBatch, state: Any, number: int, updates: int
) -> Scene:
    """The moment of the run with another method and another batch."""
    with said_by_us():
        credit = method.assign(collected.batch, state, seed=number, batch_number=number)
    plan = method.plan(collected.batch, updates, seed=number, batch_number=number)
    return scene._replace(method=method, collected=collected, credit=credit, plan=plan)


def outcome(scene: Scene, held_out: RolloutBatch) -> dict[str, float]:
    """What all updates of the batch did; the model is put back."""
    model, before = scene.policy.model, copy_params(trainable(scene.policy.model))
    with before_last_update(scene) as last:
        spent = spent_by(scene)
        apply_update(model, scene.optimizer, scene.method, last, scene.collected, scene.config)
        own, other = (compare(scene, one, before) for one in (scene.collected, held_out))
        moved = sum(
            float((p.detach() - before[name]).double().square().sum())
            for name, p in model.named_parameters()
            if name in before
        )
    return {
        "updates": len(scene.updates),
        **progress(held_out, other.scores),
        "own": progress(scene.collected, own.scores)["first_order"],
        "kl": float(other.kl_NT[held_out.batch.mask_NT.to(other.kl_NT.device)].double().mean()),
        "length": moved**0.5,
        **spent,
    }


def spent_by(scene: Scene) -> dict[str, float]:
    """What the batch's last update does at tokens that all rollouts share, as KL per token: in
    full, less with these tokens masked (the tax), and between the two (what they bring themselves);
    KL of the full one where good and bad rollouts part. NaN without such tokens.
    """
    rows = scene.method.rows(scene.collected.batch, scene.credit, scene.updates[-1])
    sets, nan = contexts(scene, rows), float("nan")
    shared_RT, rest_RT = sets[SHARED], rows.mask_NT & ~sets[SHARED]
    if not (bool(shared_RT.any()) and bool(rest_RT.any())):
        return {"num_shared": 0, "kl_shared": nan, "tax": nan, "brought": nan, "kl_fork": nan}
    model, before = scene.policy.model, copy_params(trainable(scene.policy.model))

    def mean_kl(since: Params, is_in_RT: Tensor) -> float:
        kl_RT = compare(scene, scene.collected, since, rows.row_R).kl_NT
        return float(kl_RT[is_in_RT.to(kl_RT.device)].double().mean())

    with updated(scene, rows, rest_RT):
        without = copy_params(trainable(model))
        kl_without = mean_kl(before, shared_RT)
    with updated(scene, rows):
        kl_shared, kl_fork = mean_kl(before, shared_RT), mean_kl(before, sets[FORK])
        brought = mean_kl(without, shared_RT)
    return {
        "num_shared": int(shared_RT.sum()),
        "kl_shared": kl_shared,
        "tax": kl_shared - kl_without,
        "brought": brought,
        "kl_fork": kl_fork,
    }


class Comparison(NamedTuple):
    """Rollouts under two settings of the weights; ``kl_NT`` is KL(present || before)."""

    scores: Scores
    kl_NT: Tensor


def compare(
    scene: Scene, collected: RolloutBatch, before: Params, row_R: Tensor | None = None
) -> Comparison:
    """Rollouts (all, or some rows) under the weights ``before`` and the present ones."""
    row_R = torch.arange(collected.batch.num_rollouts) if row_R is None else row_R
    scores = scores_since(scene._replace(collected=collected), before, row_R, noise_floor=0.0)
    if scores.kl_NT is None:
        raise ValueError(
            "progress: the model's head is not plain, so there are no distributions to compare."
            " Choose another model."
        )
    return Comparison(scores, scores.kl_NT)


def progress(collected: RolloutBatch, scores: Scores) -> dict[str, float]:
    """The gain of the expected reward on these rollouts, its first order (advantage times change of
    the log-prob), and the share of the rollouts that carries it: (sum r)^2 / (N sum r^2) of the
    ratios r.
    """
    batch = collected.batch
    advantage_N = leave_one_out(batch.reward_N, batch.group_N).double()
    delta_NT = (scores.logp_after_NT - scores.logp_before_NT).to(batch.mask_NT.device)
    change_N = torch.where(batch.mask_NT, delta_NT, 0).double().sum(1)
    ratio_N = change_N.exp()
    return {
        "gain": float((advantage_N * change_N.expm1()).mean()),
        "first_order": float((advantage_N * change_N).mean()),
        "carried": float(ratio_N.mean() ** 2 / ratio_N.square().mean()),
    }


def summarise(tables: Mapping[str, Frame]) -> dict[str, Any]:
    """Means over batches with Student's t intervals; differences to the first method are of the
    same batches.
    """
    table = join_frames([tables[name] for name in sorted(tables)])
    labels = list(dict.fromkeys(table["method"]))
    by_method = {label: table[table["method"] == label].set_index("batch") for label in labels}
    control = by_method[labels[0]]
    methods: dict[str, Any] = {}
    for label, own in by_method.items():
        columns = {name: own[name] for name in (*MEASURES, "length") if name in own}
        columns["difference"] = own["gain"] - control["gain"]
        methods[label] = {
            name: interval_dict(over_seeds(column.to_numpy())) for name, column in columns.items()
        }
        methods[label] |= {
            name: median_dict(own[name].to_numpy()) for name in (*SPENT, "kl_shared")
        }
    first = table.iloc[0]
    return {
        "num_batches": int(table["batch"].nunique()),
        "updates": {label: float(own["updates"].mean()) for label, own in by_method.items()},
        "shared_tokens": int(table[table["method"] == first["method"]]["num_shared"].sum()),
        "control": labels[0],
        "methods": methods,
    }


def median_dict(value_B: Sequence[float]) -> NumberDict:
    """The median over batches: a few batches have nearly all of what shared tokens bring."""
    middle, low, high = interval_dict(median(value_B)).values()
    return {"median": middle, "low": low, "high": high}


def sheet(numbers: dict[str, Any]) -> Sheet:
    """What the terminal shows, the largest gain first."""
    methods = numbers["methods"]
    shown = [name for name in MEASURES if name not in SPENT or has_shared(numbers)]
    rows = [
        [label, *(short_text(methods[label][name]) for name in shown)] for label in ordered(methods)
    ]
    updates = ", ".join(sorted({f"{number:g}" for number in numbers["updates"].values()}))
    notes = [
        f"  {numbers['num_batches']} batches, updates per batch: {updates}, control"
        f" {numbers['control']}",
        "  gain: expected reward after the batch's updates less before, on held-out rollouts;"
        " own batch: its first order on the rollouts that were trained on",
    ]
    if few := [label for label, one in methods.items() if one["carried"]["mean"] < ENOUGH]:
        notes.append(
            f"  {len(few)} of {len(methods)} methods: less than half of the held-out rollouts carry"
            " the gain, which rests on a few of them. Take a lower rate: --set lr=..."
        )
    if has_shared(numbers):
        notes.append(
            "  tax: KL per shared token in the last update, less that with them masked; brought: KL"
            " there between the two; both medians over batches"
        )
    return Sheet(notes, ["method", *(MEASURES[name] for name in shown)], rows)


def has_shared(numbers: dict[str, Any]) -> bool:
    return numbers["shared_tokens"] > 0


def ordered(methods: Mapping[str, Any]) -> list[str]:
    return sorted(methods, key=lambda label: -methods[label]["gain"]["mean"])


def short_text(number: NumberDict) -> str:
    """A mean or median of any size with its interval, three digits.

    >>> short_text({"mean": 0.00123456, "low": -0.0001, "high": 0.0021})
    '0.00123 [-0.0001, 0.0021]'
    >>> short_text({"mean": None, "low": None, "high": None})
    '-'
    """
    middle, low, high = number.values()
    if middle is None:
        return "-"
    return f"{middle:.3g}" + ("" if low is None or high is None else f" [{low:.3g}, {high:.3g}]")


def figure(numbers: dict[str, Any]) -> Drawing:
    """Gain, its difference to the control's, the first order on the own batch, and KL."""
    methods = numbers["methods"]
    rows = {label: methods[label] for label in ordered(methods)}
    title = "What the updates of one batch buy, on held-out rollouts"
    names = {name: MEASURES[name] for name in PANELS}
    return rule_figure(title, rows, names, methods[numbers["control"]])
