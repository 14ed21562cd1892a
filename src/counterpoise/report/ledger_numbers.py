"""Numbers of the ledger over time, one batch's tokens at a time: flips, residual, learning tax,
entropy of shared tokens.

Every number is that of ``metrics.jsonl`` (docs/guides/ledger.md), computed again from the tokens so that
it carries a bootstrap interval over prompts.

Axes: P prompts, S updates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from counterpoise.maths.intervals import Interval, by_cluster, over_clusters
from counterpoise.report.credit_numbers import Frame, Row, flip_rates, has, tokens_of
from counterpoise.run.read import RunFolder

NODES = ("node", "node_positive", "node_negative", "group")
TAX = ("shared by all", "shared by both signs", "forks", "elsewhere")


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
    full, fork = known["is_fully_shared"] > 0, known["is_fork"] > 0
    both = (known["node_positive"] > 0) & (known["node_negative"] > 0)
    kinds = zip(TAX, (full, both, fork, ~(full | both | fork)))
    return [
        Row(name, _by_batch(known["kl"][is_in], known[is_in]), int(is_in.sum()))
        for name, is_in in kinds
        if is_in.any()
    ]


def residual(frame: Frame) -> list[Row]:
    """What is left of the coefficients at each token that both signs share in an update;
    mean over these, then over batches.
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
    left = np.where(
        nodes["size"] > 0, nodes["sum"].abs() / nodes["size"].where(nodes["size"] > 0, 1), 0
    )
    return [Row("residual", _by_batch(pd.Series(left, nodes.index), nodes), len(nodes))]


def shared_entropy(frame: Frame) -> list[Row]:
    """Mean entropy of tokens that two or more rollouts with an advantage share, and of the others."""
    if not has(frame, "entropy", *NODES):
        return []
    is_shared = frame["node_positive"].fillna(0) + frame["node_negative"].fillna(0) > 1
    sets = (("shared", is_shared), ("not shared", ~is_shared))
    return [
        Row(name, by_cluster(frame["entropy"][is_in], frame["group"][is_in]), int(is_in.sum()))
        for name, is_in in sets
        if is_in.any()
    ]


def _rows(run: RunFolder, batch: int) -> dict[str, list[Row]]:
    found = tokens_of(run, batch)
    if found is None:
        return {}
    frame = found[1]
    return {
        "flips": flip_rates(frame),
        "residual": residual(frame),
        "tax": tax(frame),
        "entropy": shared_entropy(frame),
    }


def _by_batch(value: Any, rows: Frame) -> Interval:
    """Mean of ``value`` within each update, then over them; prompts are drawn."""
    by = [rows[name].to_numpy() for name in ("group", "update")]
    table: Frame = (
        pd.Series(np.asarray(value, float)).groupby(by).agg(["sum", "count"]).unstack(fill_value=0)
    )
    return over_clusters(table["sum"].to_numpy(), table["count"].to_numpy())
