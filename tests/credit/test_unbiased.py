"""The mean gradient over all groups of a small game, counted exactly: rules that declare
``is_unbiased`` give the gradient of the expected reward, the others are off by what their page
says.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import counterpoise as cp
from counterpoise import credit as rules
from counterpoise.advantages import ADVANTAGES
from counterpoise.credit import RULES
from helpers import conformance_table as table
from helpers.tabular_turns import THREE, TWO, UNEVEN, Game, every_group, exact_gradient
from helpers.tabular_turns import mean_gradient as mean_of


def method(*chain: cp.Stage, advantage: str = "leave_one_out") -> cp.Method:
    return cp.method("grpo", advantage=advantage, credit=list(chain))


UNBIASED = {
    name: method(advantage=name) for name, stage in ADVANTAGES.items() if stage.has("is_unbiased")
}
UNBIASED |= {
    f"{name}({params})": method(rule(**params))
    for name, rule in RULES.items()
    for params in ({}, table.RULES[name].params, {"over": "all"})
    if set(params) <= set(rule.parameters) and "rule" not in rule.parameters
    if rule(**params).has("is_unbiased")
}


def test_who_declares_it():
    expected = {"leave_one_out", "turn_baseline({})", "turn_baseline({'over': 'all'})"}
    assert set(UNBIASED) == expected
    for rule in (rules.turn_baseline(discount=0.9), rules.turn_baseline(exclude_own=False)):
        assert not rule.has("is_unbiased")


@pytest.mark.parametrize("name", UNBIASED)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("game", [THREE, UNEVEN, TWO], ids=["three", "uneven", "two"])
def test_unbiased(name, game, size):
    torch.testing.assert_close(
        mean_of(game, UNBIASED[name], size), exact_gradient(game), rtol=0, atol=1e-12
    )


def test_the_closed_form_is_the_derivative():
    """Against autograd through the probabilities of all paths."""
    for game in (THREE, UNEVEN, TWO):
        logit_U = torch.tensor(game.go_U, dtype=torch.float64).logit().requires_grad_()
        expected = torch.zeros((), dtype=torch.float64)
        for path in game.paths:
            logp_U = [
                torch.nn.functional.logsigmoid(sign * logit)
                for sign, logit in zip((1 if a == 2 else -1 for a in path), logit_U)
            ]
            expected = expected + torch.stack(logp_U).sum().exp() * sum(game.rewards(path))
        (grad_U,) = torch.autograd.grad(expected, logit_U)
        torch.testing.assert_close(exact_gradient(game), grad_U, rtol=0, atol=1e-12)


def test_all_groups_are_counted():
    batch, chance_P, score_NT = every_group(THREE, 3)
    assert len(chance_P) == 4**3 and float(chance_P.sum()) == pytest.approx(1, abs=1e-15)
    chance_N = chance_P.repeat_interleave(3)
    assert (chance_N[:, None] * score_NT).sum(0).abs().max() < 1e-15, "scores have mean 0"
    assert not batch.mask_NT[:, 2::3].any(), "replies are holes"


# the table of docs/methods/turns.md: three turns, G = 3; the gradient is .9375 .1875 .1875
BIASED = {
    "turn_baseline(exclude_own=False)": (
        method(rules.turn_baseline(exclude_own=False)),
        (0.6250, 0.0781, 0.0430),
    ),
    "turn_baseline(discount=0)": (
        method(rules.turn_baseline(discount=0.0)),
        (0.2500, -0.1250, 0.1875),
    ),
    "turn_index_baseline(exclude_own=True)": (
        method(rules.turn_index_baseline(exclude_own=True)),
        (0.5195, 0.0508, 0.1875),
    ),
    "turn_index_baseline": (method(rules.turn_index_baseline), (0.1667, -0.0521, 0.0430)),
    "mt_grpo": (cp.method("mt_grpo"), (0.5300, 0.1072, 0.0526)),
    "gigpo": (cp.method("gigpo"), (0.5634, 0.0368, 0.0535)),
    "gigpo, means": (
        cp.method("gigpo", advantage="group_mean", credit={"mode": "mean", "discount": 1.0}),
        (1.2500, 0.2031, 0.1680),
    ),
    "group_mean": (method(advantage="group_mean"), (0.6250, 0.1250, 0.1250)),
    "group_zscore": (method(advantage="group_zscore"), (0.2814, 0.0325, 0.0325)),
}


@pytest.mark.parametrize("name", BIASED)
def test_biased(name):
    chosen, expected = BIASED[name]
    assert not any(rule.has("is_unbiased") for rule in chosen.rules)
    assert mean_of(THREE, chosen).tolist() == pytest.approx(expected, abs=5e-5)


def test_the_page_has_these_numbers():
    page = (Path(__file__).parents[2] / "docs" / "methods" / "turns.md").read_text()
    rows = re.findall(r"^\|.*?\| (-?\d\.\d{4}) \| (-?\d\.\d{4}) \| (-?\d\.\d{4}) \|", page, re.M)
    exact = tuple(exact_gradient(THREE).tolist())
    expected = [exact, exact, exact, *(numbers for _, numbers in BIASED.values())]
    assert sorted(tuple(map(float, row)) for row in rows) == sorted(expected)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_more_turn_is_charged_its_mean(size):
    """Going on brings 1 more: 1/4. Means by turn index with the rollout itself give 0; over others
    the charge is the chance that another one got there.
    """
    assert float(mean_of(TWO, method(rules.turn_baseline), size)[0]) == pytest.approx(1 / 4)
    assert float(mean_of(TWO, method(rules.turn_index_baseline), size)[0]) == 0
    others = method(rules.turn_index_baseline(exclude_own=True))
    assert float(mean_of(TWO, others, size)[0]) == pytest.approx(1 / 4 * 0.5 ** (size - 1))
    shrunk = method(rules.turn_baseline(exclude_own=False))
    assert float(mean_of(TWO, shrunk, size)[0]) == pytest.approx((size - 1) / size / 4)


def test_the_bias_of_turn_index_means_in_closed_form():
    """-sum_{l>u} m_l dP(turn l is played) / d logit_u, m_l the mean reward of turn l times the
    chance that another rollout of the group plays it.
    """
    game: Game = UNEVEN
    go_U = torch.tensor(game.go_U, dtype=torch.float64)
    stop_U, more_U = (torch.tensor(column, dtype=torch.float64) for column in game[1:])
    reach_U = torch.cat([torch.ones(1), go_U[:-1]]).cumprod(0)
    mean_U = (1 - go_U) * stop_U + go_U * more_U
    charge_U = mean_U * (1 - (1 - reach_U) ** 2)  # G = 3: two others
    slope_UL = torch.triu(reach_U[None] * (1 - go_U[:, None]), diagonal=1)
    biased = mean_of(game, method(rules.turn_index_baseline(exclude_own=True)))
    expected = exact_gradient(game) - (slope_UL * charge_U).sum(1)
    torch.testing.assert_close(biased, expected, rtol=0, atol=1e-12)
