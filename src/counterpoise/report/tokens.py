"""Numbers of one batch's tokens: distributions by sign, mass by category, flips, cancellation,
prediction. From the tokens table alone.

Every mean over tokens comes with a bootstrap interval over prompts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from counterpoise.maths.columns import by_context, by_sign, residual_of
from counterpoise.maths.intervals import (
    NONE,
    Interval,
    by_cluster,
    correlation_by_cluster,
    over_clusters,
)
from counterpoise.run.read import RunFolder

Frame = Any  # a pandas.DataFrame; type checkers take its boolean selections for something else
COLUMNS = (
    "group",
    "rollout",
    "turn",
    "text",
    "sign",
    "weight",
    "credit",
    "loss_mask",
    "delta",
    "is_flip",
    "change",
    "category",
    "node_positive",
    "node_negative",
    "predicted",
    "cancellation",
    "entropy",
    "kl",
    "is_fully_shared",
    "is_fork",
    "node",
    "update",
    "coef",
    "scale",
)
TEXTS = ("text", "change", "category")
SHARING = ("both signs", "one sign", "not shared")
NODES = ("node", "node_positive", "node_negative", "group")
TAX = {
    "shared": "shared by all",
    "both_signs": "shared by both signs",
    "discriminating": "forks",
    "other": "elsewhere",
}

# a sum of credits below this share of their sizes is rounding in float32
ROUNDING = 1e-6


class Row(NamedTuple):
    """A labelled number with its interval and the count behind it."""

    label: str
    value: Interval
    count: int


def tokens_of(run: RunFolder, batch: int | None = None) -> tuple[int, Frame] | None:
    """Response tokens of a batch (the last one with a readable table), those that take part in the
    loss.
    """
    for at in [batch] if batch is not None else reversed(run.batches("tokens")):
        run.columns("tokens", at)
        table = run.table("tokens", at, COLUMNS)
        if table is not None and table.num_rows:
            frame = to_types(table.to_pandas())
            mask = (
                frame["loss_mask"].fillna(True).astype(bool)
                if "loss_mask" in frame
                else np.ones(len(frame), bool)
            )
            return at, frame[mask].reset_index(drop=True)
    return None


def to_types(frame: Frame, numbers: Collection[str] | None = None) -> Frame:
    """Numbers as numbers (what is none becomes NaN), texts as texts: a table written by others may
    hold anything. ``numbers``: only these columns, the others stay.
    """
    return frame.assign(
        **{
            name: frame[name].astype(str)
            if name in TEXTS
            else pd.to_numeric(frame[name].map(_scalar), errors="coerce")
            for name in frame.columns
            if numbers is None or name in numbers
        }
    )


def _scalar(value: object) -> object:
    return value if np.isscalar(value) else None


def has(frame: Frame, *columns: str) -> bool:
    """Whether all the columns are there with at least one value."""
    return all(column in frame and frame[column].notna().any() for column in columns)


def category_mass(frame: Frame) -> dict[str, list[Row]]:
    """Share of the sum of |credit| that each category holds, within the tokens of each sign."""
    if not has(frame, "category", "credit", "sign", "group"):
        return {}
    mass = frame["credit"].abs()
    out: dict[str, list[Row]] = {}
    order = mass.groupby(frame["category"]).sum().sort_values(ascending=False).index
    for name, of_sign in by_sign(frame["sign"]).items():
        whole_P = mass[of_sign].groupby(frame["group"]).sum()
        for category in order:
            pick = of_sign & (frame["category"] == category)
            part_P = mass[pick].groupby(frame["group"]).sum().reindex(whole_P.index, fill_value=0)
            interval = (
                over_clusters(part_P.to_numpy(), whole_P.to_numpy()) if whole_P.sum() > 0 else NONE
            )
            out.setdefault(name, []).append(Row(str(category), interval, int(pick.sum())))
    return out


def flip_rates(frame: Frame) -> list[Row]:
    """Share of tokens that moved against the sign of their own advantage, by that sign."""
    if not has(frame, "is_flip", "sign", "group"):
        return []
    flip = frame["is_flip"].astype(float)
    return [
        Row(name, by_cluster(flip[is_in], frame["group"][is_in]), int(is_in.sum()))
        for name, is_in in by_sign(frame["sign"]).items()
    ]


def change_shares(frame: Frame) -> dict[str, list[Row]]:
    """Shares of boosted, suppressed and unchanged tokens, by the sign of the advantage."""
    if not has(frame, "change", "sign", "group"):
        return {}
    out = {}
    for name, is_in in by_sign(frame["sign"]).items():
        of_sign = frame[is_in]
        is_kind = {
            kind: (of_sign["change"] == kind).astype(float)
            for kind in ("boosted", "suppressed", "unchanged")
        }
        out[name] = [
            Row(kind, by_cluster(share, of_sign["group"]), int(share.sum()))
            for kind, share in is_kind.items()
        ]
    return out


def sharing(frame: Frame) -> pd.Series:
    """How each token's node is shared: by rollouts of both signs, by several of one sign, or not at
    all.
    """
    up, down = frame["node_positive"].fillna(0), frame["node_negative"].fillna(0)
    return pd.Series(
        np.select([(up > 0) & (down > 0), up + down > 1], SHARING[:2], SHARING[2]),
        index=frame.index,
    )


def cancellation_by_sharing(frame: Frame) -> list[Row]:
    """Mean cancellation of tokens by how their node is shared."""
    if not has(frame, "cancellation", "node_positive", "node_negative", "group"):
        return []
    kind = sharing(frame)
    return [
        Row(
            name,
            by_cluster(frame["cancellation"][kind == name], frame["group"][kind == name]),
            int((kind == name).sum()),
        )
        for name in SHARING
    ]


class Prediction(NamedTuple):
    """Predicted against actual change: the correlation over all tokens and a sample of them for the
    eye.
    """

    correlation: Interval
    num_tokens: int
    sample: Frame


def prediction(frame: Frame, size: int = 1500) -> Prediction | None:
    """Pearson correlation of ``predicted`` and ``delta`` over all tokens; the sample is an even
    draw by position in the table.
    """
    if not has(frame, "predicted", "delta", "group"):
        return None
    both = frame[frame["predicted"].notna() & frame["delta"].notna()]
    pick = np.unique(np.linspace(0, len(both) - 1, min(size, len(both))).astype(int))
    return Prediction(
        correlation_by_cluster(both["predicted"], both["delta"], both["group"]),
        len(both),
        both.iloc[pick],
    )


class TopToken(NamedTuple):
    """A token text with what it got over a batch."""

    text: str
    count: int
    credit: float
    mean_credit: Interval
    mean_delta: float


def top_tokens(frame: Frame, num: int = 12) -> tuple[list[TopToken], list[TopToken]]:
    """Token texts with the largest and the smallest sum of credit: (up, down).

    A sum that is rounding beside its terms is 0 and in neither: where every rollout has the token,
    the advantages of a prompt cancel.
    """
    if not has(frame, "text", "credit", "group"):
        return [], []
    by_text: Any = frame["credit"].groupby(frame["text"])
    total, mass = by_text.sum(), frame["credit"].abs().groupby(frame["text"]).sum()
    total = total.where(total.abs() > ROUNDING * mass, 0.0).sort_values()
    up = [text for text in total.index[::-1][:num] if total[text] > 0]
    down = [text for text in total.index[:num] if total[text] < 0]
    return [_top(frame, text) for text in up], [_top(frame, text) for text in down]


def _top(frame: Frame, text: str) -> TopToken:
    rows = frame[frame["text"] == text]
    delta = float(rows["delta"].mean()) if has(rows, "delta") else float("nan")
    return TopToken(
        text,
        len(rows),
        float(rows["credit"].sum()),
        by_cluster(rows["credit"], rows["group"]),
        delta,
    )


def ledger_rows(run: RunFolder, batch: int) -> dict[str, list[Row]]:
    """All these numbers of a batch, by chart; empty lists where the columns are missing.

    A batch is read once.
    """
    return run.once(("ledger", batch), lambda: _rows(run, batch))


def tax(frame: Frame) -> list[Row]:
    """KL(after || before), mean over the tokens of each kind of context, then over updates."""
    if not has(frame, "kl", "is_fully_shared", "is_fork", "update", *NODES):
        return []
    known = frame[frame["kl"].notna()]
    both = (known["node_positive"] > 0) & (known["node_negative"] > 0)
    sets = by_context(known["is_fully_shared"] > 0, both, known["is_fork"] > 0)
    return [
        Row(TAX[name], _by_update(known["kl"][is_in], known[is_in]), int(is_in.sum()))
        for name, is_in in sets.items()
        if is_in.any()
    ]


def residual(frame: Frame) -> list[Row]:
    """What is left of the coefficients at each token that both signs share in an update;
    mean over these, then over updates.
    """
    if not has(frame, "coef", "scale", "sign", "update", *NODES):
        return []
    value = frame["coef"] * frame["scale"]
    parts = pd.DataFrame(
        {
            "sum": value,
            "size": value.abs(),
            "up": frame["sign"] > 0,
            "down": frame["sign"] < 0,
            "group": frame["group"],
        }
    )
    by_node: Any = parts.groupby([frame["update"], frame["node"]])
    nodes: Frame = by_node[["sum", "size", "up", "down"]].sum().join(by_node["group"].first())
    nodes = nodes[(nodes["up"] > 0) & (nodes["down"] > 0)].reset_index("update")
    if nodes.empty:
        return []
    left = residual_of(nodes["sum"], nodes["size"])
    return [Row("residual", _by_update(left, nodes), len(nodes))]


def shared_entropy(frame: Frame) -> list[Row]:
    """Mean entropy of tokens where rollouts with an advantage run together, and of the others."""
    if not has(frame, "entropy", *NODES):
        return []
    is_common = frame["node_positive"].fillna(0) + frame["node_negative"].fillna(0) > 1
    sets = (("common", is_common), ("single", ~is_common))
    return [
        Row(name, by_cluster(frame["entropy"][is_in], frame["group"][is_in]), int(is_in.sum()))
        for name, is_in in sets
        if is_in.any()
    ]


def _rows(run: RunFolder, batch: int) -> dict[str, list[Row]]:
    of_batch = tokens_of(run, batch)
    if of_batch is None:
        return {}
    frame = of_batch[1]
    return {
        "flips": flip_rates(frame),
        "residual": residual(frame),
        "tax": tax(frame),
        "entropy": shared_entropy(frame),
    }


def _by_update(value: pd.Series | np.ndarray, rows: Frame) -> Interval:
    """Mean of ``value`` within each update, then over them; prompts are drawn."""
    by = [rows[name].to_numpy() for name in ("group", "update")]
    table: Frame = (
        pd.Series(np.asarray(value, float)).groupby(by).agg(["sum", "count"]).unstack(fill_value=0)
    )
    return over_clusters(table["sum"].to_numpy(), table["count"].to_numpy())
