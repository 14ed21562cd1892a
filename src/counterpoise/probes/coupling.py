"""E2: which tokens push which.

The head's kernel over pairs of tokens, and the causal masking probe over all parameters.

The claim: identical tokens of low confidence couple; different or confident ones hardly do.
"""

from __future__ import annotations

from typing import Any

import torch

from counterpoise.ledger.account import head_state
from counterpoise.ledger.calculus.head_kernel import coupling_table, head_kernel
from counterpoise.ledger.calculus.logprobs import of_model
from counterpoise.maths.transfer import send
from counterpoise.policy.precision import autocast
from counterpoise.probes.output import (
    Drawing,
    Frame,
    Output,
    error_bars,
    means,
    number_dict,
    ratios,
)
from counterpoise.probes.peer_masking import BUCKETS, causal_rows, full_update
from counterpoise.probes.scene import Scene
from counterpoise.probes.updates import try_update


def probe(
    scene: Scene, output: Output, *, tokens: int = 2048, targets: int = 40, seed: int = 0
) -> None:
    """Head tables over ``tokens`` tokens of the first update; tau of ``targets`` tokens in
    8 buckets.
    """
    output.table("head", lambda: head_rows(scene, tokens))
    output.table("causal", lambda: masked_rows(scene, targets, seed))


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """The numbers of both parts, of one batch or of several."""
    causal = causal_numbers(tables["causal"])
    num_targets = len(tables["causal"][["group", "row", "position"]].drop_duplicates())
    return {"head": head_numbers(tables["head"]), "causal": causal, "num_targets": num_targets}


def head_rows(scene: Scene, num: int) -> list[dict[str, Any]]:
    """The coupling table of all pairs (prompt ``-1``), and that of each prompt's own pairs, for
    intervals over prompts.
    """
    rows = scene.rows
    texts = scene.texts(rows.row_R)
    with torch.no_grad():
        state = head_state(scene.policy.model, texts)
    has_sign_M = (rows.sign_NT.expand_as(rows.mask_NT)[rows.mask_NT] != 0).nonzero().flatten()
    if len(has_sign_M) < 2:
        raise ValueError(
            f"coupling: no rollout of batch {scene.batch_number} has an advantage, so no token"
            " pushes another. Choose another batch."
        )
    pick_M = has_sign_M[
        torch.linspace(0, len(has_sign_M) - 1, min(num, len(has_sign_M))).round().long().unique()
    ]
    target_M = send(texts.token_ids_NT[texts.mask_NT], pick_M.device)[pick_M]
    prompt_M, sign_M = (
        column.expand_as(rows.mask_NT)[rows.mask_NT][pick_M]
        for column in (rows.group_N[:, None], rows.sign_NT)
    )
    out = []
    for prompt in [-1, *prompt_M.unique().tolist()]:
        at = torch.ones_like(prompt_M, dtype=torch.bool) if prompt == -1 else prompt_M == prompt
        kernel = head_kernel(
            state.hidden_MD[pick_M[at]], state.head.weight_VD, target_M[at], state.head.bias_V
        )
        out += [
            {"group": prompt, **row}
            for row in coupling_table(kernel, target_M[at], prompt_M[at], sign_M[at])
        ]
    return out


def masked_rows(scene: Scene, targets: int, seed: int) -> list[dict[str, Any]]:
    """The causal probe on the batch's first update as it was taken."""
    rows, model = scene.rows, scene.policy.model
    change = try_update(scene, rows)
    texts = scene.texts(rows.row_R)
    weight_RT = change.update.loss.coef_NT * rows.scale_NT * change.update.clip_factor
    logprobs, scorer = of_model(model, texts, lambda: autocast(model)), of_model(model, texts)
    update = full_update(model, scene.optimizer, logprobs, weight_RT, scorer)
    ids_RT = send(texts.token_ids_NT, rows.mask_NT.device)
    return causal_rows(update, rows, ids_RT, change.scores.entropy_NT, targets, seed)


