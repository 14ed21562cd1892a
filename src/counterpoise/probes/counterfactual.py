"""E3: one update taken in full, with positives only, with negatives only, and at the head
alone.

Each variant starts from the same bit-exact snapshot. ``_fresh`` variants forget the optimizer's
momentum first, so that the batch holds this batch's gradient alone. The claim: against positives
only, the full update moves change from template to reasoning tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterpoise.ledger.measures.changes import change_sign
from counterpoise.maths.columns import by_sign, is_flip
from counterpoise.probes.output import (
    STRIDE,
    Columns,
    Drawing,
    Frame,
    Output,
    error_bars,
    join_frames,
    means,
    number_dict,
    ratios,
)
from counterpoise.probes.scene import Scene
from counterpoise.probes.updates import try_update
from counterpoise.types import Rows

SIDES = {"full": (-1, 0, 1), "positives": (1,), "negatives": (-1,)}
VARIANTS = (
    "full",
    "positives",
    "negatives",
    "head",
    "full_fresh",
    "positives_fresh",
    "negatives_fresh",
)


def probe(scene: Scene, output: Output) -> None:
    """Changes of every token of the batch's first update under each variant."""
    rows = scene.rows
    for name in VARIANTS:
        output.table(
            name, lambda name=name: token_columns(scene, rows, name, *deltas(scene, rows, name))
        )


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """Flip rates and shares from the variants' tables, of one batch or of several."""
    parts = [tables[name] for name in VARIANTS]
    table = join_frames(parts)
    numbers: dict[str, Any] = {
        "num_tokens": len(parts[0]),
        "num_prompts": int(parts[0]["group"].nunique()),
    }
    numbers |= {"flip": flip_numbers(table), "share_by_category": category_shares(table)}
    numbers["share_full_minus_positives"] = share_difference(table, "full", "positives")
    numbers["share_full_minus_positives_fresh"] = share_difference(
        table, "full_fresh", "positives_fresh"
    )
    numbers["rank_correlation_with_full"] = rank_correlations(parts)
    return numbers


def enters(rows: Rows, signs: tuple[int, ...]) -> Tensor:
    """Tokens whose advantage, of their turn or rollout, has one of the signs."""
    wanted = torch.tensor(signs, device=rows.mask_NT.device)
    return torch.isin(rows.sign_NT.long(), wanted) & rows.mask_NT


def deltas(scene: Scene, rows: Rows, variant: str) -> tuple[Tensor, Tensor | float]:
    """The change of every token under a variant, [R, T], and the noise floor."""
    if variant == "head":
        change = try_update(scene, rows)
        if change.head_delta_RT is None:
            raise ValueError(
                "counterfactual: the model's head is not plain, so there is no head-only update."
                " Choose another model."
            )
        return change.head_delta_RT, change.scores.noise_floor
    side, _, fresh = variant.partition("_")
    change = try_update(scene, rows, enters(rows, SIDES[side]), memory=not fresh)
    return change.delta_RT, change.scores.noise_floor


def token_columns(
    scene: Scene, rows: Rows, variant: str, delta_RT: Tensor, noise_floor: Tensor | float
) -> Columns:
    """One row per token."""
    mask_RT, names = rows.mask_NT, scene.categories(rows.row_R)
    known = {
        "group": rows.group_N[:, None],
        "rollout": rows.row_R.to(mask_RT.device)[:, None],
        "position": torch.arange(mask_RT.shape[1], device=mask_RT.device)[None],
        "sign": rows.sign_NT.long(),
        "delta": delta_RT,
        "change": change_sign(delta_RT, noise_floor).long(),
    }
    columns: Columns = {
        name: value.expand_as(mask_RT)[mask_RT].cpu().numpy() for name, value in known.items()
    }
    return {
        "variant": [variant] * int(mask_RT.sum()),
        "category": [name for row in names for name in row],
        **columns,
    }


def flip_numbers(table: Frame) -> dict[str, Any]:
    """Flip rate by variant and sign."""
    out: dict[str, Any] = {}
    for name, part in table.groupby("variant", sort=False):
        flip = is_flip(part["change"], part["sign"]).astype(float)
        out[str(name)] = means(flip, by_sign(part["sign"]), part["group"])
    return out


