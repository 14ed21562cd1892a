"""E1: which share of tokens moves against its own advantage, step after step. Reads the ledger's tables alone.

The claim: boosted and suppressed shares are much alike for tokens of good and of bad rollouts, so many tokens flip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from counterpoise.files import step_of
from counterpoise.probes.intervals import error_bars, mean_difference, means
from counterpoise.probes.output import STRIDE, Frame, Output, columns_of, joined, read

COLUMNS = ("step", "group", "sign", "change", "delta", "is_flip")
SIDES = {"positive": 1, "negative": -1}
CHANGES = ("boosted", "suppressed", "unchanged")


def probe(run_dir: Path, step: int, output: Output) -> tuple[go.Figure, dict[str, Any]]:
    """Flip rates and shares by sign for every ledgered batch up to ``step``, with intervals over prompts."""
    files = [path for path in sorted((run_dir / "tokens").glob("step_*.parquet")) if step_of(path) <= step]
    if not files or step_of(files[-1]) != step:
        have = ", ".join(str(step_of(path)) for path in sorted((run_dir / "tokens").glob("step_*.parquet"))) or "none"
        raise ValueError(f"{run_dir}: no ledger table of step {step} (there are: {have}). Train with ledger.every.")
    table = output.table("shares", lambda: [row for path in files for row in shares(read_tokens(path), step_of(path))])
    pooled = joined([read_tokens(path).assign(cluster=lambda t: t["step"] * STRIDE + t["group"]) for path in files])
    return figure(table), {"steps": [step_of(path) for path in files], **pooled_numbers(pooled)}


def read_tokens(path: Path) -> Frame:
    """The trained tokens of rollouts with an advantage."""
    frame = columns_of(read(path), str(path), COLUMNS)
    return frame[frame["delta"].notna() & (frame["sign"] != 0)]


def shares(tokens: Frame, step: int) -> list[dict[str, Any]]:
    """One row a sign and quantity: flip, boosted, suppressed, unchanged."""
    out = []
    for quantity in ("flip", *CHANGES):
        value = tokens["is_flip"] if quantity == "flip" else tokens["change"] == quantity
        found = means(value.astype(float), {side: tokens["sign"] == sign for side, sign in SIDES.items()}, tokens["group"])
        out += [{"step": step, "sign": side, "quantity": quantity, **bounds} for side, bounds in found.items()]
    return out


def pooled_numbers(tokens: Frame) -> dict[str, Any]:
    """Over all steps: flip rate by sign, shares by sign, and how much the boosted share differs between the signs."""
    sides = {side: (tokens["sign"] == sign).to_numpy() for side, sign in SIDES.items()}
    numbers: dict[str, Any] = {"num_tokens": len(tokens), "num_prompts": int(tokens["cluster"].nunique())}
    for quantity in ("flip", *CHANGES):
        value = (tokens["is_flip"] if quantity == "flip" else tokens["change"] == quantity).astype(float)
        numbers[quantity] = means(value, sides, tokens["cluster"])
        if quantity == "boosted" and all(mask.any() for mask in sides.values()):
            numbers["boosted_gap"] = mean_difference(value, sides["positive"], sides["negative"], tokens["cluster"])
    return numbers


def figure(table: Frame) -> go.Figure:
    """Flip rate by sign over training."""
    out = go.Figure()
    for side, colour in (("positive", "#0072B2"), ("negative", "#D55E00")):
        part = table[(table["sign"] == side) & (table["quantity"] == "flip")]
        error = error_bars(part.to_dict("records"))
        out.add_scatter(x=part["step"], y=part["mean"], error_y=error, mode="lines+markers", name=side, line={"color": colour})
    top = float(np.nanmax(table["high"])) if len(table) else 1.0
    out.update_layout(title="Share of tokens that move against their own advantage", xaxis_title="rollout batch")
    return out.update_yaxes(title="flip rate", range=[0, max(0.6, min(1.0, top))])
