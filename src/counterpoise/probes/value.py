"""E4: are the tokens that an update boosts worth more than those it suppresses?

The value of a prefix is the mean reward of fresh completions by the policy before the update.
Boosted and suppressed tokens of rollouts of the same origin (sign of the advantage) are paired by
position and entropy, within a prompt if asked. ``value``: of the prefix with the token;
``gain``: that minus the value of the prefix without it. The claim: boosted tokens have the higher
value, in good and in bad rollouts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import rankdata

from counterpoise.environments import is_environment
from counterpoise.maths.reduce import derived_seed
from counterpoise.probes.output import Drawing, Frame, Output, error_bars, join_frames, means
from counterpoise.probes.output import Rows as Records
from counterpoise.probes.scene import Scene
from counterpoise.probes.updates import Change, try_update
from counterpoise.sampling import branch, sample_from
from counterpoise.tasks import grade
from counterpoise.types import Rows

ORIGINS = {"positive": 1, "negative": -1}
CHANGES = {"boosted": 1, "suppressed": -1}
# added to the distance of tokens that may not be paired: more than any distance, sqrt(2)
APART = 10.0


class Candidates(NamedTuple):
    """Tokens of one origin and change: row of the batch, position, entropy, the prompt's number."""

    row: np.ndarray
    position: np.ndarray
    entropy: np.ndarray
    group: np.ndarray


def probe(
    scene: Scene,
    output: Output,
    *,
    pairs: int = 40,
    samples: int = 8,
    seed: int = 0,
    same_prompt: bool = False,
) -> None:
    """``pairs`` matched pairs of each origin, ``samples`` completions of each prefix;
    ``same_prompt`` pairs tokens of one prompt alone.
    """
    import pyarrow.parquet as pq

    rows = pq.read_table(
        output.table("pairs", lambda: matched_pairs(scene, pairs, seed, same_prompt))
    ).to_pylist()
    for origin in ORIGINS:
        of_origin = [row for row in rows if row["origin"] == origin]
        output.table(
            f"values_{origin}",
            lambda of_origin=of_origin: value_tokens(scene, of_origin, samples, seed),
        )


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """Means and paired differences, of one batch or of several."""
    table = join_frames([tables[f"values_{origin}"] for origin in ORIGINS])
    return {origin: numbers_of(table[table["origin"] == origin]) for origin in ORIGINS} | {
        "both": numbers_of(table)
    }


def matched_pairs(
    scene: Scene, num: int, seed: int, same_prompt: bool = False
) -> list[dict[str, Any]]:
    """Pairs of a boosted and a suppressed token of the same origin, nearest in (position, entropy);
    two rows a pair.
    """
    rows = scene.rows
    change = try_update(scene, rows)
    out: list[dict[str, Any]] = []
    for origin, sign in ORIGINS.items():
        sides = {
            name: candidates(scene, rows, change, sign, value) for name, value in CHANGES.items()
        }
        for name, side in sides.items():
            if not len(side.row):
                raise ValueError(
                    f"value: no {name} token in {origin} rollouts of batch {scene.batch_number}."
                    " Choose another batch."
                )
        drawing = derived_seed(seed, scene.batch_number, origin)
        matches = match(
            sides["boosted"], sides["suppressed"], num, drawing, same_prompt=same_prompt
        )
        if not matches:
            raise ValueError(
                f"value: no prompt of batch {scene.batch_number} has both kinds in {origin}"
                " rollouts. Leave same_prompt out."
            )
        for number, both in enumerate(matches):
            for name, k in zip(CHANGES, both):
                side = sides[name]
                r, t = int(side.row[k]), int(side.position[k])
                known = {
                    "origin": origin,
                    "pair": number,
                    "change": name,
                    "row": int(rows.row_R[r]),
                    "group": int(rows.group_N[r]),
                }
                out.append(
                    {
                        **known,
                        "position": t,
                        "entropy": float(side.entropy[k]),
                        "delta": float(change.delta_RT[r, t]),
                    }
                )
    return out


