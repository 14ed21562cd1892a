"""Laws of every credit rule: neutral parameters, padding, order, ranks, inputs; combinators; bad
parameters.
"""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from counterpoise import credit as rules
from counterpoise.checks import LOGPS
from counterpoise.maths.reduce import LOCAL
from counterpoise.stage import build, call
from helpers.credit_cases import (
    assert_equal,
    assert_rows,
    batch_of,
    credited_batches,
    laws,
    name_of,
    on_two_ranks,
    run,
    spread,
)

NEUTRAL = [
    rules.uniform,
    rules.negative_token_filter(fraction=1),
    rules.top_entropy(fraction=1.0),
    rules.conflict(positive=1.0, negative=1.0),
    rules.probability_scaled(alpha=0.0),
    rules.ktae(top=0.0),
    rules.only_improbable(max_prob=1.0),
    rules.spurious(max_prob=0.0),
    rules.spurious(entropy_quantile=0.0),
    rules.covariance(low=1e9, high=1e10),
    rules.focal(gamma=0.0),
    rules.kl_penalty(coef=0.0),
    rules.soften_negatives(kappa=0.0),
    rules.negative_mass(factor=1.0),
    rules.negatives(mass=1.0, location=0.0),
    rules.surprisal_boost(boost=1.0, damp=1.0),
    rules.answer_influence(quantile=0.0, beta=0.0),
    rules.even_mass(rule=rules.uniform),
    rules.keep_mass(rule=rules.uniform),
    rules.keep_mass(rule=rules.uniform, per_side=True),
    rules.only_positive(rule=rules.uniform),
    rules.only_negative(rule=rules.uniform),
    rules.mix(rules=(rules.uniform,), weights=(1.0,)),
]


@laws
@given(data=credited_batches())
def test_neutral_parameters_change_no_bit(data):
    batch, credit_NT = data
    for rule in NEUTRAL:
        assert_equal(rule(credit_NT, batch), credit_NT, name_of(rule), tolerance=0)


def test_a_constant_group_learns_nothing_from_edits_and_ktae():
    batch = batch_of([[1, 2], [1, 3]], reward=[1.0, 1.0])
    credit_NT = spread([0.5, -0.5], batch)
    assert torch.equal(rules.edits(credit_NT, batch), torch.zeros(2, 2, dtype=torch.float64))
    assert torch.equal(rules.ktae(credit_NT, batch), credit_NT)


EVERY_RULE = [
    rules.uniform,
    rules.negative_token_filter(fraction=0.4),
    rules.edits(),
    rules.edits(first_edits=1, serving="mean"),
    rules.top_entropy(fraction=0.4),
    rules.conflict(),
    rules.conflict(multiply=True, divide=True, rule=rules.entropy_filter(limit=1.0123457)),
    rules.entropy_filter(limit=1.0123457),
    rules.probability_scaled(),
    rules.ktae(),
    rules.shared_prefix,
    rules.spurious(max_prob=0.4),
    rules.covariance(fraction=0.2, low=0.1234567),
    rules.focal(gamma=1.0),
    rules.kl_penalty(estimator="k3", coef=0.1),
    rules.soften_negatives(kappa=0.5),
    rules.surprise_negatives(cap=0.7),
    rules.negative_mass(factor=0.3),
    rules.negatives(mass=0.3, location=0.7),
    rules.surprisal_boost(share=0.4, damp=0.5),
    rules.rare_uncertain(fraction=0.4),
    rules.only_improbable(max_prob=0.4),
    rules.only_improbable(max_prob=0.4, whiten=True),
    rules.whiten(),
    rules.tree_gain(),
    rules.teacher(),
    rules.proximal_teacher(alpha=0.3),
    rules.answer_influence(quantile=0.6, beta=2.0),
    rules.even_mass(rule=rules.soften_negatives()),
    rules.keep_mass(rule=rules.top_entropy(fraction=0.4)),
    rules.keep_mass(rule=rules.conflict(), per_side=True),
    rules.only_positive(rule=rules.ktae()),
    rules.only_negative(rule=rules.negative_token_filter(fraction=0.4)),
    rules.mix(rules=(rules.ktae(), rules.top_entropy(fraction=0.4)), weights=(0.3, -2.0)),
]


def widened(batch, extra):
    """Two more columns of padding with rubbish in them."""

    def wide(column, rubbish):
        return torch.cat(
            [column, torch.full((column.shape[0], extra), rubbish, dtype=column.dtype)], dim=1
        )

    names = ("entropy_NT", "importance_NT", *LOGPS)
    floats = {name: wide(getattr(batch, name), math.nan) for name in names}
    return batch.replace(
        token_ids_NT=wide(batch.token_ids_NT, 77), mask_NT=wide(batch.mask_NT, False), **floats
    )


