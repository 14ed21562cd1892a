"""From tables of inner products to cosines, bias and worth, with intervals.

Axes: M methods, B batches, C chunks of the truth, S numbers of a sketch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from counterpoise.maths.intervals import NONE, Interval, around
from counterpoise.probes.gradient.batches import GRADIENT, METRICS, YARDSTICK
from counterpoise.probes.gradient.cosines import (
    ENOUGH,
    TINY,
    Products,
    Statistic,
    cosines_of_mean,
    curve,
    halves_cosine,
    jackknife_error,
    mean_cosines,
    odds,
    reliability,
    times_more,
    worths,
)
from counterpoise.probes.output import Frame, NumberDict, interval_dict, join_frames

INACTIVE = 0.99  # cosine with the control's update from which a method is the control
LEAST_BATCHES = 3


def numbers_of(tables: dict[str, Frame], control: str) -> dict[str, Any]:
    """The summary: for the gradient as it is and for AdamW's step on it."""
    batches = join_frames([table for name, table in tables.items() if name.startswith("batch_")])
    truth, rollouts = tables["truth"], int(batches["rollouts"].iloc[0])
    parts = {metric: batches[batches["metric"] == metric] for metric in METRICS}
    labels = list(dict.fromkeys(batches["method"]))
    products = {m: products_of(part, truth, labels) for m, part in parts.items() if len(part)}
    plain = labels.index(YARDSTICK)
    return {
        "control": control,
        "num_batches": int(batches["batch"].nunique()),
        "rollouts_per_batch": rollouts,
        "truth": truth_numbers(products[GRADIENT], int(truth["rollouts"].sum())),
        "law": law(products[GRADIENT], plain, rollouts),
        **{m: method_numbers(products[m], parts[m], labels, control) for m in products},
    }


def method_numbers(
    products: Products, batches: Frame, labels: list[str], control: str
) -> dict[str, dict[str, Any]]:
    """The numbers of every method for one metric; worth for the gradient alone, whose law is
    known.
    """
    at, active = labels.index(control), activity(batches, labels)
    rows = method_rows(products, labels, at, num_distinct(batches))
    if batches["metric"].iloc[0] == GRADIENT:
        plain, rollouts = labels.index(YARDSTICK), int(batches["rollouts"].iloc[0])
        worth = worth_dicts(products, plain, rollouts)
        rows = {label: {**row, "worth": worth[k]} for k, (label, row) in enumerate(rows.items())}
    for label, row in rows.items():
        row["with_control"] = round(active[label], 6)
        row["verdict"] = "control" if label == control else verdict(row)
    del rows[YARDSTICK]
    return rows


def num_distinct(batches: Frame) -> int:
    """Directions that differ from the control's in some batch, one comparison each."""
    like = batches.pivot(index="method", columns="batch", values="like").drop(index=YARDSTICK)
    return max(1, len(like.drop_duplicates()) - 1)


def products_of(batches: Frame, truth: Frame, labels: list[str]) -> Products:
    """Inner products of one metric: exact where a vector was whole, by sketches between batches
    and chunks. Sketched products are shifted so that their means are the exact ones.
    """
    truth = truth.sort_values("chunk")
    is_first_C, weight_C = truth["chunk"].to_numpy() % 2 == 0, truth["rollouts"].to_numpy(float)
    truth_CS = np.stack(truth["sketch"].tolist()).astype(float)
    own, cross, scale = [], [], []
    for label in labels:
        rows = batches[batches["method"] == label].sort_values("batch")
        vector_BS = sketches_of(batches, rows)
        own_BB = vector_BS @ vector_BS.T
        np.fill_diagonal(own_BB, rows["square"])
        own.append(own_BB)
        cross.append(exact_means(vector_BS @ truth_CS.T, rows, is_first_C, weight_C))
        scale.append(rows["scale"].to_numpy(float))
    truth_CC = truth_CS @ truth_CS.T
    raw = Products(np.stack(cross), np.stack(own), truth_CC, np.stack(scale), is_first_C, weight_C)
    first_C, second_C = raw.halves_2C
    apart_CC = is_first_C[:, None] != is_first_C
    shift = float(truth["first_second"].iloc[0]) - float(first_C @ truth_CC @ second_C)
    return raw._replace(truth_CC=truth_CC + shift * apart_CC)


def sketches_of(batches: Frame, rows: Frame) -> np.ndarray:
    """[B, S]; a method like another has the other's."""
    own = batches[batches["method"] == batches["like"]].set_index(["batch", "method"])["sketch"]
    return np.stack([own[key] for key in zip(rows["batch"], rows["like"])]).astype(float)