def head_numbers(pairs: Frame) -> dict[str, Any]:
    """Mean |kernel| of same-prompt pairs by token and confidence, intervals over prompts; the same
    of all pairs without intervals.
    """
    out: dict[str, Any] = {}
    own = pairs[pairs["group"] >= 0]
    for (token, confidence), part in own.groupby(["token", "confidence"], sort=False):
        total = (part["mean_abs_kernel"] * part["pairs"]).to_numpy()
        ratio_BK = ratios([total], [part["pairs"].to_numpy(float)], part["group"].to_numpy())
        out[f"{token}/{confidence}"] = {
            "pairs": int(part["pairs"].sum()),
            **number_dict(ratio_BK[:, 0]),
        }
    whole = pairs[pairs["group"] < 0]
    for (token, prompt), part in whole.groupby(["token", "prompt"], sort=False):
        total = float((part["mean_abs_kernel"] * part["pairs"]).sum())
        out[f"{token}/{prompt}_prompt"] = {
            "pairs": int(part["pairs"].sum()),
            "mean": total / float(part["pairs"].sum()),
        }
    return out


def causal_numbers(causal: Frame) -> dict[str, Any]:
    """Mean tau and mean tau in the direction of the peers' advantage, by bucket, intervals over
    prompts.
    """
    if not len(causal):
        raise ValueError(
            "coupling: no bucket has three peers for any target. Take more targets, a larger group,"
            " or another batch."
        )
    names = {
        "/".join(bucket): (causal[list(bucket._fields)] == list(bucket)).all(axis=1)
        for bucket in BUCKETS
    }
    aligned = causal["tau"] * causal["sign"].map({"positive": 1.0, "negative": -1.0})
    tau, along = (means(value, names, causal["group"]) for value in (causal["tau"], aligned))
    size = means(causal["tau"].abs(), names, causal["group"])
    return {
        name: {
            "num": int(names[name].sum()),
            "tau": tau[name],
            "aligned": along[name],
            "size": size[name],
        }
        for name in tau
    }


def figure(numbers: dict[str, Any]) -> Drawing:
    """Left: the head's kernel by token and confidence.

    Right: tau in the direction of the peers' advantage.
    """
    from plotly.subplots import make_subplots

    titles = (
        "the head's kernel, pairs of one prompt",
        "all parameters: what three peers bring to a token",
    )
    out = make_subplots(
        1, 2, subplot_titles=titles, horizontal_spacing=0.13, column_widths=[0.38, 0.62]
    )
    for token, colour in (("identical", "#0072B2"), ("different", "#D55E00")):
        by_level = {
            level: numbers["head"].get(f"{token}/{level}") for level in ("none", "one", "both")
        }
        by_level = {level: one for level, one in by_level.items() if one}
        mean, bars = [one["mean"] for one in by_level.values()], error_bars(list(by_level.values()))
        out.add_bar(
            x=list(by_level),
            y=mean,
            error_y=bars,
            name=f"{token} tokens",
            marker_color=colour,
            row=1,
            col=1,
        )
    causal = numbers["causal"]
    mean, bars = (
        [v["aligned"]["mean"] for v in causal.values()],
        error_bars([v["aligned"] for v in causal.values()]),
    )
    colours = ["#0072B2" if name.startswith("same") else "#D55E00" for name in causal]
    labels = [f"{name.replace('/', '<br>')}<br>n={one['num']}" for name, one in causal.items()]
    out.add_bar(
        x=labels, y=mean, error_y=bars, marker_color=colours, showlegend=False, row=1, col=2
    )
    out.update_layout(title="Which tokens push which", barmode="group")
    out.update_xaxes(title="confident tokens of the pair", row=1, col=1).update_xaxes(
        title="peers: token, entropy, sign of advantage", row=1, col=2
    )
    out.update_yaxes(title="mean |kernel|, log scale", type="log", dtick=2, row=1, col=1)
    return out.update_yaxes(title="tau along their advantage, nats", row=1, col=2)