@laws
@given(data=credited_batches())
def test_padding_changes_nothing_and_stays_zero(data):
    batch, credit_NT = data
    wide_credit_NT, wide_batch = (
        torch.cat([credit_NT, torch.zeros(len(credit_NT), 2, dtype=torch.float64)], 1),
        widened(batch, 2),
    )
    for rule in EVERY_RULE:
        found_NT, wide_NT = run(rule, credit_NT, batch), run(rule, wide_credit_NT, wide_batch)
        assert_equal(wide_NT[:, :-2], found_NT, name_of(rule))
        assert_equal(
            wide_NT[~wide_batch.mask_NT],
            torch.zeros_like(wide_NT[~wide_batch.mask_NT]),
            name_of(rule),
            tolerance=0,
        )


@laws
@given(data=credited_batches(), shuffle=st.randoms())
def test_permuting_rollouts_permutes_the_credit(data, shuffle):
    batch, credit_NT = data
    order = list(range(batch.num_rollouts))
    shuffle.shuffle(order)
    row_R = torch.tensor(order)
    for rule in EVERY_RULE:
        assert_equal(
            run(rule, credit_NT[row_R], batch.select(row_R)),
            run(rule, credit_NT, batch)[row_R],
            name_of(rule),
        )


@laws
@given(data=credited_batches())
def test_inputs_stay_and_the_dtype_is_kept(data):
    batch, credit_NT = data
    before, columns = (
        credit_NT.clone(),
        {
            name: getattr(batch, name).clone()
            for name in ("token_ids_NT", "sampler_logp_NT", "entropy_NT")
        },
    )
    for rule in EVERY_RULE:
        assert run(rule, credit_NT, batch).dtype == torch.float64, name_of(rule)
        assert run(rule, credit_NT.float(), batch).dtype == torch.float32, name_of(rule)
        assert torch.equal(credit_NT, before), name_of(rule)
        assert all(torch.equal(getattr(batch, name), column) for name, column in columns.items()), (
            name_of(rule)
        )


@settings(laws, max_examples=20)
@given(data=credited_batches(max_groups=4))
def test_two_ranks_give_the_credit_of_one(data):
    batch, credit_NT = data
    cut_N = batch.group_N == batch.group_N.min()
    assume(not bool(cut_N.all()))
    for rule in EVERY_RULE:
        whole_NT = run(rule, credit_NT, batch)
        first_NT, second_NT = on_two_ranks(rule, credit_NT, batch, cut_N)
        assert_equal(first_NT, whole_NT[~cut_N], name_of(rule))
        assert_equal(second_NT, whole_NT[cut_N], name_of(rule))


KEEPS_SIGN = (
    "uniform",
    "negative_token_filter",
    "top_entropy",
    "conflict",
    "probability_scaled",
    "shared_prefix",
    "spurious",
    "covariance",
    "focal",
    "soften_negatives",
    "surprise_negatives",
    "negative_mass",
    "negatives",
    "surprisal_boost",
    "rare_uncertain",
    "only_improbable",
    "answer_influence",
)


@laws
@given(data=credited_batches())
def test_declared_signs_are_kept(data):
    batch, credit_NT = data
    for name in KEEPS_SIGN:
        found_NT = run(rules.RULES[name], credit_NT, batch)
        assert bool((found_NT * credit_NT >= 0).all()), name
        assert not found_NT[credit_NT == 0].any(), name


@laws
@given(data=credited_batches(), fraction=st.sampled_from([0.1, 0.5, 0.9]))
def test_keep_mass_keeps_the_mass(data, fraction):
    batch, credit_NT = data
    inner = rules.negative_token_filter(fraction=fraction)
    found_NT = rules.keep_mass(rule=inner)(credit_NT, batch)
    torch.testing.assert_close(found_NT.abs().sum(), credit_NT.abs().sum(), rtol=1e-12, atol=1e-12)
    sides_NT = rules.keep_mass(rule=inner, per_side=True)(credit_NT, batch)
    for side in (1, -1):
        torch.testing.assert_close(
            (side * sides_NT).clamp(min=0).sum(),
            (side * credit_NT).clamp(min=0).sum(),
            rtol=1e-12,
            atol=1e-12,
        )


def test_keep_mass_of_nothing_is_nothing():
    batch = batch_of([[1, 2]], reward=[1.0])
    assert rules.keep_mass(rule=rules.edits())(spread([1.0], batch), batch).tolist() == [[0.0, 0.0]]