def exact_means(
    cross_BC: np.ndarray, rows: Frame, is_first_C: np.ndarray, weight_C: np.ndarray
) -> np.ndarray:
    """Sketched products with the chunks, shifted to the exact product with each half."""
    out = cross_BC.copy()
    for name, side_C in (("first", is_first_C), ("second", ~is_first_C)):
        mean_B = cross_BC[:, side_C] @ weight_C[side_C] / weight_C[side_C].sum()
        out[:, side_C] += (rows[name].to_numpy() - mean_B)[:, None]
    return out


def method_rows(
    products: Products, labels: list[str], control: int, num_comparisons: int
) -> dict[str, dict[str, Any]]:
    """Cosine, difference to the control and cosine of the mean of every method."""
    columns = {
        "cosine": intervals(products, mean_cosines),
        "difference": intervals(
            products, lambda p: mean_cosines(p) - mean_cosines(p)[control], num_comparisons
        ),
        "cosine_of_mean": intervals(products, cosines_of_mean),
    }
    return {
        label: {name: interval_dict(column[k]) for name, column in columns.items()}
        for k, label in enumerate(labels)
    }


def intervals(products: Products, statistic: Statistic, num_comparisons: int = 1) -> list[Interval]:
    """A statistic of every method with the noise of batches and of the truth; nothing is said of
    one that is not defined without some batch or chunk.
    """
    freedom = min(products.cross_MBC.shape[1:]) - 1
    value_M, error_M = statistic(products), jackknife_error(products, statistic)
    return [
        around(value, error, freedom, num_comparisons) if math.isfinite(error) else NONE
        for value, error in zip(value_M.tolist(), error_M.tolist())
    ]


def worth_dicts(products: Products, plain: int, rollouts: int) -> list[NumberDict]:
    """Worth with an interval on the scale of its logarithm, paired with the plain batches. Where
    the cosine may be 0, from 0 to what its upper bound is worth.
    """
    cosine = intervals(products, mean_cosines)
    log_worth = intervals(products, lambda p: np.log(np.maximum(worths(p, plain, rollouts), TINY)))
    unit = rollouts / float(odds(cosine[plain].mean)) if cosine[plain].mean > 0 else math.nan
    out = []
    for own, logarithm in zip(cosine, log_worth):
        if own.low > 0:
            out.append(Interval(*(math.exp(min(value, 700.0)) for value in logarithm)))
        else:
            out.append(Interval(unit * float(odds(own.mean)), 0.0, unit * float(odds(own.high))))
    return [interval_dict(one) for one in out]


def activity(batches: Frame, labels: list[str]) -> dict[str, float]:
    """Mean cosine of a method's update with the control's on the same batch."""
    first = batches.drop_duplicates("batch").set_index("batch")["square"]  # the control comes first
    out = {}
    for label in labels:
        rows = batches[batches["method"] == label]
        size = np.sqrt(rows["square"].to_numpy() * first[rows["batch"]].to_numpy())
        out[label] = float(
            np.where(size > 0, rows["control"] / np.where(size > 0, size, 1), 0).mean()
        )
    return out


def verdict(row: dict[str, Any]) -> str:
    """What the difference to the control says, all methods' intervals holding together."""
    low, high = row["difference"]["low"], row["difference"]["high"]
    if row["with_control"] > INACTIVE:
        return "inactive here"
    if low is None or high is None or low <= 0 <= high:
        return "cannot be told"
    return "nearer" if low > 0 else "farther"


def truth_numbers(products: Products, rollouts: int) -> dict[str, Any]:
    """How well the truth is known; ``rollouts_needed`` where its halves agree too little."""
    halves = halves_cosine(products)
    more = times_more(halves)
    out = {
        "rollouts": rollouts,
        "halves": _round(halves),
        "reliability": _round(reliability(halves)),
    }
    if not halves >= ENOUGH:
        known = math.isfinite(more)
        out["rollouts_needed"] = math.ceil(more * rollouts) if known else None
        out["times_more"] = _round(more)
    return out


def law(products: Products, plain: int, rollouts: int) -> dict[str, Any]:
    """Cosine of means of several plain batches beside ``sqrt(n / (n + n0))``: whether the law by
    which worth is told holds here.
    """
    measured, one = curve(products, plain), float(odds(mean_cosines(products)[plain]))
    n0 = rollouts / one if one > 0 else math.nan
    return {
        "n0": _round(n0),
        "points": {
            str(size * rollouts): {
                "measured": _round(value),
                "law": _round(math.sqrt(size * rollouts / (size * rollouts + n0))),
            }
            for size, value in measured.items()
        },
    }


def _round(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