def category_shares(table: Frame) -> dict[str, Any]:
    """Each category's share of sum |delta|, by variant, beside its share of tokens."""
    names = sorted(table["category"].unique())
    parts = {str(variant): part for variant, part in table.groupby("variant", sort=False)}
    shares = {
        variant: drawn_shares(part, part["delta"].abs(), names) for variant, part in parts.items()
    }
    first = next(iter(parts.values()))
    shares["tokens"] = drawn_shares(first, np.ones(len(first)), names)
    return {
        variant: {c: number_dict(share_BK[:, k]) for k, c in enumerate(names)}
        for variant, share_BK in shares.items()
    }


def share_difference(table: Frame, first: str, second: str) -> dict[str, Any]:
    """Difference of the categories' shares between two variants; prompts are drawn jointly (the
    tokens and the seed are the same).
    """
    a, b = (table[table["variant"] == name] for name in (first, second))
    names = sorted(a["category"].unique())
    difference_BK = drawn_shares(a, a["delta"].abs(), names) - drawn_shares(
        b, b["delta"].abs(), names
    )
    return {c: number_dict(difference_BK[:, k]) for k, c in enumerate(names)}


def drawn_shares(part: Frame, size: Any, names: list[str]) -> np.ndarray:
    """Each category's share of sum(size), [1 + B, K]; over several batches the mean of the batches'
    shares.

    One sum over all batches would weigh a batch by how much a variant changes there: two variants
    that agree in every batch would then differ."""
    batch_number, size = (part["group"] // STRIDE).to_numpy(), np.asarray(size)
    sizes = [size * (batch_number == one) for one in np.unique(batch_number)]
    masks = [(part["category"] == c).to_numpy() for c in names]
    ratio_BK = ratios(
        [s * m for s in sizes for m in masks],
        [s for s in sizes for _ in masks],
        part["group"].to_numpy(),
    )
    return ratio_BK.reshape(len(ratio_BK), len(sizes), len(names)).mean(1)


def rank_correlations(parts: list[Frame]) -> dict[str, float | None]:
    """Spearman's rank correlation of each variant's change with the full one's; None where one does
    not vary (a head that is not trained).
    """
    full = parts[0]["delta"]
    return {
        name: (
            round(float(full.corr(part["delta"], method="spearman")), 4)
            if min(full.std(), part["delta"].std()) > 0
            else None
        )
        for name, part in zip(VARIANTS, parts)
    }


def figure(numbers: dict[str, Any]) -> Drawing:
    """Left: shares of the update by category, beside the category's share of tokens.

    Right: full minus positives only.
    """
    from plotly.subplots import make_subplots

    titles = ("share of sum |change of log-prob|", "full minus positives only")
    out = make_subplots(
        1, 2, subplot_titles=titles, horizontal_spacing=0.1, column_widths=[0.62, 0.38]
    )
    names = dict(
        zip(
            ("tokens", "full", "positives", "negatives", "head"),
            ("tokens", "full", "positives only", "negatives only", "head only"),
        )
    )
    for (variant, name), colour in zip(
        names.items(), ("#BBBBBB", "#000000", "#0072B2", "#D55E00", "#009E73")
    ):
        shares = numbers["share_by_category"][variant]
        y, bars = [one["mean"] for one in shares.values()], error_bars(list(shares.values()))
        out.add_bar(x=list(shares), y=y, error_y=bars, name=name, marker_color=colour, row=1, col=1)
    for key, name, colour in (
        ("", "with momentum", "#000000"),
        ("_fresh", "no momentum", "#CC79A7"),
    ):
        shares = numbers[f"share_full_minus_positives{key}"]
        y, bars = [one["mean"] for one in shares.values()], error_bars(list(shares.values()))
        style = {
            "mode": "markers",
            "name": f"difference, {name}",
            "marker": {"color": colour, "size": 9},
        }
        out.add_scatter(x=list(shares), y=y, error_y=bars, **style, row=1, col=2)
    out.add_hline(y=0, line={"color": "#999"}, row=1, col=2)  # pyright: ignore[reportArgumentType]
    out.update_layout(
        title="Where an update goes, by token category", barmode="group", scattermode="group"
    )
    out.update_yaxes(title="share, 95% interval", tickformat=".0%", row=1, col=1)
    return out.update_yaxes(tickformat=".0%", row=1, col=2)
