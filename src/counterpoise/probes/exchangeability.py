"""What is left at tokens that good and bad rollouts share, under several losses: M1 and M2 switched
on and off.

M1 is sequence coupling (a weight that holds the ratios of other tokens), M2 is clipping that
depends on the sign.

At a shared trie node all rollouts bring the same gradient. With centred advantages it cancels where
their weights are equal. All losses get the same advantages (reward minus group mean), the same
reduction (one constant) and the same off-policy log-probs: those of the policy after all but the
last of the batch's own updates. With one update a batch all ratios are 1 and there
is nothing to see."""

from __future__ import annotations

from typing import Any

import torch

from counterpoise.catalogue.method import Method
from counterpoise.catalogue.registry import method as make_method
from counterpoise.ledger.measures.residual import residual
from counterpoise.ledger.measures.sharing import sharing
from counterpoise.maths.trie import prefix_nodes
from counterpoise.policy import measure
from counterpoise.policy.precision import autocast
from counterpoise.probes.output import (
    Columns,
    Drawing,
    Frame,
    NumberDict,
    Output,
    error_bars,
    means,
)
from counterpoise.probes.scene import Scene
from counterpoise.probes.updates import before_last_update

NO_CLIP = {"clip_low": 1e6, "clip_high": 1e6}
# name -> (M1 sequence coupling, M2 sign-dependent clipping, axes)
LOSSES: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "token ratio": (False, False, {"loss": {"name": "detached_ratio", **NO_CLIP}}),
    "token ratio, clipped": (
        False,
        True,
        {"loss": {"name": "clipped", "clip_low": 0.2, "clip_high": 0.2}},
    ),
    "token ratio, symmetric clip": (
        False,
        False,
        {"loss": {"name": "symmetric_clip", "clip": 0.2}},
    ),
    "sequence ratio": (True, False, {"loss": {"name": "sequence_ratio", **NO_CLIP}}),
    "sequence ratio, clipped": (True, True, {"loss": "sequence_ratio"}),
    "DFPO min": (False, False, {"loss": {"name": "dfpo", "transform": "min"}}),
    "DFPO orth": (False, False, {"loss": {"name": "dfpo", "transform": "orth"}}),
    "reinforce": (False, False, {"loss": "reinforce"}),
    "reinforce, per-sequence mean": (
        False,
        False,
        {"loss": "reinforce", "reduction": "per_sequence"},
    ),
}
ROUNDING = 1e-6  # of a residual of centred advantages that cancel
NO_INTERVAL: NumberDict = {"mean": None, "low": None, "high": None}
BASE = {
    "advantage": "group_mean",
    "credit": [],
    "reduction": "constant_length",
    "controller": None,
    "plan": "query_preserved",
}


def probe(scene: Scene, output: Output) -> None:
    """Residual |sum A alpha| / sum |A alpha| of nodes that rollouts of both signs share, by loss.

    Equal weights leave |sum A| / sum |A| of the rollouts at the node, 0 where the whole group is
    there. The excess is the distance from that."""
    if len(scene.updates) < 2:
        raise ValueError(
            "exchangeability: one update a batch is on-policy, all ratios are 1. Train with"
            " optimizer.updates_per_batch or optimizer.epochs above 1."
        )
    output.table("nodes", lambda: node_rows(scene))


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """Mean excess by loss over the nodes of both signs, and the residual of nodes that whole groups
    share; intervals over prompts.

    A node where a loss clips every rollout has nothing left to cancel: it is counted
    (``num_empty``) and has no excess."""
    numbers: dict[str, Any] = {}
    for name, (m1, m2, _) in LOSSES.items():
        part = tables["nodes"][tables["nodes"]["loss"] == name]
        is_empty = (part["residual"] == 0) & (part["of_advantage"] > ROUNDING)
        excess = means(
            (part["residual"] - part["of_advantage"]).abs(), {"all": ~is_empty}, part["group"]
        )
        whole = means(part["residual"], {"all": part["is_full"]}, part["group"]).get("all")
        counts = {
            "num_nodes": len(part),
            "num_full": int(part["is_full"].sum()),
            "num_empty": int(is_empty.sum()),
        }
        numbers[name] = {
            "M1": m1,
            "M2": m2,
            **counts,
            **excess.get("all", NO_INTERVAL),
            "residual_of_full": whole,
        }
    return numbers


