"""E1: which share of tokens moves against its own advantage, batch after batch.

Reads the ledger's tables alone.

The claim: boosted and suppressed shares are much alike for tokens of good and of bad rollouts, so
many tokens flip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoise.maths.columns import by_sign
from counterpoise.probes.output import (
    STRIDE,
    Columns,
    Drawing,
    Frame,
    Output,
    columns_of,
    error_bars,
    mean_difference,
    means,
)
from counterpoise.run.read import batch_files

COLUMNS = ("batch", "group", "sign", "change", "is_flip")
CHANGES = ("boosted", "suppressed", "unchanged")
COLOURS = {"positive": "#0072B2", "negative": "#D55E00"}


def probe(run_dir: Path, batch_number: int, output: Output) -> None:
    """The trained tokens of rollouts with an advantage, of every ledgered batch up to ``batch``."""
    files = batch_files(run_dir, "tokens")
    if batch_number not in files:
        have = ", ".join(map(str, files)) or "none"
        raise ValueError(
            f"{run_dir}: no ledger table of batch {batch_number} (there are: {have}). Train with"
            " ledger.every."
        )
    output.table(
        "tokens", lambda: token_columns([path for k, path in files.items() if k <= batch_number])
    )


def token_columns(files: list[Path]) -> Columns:
    """One row per token; tokens that no update saw are left out."""
    out: Columns = {name: [] for name in COLUMNS}
    for path in files:
        columns = columns_of(path, (*COLUMNS, "delta"))
        moved = [
            k
            for k, (delta, sign) in enumerate(zip(columns["delta"], columns["sign"]))
            if delta is not None and sign != 0
        ]
        for name in COLUMNS:
            out[name] += [columns[name][k] for k in moved]
    return out


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """Shares by sign over all batches and for each, and how much the boosted share differs between
    the signs; intervals over prompts.
    """
    tokens = tables["tokens"]
    if not len(tokens):
        raise ValueError(
            "flips: no ledgered batch has a rollout with an advantage. Train longer, or choose an"
            " easier task."
        )
    tokens = tokens.assign(cluster=tokens["batch"] * STRIDE + tokens["group"])
    updates = sorted(tokens["batch"].unique().tolist())
    numbers: dict[str, Any] = {
        "batches": updates,
        "num_tokens": len(tokens),
        "num_prompts": int(tokens["cluster"].nunique()),
    }
    numbers |= shares(tokens)
    sides = by_sign(tokens["sign"].to_numpy())
    if all(mask.any() for mask in sides.values()):
        boosted = (tokens["change"] == "boosted").astype(float)
        numbers["boosted_gap"] = mean_difference(
            boosted, sides["positive"], sides["negative"], tokens["cluster"]
        )
    return numbers | {
        "by_batch": {
            str(batch_number): shares(tokens[tokens["batch"] == batch_number])
            for batch_number in updates
        }
    }


def shares(tokens: Frame) -> dict[str, Any]:
    """flip, flip_of_moved (of the tokens that changed at all), boosted, suppressed, unchanged: by
    sign, with intervals.
    """
    sides = by_sign(tokens["sign"].to_numpy())
    flip, moved = tokens["is_flip"].astype(float), (tokens["change"] != "unchanged").to_numpy()
    out = {"flip": means(flip, sides, tokens["cluster"])}
    out["flip_of_moved"] = means(
        flip, {side: mask & moved for side, mask in sides.items()}, tokens["cluster"]
    )
    return out | {
        name: means((tokens["change"] == name).astype(float), sides, tokens["cluster"])
        for name in CHANGES
    }


def figure(numbers: dict[str, Any]) -> Drawing:
    """Left: flip rate by sign over training, of all tokens and of those that changed.

    Right: shares by sign, all batches together.
    """
    from plotly.subplots import make_subplots

    titles = ("flip rate over training", "what became of the tokens, all batches")
    out = make_subplots(
        1, 2, subplot_titles=titles, horizontal_spacing=0.1, column_widths=[0.6, 0.4]
    )
    by_batch = numbers["by_batch"]
    for quantity, dash, what in (
        ("flip_of_moved", "solid", "of tokens that changed"),
        ("flip", "dot", "of all tokens"),
    ):
        for side, colour in COLOURS.items():
            shares = {
                int(batch_number): one[quantity][side]
                for batch_number, one in by_batch.items()
                if side in one[quantity]
            }
            y, bars = [one["mean"] for one in shares.values()], error_bars(list(shares.values()))
            style = {
                "mode": "lines+markers",
                "name": f"{side}, {what}",
                "line": {"color": colour, "dash": dash},
            }
            out.add_scatter(x=list(shares), y=y, error_y=bars, **style, row=1, col=1)
    for side, colour in COLOURS.items():
        shares = {name: numbers[name][side] for name in CHANGES if side in numbers[name]}
        y, bars = [one["mean"] for one in shares.values()], error_bars(list(shares.values()))
        out.add_bar(
            x=list(shares),
            y=y,
            error_y=bars,
            name=f"{side} rollouts",
            marker_color=colour,
            row=1,
            col=2,
        )
    out.add_hline(y=0.5, line={"color": "#999", "dash": "dash"}, row=1, col=1)  # pyright: ignore[reportArgumentType]
    out.update_layout(
        title="Tokens that an update moves against their own advantage", barmode="group"
    )
    out.update_xaxes(title="batch", row=1, col=1)
    return out.update_yaxes(
        title="share of tokens, 95% interval", tickformat=".0%", rangemode="tozero"
    )
