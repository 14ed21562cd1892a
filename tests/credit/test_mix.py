"""mix: several rules side by side, in code, in recipes and in chains."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given

import counterpoise as cp
from counterpoise import credit as rules
from counterpoise.stage import Stage
from helpers import reference_credit as reference
from helpers.credit_cases import as_lists, assert_rows, batch_of, credited_batches, laws, spread
from helpers.full_batch import make_batch


@Stage
def two(credit_NT, batch):
    """Credit 2 on every token."""
    return 2.0 * batch.mask_NT


@Stage
def minus_one(credit_NT, batch):
    """Credit -1 on every token."""
    return -1.0 * batch.mask_NT


def test_a_quarter_of_2_and_three_quarters_of_minus_1():
    batch = batch_of([[1, 2], [3]])
    mixed_NT = rules.mix(rules=(two, minus_one), weights=(0.25, 0.75))(spread([0, 0], batch), batch)
    assert_rows(mixed_NT, [[-0.25, -0.25], [-0.25]])


@laws
@given(data=credited_batches())
def test_each_rule_gets_the_same_credit_and_results_are_added(data):
    batch, credit_NT = data
    rule = rules.mix(
        rules=(rules.shared_prefix, rules.top_entropy(fraction=0.5)), weights=(0.3, -1.2)
    )
    credit, r = as_lists(credit_NT, batch), reference.Rollouts(batch)
    parts = reference.shared_prefix(credit, r), reference.top_entropy(credit, r, 0.5)
    expected = [[0.3 * a - 1.2 * b for a, b in zip(*rows)] for rows in zip(*parts)]
    assert_rows(rule(credit_NT, batch), expected)


def test_a_recipe_mixes_by_name_and_survives_json():
    spec = {
        "name": "mix",
        "rules": ["uniform", {"name": "keep_mass", "rule": {"name": "top_entropy"}}],
        "weights": [0.9, 0.1],
    }
    method, batch = cp.method("grpo", credit=[spec]), make_batch()
    bound = rules.mix(
        rules=(rules.uniform, rules.keep_mass(rule=rules.top_entropy)), weights=(0.9, 0.1)
    )
    expected_NT = cp.method("grpo", credit=[bound]).assign(batch).credit_NT
    again = cp.method(**json.loads(json.dumps(method.describe())))
    assert torch.equal(method.assign(batch).credit_NT, expected_NT)
    assert torch.equal(again.assign(batch).credit_NT, expected_NT)
    assert method.needs == {"entropy_NT"}
    assert method.label == (
        "grpo, credit mix(rules=[uniform, keep_mass(rule=top_entropy)], weights=[0.9, 0.1])"
    )


def test_the_mass_of_each_part_is_logged_draws_included():
    """A part that draws at random: what is logged is the draw that was used."""
    draws = rules.covariance(fraction=0.5, low=-100.0, high=100.0)
    batch = make_batch()
    alone = cp.method("grpo", credit=[rules.mix(rules=(draws,), weights=(1.0,))]).assign(
        batch, seed=3
    )
    mass = float(alone.credit_NT.abs().sum())
    assert alone.metrics["credit/mix/0_covariance/mass"] == pytest.approx(mass, rel=1e-12)
    mixed = cp.method("grpo", credit=[rules.mix(rules=(draws, two), weights=(0.5, 0.1))]).assign(
        batch, seed=3
    )
    assert mixed.metrics["credit/mix/0_covariance/mass"] == pytest.approx(mass, rel=1e-12)
    assert mixed.metrics["credit/mix/1_two/mass"] == 2 * float(batch.mask_NT.sum())


def test_a_part_reports_its_own_numbers():
    chosen = rules.mix(rules=(rules.uniform, rules.negative_token_filter), weights=(0.5, 0.5))
    mixed = cp.method("grpo", credit=[chosen]).assign(make_batch()).metrics
    alone = cp.method("grpo", credit=["negative_token_filter"]).assign(make_batch()).metrics
    key = "negative_kept_frac"
    assert (
        mixed[f"credit/mix/1_negative_token_filter/{key}"]
        == alone[f"credit/negative_token_filter/{key}"]
    )


def test_what_the_parts_declare_holds_of_the_mix():
    def mixed(*parts):
        return rules.mix(rules=parts, weights=(1.0,) * len(parts))

    assert mixed(rules.uniform, rules.focal()).has("reads_rewards_only")
    assert not mixed(rules.uniform, rules.ktae()).has("reads_rewards_only")
    assert mixed(rules.uniform, rules.turn_baseline()).has("assigns_turns")
    assert not mixed(rules.top_entropy(), rules.turn_baseline()).has("assigns_turns")
    assert cp.method("grpo", credit=[mixed(mixed(rules.ktae()))]).reads_success
    ibpo = mixed(rules.uniform, rules.keep_mass(rule=rules.edits(corrections=2)))
    assert [stage.name for stage in cp.method("grpo", credit=[ibpo]).collectors] == ["edits"]
