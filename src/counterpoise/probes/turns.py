"""Is the credit of a turn its exact advantage?

The built-in games are small: every history is scored once by the policy that sampled, and values
are added up backwards, so that the advantage of a turn is exact (``turn_values``). The mean
advantage of the actions after a history is 0, so a baseline that depends on the history alone
changes no product of credit and advantage in the mean: ``slope`` = sum credit * advantage / sum
advantage^2 is 1 at every turn for an unbiased rule, whatever its noise.

Axes: N rollouts, T tokens, U turns, M turns end to end, B draws of prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterpoise.maths.turns import turns
from counterpoise.policy.actions import action_probabilities
from counterpoise.probes.methods import assign, methods_of
from counterpoise.probes.output import Columns, Drawing, Frame, NumberDict, Output, number_dict
from counterpoise.probes.ranking import correlation, draw_weights
from counterpoise.probes.scene import Scene
from counterpoise.probes.sheet import Sheet, merged, number_text, ordered, rule_figure
from counterpoise.probes.turn_values import remembered, turn_values
from counterpoise.types import TokenBatch

METHODS = (
    "turn_rloo, {name: turn_rloo, credit: [{name: turn_baseline, over: all}]}, rloo, dr_grpo, grpo,"
    " {name: turn_rloo, credit: [turn_index_baseline]}, mt_grpo, gigpo, igpo, turn_credit,"
    " {name: turn_rloo, credit: [turn_baseline, negative_token_filter]}"
)
MEASURES = {
    "correlation": "correlation",
    "slope": "slope",
    "variance": "variance",
    "correlation_belief": "correlation, belief",
    "slope_belief": "slope, belief",
}
GAMES = "guess, mastermind, lookup"


def probe(scene: Scene, output: Output, *, methods: str = METHODS, histories: int = 20_000) -> None:
    """One row per turn with its exact advantage, and the credit that each method gives it; a belief
    of more than ``histories`` histories is left out.
    """
    output.table("values", lambda: scene_values(scene, histories))
    output.table("credits", lambda: scene_credits(scene, methods))


def scene_values(scene: Scene, most: int) -> Columns:
    """The exact advantages of a saved batch."""
    game, collected = check_game(scene), scene.collected
    temperature = scene.config.rollouts.temperature
    plays = remembered(
        lambda prompt, tree: action_probabilities(
            scene.policy, prompt, tree, temperature=temperature
        )
    )
    group = collected.batch.group_N.tolist()
    return turn_values(game, collected.prompts, group, collected.conversations or [], plays, most)


def check_game(scene: Scene) -> Any:
    """The task of a run, if it is a game with exact values that was played to its end."""
    game, config = scene.task, scene.config
    if not hasattr(game, "possible") or scene.collected.conversations is None:
        raise ValueError(
            f"turns: the task {config.task['name']!r} has no exact values. Take a run of a game"
            f" that has: {GAMES}."
        )
    if config.rollouts.max_turns < game.turns:
        raise ValueError(
            f"turns: rollouts.max_turns {config.rollouts.max_turns} ends episodes of {game.turns}"
            " turns early, and exact values are those of whole episodes. Train with as many."
        )
    return game


def scene_credits(scene: Scene, methods: str) -> Columns:
    """The credit of each turn of a saved batch under several methods."""
    assigned = assign(scene, methods_of(methods))
    credits = {label: one.credit.credit_NT for label, one in assigned.items()}
    return turn_credits(scene.collected.batch, credits)


def turn_credits(batch: TokenBatch, credits: Mapping[str, Tensor]) -> Columns:
    """The mean credit of the tokens of each turn, one row per turn that was played."""
    played = turns(batch)
    row_M, turn_M = played.mask_NU.nonzero(as_tuple=True)
    columns = {"group": batch.group_N[row_M], "rollout": row_M, "turn": turn_M}
    columns |= {
        f"rule/{label}": turn_mean(credit_NT.double(), played.turn_NT, played.mask_NU)[
            row_M, turn_M
        ]
        for label, credit_NT in credits.items()
    }
    return {name: column.cpu().numpy() for name, column in columns.items()}


def turn_mean(value_NT: Tensor, turn_NT: Tensor, mask_NU: Tensor) -> Tensor:
    """The mean over the tokens of each turn, 0 for a turn without tokens, [N, U].

    >>> mask_NU = torch.ones(1, 2, dtype=torch.bool)
    >>> turn_mean(torch.tensor([[1.0, 3.0, 9.0, 5.0]]), torch.tensor([[0, 0, -1, 1]]), mask_NU)
    tensor([[2., 5.]])
    """
    is_token_NT, out_NU = turn_NT >= 0, value_NT.new_zeros(mask_NU.shape)
    place_NT = turn_NT.clamp(min=0)
    total_NU = out_NU.scatter_add(1, place_NT, torch.where(is_token_NT, value_NT, 0))
    count_NU = out_NU.scatter_add(1, place_NT, is_token_NT.to(value_NT.dtype))
    return total_NU / count_NU.clamp(min=1)


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """Numbers of every rule with intervals over prompts, of one batch or of several."""
    keys = ["group", "rollout", "turn"]
    table = tables["values"].merge(tables["credits"], on=keys, validate="one_to_one")
    return turn_numbers(table)


def turn_numbers(table: Frame) -> dict[str, Any]:
    """Per rule: correlation with the exact advantage, slope, variance, and the slope of each turn.

    Turns that are not in the game (malformed ones, and what follows them) are left out; ``weight``
    is a column where turns count differently.
    """
    kept = table[np.isfinite(table["advantage"])]
    labels = [name.removeprefix("rule/") for name in table if str(name).startswith("rule/")]
    weight_M = kept["weight"] if "weight" in kept else np.ones(len(kept))
    weight_BM = draw_weights(weight_M, kept["group"])
    return {
        "num_turns": len(kept),
        "num_left_out": len(table) - len(kept),
        "has_belief": bool(np.isfinite(kept["belief"]).all()),
        "rules": {
            label: rule_numbers(kept, kept[f"rule/{label}"].to_numpy(float), weight_BM)
            for label in labels
        },
    }


def rule_numbers(
    table: Frame, credit_M: np.ndarray, weight_BM: np.ndarray
) -> dict[str, NumberDict | dict[str, NumberDict]]:
    """The measures of one rule, and its slope at each turn."""
    exact_M, belief_M = (table[name].to_numpy(float) for name in ("advantage", "belief"))
    slope_B = slope(credit_M, exact_M, weight_BM)
    measures = {
        "correlation": correlation(credit_M, exact_M, weight_BM),
        "slope": slope_B,
        "variance": variance(credit_M, exact_M, slope_B, weight_BM),
        "correlation_belief": correlation(credit_M, belief_M, weight_BM),
        "slope_belief": slope(credit_M, belief_M, weight_BM),
    }
    out: dict[str, Any] = {name: number_dict(value_B) for name, value_B in measures.items()}
    turn_M = table["turn"].to_numpy()
    out["slope_by_turn"] = {
        f"turn {turn + 1}": number_dict(slope(credit_M, exact_M, weight_BM * (turn_M == turn)))
        for turn in np.unique(turn_M)
    }
    return out


def slope(credit_M: np.ndarray, exact_M: np.ndarray, weight_BM: np.ndarray) -> np.ndarray:
    """sum credit * advantage / sum advantage^2, [B]; NaN where no advantage differs from 0.

    >>> slope(np.array([3.0, -1.0]), np.array([1.0, -1.0]), np.ones((1, 2)))
    array([2.])
    """
    product_B, square_B = weight_BM @ (credit_M * exact_M), weight_BM @ exact_M**2
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(square_B > 0, product_B / square_B, np.nan)


def variance(
    credit_M: np.ndarray, exact_M: np.ndarray, slope_B: np.ndarray, weight_BM: np.ndarray
) -> np.ndarray:
    """Mean square of credit / slope - advantage, [B]: the noise, in units of the reward."""
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled_BM = credit_M / slope_B[:, None]
        return (weight_BM * (scaled_BM - exact_M) ** 2).sum(1) / weight_BM.sum(1)


def sheet(numbers: dict[str, Any]) -> Sheet:
    """What the terminal shows: rules by their correlation."""
    rules = ordered(numbers["rules"], {}, "correlation")
    names = list(dict.fromkeys(turn for one in rules.values() for turn in one["slope_by_turn"]))
    notes = [
        f"{numbers['num_turns']} turns against their exact advantage given the secret"
        f" ({numbers['num_left_out']} that the game does not know left out)",
        "slope: 1 at every turn is unbiased; equal at every turn is another learning rate alone",
        "variance: mean square of credit / slope - advantage",
    ]
    if not numbers["has_belief"]:
        notes.append("no advantage over the belief: too many histories (--set histories=...)")
    lines = [
        [
            label,
            *(number_text(one[name]) for name in MEASURES),
            *(number_text(one["slope_by_turn"].get(name)) for name in names),
        ]
        for label, one in rules.items()
    ]
    return Sheet(
        notes, ["rule", *MEASURES.values(), *(f"slope, {n}" for n in names)], merged(lines)
    )


def figure(numbers: dict[str, Any]) -> Drawing:
    """Correlation, slope and variance of every rule; dashed: a slope of 1."""
    return rule_figure(
        "Credit of turns against their exact advantage",
        ordered(numbers["rules"], {}, "correlation"),
        {name: MEASURES[name] for name in ("correlation", "slope", "variance")},
        {"slope": {"mean": 1.0}},
    )