def test_only_one_side_by_hand():
    batch = batch_of([[1, 2], [3, 4]], entropy=[[0.0, 2.0], [0.0, 2.0]])
    credit_NT = spread([1.0, -1.0], batch)
    assert_rows(
        rules.only_positive(rule=rules.top_entropy(fraction=0.5))(credit_NT, batch),
        [[0, 1], [-1, -1]],
    )
    assert_rows(
        rules.only_negative(rule=rules.top_entropy(fraction=0.5))(credit_NT, batch),
        [[1, 1], [0, -1]],
    )


def test_needs_reach_through_combinators():
    assert rules.top_entropy().needs == {"entropy_NT"}
    assert rules.keep_mass(rule=rules.only_positive(rule=rules.spurious())).needs == {"entropy_NT"}
    assert rules.only_negative(rule=rules.keep_mass(rule=rules.kl_penalty())).needs == {
        "ref_logp_NT"
    }
    assert rules.keep_mass(rule=rules.conflict).needs == frozenset()


def test_a_nested_rule_still_reports():
    batch = batch_of([[1, 2]], sampler_logp=[[-1.0, -2.0]])
    outer = rules.keep_mass(rule=rules.negative_token_filter(fraction=0.5))
    credit_NT = spread([-1.0], batch)
    report = call(
        outer.report, credit_NT, outer(credit_NT, batch), batch, reduce=LOCAL, **outer.params
    )
    assert float(report["negative_kept_frac"]) == 0.5


def test_the_table_binds_builds_and_pickles():
    batch = batch_of(
        [[1, 2], [1, 3]], reward=[1.0, 0.0], entropy=[[0.1, 0.2]] * 2, ref_logp=[[-1.0, -2.0]] * 2
    )
    batch = batch.replace(
        turn_score_NU=torch.ones(2, 1),
        trainer_logp_NT=batch.ref_logp_NT,
        ref_kl_NT=-batch.ref_logp_NT,
        segment_NT=torch.tensor([[0, 1]] * 2),
        value_NT=torch.tensor([[0.5, 0.8], [0.5, 0.2]]).double(),
        teacher_logp_NT=batch.sampler_logp_NT,
        importance_NT=-batch.sampler_logp_NT,
        has_teacher_N=torch.tensor([True, False]),
    )
    credit_NT = spread([1.0, -1.0], batch)
    nests = {"keep_mass", "even_mass", "only_positive", "only_negative", "mix"}
    for name in set(rules.RULES) - {"delta", "group_divergence", "value_baseline", *nests}:
        rule = build("credit rule", rules.RULES, {"name": name})
        assert torch.equal(
            run(pickle.loads(pickle.dumps(rule)), credit_NT, batch),
            run(rules.RULES[name], credit_NT, batch),
        )
    nested = build(
        "credit rule",
        rules.RULES,
        {"name": "keep_mass", "rule": {"name": "top_entropy", "fraction": 0.5}},
    )
    assert nested.params["rule"].params == {"fraction": 0.5}