def node_rows(scene: Scene) -> Columns:
    """One row per node and loss."""
    batch, logp_NT = scene.collected.batch, off_policy_logp(scene)
    everyone = torch.arange(batch.num_rollouts, device=batch.mask_NT.device)
    advantage_N = make_method("dr_grpo", **BASE).assign(batch).advantage_N
    columns = (batch.token_ids_NT.cpu(), batch.mask_NT.cpu(), batch.group_N.cpu())
    nodes, shared = prefix_nodes(*columns), sharing(*columns, advantage_N.cpu()[:, None])
    node_K = nodes.node_NT[shared.is_both_NT].unique()
    if not len(node_K):
        raise ValueError(
            f"exchangeability: good and bad rollouts of batch {scene.batch_number} share no token."
            " Choose another batch."
        )
    first_M = torch.zeros_like(nodes.size_M).index_put(
        (nodes.node_NT[columns[1]],), columns[1].nonzero()[:, 0]
    )
    plain_M = residual(torch.where(columns[1], advantage_N.cpu()[:, None], 0).double(), nodes)
    is_full_M = torch.zeros_like(nodes.size_M, dtype=torch.bool).index_fill(
        0, nodes.node_NT[shared.is_full_NT], True
    )
    known = {
        "group": columns[2][first_M[node_K]],
        "node": node_K,
        "of_advantage": plain_M[node_K],
        "is_full": is_full_M[node_K],
    }
    out: Columns = {name: value.repeat(len(LOSSES)).numpy() for name, value in known.items()}
    values = []
    for _, _, axes in LOSSES.values():
        chosen: Method = make_method("dr_grpo", **(BASE | axes))
        rows = chosen.prepare(logp_NT, chosen.rows(batch, chosen.assign(batch), everyone))
        loss = chosen.loss(logp_NT, rows)
        values.append(residual((loss.coef_NT * rows.scale_NT).double().cpu(), nodes)[node_K])
    return {
        "loss": [name for name in LOSSES for _ in node_K],
        **out,
        "residual": torch.cat(values).numpy(),
    }


def off_policy_logp(scene: Scene) -> torch.Tensor:
    """Log-probs of the whole batch after all but the last of its own updates; model and
    optimizer are put back.
    """
    model, texts = scene.policy.model, scene.texts(torch.arange(scene.collected.batch.num_rollouts))
    with before_last_update(scene), autocast(model):
        columns = measure(
            model,
            texts.prompt_ids,
            texts.token_ids_NT,
            texts.mask_NT,
            {"trainer_logp_NT"},
            temperature=texts.temperature,
            token_budget=texts.token_budget,
        )
    return columns["trainer_logp_NT"]


def figure(numbers: dict[str, Any]) -> Drawing:
    """Excess by loss."""
    import plotly.graph_objects as go

    out = go.Figure()
    kinds = {
        "equal weights expected": (False, False),
        "M1: sequence coupling": (True, False),
        "M2: clip by sign": (False, True),
    }
    for (name, kind), colour in zip(
        (kinds | {"M1 and M2": (True, True)}).items(), ("#0072B2", "#E69F00", "#CC79A7", "#D55E00")
    ):
        of_kind = {loss: one for loss, one in numbers.items() if (one["M1"], one["M2"]) == kind}
        mean, bars = [one["mean"] for one in of_kind.values()], error_bars(list(of_kind.values()))
        out.add_bar(
            x=[wrap_title(loss) for loss in of_kind],
            y=mean,
            error_y=bars,
            name=name,
            marker_color=colour,
        )
    out.update_layout(title="What a loss leaves at shared tokens beyond what equal weights would")
    out.update_xaxes(categoryorder="array", categoryarray=[wrap_title(loss) for loss in numbers])
    return out.update_yaxes(title="mean |excess residual|, 95% interval")


def wrap_title(loss: str) -> str:
    """A label on several lines."""
    return loss.replace(", ", ",<br>").replace(" ", "<br>", 1)
