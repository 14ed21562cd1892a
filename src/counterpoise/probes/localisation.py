"""Does the credit of a failed rollout fall on the token at which it first went wrong?

Over failed rollouts whose first wrong token is known, per rule: the share of the rollout's negative
credit on that token, its AUROC by -credit against the rollout's other tokens, and its reciprocal
rank. (The AUROC of one token is its percentile; the reciprocal rank says how near to the top it
is.) The control ``uniform`` and plain signals are measured as if they were negative credit.

Axes: N rollouts, R failed ones with a known error, T response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterpoise.policy import Policy
from counterpoise.policy.offsets import positions_at, written
from counterpoise.probes.fresh import scene_credits
from counterpoise.probes.output import Columns, Drawing, Frame, Output, means
from counterpoise.probes.ranking import place
from counterpoise.probes.references import UNIFORM, reference_weights
from counterpoise.probes.scene import Scene
from counterpoise.probes.sheet import Sheet, merged, number_text, ordered, rule_figure
from counterpoise.rollouts import RolloutBatch
from counterpoise.tasks import Task, first_error
from counterpoise.types import TokenBatch

MEASURES = {
    "share": "share",
    "above_uniform": "above uniform",
    "auroc": "AUROC",
    "reciprocal_rank": "1 / rank",
}


def probe(scene: Scene, output: Output, *, methods: str = "all") -> None:
    """One row per rule and failed rollout whose first wrong token is known."""
    output.table("rollouts", lambda: scene_rows(scene, methods))


def scene_rows(scene: Scene, methods: str) -> Columns:
    """The rows of a saved batch under several methods."""
    if getattr(scene.task, "first_error", None) is None:
        raise ValueError(
            f"localisation: the task {scene.config.task['name']!r} does not say where an answer"
            " goes wrong. Give it a method first_error(prompt, text) (docs/guides/own_task.md)."
        )
    batch = scene.collected.batch
    first_error_N = first_error_tokens(scene.policy, scene.task, scene.collected)
    columns = error_rows(batch, scene_credits(scene, methods), first_error_N)
    if not len(columns["rollout"]):
        raise ValueError(
            f"localisation: no failed rollout of batch {scene.batch_number} has a known error."
            " Choose another batch."
        )
    return columns


def first_error_tokens(policy: Policy, task: Task, rollouts: RolloutBatch) -> Tensor:
    """The position of each rollout's first wrong token, [N]; -1 where there is none or the task
    does not know.
    """
    batch, group = rollouts.batch, rollouts.batch.group_N.tolist()
    offsets = [
        first_error(task, rollouts.prompts[p], text) for p, text in zip(group, rollouts.texts)
    ]
    own = written(policy.tokenizer, batch.token_ids_NT, batch.mask_NT)
    positions = positions_at(policy.tokenizer, own, offsets)
    return torch.tensor(positions, device=batch.token_ids_NT.device)


def localise(
    batch: TokenBatch, credits: Mapping[str, Tensor], first_error_N: Tensor
) -> dict[str, Any]:
    """Per rule: does the negative credit of failed rollouts fall on the first wrong token?

    Args:
        batch: rollouts; those that are no success enter.
        credits: label -> credit_NT.
        first_error_N: position of the first wrong token; -1 where it is not known.

    Returns the numbers of the probe's summary: under ``rules`` and ``references`` a dict per label.

    >>> batch = TokenBatch.from_lists(
    ...     [[5, 6, 7, 8]], group=[0], reward=[0.0], sampler_logp=[[-0.1, -0.1, -2.0, -0.1]]
    ... )
    >>> credit_NT = torch.tensor([[-0.1, -0.1, -0.7, -0.1]])
    >>> numbers = localise(batch, {"mine": credit_NT}, torch.tensor([2]))
    >>> numbers["rules"]["mine"]["share"]["mean"], numbers["references"]["uniform"]["share"]["mean"]
    (0.7, 0.25)
    """
    import pandas as pd

    return summarise({"rollouts": pd.DataFrame(error_rows(batch, credits, first_error_N))})


def error_rows(batch: TokenBatch, credits: Mapping[str, Tensor], first_error_N: Tensor) -> Columns:
    """One row per rule and rollout that failed at a known token."""
    row_R = ((first_error_N >= 0) & ~batch.is_success_N).nonzero()[:, 0]
    sides = {
        False: credits,
        True: {name: -weight_NT for name, weight_NT in reference_weights(batch).items()},
    }
    parts = [
        rule_rows(batch, credit_NT, first_error_N, row_R)
        | {"rule": [label] * len(row_R), "is_reference": [is_reference] * len(row_R)}
        for is_reference, columns in sides.items()
        for label, credit_NT in columns.items()
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def rule_rows(
    batch: TokenBatch, credit_NT: Tensor, first_error_N: Tensor, row_R: Tensor
) -> Columns:
    """Share, AUROC and reciprocal rank of the first wrong token; NaN without negative credit."""
    mask_RT, target_R = batch.mask_NT[row_R], first_error_N[row_R]
    blame_RT = -credit_NT[row_R].double() * mask_RT
    negative_RT = blame_RT.clamp(min=0)
    mass_R = negative_RT.sum(1)
    share_R = negative_RT.gather(1, target_R[:, None])[:, 0] / mass_R
    auroc_R, reciprocal_R = place(blame_RT, mask_RT, target_R)
    columns = {
        "group": batch.group_N[row_R],
        "rollout": row_R,
        "position": target_R,
        "length": mask_RT.sum(1),
        "negative_mass": mass_R,
        "share": share_R,
        "above_uniform": share_R - 1 / mask_RT.sum(1),
        "auroc": auroc_R.where(mass_R > 0, torch.nan),
        "reciprocal_rank": reciprocal_R.where(mass_R > 0, torch.nan),
    }
    return {name: column.cpu().numpy() for name, column in columns.items()}


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """Means over rollouts with intervals over prompts, of one batch or of several."""
    table = tables["rollouts"]
    is_control = table["rule"].eq(UNIFORM) & table["is_reference"]
    return {
        "num_rollouts": int(is_control.sum()),
        "rules": rule_numbers(table[~table["is_reference"]]),
        "references": rule_numbers(table[table["is_reference"]]),
    }


def rule_numbers(table: Frame) -> dict[str, dict[str, Any]]:
    """The measures of each rule; ``num_without``: rollouts to which it gives no negative credit,
    which are in no mean.
    """
    rules = list(dict.fromkeys(table["rule"]))
    sets = {rule: (table["rule"] == rule).to_numpy() for rule in rules}
    out: dict[str, dict[str, Any]] = {rule: {} for rule in rules}
    for measure in MEASURES:
        is_known = np.isfinite(table[measure].to_numpy(float))
        known = {rule: mask & is_known for rule, mask in sets.items()}
        for rule, number in means(table[measure], known, table["group"]).items():
            out[rule][measure] = number
    for rule, mask in sets.items():
        out[rule]["num_without"] = int((table["negative_mass"][mask] <= 0).sum())
    return out


def sheet(numbers: dict[str, Any]) -> Sheet:
    """What the terminal shows: rules by their share, references behind them."""
    rows = ordered(numbers["rules"], numbers["references"], "share")
    notes = [
        f"{numbers['num_rollouts']} failed rollouts with a known first error: share of the negative"
        " credit on that token",
        "without: rollouts to which a rule gives no negative credit, in no mean; (references)",
    ]
    lines = [
        [label, *(number_text(one.get(name)) for name in MEASURES), str(one["num_without"])]
        for label, one in rows.items()
    ]
    return Sheet(notes, ["rule", *MEASURES.values(), "without"], merged(lines))


def figure(numbers: dict[str, Any]) -> Drawing:
    """Share and AUROC of every rule; dashed: the control."""
    return rule_figure(
        "Credit on the first wrong token of failed rollouts",
        ordered(numbers["rules"], numbers["references"], "share"),
        {"share": "share of the negative credit", "auroc": "AUROC"},
        numbers["references"][UNIFORM],
    )
