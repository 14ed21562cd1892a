"""One saved batch under several methods: their credits side by side, and the update that each would
have made.

Axes as in ``types``; K methods.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr

from counterpoise.catalogue.method import Method
from counterpoise.maths.columns import by_sign, is_flip
from counterpoise.maths.turns import token_advantage
from counterpoise.probes.methods import Assigned, assign, named_method
from counterpoise.probes.output import Drawing, error_bars, means, write_summary
from counterpoise.probes.scene import Scene, checkpoint_of, open_scene, read_config
from counterpoise.probes.updates import try_update
from counterpoise.run.files import inside, write_table
from counterpoise.run.read import batch_files, check_current, open_run, read_mapping
from counterpoise.run.rollouts import read_rollouts
from counterpoise.stage import success_of
from counterpoise.types import TokenBatch

LONGEST = 100  # letters of a folder's name


class Saved(NamedTuple):
    """A batch from its file, and what of the run decides its credit: the seed, and the name of the
    method whose memory only a checkpoint holds.
    """

    batch: TokenBatch
    seed: int
    method: str


def replay(
    run_dir: Path,
    batch_number: int,
    specs: Sequence[str],
    *,
    apply: bool = False,
    trust: bool = False,
) -> dict[str, Any]:
    """Credits of a saved batch under several methods, rank correlations, and with ``apply`` the
    update of each.

    Args:
        run_dir, batch: a run folder and a batch with rollouts; with a checkpoint too where a method
            reads more than the file has, samples or has a memory, and for ``apply``.
        specs: names of methods, or YAML mappings with ``name`` and axes: ``{name: dapo, plan:
            query_preserved}``.
        apply: try each method's update on the rows of the run's first update, all from one
            snapshot.
        trust: import the code that the folder's recipe names, as in ``open_scene``.

    Returns a summary, also in ``RUN/probes/replay/update_N/<methods>/summary.json``; beside it a
    figure, ``credits.parquet`` and, with ``apply``,
    ``updates.parquet``.
    """
    named = dict(map(named_method, specs))
    if len(named) != len(specs):
        raise ValueError(f"replay: a method is named twice in {list(specs)}. Name each once.")
    saved = read_saved(run_dir, batch_number, trust=trust)
    why = "--apply tries updates" if apply else why_model(named, saved)
    scene = None
    if saved is None or why:
        check_checkpoint(run_dir, batch_number, why)
        scene = open_scene(run_dir, batch_number, trust=trust)
        assigned, batch = assign(scene, named), scene.collected.batch
    else:
        assigned, batch = assign_saved(saved, named, batch_number), saved.batch
    place = ("probes", "replay", f"batch_{batch_number:06d}", folder_name(list(named)))
    folder = inside(run_dir, *place)
    columns = credit_columns(batch, assigned)
    numbers: dict[str, Any] = {
        "credit": {label: credit_numbers(one) for label, one in assigned.items()}
    }
    numbers["rank_correlation"] = correlations(
        {label: columns[f"credit/{label}"] for label in named}
    )
    if apply and scene is not None:
        table = updates(scene, assigned)
        write_table(folder / "updates.parquet", {name: table[name].to_numpy() for name in table})
        numbers["update"] = {label: update_numbers(table, label) for label in named}
        numbers["rank_correlation_of_updates"] = correlations(
            {label: table[f"delta/{label}"].to_numpy() for label in named}
        )
    write_table(folder / "credits.parquet", columns)
    facts = {"probe": "replay", "batch": batch_number, "methods": list(named)}
    return write_summary(folder, facts, numbers, lambda: figure(numbers))


def folder_name(specs: list[str]) -> str:
    """Methods as the name of a folder; one that would be too long ends with a hash of the rest.

    >>> folder_name(["dapo", "{name: dapo, credit: [top_entropy]}"])
    'dapo+name_dapo_credit_top_entropy'
    """
    name = "+".join(re.sub(r"[^A-Za-z0-9.]+", "_", spec).strip("_") for spec in specs)
    return (
        name
        if len(name) <= LONGEST
        else f"{name[: LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    )


def read_saved(run_dir: Path, batch_number: int, *, trust: bool) -> Saved | None:
    """The batch as its file has it, None where there is none; a recipe that names code is asked
    about (``trust``) as where it is built from. The account of a host has no recipe.
    """
    check_current(run_dir)
    if not read_mapping(run_dir / "manifest.json").get("host"):
        read_config(run_dir, trust=trust)
    file = batch_files(run_dir, "rollouts").get(batch_number)
    if file is None:
        return None
    config = open_run(run_dir).config
    given = {name: config.get(name) for name in ("rollouts", "task", "method")}
    rollouts, task, method = (one if isinstance(one, dict) else {} for one in given.values())
    batch = read_rollouts(file, max_length=rollouts.get("max_new_tokens")).batch
    return Saved(
        batch.replace(success=success_of(task)), config.get("seed", 0), method.get("name", "")
    )


def why_model(methods: Mapping[str, Method], saved: Saved | None) -> str:
    """Why saved rollouts are not enough for some method; empty where they are."""
    for label, method in methods.items() if saved else ():
        assert saved is not None
        lacks = [name for name in sorted(method.needs) if getattr(saved.batch, name) is None]
        state = method.init()
        has_memory = any(part is not None for part in (state["controller"], *state["rules"]))
        reasons = {
            "samples more": bool(method.collectors),
            f"reads {', '.join(lacks)}": bool(lacks),
            "has a memory, which the checkpoint holds": has_memory and method.name == saved.method,
        }
        for reason, holds in reasons.items():
            if holds:
                return f"{label} {reason}"
    return ""


def check_checkpoint(run_dir: Path, batch_number: int, why: str) -> None:
    """The batch has one; else an error that says why it takes one."""
    try:
        checkpoint_of(run_dir, batch_number)
    except ValueError as error:
        rest = f" Its saved rollouts are not enough: {why}." if why else ""
        raise ValueError(f"{error}{rest}") from None


def assign_saved(
    saved: Saved, methods: Mapping[str, Method], batch_number: int
) -> dict[str, Assigned]:
    """The credit of each method from the saved rollouts alone."""
    batch, seed = saved.batch, saved.seed
    return {
        label: Assigned(method, batch, method.assign(batch, seed=seed, batch_number=batch_number))
        for label, method in methods.items()
    }


def credit_columns(batch: TokenBatch, assigned: dict[str, Assigned]) -> dict[str, np.ndarray]:
    """One row per token: where it is, and its credit under each method."""
    mask_NT = batch.mask_NT
    where = {
        "group": batch.group_N[:, None],
        "rollout": torch.arange(batch.num_rollouts, device=mask_NT.device)[:, None],
        "position": torch.arange(mask_NT.shape[1], device=mask_NT.device)[None],
        "token_ids": batch.token_ids_NT,
    }
    columns = where | {f"credit/{label}": one.credit.credit_NT for label, one in assigned.items()}
    return {
        name: value.expand_as(mask_NT)[mask_NT].cpu().numpy() for name, value in columns.items()
    }


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
        out[f"{a} ~ {b}"] = (
            round(float(np.asarray(spearmanr(first, second)[0])), 6) if varies else None
        )
    return out


def updates(scene: Scene, assigned: dict[str, Assigned]) -> pd.DataFrame:
    """Each method's update of the same rows from the same snapshot, one row per token; signs are
    those of the run's own advantages.
    """
    row_R = scene.plan.updates[0]
    columns: dict[str, torch.Tensor] = {
        "group": scene.collected.batch.group_N[row_R][:, None],
        "rollout": row_R[:, None],
        "position": torch.arange(scene.collected.batch.mask_NT.shape[1], device=row_R.device)[None],
        "sign": token_advantage(scene.credit, scene.collected.batch)[row_R].sign(),
    }
    for label, one in assigned.items():
        change = try_update(scene, one.method.rows(one.batch, one.credit, row_R), method=one.method)
        columns |= {f"delta/{label}": change.delta_RT, f"change/{label}": change.sign_RT}
    mask_RT = scene.collected.batch.mask_NT[row_R]
    return pd.DataFrame(
        {name: value.expand_as(mask_RT)[mask_RT].cpu().numpy() for name, value in columns.items()}
    )


def update_numbers(table: pd.DataFrame, label: str) -> dict[str, Any]:
    """Mean change of the log-prob by sign, and flips."""
    sides = by_sign(table["sign"])
    flip = is_flip(table[f"change/{label}"], table["sign"]).astype(float)
    return {
        "delta": means(table[f"delta/{label}"], sides, table["group"]),
        "flip": means(flip, sides, table["group"]),
    }


def figure(numbers: dict[str, Any]) -> Drawing:
    """Left: mean credit by sign of each method.

    Right: flips of its update by sign, where it was tried.
    """
    from plotly.subplots import make_subplots

    tried_ones = numbers.get("update", {})
    titles = (
        "mean credit of a token",
        *(("tokens that its update moves against their advantage",) if tried_ones else ()),
    )
    out = make_subplots(1, len(titles), subplot_titles=titles, horizontal_spacing=0.12)
    labels = list(numbers["credit"])
    for side, colour in (("positive", "#0072B2"), ("negative", "#D55E00")):
        mass = [numbers["credit"][label][f"mean_{side}"] for label in labels]
        out.add_bar(x=labels, y=mass, name=f"{side} credit", marker_color=colour, row=1, col=1)
        if tried_ones:
            flips = [
                tried_ones[label]["flip"].get(side, {"mean": None, "low": None, "high": None})
                for label in labels
            ]
            name, bars = f"{side} rollouts", error_bars(flips)
            y = [one["mean"] for one in flips]
            out.add_bar(
                x=labels,
                y=y,
                error_y=bars,
                name=name,
                marker={"color": colour, "opacity": 0.6},
                row=1,
                col=2,
            )
    out.update_layout(title="One batch under several methods", barmode="group")
    out.update_yaxes(title="advantage x weight", row=1, col=1)
    return out.update_yaxes(title="share", rangemode="tozero", row=1, col=2) if tried_ones else out
