"""The learning tax: KL(after || before) that an update spends where good and bad rollouts agree,
because of what they bring there themselves.

Measured at the last of the batch's updates, from the policy after all the others: at the first one
all ratios are 1, nothing is clipped, and what equal tokens bring cancels by construction. The
control is the same update with these tokens masked (scale 0): what it spends there is what the
rest of the update does by generalising. The tax is the difference.

The update is also tried with one sign alone and at fractions of its length: to second order KL is
1/2 eta^2 g^T F g, so half an update costs a quarter. Over training the ledger keeps KL by kind of
context (``ledger/tax/...`` of the metrics), without a control.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from counterpoise.ledger.account import score_update
from counterpoise.ledger.calculus.logprobs import copy_params, trainable
from counterpoise.ledger.calculus.snapshot import restore, snapshot
from counterpoise.ledger.measures.sharing import sharing
from counterpoise.maths.turns import token_advantage
from counterpoise.probes.counterfactual import SIDES, enters
from counterpoise.probes.output import Columns, Drawing, Frame, Output, error_bars, means
from counterpoise.probes.scene import Scene
from counterpoise.probes.updates import before_last_update, forget, try_update
from counterpoise.trainer.update import apply_update
from counterpoise.types import Rows

CONTEXTS = ("shared", "both_signs", "discriminating", "other")
MASKED = ("shared", "both_signs")  # each has a control without its tokens
FRACTIONS = (0.25, 0.5, 1.0, 2.0)
FIRST = (
    "the batch has one update, which is the first: all ratios are 1 and nothing is clipped. Train"
    " with optimizer.updates_per_batch or optimizer.epochs above 1 to see what they cost"
)


def probe(scene: Scene, output: Output) -> None:
    """KL of every token by kind of context and variant, and at fractions of the update."""
    output.table("contexts", lambda: context_columns(scene))
    output.table("lengths", lambda: length_rows(scene))


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """The tax, mean KL by kind of context and variant, and the quadratic law; of one batch or of
    several.
    """
    table, by_length = tables["contexts"], tables["lengths"].groupby("fraction")["kl"].mean()
    last = int(table["update"].max())
    numbers: dict[str, Any] = {"update": f"the last, number {last} (counted from 0)"}
    if last == 0:
        numbers["update"] = FIRST
    numbers["tax"] = taxes(table)
    for variant, part in table.groupby("variant", sort=False):
        sets = {name: part["context"] == name for name in CONTEXTS}
        numbers[str(variant)] = means(part["kl"], sets, part["group"])
    if by_length[1.0] > 0:
        law = {str(f): round(float(kl / by_length[1.0]), 4) for f, kl in by_length.items()}
        numbers["kl_of_fraction_over_kl_of_step"] = law
    return numbers


def taxes(table: Frame) -> dict[str, Any]:
    """KL at the tokens of a kind in the full update minus KL there with these tokens masked,
    intervals over prompts; a sentence where no token is of the kind.
    """
    of = {name: part.reset_index(drop=True) for name, part in table.groupby("variant", sort=False)}
    out: dict[str, Any] = {}
    for kind in MASKED:
        if f"{kind}_masked" not in of:
            out[kind] = "no token of the update is of this kind"
            continue
        is_it = of["full"]["context"] == kind
        # batches without such tokens have no control: rows are told apart by batch and token
        control = of[f"{kind}_masked"].set_index(["group", "token"])["kl"]
        full = of["full"][is_it].set_index(["group", "token"])
        spent = (full["kl"] - control.reindex(full.index)).dropna().reset_index()
        out |= means(spent["kl"], {kind: [True] * len(spent)}, spent["group"])
    return out


def context_columns(scene: Scene) -> Columns:
    """One row per token and variant."""
    with before_last_update(scene) as rows:
        sets = contexts(scene, rows)
        variants = {name: enters(rows, signs) for name, signs in SIDES.items()}
        for kind in MASKED:
            rest_RT = rows.mask_NT & ~sets[kind]
            if bool(sets[kind].any()) and bool(rest_RT.any()):
                variants[f"{kind}_masked"] = rest_RT
        kl = {name: kl_of(scene, rows, enters_RT) for name, enters_RT in variants.items()}
    mask_RT, names = rows.mask_NT, [""] * int(rows.mask_NT.sum())
    for name, is_in_RT in sets.items():
        for at in is_in_RT[mask_RT].nonzero().flatten().tolist():
            names[at] = name
    group = rows.group_N[:, None].expand_as(mask_RT)[mask_RT].tolist()
    return {
        "variant": [name for name in kl for _ in names],
        "update": [len(scene.updates) - 1] * (len(kl) * len(names)),
        "group": group * len(kl),
        "token": list(range(len(names))) * len(kl),
        "context": names * len(kl),
        "kl": [value for kl_RT in kl.values() for value in kl_RT[mask_RT].tolist()],
    }


def kl_of(scene: Scene, rows: Rows, enters_RT: Tensor) -> Tensor:
    kl_RT = try_update(scene, rows, enters_RT).scores.kl_NT
    if kl_RT is None:
        raise ValueError(
            "tax: the model's head is not plain, so there are no distributions to compare."
            " Choose another model."
        )
    return kl_RT


def contexts(scene: Scene, rows: Rows) -> dict[str, Tensor]:
    """The kinds of context of the rows' tokens, as the ledger has them: of the whole batch."""
    batch = scene.collected.batch
    advantage_NT = token_advantage(scene.credit, batch)
    columns = (batch.token_ids_NT, batch.mask_NT, batch.group_N, advantage_NT)
    whole = sharing(*(column.cpu() for column in columns))
    sets = whole.select(rows.row_R.cpu()).contexts
    return {name: is_in.to(rows.mask_NT.device) & rows.mask_NT for name, is_in in sets.items()}


def length_rows(scene: Scene) -> list[dict[str, Any]]:
    """Mean KL over all tokens of the update at fractions of the parameter change (this update's
    gradient alone).
    """
    with before_last_update(scene) as rows:
        return kl_of_fractions(scene, rows)


def kl_of_fractions(scene: Scene, rows: Rows) -> list[dict[str, Any]]:
    model, optimizer, texts = scene.policy.model, scene.optimizer, scene.texts(rows.row_R)
    saved, before = snapshot(model, optimizer), copy_params(trainable(model))
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
    labels = ("all rollouts agree", "both signs agree", "both signs part (fork)", "other")
    variants = {
        "full": ("full", "#000000"),
        "shared_masked": ("without tokens of all", "#56B4E9"),
        "both_signs_masked": ("without tokens of both signs", "#009E73"),
        "positives": ("positives alone", "#0072B2"),
        "negatives": ("negatives alone", "#D55E00"),
    }
    for variant, (name, colour) in variants.items():
        of = numbers.get(variant, {})
        out.add_bar(
            x=[labels[CONTEXTS.index(kind)] for kind in of],
            y=[one["mean"] for one in of.values()],
            error_y=error_bars(list(of.values())),
            name=name,
            marker_color=colour,
        )
    which = "the first (and only)" if numbers["update"] == FIRST else "the last"
    title = f"KL that {which} update of a batch spends, by kind of context"
    out.update_layout(title=title, barmode="group")
    out.update_xaxes(categoryorder="array", categoryarray=labels)
    return out.update_yaxes(title="KL, nats per token, log scale", type="log", dtick=1)