def candidates(scene: Scene, rows: Rows, change: Change, sign: int, value: int) -> Candidates:
    """Tokens of rollouts with that sign that moved that way; stop tokens have no continuation and
    are left out.
    """
    stop = torch.tensor(list(scene.policy.stop_ids), device=rows.mask_NT.device)
    is_stop_RT = torch.isin(scene.collected.batch.token_ids_NT[rows.row_R], stop)
    at_RT = (change.sign_RT == value) & rows.mask_NT & ~is_stop_RT & (rows.sign_NT == sign)
    row, position = (index.cpu().numpy() for index in at_RT.nonzero(as_tuple=True))
    entropy = change.scores.entropy_NT[at_RT].double().cpu().numpy()
    return Candidates(row, position, entropy, rows.group_N.cpu().numpy()[row])


def match(
    boosted: Candidates, suppressed: Candidates, num: int, seed: int, *, same_prompt: bool = False
) -> list[tuple[int, int]]:
    """At most ``num`` pairs of indices: randomly drawn tokens of the rarer kind, each with a
    partner of its own, total distance least.

    Distance: positions and entropies as ranks in [0, 1] among all candidates of the origin,
        Euclidean. With ``same_prompt`` a token whose
    prompt has no partner for it is left out.
    """
    sizes = len(boosted.row), len(suppressed.row)
    columns = [
        np.concatenate([getattr(boosted, name), getattr(suppressed, name)])
        for name in ("position", "entropy")
    ]
    ranks = np.stack([rankdata(column) / len(column) for column in columns], 1)
    sides, groups = (ranks[: sizes[0]], ranks[sizes[0] :]), (boosted.group, suppressed.group)
    rare = int(sizes[1] < sizes[0])
    drawn = np.random.default_rng(seed).permutation(sizes[rare])
    drawn = (
        drawn[np.isin(groups[rare][drawn], groups[1 - rare])][:num] if same_prompt else drawn[:num]
    )
    distance = np.linalg.norm(sides[rare][drawn][:, None] - sides[1 - rare][None], axis=-1)
    is_apart = (
        groups[rare][drawn][:, None] != groups[1 - rare][None]
        if same_prompt
        else np.zeros(distance.shape, bool)
    )
    first, second = linear_sum_assignment(distance + APART * is_apart)
    pairs = [(int(drawn[i]), int(j)) for i, j in zip(first, second) if not is_apart[i, j]]
    return [(j, i) for i, j in pairs] if rare else pairs


def value_tokens(scene: Scene, rows: Records, samples: int, seed: int) -> Records:
    """The pairs with ``value`` (the token in the prefix) and ``before`` (without it)."""
    batch = scene.collected.batch
    ids = [batch.token_ids_NT[row["row"]].tolist() for row in rows]
    prefixes = [ids[i][: row["position"] + extra] for extra in (1, 0) for i, row in enumerate(rows)]
    reward = prefix_values(scene, [row["row"] for row in rows] * 2, prefixes, samples, seed)
    return [
        {**row, "value": reward[i], "before": reward[len(rows) + i]} for i, row in enumerate(rows)
    ]


def prefix_values(
    scene: Scene, row: list[int], prefixes: list[list[int]], samples: int, seed: int
) -> list[float]:
    """Mean reward of fresh completions of each prefix, by the policy as it is."""
    return completion_rewards(scene, row, prefixes, samples, seed).mean(1).tolist()


