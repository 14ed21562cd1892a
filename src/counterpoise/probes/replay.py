"""One saved batch under several methods: their credits side by side, and the update that each would have made.

Axes as in ``types``; K methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import yaml
from scipy.stats import spearmanr

from counterpoise.files import write_json, write_table
from counterpoise.methods import Method
from counterpoise.presets import method as make_method
from counterpoise.probes.intervals import means
from counterpoise.probes.scene import Scene, open_scene
from counterpoise.probes.updates import tried
from counterpoise.rollouts import load_model
from counterpoise.schema import SCHEMA_VERSION
from counterpoise.trainer.collect import measured
from counterpoise.types import Credit, TokenBatch


class Assigned(NamedTuple):
    """What a method made of the batch."""

    method: Method
    batch: TokenBatch
    credit: Credit


def replay(run_dir: Path, step: int, specs: Sequence[str], *, apply: bool = False) -> dict[str, Any]:
    """Credits of a saved batch under several methods, rank correlations, and with ``apply`` the update of each.

    Args:
        run_dir, step: a run folder and a step with a checkpoint and rollouts.
        specs: names of methods, or YAML mappings with ``name`` and axes: ``{name: dapo, plan: query_preserved}``.
        apply: try each method's update on the rows of the run's first optimizer step, all from one snapshot.

    Returns a summary, also in ``RUN/probes/replay/step_N/summary.json``; credits are in ``credits.parquet`` beside it.
    """
    named = dict(map(named_method, specs))
    if len(named) != len(specs):
        raise ValueError(f"replay: a method is named twice in {list(specs)}. Name each once.")
    scene = open_scene(run_dir, step)
    assigned = {label: assign(scene, made) for label, made in named.items()}
    folder = run_dir / "probes" / "replay" / f"step_{step:06d}"
    columns = credit_columns(scene, assigned)
    numbers: dict[str, Any] = {"credit": {label: credit_numbers(one) for label, one in assigned.items()}}
    numbers["rank_correlation"] = correlations({label: columns[f"credit/{label}"] for label in named})
    if apply:
        deltas, numbers["update"] = updates(scene, assigned)
        numbers["rank_correlation_of_updates"] = correlations(deltas)
    write_table(folder / "credits.parquet", columns)
    summary = {"schema_version": SCHEMA_VERSION, "probe": "replay", "step": step, "methods": list(named), "numbers": numbers}
    write_json(folder / "summary.json", summary)
    return {**summary, "folder": str(folder)}


def named_method(spec: str) -> tuple[str, Method]:
    """``dapo`` or ``{name: dapo, plan: query_preserved}``, with the text as its label."""
    axes = yaml.safe_load(spec)
    if isinstance(axes, str):
        axes = {"name": axes}
    if not isinstance(axes, dict) or not isinstance(axes.get("name"), str):
        raise ValueError(
            f"--method {spec!r}: expected a name, or a mapping with name, for example '{{name: dapo, credit: [top_entropy]}}'."
        )
    return spec, make_method(**axes)


def assign(scene: Scene, method: Method) -> Assigned:
    """Columns that the method needs, then its credit. The run's own method gets the run's state, others their first."""
    reference = scene.reference
    if reference is None and "ref_logp_NT" in method.needs:
        reference = load_model(scene.config.model, dtype=torch.float32, device=scene.policy.model.device).model
    collected = measured(scene.policy, method, scene.config, scene.collected, reference)
    state = scene.state.method if method.describe() == scene.method.describe() else None
    return Assigned(method, collected.batch, method.assign(collected.batch, state, seed=scene.config.seed, step=scene.step))


def credit_columns(scene: Scene, assigned: dict[str, Assigned]) -> dict[str, np.ndarray]:
    """One row a token: where it is, and its credit under each method."""
    batch = scene.collected.batch
    mask_NT = batch.mask_NT
    where = {
        "group": batch.group_N[:, None],
        "rollout": torch.arange(batch.num_rollouts, device=mask_NT.device)[:, None],
        "position": torch.arange(mask_NT.shape[1], device=mask_NT.device)[None],
        "token_ids": batch.token_ids_NT,
    }
    columns = where | {f"credit/{label}": one.credit.credit_NT for label, one in assigned.items()}
    return {name: value.expand_as(mask_NT)[mask_NT].cpu().numpy() for name, value in columns.items()}


def credit_numbers(one: Assigned) -> dict[str, float]:
    """Mass by sign and the share of tokens with credit."""
    credit_M = one.credit.credit_NT[one.batch.mask_NT].double()
    return {
        "mean_positive": float(credit_M.clamp(min=0).mean()),
        "mean_negative": float(credit_M.clamp(max=0).mean()),
        "credited_frac": float((credit_M != 0).double().mean()),
    }


def correlations(columns: dict[str, np.ndarray]) -> dict[str, float | None]:
    """Spearman's rank correlation of every pair; None where a column does not vary.

    >>> correlations({"a": np.array([1.0, 2.0, 3.0]), "b": np.array([1.0, 4.0, 9.0])})
    {'a ~ b': 1.0}
    """
    out = {}
    for (a, first), (b, second) in combinations(columns.items(), 2):
        varies = np.ptp(first) > 0 and np.ptp(second) > 0
        out[f"{a} ~ {b}"] = round(float(np.asarray(spearmanr(first, second)[0])), 6) if varies else None
    return out


def updates(scene: Scene, assigned: dict[str, Assigned]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Each method's update of the same rows from the same snapshot; signs are those of the run's own advantages."""
    deltas, numbers, row_R = {}, {}, scene.plan.steps[0]
    sign_R1 = scene.credit.advantage_N[row_R].sign()[:, None]
    for label, one in assigned.items():
        rows = one.method.rows(one.batch, one.credit, row_R)
        change = tried(scene, rows, method=one.method)
        flat = {"delta": change.delta_RT, "sign": sign_R1, "change": change.sign_RT, "group": rows.group_N[:, None]}
        table = pd.DataFrame({name: value.expand_as(rows.mask_NT)[rows.mask_NT].cpu().numpy() for name, value in flat.items()})
        sides = {"positive": table["sign"] > 0, "negative": table["sign"] < 0}
        flip = (table["sign"] * table["change"] < 0).astype(float)
        deltas[label] = table["delta"].to_numpy()
        numbers[label] = {"delta": means(table["delta"], sides, table["group"]), "flip": means(flip, sides, table["group"])}
    return deltas, numbers
