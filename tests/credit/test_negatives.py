"""Rules on negative credit: against loops, at special cases, under an entropy controller."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import counterpoise as cp
from counterpoise import credit as rules
from helpers.credit_cases import (
    as_lists,
    assert_equal,
    assert_rows,
    batch_of,
    credited_batches,
    laws,
    spread,
)
from helpers.full_batch import make_batch


def soft(c, logp, kappa):
    return c * (1 - math.exp(logp)) ** kappa if c < 0 else c


@laws
@given(data=credited_batches(), kappa=st.sampled_from([0.5, 1.0, 2.0]))
def test_soften_negatives_by_loops(data, kappa):
    batch, credit_NT = data
    credit, logp = as_lists(credit_NT, batch), as_lists(batch.sampler_logp_NT, batch)
    expected = [[soft(c, lp, kappa) for c, lp in zip(*rows)] for rows in zip(credit, logp)]
    assert_rows(rules.soften_negatives(credit_NT, batch, kappa=kappa), expected)


@laws
@given(data=credited_batches(), cap=st.sampled_from([0.5, 1.0, 3.0]))
def test_surprise_negatives_by_loops(data, cap):
    batch, credit_NT = data
    columns = (credit_NT, batch.sampler_logp_NT, batch.entropy_NT)
    expected = [
        [c * min(cap, max(0, -lp - h)) if c < 0 else c for c, lp, h in zip(*rows)]
        for rows in zip(*(as_lists(column, batch) for column in columns))
    ]
    assert_rows(rules.surprise_negatives(credit_NT, batch, cap=cap), expected)


@laws
@given(
    data=credited_batches(),
    mass=st.sampled_from([0.0, 0.15, 1.0, 2.0]),
    location=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_every_rollout_keeps_its_share_of_negative_mass_wherever_it_lies(data, mass, location):
    batch, credit_NT = data
    new_NT = rules.negatives(credit_NT, batch, mass=mass, location=location)
    assert_equal(new_NT.clamp(max=0).sum(1), mass * credit_NT.clamp(max=0).sum(1))
    assert torch.equal(new_NT[credit_NT >= 0], credit_NT[credit_NT >= 0])


def test_location_one_is_soften_negatives_up_to_the_mass_of_each_rollout():
    batch = make_batch()
    credit_NT = spread([-1.0] * batch.num_rollouts, batch)
    here_NT, soft_NT = (
        rules.negatives(credit_NT, batch, location=1.0),
        rules.soften_negatives(credit_NT, batch),
    )
    assert_equal(here_NT / here_NT.sum(1, keepdim=True), soft_NT / soft_NT.sum(1, keepdim=True))


def test_a_rollout_of_certain_tokens_stays_as_it_is():
    batch = batch_of([[1, 2]], sampler_logp=[[0.0, 0.0]])
    assert_rows(
        rules.negatives(spread([-1.0], batch), batch, mass=0.5, location=1.0), [[-0.5, -0.5]]
    )


def test_a_log_prob_of_rounding_above_zero_is_certainty():
    batch = batch_of([[1, 2]], sampler_logp=[[1e-7, -1.0]])
    for kappa in (0.5, 1.0):
        assert rules.soften_negatives(spread([-1.0], batch), batch, kappa=kappa)[0, 0] == 0


@pytest.mark.parametrize(
    "rule", [rules.soften_negatives(), rules.negative_token_filter(), rules.top_entropy()]
)
def test_even_mass_has_the_mass_of_its_rule_and_none_of_its_choice(rule):
    batch = make_batch()
    credit_NT = cp.method("dapo").assign(batch).credit_NT
    even_NT, ruled_NT = rules.even_mass(rule=rule)(credit_NT, batch), rule(credit_NT, batch)
    for side in (1, -1):
        is_side_NT = side * credit_NT > 0
        assert_equal((side * even_NT).clamp(min=0).sum(), (side * ruled_NT).clamp(min=0).sum())
        factor_M = (even_NT / credit_NT)[is_side_NT]
        assert_equal(factor_M, factor_M[:1].expand_as(factor_M))


def test_the_report_says_how_much_is_left_and_where():
    batch = batch_of([[1, 2], [3, 4]], sampler_logp=[[-1.0, -2.0], [-1.0, -3.0]])
    batch = batch.replace(reward_N=torch.tensor([1.0, 0.0]).double())
    out = cp.method("dapo", credit=[rules.negative_mass(factor=0.25)]).assign(batch)
    assert out.metrics["credit/negative_mass/negative_mass"] == pytest.approx(0.25)
    assert out.metrics["credit/negative_mass/negative_logp"] == pytest.approx(-2.0)


def test_a_constant_factor_works_where_only_rewards_are_known():
    assert cp.method("dapo", credit=["negative_mass"]).reads_rewards_only
    assert not cp.method("dapo", credit=["soften_negatives"]).reads_rewards_only


@pytest.mark.parametrize("name", ["mass", "location"])
def test_an_entropy_controller_moves_the_rule_behind_another(name):
    """The path names a parameter; the first rule that has it is moved, the one before it stays."""
    batch, chain = make_batch(), [rules.top_entropy(fraction=0.5), rules.negatives()]
    control = {"path": f"credit.{name}", "start": 0.5, "lo": 0.0, "hi": 1.0, "rate": 0.1}
    method = cp.method("dapo", credit=chain, controller={"name": "entropy_target", **control})
    first = method.assign(batch)
    second = method.assign(batch.replace(entropy_NT=batch.entropy_NT - 2.0), first.state)
    assert second.metrics["controller/entropy_target/value"] == pytest.approx(0.7)
    fixed = [rules.top_entropy(fraction=0.5), rules.negatives(**{name: 0.7})]
    expected = cp.method("dapo", credit=fixed).assign(
        batch.replace(entropy_NT=batch.entropy_NT - 2)
    )
    torch.testing.assert_close(second.credit_NT, expected.credit_NT)


def test_a_parameter_that_no_rule_has_is_named():
    with pytest.raises(ValueError, match="top_entropy has no parameter 'mass'"):
        cp.method("top_entropy", credit={"mass": 0.5})