def completion_rewards(
    scene: Scene, row: list[int], prefixes: list[list[int]], samples: int, seed: int
) -> np.ndarray:
    """Rewards of fresh completions by the policy as it is, [prefixes, samples]; prefix i answers
    the prompt of rollout ``row[i]``.
    """
    config, policy, collected = scene.config, scene.policy, scene.collected
    settings = config.rollouts
    check_one_turn(scene)
    with torch.random.fork_rng():
        fresh = sample_from(
            policy,
            [collected.prompt_ids[r] for r in row],
            prefixes,
            samples,
            by=branch,
            max_new_tokens=settings.max_new_tokens,
            seed=derived_seed(seed, scene.batch_number, "value"),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_rows=settings.max_rows or settings.prompts * settings.group_size,
        )
    index = fresh.prompt_index_N.tolist()
    # a prefix near the limit gets what the rollout would have had left
    left = [settings.max_new_tokens - len(prefix) for prefix in prefixes]
    new = [
        ids[keep].tolist()[: left[i]]
        for i, ids, keep in zip(index, fresh.token_ids_NT.cpu(), fresh.mask_NT.cpu())
    ]
    answers = [prefixes[i] + ids for i, ids in zip(index, new)]
    reward = response_rewards(scene, [row[i] for i in index], answers)
    return reward[np.argsort(index, kind="stable")].reshape(len(prefixes), samples)


def check_one_turn(scene: Scene) -> None:
    """Fresh completions are graded once: a run with an environment is an error."""
    if is_environment(scene.task):
        raise ValueError(
            f"probe: task {scene.config.task['name']!r} is an environment, and the value of a"
            " prefix is measured on tasks with one turn alone. The probe turns has the exact values"
            " of the built-in environments."
        )


def response_rewards(scene: Scene, row: list[int], responses: list[list[int]]) -> np.ndarray:
    """Rewards of whole responses; response i answers the prompt of rollout ``row[i]``."""
    check_one_turn(scene)
    texts = scene.policy.tokenizer.batch_decode(responses, skip_special_tokens=True)
    prompts, group = scene.collected.prompts, scene.collected.batch.group_N.tolist()
    asked = [(prompts[group[r]], text) for r, text in zip(row, texts)]
    return np.array(grade(scene.task, asked, scene.config.grader_time_limit_s).reward, float)


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
        out[f"{quantity}_difference"] = means(gap, {"all": np.ones(len(gap), bool)}, cluster).get(
            "all"
        )
    for column in ("position", "entropy"):
        out[f"{column}_difference"] = round(
            float(table[sets["boosted"]][column].mean() - table[sets["suppressed"]][column].mean()),
            4,
        )
    return out


def figure(numbers: dict[str, Any]) -> Drawing:
    """Left: value of boosted and suppressed tokens by origin. Right: the paired differences."""
    from plotly.subplots import make_subplots

    titles = (
        "value of the prefix that ends with the token",
        "boosted minus suppressed, pair by pair",
    )
    out = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.12)
    for name, colour in (("boosted", "#0072B2"), ("suppressed", "#D55E00")):
        by_origin = [numbers[origin]["value"][name] for origin in ORIGINS]
        mean, x = [one["mean"] for one in by_origin], [f"{origin} rollouts" for origin in ORIGINS]
        out.add_bar(
            x=x, y=mean, error_y=error_bars(by_origin), name=name, marker_color=colour, row=1, col=1
        )
    for name, what, colour in (
        ("value", "value", "#555555"),
        ("before", "value before the token", "#AAAAAA"),
        ("gain", "gain by the token", "#009E73"),
    ):
        by_origin = {origin: numbers[origin][f"{name}_difference"] for origin in (*ORIGINS, "both")}
        mean, bars = (
            [one["mean"] for one in by_origin.values()],
            error_bars(list(by_origin.values())),
        )
        out.add_scatter(
            x=list(by_origin),
            y=mean,
            error_y=bars,
            mode="markers",
            name=what,
            marker={"color": colour, "size": 10},
            row=1,
            col=2,
        )
    out.add_hline(y=0, line={"color": "#999"}, row=1, col=2)  # pyright: ignore[reportArgumentType]
    out.update_layout(
        title="Monte Carlo value of tokens, matched on position and entropy",
        barmode="group",
        scattermode="group",
    )
    out.update_yaxes(title="mean reward of fresh completions", rangemode="tozero", row=1, col=1)
    return out.update_yaxes(title="difference of mean reward", row=1, col=2)
