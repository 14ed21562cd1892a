"""The learning tax: KL(after || before) spent where all rollouts agree, beside the KL where they
part.

The first update of the batch is tried in full, with one sign alone, and at fractions of its
length: to second order the tax is 1/2 eta^2 g^T F g, so half a step costs a quarter. Over training
    the ledger keeps it (``ledger/tax/...`` of the metrics).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from counterpoise.ledger import Sharing, copy_params, restore, sharing, trainable
from counterpoise.ledger.account import score_update
from counterpoise.ledger.calculus.snapshot import snapshot
from counterpoise.probes.counterfactual import SIDES, enters
from counterpoise.probes.output import Columns, Drawing, Frame, Output, error_bars, means
from counterpoise.probes.scene import Scene
from counterpoise.probes.updates import forget, try_update
from counterpoise.trainer.update import apply_update
from counterpoise.types import Rows

CONTEXTS = ("shared", "both_signs", "discriminating", "other")
FRACTIONS = (0.25, 0.5, 1.0, 2.0)


def probe(scene: Scene, output: Output) -> None:
    """KL of every token by kind of context and variant, and at fractions of the batch."""
    output.table("contexts", lambda: context_columns(scene))
    output.table("lengths", lambda: length_rows(scene))


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """Mean KL by kind of context and variant, and the quadratic law; of one batch or of several."""
    table, by_length = tables["contexts"], tables["lengths"].groupby("fraction")["kl"].mean()
    kl: dict[str, Any] = {}
    for variant, part in table.groupby("variant", sort=False):
        kl[str(variant)] = means(
            part["kl"], {name: part["context"] == name for name in CONTEXTS}, part["group"]
        )
    law = (
        {str(f): round(float(kl / by_length[1.0]), 4) for f, kl in by_length.items()}
        if by_length[1.0] > 0
        else {}
    )
    return {**kl, "kl_of_fraction_over_kl_of_step": law}


def context_columns(scene: Scene) -> Columns:
    """One row per token and variant."""
    rows = scene.rows
    mask_RT, kind = rows.mask_NT, kinds(scene, rows)
    context = [kind[r][t] for r, t in mask_RT.nonzero().tolist()]
    group = rows.group_N[:, None].expand_as(mask_RT)[mask_RT].tolist()
    out: Columns = {"variant": [], "group": [], "context": [], "kl": []}
    for variant, signs in SIDES.items():
        kl_RT = try_update(scene, rows, enters(rows, signs)).scores.kl_NT
        if kl_RT is None:
            raise ValueError(
                "tax: the model's head is not plain, so there are no distributions to compare."
                " Choose another model."
            )
        for name, column in (
            ("variant", [variant] * len(group)),
            ("group", group),
            ("context", context),
            ("kl", kl_RT[mask_RT].tolist()),
        ):
            out[name] += column
    return out


def kinds(scene: Scene, rows: Rows) -> list[list[str]]:
    """The kind of every token's context: ``shared`` if all rollouts take this token, else
    ``discriminating`` at a fork, else ``both_signs``.
    """
    ids_RT = scene.collected.batch.token_ids_NT[rows.row_R]
    shared: Sharing = sharing(ids_RT, rows.mask_NT, rows.group_N, rows.advantage_N)
    code_RT = torch.full_like(ids_RT, 3)
    for code, is_in_RT in (
        (1, shared.is_both_NT),
        (2, shared.is_fork_NT),
        (0, shared.is_full_NT & shared.is_both_NT),
    ):
        code_RT[is_in_RT] = code
    return [[CONTEXTS[c] for c in row] for row in code_RT.tolist()]


def length_rows(scene: Scene) -> list[dict[str, Any]]:
    """Mean KL over all tokens of the batch at fractions of the parameter change (this batch's
    gradient alone).
    """
    model, optimizer, rows = scene.policy.model, scene.optimizer, scene.rows
    texts, saved, before = (
        scene.texts(rows.row_R),
        snapshot(model, optimizer),
        copy_params(trainable(model)),
    )
    out = []
    try:
        forget(optimizer)
        apply_update(model, optimizer, scene.method, rows, scene.collected, scene.config)
        after = copy_params(trainable(model))
        for fraction in FRACTIONS:
            move(model, before, after, fraction)
            kl_RT = score_update(model, before, texts, None).kl_NT
            assert kl_RT is not None
            out.append({"fraction": fraction, "kl": float(kl_RT[rows.mask_NT].double().mean())})
    finally:
        restore(saved, model, optimizer)
    return out


@torch.no_grad()
def move(
    model: torch.nn.Module, before: dict[str, Tensor], after: dict[str, Tensor], fraction: float
) -> None:
    """Set the parameters to before + fraction (after - before)."""
    for name, p in model.named_parameters():
        if name in before:
            p.copy_(before[name] + fraction * (after[name] - before[name]))


def figure(numbers: dict[str, Any]) -> Drawing:
    """KL by kind of context and variant."""
    import plotly.graph_objects as go

    out = go.Figure()
    labels = dict(
        zip(CONTEXTS, ("all rollouts agree", "both signs agree", "both signs part (fork)", "other"))
    )
    for variant, colour in (
        ("full", "#000000"),
        ("positives", "#0072B2"),
        ("negatives", "#D55E00"),
    ):
        by_context = numbers[variant]
        mean, bars = (
            [one["mean"] for one in by_context.values()],
            error_bars(list(by_context.values())),
        )
        out.add_bar(
            x=[labels[name] for name in by_context],
            y=mean,
            error_y=bars,
            name=variant,
            marker_color=colour,
        )
    out.update_layout(title="KL that one update spends, by kind of context", barmode="group")
    return out.update_yaxes(title="KL, nats per token, log scale", type="log", dtick=1)