BAD = [
    (
        rules.negative_token_filter,
        {"fraction": 0.0},
        "fraction must be a number > 0 and <= 1, got 0.0",
    ),
    (
        rules.negative_token_filter,
        {"fraction": "0.1"},
        "fraction must be a number > 0 and <= 1, got '0.1'",
    ),
    (
        rules.top_entropy,
        {"fraction": 3},
        "top_entropy: fraction must be a number > 0 and <= 1, got 3",
    ),
    (rules.top_entropy, {"fraction": math.nan}, "got nan"),
    (rules.conflict, {"positive": -1.0}, "conflict: positive must be a number >= 0"),
    (rules.conflict, {"rule": "uniform"}, "conflict: rule must be a credit rule"),
    (rules.entropy_filter, {"coef": -1.0}, "entropy_filter: coef must be a number >= 0"),
    (rules.entropy_filter, {"limit": math.nan}, "got nan"),
    (rules.conflict, {"runs": "left"}, "runs must be one of start, end, both, got 'left'"),
    (rules.probability_scaled, {"alpha": 1.5}, "alpha must be a number >= 0 and <= 1, got 1.5"),
    (rules.ktae, {"fisher_weight": 0.0, "gain_weight": 0.0}, "both 0"),
    (rules.ktae, {"top": -1.0}, "ktae: top must be a number >= 0"),
    (rules.spurious, {"max_prob": 2.0}, "max_prob must be a number >= 0 and <= 1"),
    (rules.spurious, {"entropy_quantile": -0.1}, "entropy_quantile must be a number >= 0 and <= 1"),
    (rules.spurious, {"quantile_over": "group"}, "quantile_over must be one of rare, batch"),
    (
        rules.spurious,
        {"renormalise": True},
        "renormalise must be one of tokens, mass, none, got True",
    ),
    (rules.covariance, {"fraction": 0}, "covariance: fraction must be a number > 0 and <= 1"),
    (rules.covariance, {"low": 5.0, "high": 1.0}, "high must be a number > 5, got 1.0"),
    (rules.focal, {"gamma": -1.0}, "focal: gamma must be a number >= 0"),
    (rules.kl_penalty, {"coef": -0.1}, "kl_penalty: coef must be a number >= 0"),
    (rules.kl_penalty, {"estimator": "k4"}, "kl: estimator must be one of k1, k2, k3, got 'k4'"),
    (rules.edits, {"first_edits": 0}, "first_edits must be a whole number >= 1"),
    (rules.edits, {"serving": "max"}, "serving must be one of sum, mean"),
    (rules.soften_negatives, {"kappa": -1.0}, "kappa must be a number >= 0, got -1.0"),
    (rules.surprise_negatives, {"cap": 0.0}, "cap must be a number > 0, got 0.0"),
    (rules.negative_mass, {"factor": "half"}, "factor must be a number >= 0, got 'half'"),
    (rules.negatives, {"mass": -0.1}, "negatives: mass must be a number >= 0"),
    (rules.negatives, {"location": 1.5}, "location must be a number >= 0 and <= 1, got 1.5"),
    (rules.surprisal_boost, {"share": 0.0}, "share must be a number > 0 and <= 1, got 0.0"),
    (rules.surprisal_boost, {"boost": -1.0}, "boost must be a number >= 0, got -1.0"),
    (rules.rare_uncertain, {"fraction": 2}, "fraction must be a number > 0 and <= 1, got 2"),
    (rules.prefix_value, {"split": "words"}, "split must be one of sentences, lines, improbable"),
    (rules.prefix_value, {"samples": 0}, "samples must be a whole number >= 1, got 0"),
    (rules.prefix_value, {"max_steps": 0}, "max_steps must be a whole number >= 1 or None, got 0"),
    (rules.prefix_value, {"max_prob": 2}, "max_prob must be a number > 0 and <= 1, got 2"),
    (rules.only_improbable, {"max_prob": 0}, "max_prob must be a number > 0 and <= 1, got 0"),
    (rules.tree_gain, {"eps": -1.0}, "eps must be a number >= 0, got -1.0"),
    (rules.whiten, {"eps": 0.0}, "eps must be a number > 0, got 0.0"),
    (rules.group_divergence, {"fraction": 0}, "fraction must be a number > 0 and <= 1, got 0"),
    (rules.group_divergence, {"topk": 0}, "topk must be a whole number >= 1 or None, got 0"),
    (rules.answer_influence, {"quantile": 2}, "quantile must be a number >= 0 and <= 1, got 2"),
    (rules.even_mass, {"rule": None}, "even_mass: rule must be a credit rule"),
    (rules.keep_mass, {"rule": "top_entropy"}, "keep_mass: rule must be a credit rule"),
    (rules.only_positive, {"rule": None}, "only_positive: rule must be a credit rule"),
    (rules.mix, {"rules": (), "weights": ()}, "mix: rules must be a list of one or more credit"),
    (rules.mix, {"rules": ("ktae",), "weights": (1,)}, "mix: rule must be a credit rule"),
    (
        rules.mix,
        {"rules": (rules.uniform, rules.ktae), "weights": (1.0,)},
        "mix: weights must be a list of 2 numbers, one per rule, got (1.0,)",
    ),
    (
        rules.mix,
        {"rules": (rules.uniform,), "weights": ("half",)},
        "mix: weights[0] must be a finite number, got 'half'",
    ),
    (
        rules.mix,
        {"rules": (rules.value_baseline(),), "weights": (1.0,)},
        "mix: a rule with memory cannot be nested",
    ),
]


@pytest.mark.parametrize(
    ("rule", "params", "message"), BAD, ids=lambda value: getattr(value, "__name__", None)
)
def test_bad_parameters_say_what_is_wrong(rule, params, message):
    batch = batch_of(
        [[1, 2], [1, 3]], reward=[1.0, 0.0], entropy=[[0.1, 0.2]] * 2, ref_logp=[[-1.0, -2.0]] * 2
    )
    with pytest.raises(ValueError) as error:
        rule(spread([1.0, -1.0], batch), batch, **params)
    assert message in str(error.value)


@pytest.mark.parametrize("rule", [rules.top_entropy, rules.spurious, rules.kl_penalty])
def test_a_missing_column_is_named(rule):
    batch = batch_of([[1]])
    with pytest.raises(ValueError, match=r"has no column '(entropy|ref_logp)_NT'. Measure it:"):
        rule(spread([1.0], batch), batch)
