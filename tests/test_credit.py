"""Credit rules: loops-only twins, by-hand numbers, special cases, laws on ragged batches, ranks, bad parameters."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import threading

import pytest
import reference_credit as reference
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from strategies import ragged_batches

from counterpoise import credit as rules
from counterpoise.build import base, bound, build, call, needs_of
from counterpoise.covariance import token_covariance
from counterpoise.credit.association import Tables, fisher_exact, information_gain
from counterpoise.credit.edits import edit_credit, edit_distance, nearest_correct
from counterpoise.credit.entropy import pooled_quantile
from counterpoise.credit.overlap import conflict_tokens
from counterpoise.kl import KL_ESTIMATORS, kl_estimator
from counterpoise.numerics import LOCAL, Reduce, seeded
from counterpoise.trie import pair_index, prefix_nodes
from counterpoise.types import TokenBatch

ADVANTAGES = st.sampled_from([-1.5, -0.5, 0.0, 0.25, 2.0])
laws = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def credited_batches(draw, **options):
    """A batch and a credit: one number a rollout (the first rule of a chain), or any number a token (a later rule)."""
    batch = draw(ragged_batches(**options))
    per_rollout = draw(st.lists(ADVANTAGES, min_size=batch.num_rollouts, max_size=batch.num_rollouts))
    credit_NT = torch.tensor(per_rollout, dtype=torch.float64)[:, None] * batch.mask_NT
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        credit_NT = credit_NT * torch.tensor([-1.0, 0.0, 0.5, 1.0]).double()[torch.randint(4, credit_NT.shape, generator=generator)]
    return batch, credit_NT + 0.0


def as_lists(value_NT, batch):
    return [row[:n] for row, n in zip(value_NT.tolist(), batch.length_N.tolist())]


def padded(rows, width):
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


def equal(actual, expected, name="", tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


def close(actual_NT, rows, name=""):
    equal(actual_NT, padded(rows, actual_NT.shape[1]), name)


def name_of(rule):
    return f"{base(rule).__name__}({bound(rule)})"


def batch_of(ids, *, group=None, reward=None, **columns):
    """A float64 batch; log-probs of -1 unless given."""
    columns = {"sampler_logp": [[-1.0] * len(row) for row in ids], **columns}
    return TokenBatch.from_lists(
        ids, group=group or [0] * len(ids), reward=reward or [0.0] * len(ids), dtype=torch.float64, **columns
    )


def spread(advantages, batch):
    return torch.tensor(advantages, dtype=torch.float64)[:, None] * batch.mask_NT


# ---------------------------------------------------------------------------------------------------------------------------------- twins
TWINS = [
    (rules.negative_token_filter(fraction=0.1), reference.negative_token_filter),
    (rules.negative_token_filter(fraction=0.5), reference.negative_token_filter),
    (rules.top_entropy(fraction=0.2), reference.top_entropy),
    (rules.top_entropy(fraction=0.75), reference.top_entropy),
    (rules.spurious(max_prob=0.3, entropy_quantile=0.75, quantile_over="rare", renormalise="tokens"), reference.spurious),
    (rules.spurious(max_prob=0.3, entropy_quantile=0.8, quantile_over="batch", renormalise="mass"), reference.spurious),
    (rules.spurious(max_prob=0.9, entropy_quantile=1.0, quantile_over="rare", renormalise="none"), reference.spurious),
    (rules.conflict(positive=2.0, negative=0.0, runs="both"), reference.conflict),
    (rules.conflict(positive=3.0, negative=0.5, runs="start"), reference.conflict),
    (rules.conflict(positive=2.0, negative=0.0, runs="end"), reference.conflict),
    (rules.shared_prefix, reference.shared_prefix),
    (rules.probability_scaled(alpha=0.3), reference.probability_scaled),
    (rules.focal(gamma=2.5, threshold=0.5), reference.focal),
    (rules.kl_penalty(estimator="k1", coef=0.1), reference.kl_penalty),
    (rules.kl_penalty(estimator="k2", coef=0.1), reference.kl_penalty),
    (rules.kl_penalty(estimator="k3", coef=0.1), reference.kl_penalty),
    (
        rules.ktae(fisher_weight=1.0, gain_weight=2.0, frequency_weight=0.0, top=1.5, threshold=0.5),
        reference.ktae,
    ),
    (
        rules.ktae(fisher_weight=1.0, gain_weight=1.0, frequency_weight=1.0, top=1.0, threshold=0.5),
        reference.ktae,
    ),
]


@laws
@given(data=credited_batches())
def test_every_rule_equals_its_twin(data):
    batch, credit_NT = data
    for rule, twin in TWINS:
        expected = twin(as_lists(credit_NT, batch), reference.Rollouts(batch), **bound(rule))
        close(rule(credit_NT, batch), expected, name_of(rule))


@laws
@given(data=credited_batches())
def test_token_covariance_equals_its_twin(data):
    batch, credit_NT = data
    found_NT = token_covariance(batch.sampler_logp_NT, credit_NT, batch.mask_NT)
    close(found_NT, reference.token_covariance(as_lists(credit_NT, batch), reference.Rollouts(batch)))


@laws
@given(data=credited_batches())
def test_covariance_drops_the_whole_band_when_the_share_allows(data):
    batch, credit_NT = data
    low, high = 0.3712345, 2.1234567
    cov = reference.token_covariance(as_lists(credit_NT, batch), reference.Rollouts(batch))
    expected = [[0.0 if low < v < high else c for v, c in zip(*rows)] for rows in zip(cov, as_lists(credit_NT, batch))]
    close(rules.covariance(credit_NT, batch, fraction=1.0, low=low, high=high), expected)


@laws
@given(batch=ragged_batches(max_group_size=5))
def test_prefix_nodes_equal_their_twin(batch):
    nodes, rollouts = prefix_nodes(batch.token_ids_NT, batch.mask_NT, batch.group_N), reference.Rollouts(batch)
    close(
        nodes.size_NT.double(),
        [[reference.prefix_size(rollouts, i, t) for t in range(n)] for i, n in enumerate(batch.length_N.tolist())],
    )
    prefixes = {}
    for i, t in rollouts.places():
        prefixes.setdefault((rollouts.group[i], tuple(rollouts.token_ids[i][: t + 1])), set()).add(int(nodes.node_NT[i, t]))
    assert all(len(found) == 1 for found in prefixes.values())
    assert sorted(next(iter(found)) for found in prefixes.values()) == list(range(len(nodes.size_M)))
    assert torch.equal(nodes.node_NT == -1, ~batch.mask_NT)
    assert torch.equal(nodes.sum(batch.mask_NT.double()), nodes.size_M.double())


# ---------------------------------------------------------------------------------------------------------------------------------- edits
@st.composite
def id_pairs(draw):
    ids = st.lists(st.integers(0, 3), min_size=1, max_size=9)
    return draw(ids), draw(ids)


@laws
@given(pair=id_pairs())
def test_edit_credit_marks_a_shortest_alignment(pair):
    failed_ids, corrected_ids = pair
    failed, corrected = edit_credit(failed_ids, corrected_ids, 2.0)
    assert set(failed) <= {0.0, -2.0}
    assert set(corrected) <= {0.0, 2.0}
    # what is left on both sides is the same text, and the gaps between it cost max(gone, come) edits each
    kept_failed = [t for t, c in enumerate(failed) if c == 0]
    kept_corrected = [t for t, c in enumerate(corrected) if c == 0]
    assert [failed_ids[t] for t in kept_failed] == [corrected_ids[t] for t in kept_corrected]
    ends_failed, ends_corrected = [-1, *kept_failed, len(failed_ids)], [-1, *kept_corrected, len(corrected_ids)]
    gaps = zip(itertools.pairwise(ends_failed), itertools.pairwise(ends_corrected))
    distance = reference.edit_distance(failed_ids, corrected_ids)
    assert sum(max(b - a, d - c) - 1 for (a, b), (c, d) in gaps) == distance
    assert edit_distance(failed_ids, corrected_ids) == distance / max(len(failed_ids), len(corrected_ids))


@laws
@given(batch=ragged_batches(max_group_size=5, max_length=4, vocab=3), serving=st.sampled_from(["sum", "mean"]))
def test_edits_equal_their_twin(batch, serving):
    rollouts = reference.Rollouts(batch)
    out = [[0.0] * len(ids) for ids in rollouts.token_ids]
    served = {}
    for i, ids in enumerate(rollouts.token_ids):
        correct = [j for j in rollouts.siblings(i) if rollouts.reward[j] > 0.5]
        if rollouts.reward[i] > 0.5 or not correct:
            continue

        def nearness(j, ids=ids):
            other = rollouts.token_ids[j]
            return reference.edit_distance(ids, other) / max(len(ids), len(other)), other

        best = min(nearness(j) for j in correct)
        copies = [j for j in correct if nearness(j) == best]
        own, other = edit_credit(ids, rollouts.token_ids[copies[0]], 1.0)
        out[i] = own
        for j in copies:
            served.setdefault(j, []).append([c / len(copies) for c in other])
    for j, parts in served.items():
        out[j] = [sum(column) / (len(parts) if serving == "mean" else 1) for column in zip(*parts)]
    close(rules.edits(torch.ones(batch.mask_NT.shape, dtype=torch.float64), batch, serving=serving), out)


def test_edits_by_hand():
    # failed 1 2 3 4 5 6, nearest correct 1 9 3 5 6 8: 2 -> 9, 4 goes, 8 comes; the far sibling is left alone. Gain 0.9 - 0.2.
    batch = batch_of(
        [[1, 2, 3, 4, 5, 6], [1, 9, 3, 5, 6, 8], [7, 7, 7], [1, 2], [1, 2]],
        group=[4, 4, 4, 8, 8],
        reward=[0.2, 0.9, 0.8, 1.0, 1.0],
    )
    incoming_NT, g = torch.ones(5, 6, dtype=torch.float64), 0.7
    found_NT = rules.edits(incoming_NT, batch)
    close(found_NT, [[0, -g, 0, -g, 0, 0], [0, g, 0, 0, 0, g], [0] * 3, [0] * 2, [0] * 2])
    first_NT = rules.edits(incoming_NT, batch, first_edits=1)
    close(first_NT, [[0, -g, 0, 0, 0, 0], [0, g, 0, 0, 0, 0], [0] * 3, [0] * 2, [0] * 2])
    report = base(rules.edits).report(incoming_NT, found_NT, batch)
    assert {key: float(value) for key, value in report.items()} == pytest.approx(
        {"pairs": 1, "skipped_groups": 1, "skipped_group_frac": 0.5, "credit_sum": 0.0, "credit_sum_per_pair": 0.0}, abs=1e-12
    )


def test_edits_of_a_reference_that_serves_two():
    # both failures differ from the only correct answer in their last token: its last token gets 1 + 1, or their mean
    batch = batch_of([[1, 2], [1, 3], [1, 4]], reward=[1.0, 0.0, 0.0])
    close(rules.edits(torch.zeros(3, 2).double(), batch), [[0, 2], [0, -1], [0, -1]])
    close(rules.edits(torch.zeros(3, 2).double(), batch, serving="mean"), [[0, 1], [0, -1], [0, -1]])
    # identical correct answers share it
    twice = batch_of([[1, 2], [1, 3], [1, 2]], reward=[1.0, 0.0, 1.0])
    close(rules.edits(torch.zeros(3, 2).double(), twice), [[0, 0.5], [0, -1], [0, 0.5]])


def test_nearest_correct_breaks_ties_by_reward_then_ids():
    assert nearest_correct([1, 2], [([1, 9], 0.8), ([1, 8], 1.0), ([1, 7], 1.0)]) == 2
    assert nearest_correct([1, 2], [([3, 4], 1.0), ([1, 2], 0.7)]) == 1


# -------------------------------------------------------------------------------------------------------------------------------- by hand
def test_negative_token_filter_by_hand():
    # ceil(0.1 * 11) = 2 of the failed rollout's tokens stay: the two rarest, the earlier of a tie. The correct one is untouched.
    logp = [-1.0, -5.0, -2.0, -0.1, -5.0, -5.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    batch = batch_of([list(range(11)), [1, 2, 3]], reward=[0.0, 1.0], sampler_logp=[logp, [-9.0] * 3])
    found_NT = rules.negative_token_filter(spread([-2.0, 1.0], batch), batch, fraction=0.1)
    close(found_NT, [[0, -2, 0, 0, -2] + [0] * 6, [1, 1, 1]])
    report = base(rules.negative_token_filter).report(spread([-2.0, 1.0], batch), found_NT, batch)
    assert float(report["negative_kept_frac"]) == pytest.approx(2 / 11)
    assert float(report["negative_kept_logp"]) == -5.0
    assert float(report["negative_dropped_logp"]) == pytest.approx((sum(logp) + 10) / 9)


def test_negative_token_filter_keeps_no_token_for_rounding_noise():
    # 0.07 * 100 is 7.000000000000001 in floating point
    batch = batch_of([list(range(100))], sampler_logp=[[-t / 10 for t in range(100)]])
    assert int((rules.negative_token_filter(spread([-1.0], batch), batch, fraction=0.07) != 0).sum()) == 7


def test_top_entropy_by_hand():
    # 6 tokens, fraction 0.4: the 0.6 quantile stands at rank 3 of 0..5: 0.5, and ties at the threshold stay
    batch = batch_of([[1, 2, 3, 4], [5, 6]], entropy=[[0.1, 0.5, 0.2, 0.5], [0.3, 0.9]])
    close(rules.top_entropy(spread([1.0, -1.0], batch), batch, fraction=0.4), [[0, 1, 0, 1], [0, -1]])
    report = call(base(rules.top_entropy).report, None, None, batch, fraction=0.4, reduce=LOCAL)
    assert float(report["threshold"]) == 0.5


def test_conflict_by_hand():
    # group 0: A is rewarded, B and C punished. From the start: 1 in all, then A and B part, C agrees with A for one more token.
    # From the end, right-aligned: 9 9 ends A and B; C ends on 9 but has 3 before it.
    batch = batch_of([[1, 2, 5, 9, 9], [1, 4, 9, 9], [1, 2, 3, 9], [1, 2]], group=[0, 0, 0, 1])
    credit_NT = spread([1.0, -1.0, -1.0, -1.0], batch)
    start_NT = rules.conflict(credit_NT, batch, runs="start")
    close(start_NT, [[2, 2, 1, 1, 1], [0, -1, -1, -1], [0, 0, -1, -1], [-1, -1]])
    end_NT = rules.conflict(credit_NT, batch, runs="end")
    close(end_NT, [[1, 1, 1, 2, 2], [-1, -1, 0, 0], [-1, -1, -1, 0], [-1, -1]])
    # the 9 at position 3 is in A (+), B (-) and C (-), but their runs from the start are broken before it
    close(rules.conflict(credit_NT, batch), [[2, 2, 1, 2, 2], [0, -1, 0, 0], [0, 0, -1, 0], [-1, -1]])
    assert not torch.signbit(rules.conflict(credit_NT, batch)[1, 0])  # 0.0, not -0.0


def test_conflict_tokens_need_both_signs_in_one_group():
    batch = batch_of([[1], [1], [1]], group=[0, 0, 1])
    assert not conflict_tokens(spread([1.0, 0.0, -1.0], batch), batch).any()
    assert conflict_tokens(spread([1.0, -1.0, -1.0], batch), batch).flatten().tolist() == [True, True, False]


def test_shared_prefix_by_hand():
    batch = batch_of([[1, 2, 3], [1, 2], [1, 5], [1, 2, 3]], group=[0, 0, 0, 7])
    found_NT = rules.shared_prefix(spread([6.0, 6.0, 6.0, 6.0], batch), batch)
    close(found_NT, [[2, 3, 6], [2, 3], [2, 6], [6, 6, 6]])
    report = base(rules.shared_prefix).report(found_NT, found_NT, batch)
    assert float(report["shared_frac"]) == 0.5  # 5 of 10 tokens
    assert float(report["sharing_rollouts"]) == pytest.approx((3 + 2 + 1 + 3 + 2 + 3 + 1 + 1 + 1 + 1) / 10)


def test_spurious_by_hand():
    # rare tokens of positive credit: p = e^-7 at entropies 0.2, 1.0, 2.0; the middle of them (q = 0.5) is 1.0, so only 0.2 goes
    batch = batch_of(
        [[1, 2, 3, 4], [5, 6]],
        sampler_logp=[[-7.0, -7.0, -7.0, -0.1], [-7.0, -0.1]],
        entropy=[[0.2, 1.0, 2.0, 0.0], [0.0, 0.0]],
    )
    credit_NT = spread([1.0, -1.0], batch)
    close(rules.spurious(credit_NT, batch, entropy_quantile=0.5), [[0, 1.2, 1.2, 1.2], [-1.2, -1.2]])  # 6 tokens / 5 kept
    close(rules.spurious(credit_NT, batch, entropy_quantile=0.5, renormalise="none"), [[0, 1, 1, 1], [-1, -1]])
    assert float(rules.spurious(credit_NT, batch, renormalise="mass").abs().sum()) == pytest.approx(6.0)
    report = base(rules.spurious).report(credit_NT, rules.spurious(credit_NT, batch, entropy_quantile=0.5), batch)
    assert (float(report["spurious_frac"]), float(report["spurious_entropy"])) == pytest.approx((1 / 6, 0.2))


def test_ktae_by_hand():
    # 3 correct rollouts hold token 5, 3 failed ones do not: p = 2 / C(6, 3) = 0.1, F = e^-0.2, IG = 1 bit, asin 1 - asin 0 = pi / 2.
    # Token 1 is everywhere: p = 1, IG = 0, nothing is added. 6 mirrors 5.
    batch = batch_of([[1, 5], [1, 5], [1, 5], [1, 6], [1, 6], [1, 6]], reward=[1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    found_NT = rules.ktae(spread([0.0] * 6, batch), batch, frequency_weight=0.0)
    key = math.tanh((math.exp(-0.2) + 1) / 2 * math.pi / 2 / 2)
    close(found_NT, [[0, key]] * 3 + [[0, -key]] * 3)
    # with frequencies the one-sided token saturates: 0.5 * 3 / (0.5 + 2) / 1e-5 = 6e4
    close(rules.ktae(spread([0.0] * 6, batch), batch), [[0, 1]] * 3 + [[0, -1]] * 3)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 5), (4, 4), (7, 2)])
def test_fisher_and_information_gain_equal_scipy(sizes):
    scipy = pytest.importorskip("scipy.stats")
    right, wrong = sizes
    for a, b in itertools.product(range(right + 1), range(wrong + 1)):
        tables = Tables(*(torch.tensor([x], dtype=torch.float64) for x in (a, b, right, wrong)))
        assert float(fisher_exact(tables)) == pytest.approx(scipy.fisher_exact([[a, b], [right - a, wrong - b]]).pvalue, abs=1e-12)
        joint = [x / (right + wrong) for x in (a, b, right - a, wrong - b)]
        given = sum(scipy.entropy(pair, base=2) * sum(pair) for pair in (joint[:2], joint[2:]) if sum(pair))
        assert float(information_gain(tables)) == pytest.approx(scipy.entropy([right, wrong], base=2) - given, abs=1e-12)


def test_focal_by_hand():
    # solve rates 3/4 and 1/2: factors (1/4)^2 and (1/2)^2
    batch = batch_of([[1], [1], [1], [1], [1], [1]], group=[0, 0, 0, 0, 1, 1], reward=[1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    close(rules.focal(spread([16.0] * 6, batch), batch, gamma=2.0), [[1]] * 4 + [[4]] * 2)


def test_kl_penalty_by_hand():
    # logp - ref = 2: k1 = 2, k2 = 2, k3 = e^-2 + 1
    batch = batch_of([[1]], sampler_logp=[[-1.0]], ref_logp=[[-3.0]])
    found = [float(rules.kl_penalty(spread([1.0], batch), batch, estimator=k, coef=0.5)) for k in ("k1", "k2", "k3")]
    assert found == pytest.approx([0.0, 0.0, 1 - 0.5 * (math.exp(-2) + 1)])


def test_kl_estimators_near_zero_agree():
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    for name in KL_ESTIMATORS:
        assert kl_estimator(name)(logp, logp).tolist() == [0.0, 0.0]
    gap = kl_estimator("k3")(logp, logp + 1e-6)
    torch.testing.assert_close(gap, kl_estimator("k2")(logp, logp + 1e-6), rtol=1e-3, atol=0)


# ------------------------------------------------------------------------------------------------------------------------ the random draw
def many_candidates():
    """60 rollouts of one token; the rewarded half is confident, so its 30 tokens lie in the band."""
    batch = batch_of([[i] for i in range(60)], sampler_logp=[[-0.01 if i < 30 else -5.0] for i in range(60)])
    return batch, spread([1.0] * 30 + [-1.0] * 30, batch)


def test_covariance_draws_its_share_from_the_band():
    batch, credit_NT = many_candidates()
    cov_NT = token_covariance(batch.sampler_logp_NT, credit_NT, batch.mask_NT)
    assert int(((cov_NT > 1) & (cov_NT < 5)).sum()) == 60
    counts = torch.zeros(60)
    for seed in range(300):
        found_NT = rules.covariance(credit_NT, batch, fraction=0.1, generator=seeded(seed, 0, "draw"))
        dropped_N = (found_NT == 0).flatten()
        assert int(dropped_N.sum()) == 6  # floor(0.1 * 60)
        counts += dropped_N
    # each is drawn with probability 0.1: mean 30, standard deviation 5.2
    assert counts.min() > 30 - 5 * 5.2
    assert counts.max() < 30 + 5 * 5.2
    again = [rules.covariance(credit_NT, batch, fraction=0.1, generator=seeded(1, 2, "draw")) for _ in range(2)]
    assert torch.equal(*again)


def test_covariance_drops_at_least_one_and_none_outside_the_band():
    batch, credit_NT = many_candidates()
    assert int((rules.covariance(credit_NT, batch) == 0).sum()) == 1
    assert torch.equal(rules.covariance(credit_NT, batch, low=100.0, high=200.0), credit_NT)
    report = base(rules.covariance).report(credit_NT, rules.covariance(credit_NT, batch), batch)
    assert (float(report["dropped"]), float(report["band_frac"])) == (1.0, 1.0)


# --------------------------------------------------------------------------------------------------------------------------- special cases
NEUTRAL = [
    rules.uniform,
    rules.negative_token_filter(fraction=1),
    rules.top_entropy(fraction=1.0),
    rules.conflict(positive=1.0, negative=1.0),
    rules.probability_scaled(alpha=0.0),
    rules.ktae(top=0.0),
    rules.spurious(max_prob=0.0),
    rules.spurious(entropy_quantile=0.0),
    rules.covariance(low=1e9, high=1e10),
    rules.focal(gamma=0.0),
    rules.kl_penalty(coef=0.0),
    rules.keep_mass(rule=rules.uniform),
    rules.keep_mass(rule=rules.uniform, per_side=True),
    rules.only_positive(rule=rules.uniform),
    rules.only_negative(rule=rules.uniform),
    rules.chain(rules=()),
]


@laws
@given(data=credited_batches())
def test_neutral_parameters_change_no_bit(data):
    batch, credit_NT = data
    for rule in NEUTRAL:
        equal(rule(credit_NT, batch), credit_NT, name_of(rule), tolerance=0)


def test_a_constant_group_learns_nothing_from_edits_and_ktae():
    batch = batch_of([[1, 2], [1, 3]], reward=[1.0, 1.0])
    credit_NT = spread([0.5, -0.5], batch)
    assert torch.equal(rules.edits(credit_NT, batch), torch.zeros(2, 2, dtype=torch.float64))
    assert torch.equal(rules.ktae(credit_NT, batch), credit_NT)


# ------------------------------------------------------------------------------------------------------------------------------------ laws
EVERY_RULE = [
    rules.uniform,
    rules.negative_token_filter(fraction=0.4),
    rules.edits(),
    rules.edits(first_edits=1, serving="mean"),
    rules.top_entropy(fraction=0.4),
    rules.conflict(),
    rules.probability_scaled(),
    rules.ktae(),
    rules.shared_prefix,
    rules.spurious(max_prob=0.4),
    rules.covariance(fraction=0.2, low=0.1234567),
    rules.focal(gamma=1.0),
    rules.kl_penalty(estimator="k3", coef=0.1),
    rules.keep_mass(rule=rules.top_entropy(fraction=0.4)),
    rules.keep_mass(rule=rules.conflict(), per_side=True),
    rules.only_positive(rule=rules.ktae()),
    rules.only_negative(rule=rules.negative_token_filter(fraction=0.4)),
    rules.chain(rules=(rules.conflict(), rules.covariance(fraction=0.2, low=0.1234567), rules.spurious(max_prob=0.4))),
]


def run(rule, credit_NT, batch, reduce=LOCAL):
    return call(rule, credit_NT, batch, reduce=reduce, generator=seeded(0, 0, "test"))


def widened(batch, extra):
    """Two more columns of padding with rubbish in them."""

    def wide(column, rubbish):
        return torch.cat([column, torch.full((column.shape[0], extra), rubbish, dtype=column.dtype)], dim=1)

    floats = {
        name: wide(getattr(batch, name), math.nan) for name in ("sampler_logp_NT", "entropy_NT", "ref_logp_NT", "trainer_logp_NT")
    }
    return batch.replace(token_ids_NT=wide(batch.token_ids_NT, 77), mask_NT=wide(batch.mask_NT, False), **floats)


@laws
@given(data=credited_batches())
def test_padding_changes_nothing_and_stays_zero(data):
    batch, credit_NT = data
    wide_credit_NT, wide_batch = torch.cat([credit_NT, torch.zeros(len(credit_NT), 2, dtype=torch.float64)], 1), widened(batch, 2)
    for rule in EVERY_RULE:
        found_NT, wide_NT = run(rule, credit_NT, batch), run(rule, wide_credit_NT, wide_batch)
        equal(wide_NT[:, :-2], found_NT, name_of(rule))
        equal(wide_NT[~wide_batch.mask_NT], torch.zeros_like(wide_NT[~wide_batch.mask_NT]), name_of(rule), tolerance=0)


@laws
@given(data=credited_batches(), shuffle=st.randoms())
def test_permuting_rollouts_permutes_the_credit(data, shuffle):
    batch, credit_NT = data
    order = list(range(batch.num_rollouts))
    shuffle.shuffle(order)
    row_R = torch.tensor(order)
    for rule in EVERY_RULE:
        equal(run(rule, credit_NT[row_R], batch.select(row_R)), run(rule, credit_NT, batch)[row_R], name_of(rule))


@laws
@given(data=credited_batches())
def test_inputs_stay_and_the_dtype_is_kept(data):
    batch, credit_NT = data
    before, columns = credit_NT.clone(), {name: getattr(batch, name).clone() for name in ("token_ids_NT", "sampler_logp_NT", "entropy_NT")}
    for rule in EVERY_RULE:
        assert run(rule, credit_NT, batch).dtype == torch.float64, name_of(rule)
        assert run(rule, credit_NT.float(), batch).dtype == torch.float32, name_of(rule)
        assert torch.equal(credit_NT, before), name_of(rule)
        assert all(torch.equal(getattr(batch, name), column) for name, column in columns.items()), name_of(rule)


def on_two_ranks(rule, credit_NT, batch, cut):
    """The rule on two halves of the batch, in two threads that exchange through the hook as ranks do."""
    barrier, box, out = threading.Barrier(2, timeout=30), [None, None], [None, None]

    def exchange(rank, value):
        box[rank] = value
        barrier.wait()
        parts = list(box)
        barrier.wait()
        return parts

    def work(rank):
        row_R = (cut if rank else ~cut).nonzero().flatten()
        hook = Reduce(sum=lambda v: sum(exchange(rank, v)), cat=lambda v: torch.cat(exchange(rank, v)))
        out[rank] = run(rule, credit_NT[row_R], batch.select(row_R), hook)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


@settings(laws, max_examples=20)
@given(data=credited_batches(max_groups=4))
def test_two_ranks_give_the_credit_of_one(data):
    batch, credit_NT = data
    cut_N = batch.group_N == batch.group_N.min()
    assume(not bool(cut_N.all()))
    for rule in EVERY_RULE:
        whole_NT = run(rule, credit_NT, batch)
        first_NT, second_NT = on_two_ranks(rule, credit_NT, batch, cut_N)
        equal(first_NT, whole_NT[~cut_N], name_of(rule))
        equal(second_NT, whole_NT[cut_N], name_of(rule))


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
)


@laws
@given(data=credited_batches())
def test_declared_signs_are_kept(data):
    batch, credit_NT = data
    for name in KEEPS_SIGN:
        found_NT = run(rules.RULES[name], credit_NT, batch)
        assert bool((found_NT * credit_NT >= 0).all()), name
        assert not found_NT[credit_NT == 0].any(), name


# ------------------------------------------------------------------------------------------------------------------------------ combinators
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
            (side * sides_NT).clamp(min=0).sum(), (side * credit_NT).clamp(min=0).sum(), rtol=1e-12, atol=1e-12
        )


def test_keep_mass_of_nothing_is_nothing():
    batch = batch_of([[1, 2]], reward=[1.0])
    assert rules.keep_mass(rule=rules.edits())(spread([1.0], batch), batch).tolist() == [[0.0, 0.0]]


def test_only_one_side_by_hand():
    batch = batch_of([[1, 2], [3, 4]], entropy=[[0.0, 2.0], [0.0, 2.0]])
    credit_NT = spread([1.0, -1.0], batch)
    close(rules.only_positive(rule=rules.top_entropy(fraction=0.5))(credit_NT, batch), [[0, 1], [-1, -1]])
    close(rules.only_negative(rule=rules.top_entropy(fraction=0.5))(credit_NT, batch), [[1, 1], [0, -1]])


def test_chain_equals_its_rules_in_turn():
    batch = batch_of([[1, 2], [1, 3]], sampler_logp=[[-1.0, -2.0], [-1.0, -0.1]])
    credit_NT = spread([1.0, -1.0], batch)
    parts = (rules.conflict(), rules.probability_scaled(alpha=0.5), rules.negative_token_filter(fraction=0.5))
    expected_NT = functools.reduce(lambda value_NT, rule: rule(value_NT, batch), parts, credit_NT)
    assert torch.equal(rules.chain(rules=parts)(credit_NT, batch), expected_NT)


def test_needs_reach_through_combinators():
    assert needs_of(rules.top_entropy()) == {"entropy_NT"}
    assert needs_of(rules.keep_mass(rule=rules.only_positive(rule=rules.spurious()))) == {"entropy_NT"}
    assert needs_of(rules.chain(rules=(rules.kl_penalty(), rules.keep_mass(rule=rules.top_entropy())))) == {
        "entropy_NT",
        "ref_logp_NT",
    }
    assert needs_of(rules.chain(rules=(rules.conflict, rules.focal()))) == frozenset()


def test_a_nested_rule_still_reports():
    batch = batch_of([[1, 2]], sampler_logp=[[-1.0, -2.0]])
    outer = rules.keep_mass(rule=rules.negative_token_filter(fraction=0.5))
    credit_NT = spread([-1.0], batch)
    report = call(base(outer).report, credit_NT, outer(credit_NT, batch), batch, reduce=LOCAL, **bound(outer))
    assert float(report["negative_kept_frac"]) == 0.5


# ------------------------------------------------------------------------------------------------------------------------------- the table
def test_the_table_binds_builds_and_pickles():
    batch = batch_of([[1, 2], [1, 3]], reward=[1.0, 0.0], entropy=[[0.1, 0.2]] * 2, ref_logp=[[-1.0, -2.0]] * 2)
    credit_NT = spread([1.0, -1.0], batch)
    for name in set(rules.RULES) - {"delta", "chain", "keep_mass", "only_positive", "only_negative"}:
        rule = build("credit rule", rules.RULES, {"name": name})
        assert torch.equal(run(pickle.loads(pickle.dumps(rule)), credit_NT, batch), run(rules.RULES[name], credit_NT, batch))
    nested = build("credit rule", rules.RULES, {"name": "keep_mass", "rule": {"name": "top_entropy", "fraction": 0.5}})
    assert bound(bound(nested)["rule"]) == {"fraction": 0.5}


BAD = [
    (rules.negative_token_filter, {"fraction": 0.0}, "fraction must be in (0, 1], got 0.0"),
    (rules.negative_token_filter, {"fraction": "0.1"}, "fraction must be in (0, 1], got '0.1'"),
    (rules.top_entropy, {"fraction": 3}, "top_entropy: fraction must be in (0, 1], got 3"),
    (rules.top_entropy, {"fraction": math.nan}, "got nan"),
    (rules.conflict, {"positive": -1.0}, "conflict: positive must be in [0, inf]"),
    (rules.conflict, {"runs": "left"}, "runs must be one of start, end, both, got 'left'"),
    (rules.probability_scaled, {"alpha": 1.5}, "alpha must be in [0, 1], got 1.5"),
    (rules.ktae, {"fisher_weight": 0.0, "gain_weight": 0.0}, "both 0"),
    (rules.ktae, {"top": -1.0}, "ktae: top must be in [0, inf]"),
    (rules.spurious, {"max_prob": 2.0}, "max_prob must be in [0, 1]"),
    (rules.spurious, {"entropy_quantile": -0.1}, "entropy_quantile must be in [0, 1]"),
    (rules.spurious, {"quantile_over": "group"}, "quantile_over must be one of rare, batch"),
    (rules.spurious, {"renormalise": True}, "renormalise must be one of tokens, mass, none, got True"),
    (rules.covariance, {"fraction": 0}, "covariance: fraction must be in (0, 1]"),
    (rules.covariance, {"low": 5.0, "high": 1.0}, "low must be below high"),
    (rules.focal, {"gamma": -1.0}, "focal: gamma must be in [0, inf]"),
    (rules.kl_penalty, {"coef": -0.1}, "kl_penalty: coef must be in [0, inf]"),
    (rules.kl_penalty, {"estimator": "k4"}, "unknown KL estimator 'k4'"),
    (rules.edits, {"first_edits": 0}, "first_edits must be a whole number >= 1"),
    (rules.edits, {"serving": "max"}, "serving must be one of sum, mean"),
    (rules.keep_mass, {"rule": "top_entropy"}, "keep_mass: rule must be a credit rule"),
    (rules.only_positive, {"rule": None}, "only_positive: rule must be a credit rule"),
    (rules.chain, {"rules": rules.uniform}, "rules must be a tuple"),
    (rules.chain, {"rules": ("uniform",)}, "chain: rule must be a credit rule"),
]


@pytest.mark.parametrize(("rule", "params", "message"), BAD, ids=lambda value: getattr(value, "__name__", None))
def test_bad_parameters_say_what_is_wrong(rule, params, message):
    batch = batch_of([[1, 2], [1, 3]], reward=[1.0, 0.0], entropy=[[0.1, 0.2]] * 2, ref_logp=[[-1.0, -2.0]] * 2)
    with pytest.raises(ValueError) as error:
        rule(spread([1.0, -1.0], batch), batch, **params)
    assert message in str(error.value)


@pytest.mark.parametrize("rule", [rules.top_entropy, rules.spurious, rules.kl_penalty])
def test_a_missing_column_is_named(rule):
    batch = batch_of([[1]])
    with pytest.raises(ValueError, match=r"has no column '(entropy|ref_logp)_NT'. Measure it:"):
        rule(spread([1.0], batch), batch)


def test_prefix_nodes_refuse_a_gap():
    with pytest.raises(ValueError, match="gap before a response token"):
        prefix_nodes(torch.ones(1, 3, dtype=torch.long), torch.tensor([[True, False, True]]), torch.tensor([0]))


def test_pair_index_of_nothing_and_of_negative_ids():
    assert pair_index(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long))[1] == 0
    index, count = pair_index(torch.tensor([0, 0, 1, 0]), torch.tensor([-100, 5, -100, -100]))
    assert (index.tolist(), count) == ([0, 1, 2, 0], 3)


# ------------------------------------------------------------------------------------------------------------------------------------ hosts
@pytest.mark.parametrize("level", [0.0, 0.3, 0.8, 1.0])
def test_pooled_quantile_equals_torch(level):
    value_NT = torch.rand(7, 11, dtype=torch.float64, generator=seeded(0, 0, "q"))
    mask_NT = torch.rand(7, 11, generator=seeded(0, 1, "q")) < 0.7
    torch.testing.assert_close(pooled_quantile(value_NT, mask_NT, level), torch.quantile(value_NT[mask_NT], level), rtol=0, atol=0)


@pytest.mark.hosts
@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.9])
def test_top_entropy_selects_the_tokens_of_trl(fraction):
    trl = pytest.importorskip("trl")

    class Alone:
        """One process, as ``accelerate`` shows it."""

        def pad_across_processes(self, value, **_):
            return value

        def gather(self, value):
            return value

    class Host:
        accelerator = Alone()

    for seed in range(5):
        entropy_NT = 3 * torch.rand(6, 40, generator=seeded(seed, 0, "entropy"))
        mask_NT = torch.arange(40) < torch.randint(1, 41, (6, 1), generator=seeded(seed, 0, "mask"))
        ones_NT = torch.ones(6, 40)
        batch = TokenBatch(ones_NT.long(), mask_NT, torch.zeros(6).long(), torch.zeros(6), -ones_NT, entropy_NT=entropy_NT)
        theirs_NT = trl.GRPOTrainer.get_high_entropy_mask(Host(), entropy_NT, mask_NT, 1 - fraction)
        assert torch.equal(rules.top_entropy(ones_NT * mask_NT, batch, fraction=fraction) != 0, theirs_NT)
