"""E4: are the tokens that an update boosts worth more than those it suppresses?

The value of a prefix is the mean reward of fresh completions by the policy before the update. Boosted and suppressed tokens of rollouts of the
same origin (sign of the advantage) are paired by position and entropy. ``value``: of the prefix with the token; ``gain``: that minus the
value of the prefix without it. The claim: boosted tokens have the higher value, in good and in bad rollouts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from scipy.optimize import linear_sum_assignment

from counterpoise.numerics import derived_seed
from counterpoise.probes.intervals import error_bars, means
from counterpoise.probes.output import Frame, Output, joined
from counterpoise.probes.scene import Scene
from counterpoise.probes.updates import Change, tried
from counterpoise.rollouts import branch
from counterpoise.tasks import grade
from counterpoise.trainer.collect import autocast
from counterpoise.types import Rows

ORIGINS = {"positive": 1, "negative": -1}
CHANGES = {"boosted": 1, "suppressed": -1}


class Candidates(NamedTuple):
    """Tokens of one origin and change: row of the step, position, entropy."""

    row: np.ndarray
    position: np.ndarray
    entropy: np.ndarray


def probe(scene: Scene, output: Output, *, pairs: int = 40, samples: int = 8, seed: int = 0) -> tuple[go.Figure, dict[str, Any]]:
    """``pairs`` matched pairs of each origin, ``samples`` completions of each prefix."""
    found = output.table("pairs", lambda: matched_pairs(scene, pairs, seed))
    parts = [
        output.table(f"values_{origin}", lambda origin=origin: valued(scene, found[found["origin"] == origin], samples, seed))
        for origin in ORIGINS
    ]
    return summarise({f"values_{origin}": part for origin, part in zip(ORIGINS, parts)})


def summarise(tables: dict[str, Frame]) -> tuple[go.Figure, dict[str, Any]]:
    """Means and paired differences, of one step or of several."""
    table = joined([tables[f"values_{origin}"] for origin in ORIGINS])
    numbers = {origin: numbers_of(table[table["origin"] == origin]) for origin in ORIGINS} | {"both": numbers_of(table)}
    return figure(numbers), numbers


def matched_pairs(scene: Scene, num: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of a boosted and a suppressed token of the same origin, nearest in (position, entropy); two rows a pair."""
    rows = scene.rows
    change = tried(scene, rows)
    out: list[dict[str, Any]] = []
    for origin, sign in ORIGINS.items():
        sides = {name: candidates(scene, rows, change, sign, value) for name, value in CHANGES.items()}
        for name, side in sides.items():
            if not len(side.row):
                raise ValueError(f"value: no {name} token in {origin} rollouts of step {scene.step}. Choose another step.")
        for number, both in enumerate(match(sides["boosted"], sides["suppressed"], num, derived_seed(seed, scene.step, origin))):
            for name, k in zip(CHANGES, both):
                side = sides[name]
                r, t = int(side.row[k]), int(side.position[k])
                known = {"origin": origin, "pair": number, "change": name, "row": int(rows.row_R[r]), "group": int(rows.group_N[r])}
                out.append({**known, "position": t, "entropy": float(side.entropy[k]), "delta": float(change.delta_RT[r, t])})
    return out


def candidates(scene: Scene, rows: Rows, change: Change, sign: int, value: int) -> Candidates:
    """Tokens of rollouts with that sign that moved that way; stop tokens have no continuation and are left out."""
    stop = torch.tensor(list(scene.policy.stop_ids), device=rows.mask_NT.device)
    is_stop_RT = torch.isin(scene.collected.batch.token_ids_NT[rows.row_R], stop)
    at_RT = (change.sign_RT == value) & rows.mask_NT & ~is_stop_RT & (rows.advantage_N.sign() == sign)[:, None]
    row, position = (index.cpu().numpy() for index in at_RT.nonzero(as_tuple=True))
    return Candidates(row, position, change.scores.entropy_NT[at_RT].double().cpu().numpy())


def match(boosted: Candidates, suppressed: Candidates, num: int, seed: int) -> list[tuple[int, int]]:
    """At most ``num`` pairs of indices: randomly drawn tokens of the rarer kind, each with a partner of its own, total distance least.

    Distance: positions and entropies as ranks in [0, 1] among all candidates of the origin, Euclidean.
    """
    sizes = len(boosted.row), len(suppressed.row)
    columns = [np.concatenate([getattr(boosted, name), getattr(suppressed, name)]) for name in ("position", "entropy")]
    ranks = np.stack([pd.Series(column).rank().to_numpy() / len(column) for column in columns], 1)
    sides = ranks[: sizes[0]], ranks[sizes[0] :]
    rare = int(sizes[1] < sizes[0])
    drawn = np.random.default_rng(seed).permutation(sizes[rare])[:num]
    distance = np.linalg.norm(sides[rare][drawn][:, None] - sides[1 - rare][None], axis=-1)
    first, second = linear_sum_assignment(distance)
    found = [(int(drawn[i]), int(j)) for i, j in zip(first, second)]
    return [(j, i) for i, j in found] if rare else found


def valued(scene: Scene, tokens: Frame, samples: int, seed: int) -> list[dict[str, Any]]:
    """The pairs with ``value`` (the token in the prefix) and ``before`` (without it)."""
    batch, rows = scene.collected.batch, tokens.to_dict("records")
    ids = [batch.token_ids_NT[row["row"]].tolist() for row in rows]
    prefixes = [ids[i][: row["position"] + extra] for extra in (1, 0) for i, row in enumerate(rows)]
    reward = prefix_values(scene, [row["row"] for row in rows] * 2, prefixes, samples, seed)
    return [{**row, "value": reward[i], "before": reward[len(rows) + i]} for i, row in enumerate(rows)]


def prefix_values(scene: Scene, row: list[int], prefixes: list[list[int]], samples: int, seed: int) -> list[float]:
    """Mean reward of fresh completions of each prefix, by the policy as it is."""
    config, policy, collected = scene.config, scene.policy, scene.collected
    settings = config.rollouts
    with autocast(policy.model), torch.random.fork_rng():
        fresh = branch(
            policy.model,
            [collected.prompt_ids[r] for r in row],
            prefixes,
            samples,
            max_new_tokens=settings.max_new_tokens,
            seed=derived_seed(seed, scene.step, "value"),
            stop_ids=policy.stop_ids,
            pad_id=policy.tokenizer.pad_token_id,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_rows=settings.max_rows or settings.prompts * settings.group_size,
        )
    index = fresh.prompt_index_N.tolist()
    # a prefix near the limit gets what the rollout would have had left
    left = [settings.max_new_tokens - len(prefix) for prefix in prefixes]
    new = [ids[keep].tolist()[: left[i]] for i, ids, keep in zip(index, fresh.token_ids_NT.cpu(), fresh.mask_NT.cpu())]
    texts = policy.tokenizer.batch_decode([prefixes[i] + ids for i, ids in zip(index, new)], skip_special_tokens=True)
    group = collected.batch.group_N.tolist()
    asked = [(collected.prompts[group[row[i]]], text) for i, text in zip(index, texts)]
    reward = np.array(grade(scene.task, asked, config.grader_time_limit_s).reward)
    return (np.bincount(index, reward, minlength=len(prefixes)) / samples).tolist()


def numbers_of(table: Frame) -> dict[str, Any]:
    """Means by change and the paired difference, intervals over the boosted token's prompt."""
    table = table.assign(gain=table["value"] - table["before"])
    out: dict[str, Any] = {"num_pairs": len(table) // 2}
    sets = {name: table["change"] == name for name in CHANGES}
    for quantity in ("value", "before", "gain"):
        out[quantity] = means(table[quantity], sets, table["group"])
        wide = table.pivot_table(index=["origin", "pair"], columns="change", values=quantity)
        cluster = table[sets["boosted"]].set_index(["origin", "pair"])["group"].reindex(wide.index)
        gap = wide["boosted"] - wide["suppressed"]
        out[f"{quantity}_difference"] = means(gap, {"all": np.ones(len(gap), bool)}, cluster).get("all")
    for column in ("position", "entropy"):
        out[f"{column}_difference"] = round(
            float(table[sets["boosted"]][column].mean() - table[sets["suppressed"]][column].mean()), 4
        )
    return out


def figure(numbers: dict[str, Any]) -> go.Figure:
    """Value of boosted and suppressed tokens by origin."""
    out = go.Figure()
    for name, colour in (("boosted", "#0072B2"), ("suppressed", "#D55E00")):
        found = [numbers[origin]["value"][name] for origin in ORIGINS]
        out.add_bar(x=list(ORIGINS), y=[f["mean"] for f in found], error_y=error_bars(found), name=name, marker_color=colour)
    out.update_layout(title="Monte Carlo value of tokens, matched on position and entropy", barmode="group")
    return out.update_xaxes(title="sign of the rollout's advantage").update_yaxes(title="mean reward of fresh completions")
