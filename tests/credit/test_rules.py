"""Credit rules against loops-only twins, numbers worked out by hand and TRL's selection; the prefix
trie.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given

import counterpoise as cp
from counterpoise import credit as rules
from counterpoise.credit.association import Tables, fisher_exact, information_gain
from counterpoise.credit.entropy import pooled_quantile
from counterpoise.credit.overlap import conflict_tokens
from counterpoise.maths.covariance import token_covariance
from counterpoise.maths.kl import KL_ESTIMATORS, kl_estimator
from counterpoise.maths.reduce import LOCAL, seeded_generator
from counterpoise.maths.trie import pair_index, prefix_nodes
from counterpoise.stage import call
from counterpoise.types import TokenBatch
from helpers import reference_credit as reference
from helpers.credit_cases import (
    as_lists,
    assert_rows,
    batch_of,
    credited_batches,
    laws,
    name_of,
    spread,
)
from helpers.strategies import ragged_batches

TWINS = [
    (rules.negative_token_filter(fraction=0.1), reference.negative_token_filter),
    (rules.negative_token_filter(fraction=0.5), reference.negative_token_filter),
    (rules.top_entropy(fraction=0.2), reference.top_entropy),
    (rules.top_entropy(fraction=0.75), reference.top_entropy),
    (
        rules.spurious(
            max_prob=0.3, entropy_quantile=0.75, quantile_over="rare", renormalise="tokens"
        ),
        reference.spurious,
    ),
    (
        rules.spurious(
            max_prob=0.3, entropy_quantile=0.8, quantile_over="batch", renormalise="mass"
        ),
        reference.spurious,
    ),
    (
        rules.spurious(
            max_prob=0.9, entropy_quantile=1.0, quantile_over="rare", renormalise="none"
        ),
        reference.spurious,
    ),
    (rules.conflict(positive=2.0, negative=0.0, runs="both"), reference.conflict),
    (rules.conflict(positive=3.0, negative=0.5, runs="start"), reference.conflict),
    (rules.conflict(positive=2.0, negative=0.0, runs="end"), reference.conflict),
    (
        rules.conflict(positive=2.0, negative=0.5, runs="both", multiply=True, divide=True),
        reference.conflict,
    ),
    (
        rules.conflict(
            positive=2.0,
            negative=0.0,
            runs="both",
            multiply=True,
            divide=True,
            rule=rules.entropy_filter(limit=1.0123457, coef=0.1),
        ),
        reference.conflict,
    ),
    (rules.entropy_filter(limit=0.7123457, coef=0.1), reference.entropy_filter),
    (rules.shared_prefix, reference.shared_prefix),
    (rules.probability_scaled(alpha=0.3), reference.probability_scaled),
    (rules.focal(gamma=2.5), reference.focal),
    (rules.kl_penalty(estimator="k1", coef=0.1), reference.kl_penalty),
    (rules.kl_penalty(estimator="k2", coef=0.1), reference.kl_penalty),
    (rules.kl_penalty(estimator="k3", coef=0.1), reference.kl_penalty),
    (rules.surprisal_boost(share=0.1, boost=1.1, damp=1.0), reference.surprisal_boost),
    (rules.surprisal_boost(share=0.5, boost=1.5, damp=0.5), reference.surprisal_boost),
    (rules.rare_uncertain(fraction=0.2), reference.rare_uncertain),
    (rules.only_improbable(max_prob=0.5), reference.only_improbable),
    (rules.whiten(eps=1e-8), reference.whiten),
    (rules.whiten(eps=1e-4, size=0.5), reference.whiten),
    (rules.rare_uncertain(fraction=0.75), reference.rare_uncertain),
    (rules.answer_influence(quantile=0.5, beta=1.0, floor=0.1), reference.answer_influence),
    (rules.answer_influence(quantile=0.9, beta=2.5, floor=0.0), reference.answer_influence),
    (rules.teacher(source="solution"), reference.teacher),
    (rules.proximal_teacher(alpha=0.2), reference.proximal_teacher),
    (rules.proximal_teacher(alpha=0.7), reference.proximal_teacher),
    (rules.ktae(fisher_weight=1.0, gain_weight=2.0, frequency_weight=0.0, top=1.5), reference.ktae),
    (rules.ktae(fisher_weight=1.0, gain_weight=1.0, frequency_weight=1.0, top=1.0), reference.ktae),
]


@laws
@given(data=credited_batches())
def test_every_rule_equals_its_twin(data):
    batch, credit_NT = data
    for rule, twin in TWINS:
        expected = twin(as_lists(credit_NT, batch), reference.Rollouts(batch), **rule.params)
        assert_rows(rule(credit_NT, batch), expected, name_of(rule))


@laws
@given(data=credited_batches())
def test_token_covariance_equals_its_twin(data):
    batch, credit_NT = data
    found_NT = token_covariance(batch.sampler_logp_NT, credit_NT, batch.mask_NT)
    assert_rows(
        found_NT, reference.token_covariance(as_lists(credit_NT, batch), reference.Rollouts(batch))
    )


@laws
@given(data=credited_batches())
def test_covariance_drops_the_whole_band_when_the_share_allows(data):
    batch, credit_NT = data
    low, high = 0.3712345, 2.1234567
    cov = reference.token_covariance(as_lists(credit_NT, batch), reference.Rollouts(batch))
    expected = [
        [0.0 if low < v < high else c for v, c in zip(*rows)]
        for rows in zip(cov, as_lists(credit_NT, batch))
    ]
    assert_rows(rules.covariance(credit_NT, batch, fraction=1.0, low=low, high=high), expected)


@laws
@given(batch=ragged_batches(max_group_size=5))
def test_prefix_nodes_equal_their_twin(batch):
    nodes, rollouts = (
        prefix_nodes(batch.token_ids_NT, batch.mask_NT, batch.group_N),
        reference.Rollouts(batch),
    )
    assert_rows(
        nodes.size_NT.double(),
        [
            [reference.prefix_size(rollouts, i, t) for t in range(n)]
            for i, n in enumerate(batch.length_N.tolist())
        ],
    )
    prefixes = {}
    for i, t in rollouts.places():
        prefixes.setdefault((rollouts.group[i], tuple(rollouts.token_ids[i][: t + 1])), set()).add(
            int(nodes.node_NT[i, t])
        )
    assert all(len(found) == 1 for found in prefixes.values())
    assert sorted(next(iter(found)) for found in prefixes.values()) == list(
        range(len(nodes.size_M))
    )
    assert torch.equal(nodes.node_NT == -1, ~batch.mask_NT)
    assert torch.equal(nodes.sum(batch.mask_NT.double()), nodes.size_M.double())


def test_pair_index_of_nothing_and_of_negative_ids():
    assert (
        pair_index(torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long))[1] == 0
    )
    index, count = pair_index(torch.tensor([0, 0, 1, 0]), torch.tensor([-100, 5, -100, -100]))
    assert (index.tolist(), count) == ([0, 1, 2, 0], 3)


def test_negative_token_filter_by_hand():
    # ceil(0.1 * 11) = 2 of the failed rollout's tokens stay: the two rarest, the earlier of a tie.
    # The correct one is untouched.
    logp = [-1.0, -5.0, -2.0, -0.1, -5.0, -5.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    batch = batch_of(
        [list(range(11)), [1, 2, 3]], reward=[0.0, 1.0], sampler_logp=[logp, [-9.0] * 3]
    )
    found_NT = rules.negative_token_filter(spread([-2.0, 1.0], batch), batch, fraction=0.1)
    assert_rows(found_NT, [[0, -2, 0, 0, -2] + [0] * 6, [1, 1, 1]])
    report = rules.negative_token_filter.report(spread([-2.0, 1.0], batch), found_NT, batch)
    assert float(report["negative_kept_frac"]) == pytest.approx(2 / 11)
    assert float(report["negative_kept_logp"]) == -5.0
    assert float(report["negative_dropped_logp"]) == pytest.approx((sum(logp) + 10) / 9)


def test_negative_token_filter_keeps_no_token_for_rounding_noise():
    # 0.07 * 100 is 7.000000000000001 in floating point
    batch = batch_of([list(range(100))], sampler_logp=[[-t / 10 for t in range(100)]])
    assert (
        int((rules.negative_token_filter(spread([-1.0], batch), batch, fraction=0.07) != 0).sum())
        == 7
    )


def test_top_entropy_by_hand():
    # 6 tokens, fraction 0.4: the 0.6 quantile stands at rank 3 of 0..5: 0.5, and ties at the
    # threshold stay
    batch = batch_of([[1, 2, 3, 4], [5, 6]], entropy=[[0.1, 0.5, 0.2, 0.5], [0.3, 0.9]])
    assert_rows(
        rules.top_entropy(spread([1.0, -1.0], batch), batch, fraction=0.4), [[0, 1, 0, 1], [0, -1]]
    )
    report = call(rules.top_entropy.report, None, None, batch, fraction=0.4, reduce=LOCAL)
    assert float(report["threshold"]) == 0.5


def test_conflict_by_hand():
    # group 0: A is rewarded, B and C punished. From the start: 1 in all, then A and B part, C
    # agrees with A for one more token. From the end, right-aligned: 9 9 ends A and B; C ends on 9
    # but has 3 before it.
    batch = batch_of([[1, 2, 5, 9, 9], [1, 4, 9, 9], [1, 2, 3, 9], [1, 2]], group=[0, 0, 0, 1])
    credit_NT = spread([1.0, -1.0, -1.0, -1.0], batch)
    start_NT = rules.conflict(credit_NT, batch, runs="start")
    assert_rows(start_NT, [[2, 2, 1, 1, 1], [0, -1, -1, -1], [0, 0, -1, -1], [-1, -1]])
    end_NT = rules.conflict(credit_NT, batch, runs="end")
    assert_rows(end_NT, [[1, 1, 1, 2, 2], [-1, -1, 0, 0], [-1, -1, -1, 0], [-1, -1]])
    # the 9 at position 3 is in A (+), B (-) and C (-), but their runs from the start are broken
    # before it
    assert_rows(
        rules.conflict(credit_NT, batch), [[2, 2, 1, 2, 2], [0, -1, 0, 0], [0, 0, -1, 0], [-1, -1]]
    )
    assert not torch.signbit(rules.conflict(credit_NT, batch)[1, 0])  # 0.0, not -0.0


def test_gtpo_as_its_authors_compute_it_by_hand():
    """A token in both runs gets 2 x 2, undecided rollouts drop, others pay a tenth of their mean
    entropy, and all of a rollout is divided by the number of its conflict tokens; sides are those
    before the charge.
    """
    # A and B are one token, in the run from the start and in that from the end; D is undecided
    batch = batch_of(
        [[1], [1], [2, 3], [2, 4]],
        group=[0, 0, 1, 1],
        reward=[1.0, 0.0, 1.0, 0.0],
        entropy=[[0.6], [0.2], [0.1, 0.3], [0.9, 0.7]],
    )
    credit = cp.method("gtpo").assign(batch)
    assert_rows(credit.credit_NT, [[4 * (0.5 - 0.06)], [0], [2 * (0.5 - 0.02), 0.5 - 0.02], [0, 0]])
    assert credit.metrics["credit/conflict/filtered_frac"] == 0.25
    # two conflict tokens: every token of the rollout gets half; a constant group is charged
    batch = batch_of(
        [[1, 5, 9], [1, 6, 9], [7], [8]],
        group=[0, 0, 1, 1],
        reward=[1.0, 0.0, 1.0, 1.0],
        entropy=[[0.0] * 3, [0.0] * 3, [0.5], [0.3]],
    )
    assert_rows(
        cp.method("gtpo").assign(batch).credit_NT,
        [[0.5, 0.25, 0.5], [0, -0.25, 0], [-0.05], [-0.03]],
    )
    old = cp.method("gtpo", advantage="group_zscore", credit=["conflict"])
    assert "entropy_NT" not in old.needs and "entropy_NT" in cp.method("gtpo").needs


def test_conflict_tokens_need_both_signs_in_one_group():
    batch = batch_of([[1], [1], [1]], group=[0, 0, 1])
    assert not conflict_tokens(spread([1.0, 0.0, -1.0], batch), batch).any()
    assert conflict_tokens(spread([1.0, -1.0, -1.0], batch), batch).flatten().tolist() == [
        True,
        True,
        False,
    ]


def test_shared_prefix_by_hand():
    batch = batch_of([[1, 2, 3], [1, 2], [1, 5], [1, 2, 3]], group=[0, 0, 0, 7])
    found_NT = rules.shared_prefix(spread([6.0, 6.0, 6.0, 6.0], batch), batch)
    assert_rows(found_NT, [[2, 3, 6], [2, 3], [2, 6], [6, 6, 6]])
    report = rules.shared_prefix.report(found_NT, found_NT, batch)
    assert float(report["shared_frac"]) == 0.5  # 5 of 10 tokens
    assert float(report["sharing_rollouts"]) == pytest.approx(
        (3 + 2 + 1 + 3 + 2 + 3 + 1 + 1 + 1 + 1) / 10
    )


def test_spurious_by_hand():
    # rare tokens of positive credit: p = e^-7 at entropies 0.2, 1.0, 2.0; the middle of them (q =
    # 0.5) is 1.0, so only 0.2 goes
    batch = batch_of(
        [[1, 2, 3, 4], [5, 6]],
        sampler_logp=[[-7.0, -7.0, -7.0, -0.1], [-7.0, -0.1]],
        entropy=[[0.2, 1.0, 2.0, 0.0], [0.0, 0.0]],
    )
    credit_NT = spread([1.0, -1.0], batch)
    assert_rows(
        rules.spurious(credit_NT, batch, entropy_quantile=0.5), [[0, 1.2, 1.2, 1.2], [-1.2, -1.2]]
    )  # 6 tokens / 5 kept
    assert_rows(
        rules.spurious(credit_NT, batch, entropy_quantile=0.5, renormalise="none"),
        [[0, 1, 1, 1], [-1, -1]],
    )
    assert float(rules.spurious(credit_NT, batch, renormalise="mass").abs().sum()) == pytest.approx(
        6.0
    )
    report = rules.spurious.report(
        credit_NT, rules.spurious(credit_NT, batch, entropy_quantile=0.5), batch
    )
    assert (float(report["spurious_frac"]), float(report["spurious_entropy"])) == pytest.approx(
        (1 / 6, 0.2)
    )


def test_surprisal_boost_by_hand():
    batch = batch_of([[1, 2, 3, 4]], sampler_logp=[[-0.1, -2.0, -0.5, -3.0]])
    boosted_NT = rules.surprisal_boost(spread([1.0], batch), batch, share=0.25)
    assert_rows(boosted_NT, [[1, 1, 1, 1.1]])
    damped_NT = rules.surprisal_boost(spread([-1.0], batch), batch, share=0.5, damp=0.9)
    assert_rows(damped_NT, [[-1, -0.9, -1, -0.9]])


def test_ktae_by_hand():
    # 3 correct rollouts hold token 5, 3 failed ones do not: p = 2 / C(6, 3) = 0.1, F = e^-0.2, IG =
    # 1 bit, asin 1 - asin 0 = pi / 2. Token 1 is everywhere: p = 1, IG = 0, nothing is added. 6
    # mirrors 5.
    batch = batch_of(
        [[1, 5], [1, 5], [1, 5], [1, 6], [1, 6], [1, 6]], reward=[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    )
    found_NT = rules.ktae(spread([0.0] * 6, batch), batch, frequency_weight=0.0)
    key = math.tanh((math.exp(-0.2) + 1) / 2 * math.pi / 2 / 2)
    assert_rows(found_NT, [[0, key]] * 3 + [[0, -key]] * 3)
    # with frequencies the one-sided token saturates: 0.5 * 3 / (0.5 + 2) / 1e-5 = 6e4
    assert_rows(rules.ktae(spread([0.0] * 6, batch), batch), [[0, 1]] * 3 + [[0, -1]] * 3)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 5), (4, 4), (7, 2)])
def test_fisher_and_information_gain_equal_scipy(sizes):
    scipy = pytest.importorskip("scipy.stats")
    right, wrong = sizes
    for a, b in itertools.product(range(right + 1), range(wrong + 1)):
        tables = Tables(*(torch.tensor([x], dtype=torch.float64) for x in (a, b, right, wrong)))
        assert float(fisher_exact(tables)) == pytest.approx(
            scipy.fisher_exact([[a, b], [right - a, wrong - b]]).pvalue, abs=1e-12
        )
        joint = [x / (right + wrong) for x in (a, b, right - a, wrong - b)]
        given = sum(
            scipy.entropy(pair, base=2) * sum(pair) for pair in (joint[:2], joint[2:]) if sum(pair)
        )
        assert float(information_gain(tables)) == pytest.approx(
            scipy.entropy([right, wrong], base=2) - given, abs=1e-12
        )


def test_focal_by_hand():
    # solve rates 3/4 and 1/2: factors (1/4)^2 and (1/2)^2
    batch = batch_of(
        [[1], [1], [1], [1], [1], [1]],
        group=[0, 0, 0, 0, 1, 1],
        reward=[1.0, 1.0, 1.0, 0.0, 0.0, 1.0],
    )
    assert_rows(rules.focal(spread([16.0] * 6, batch), batch, gamma=2.0), [[1]] * 4 + [[4]] * 2)


def test_kl_penalty_by_hand():
    # logp - ref = 2: k1 = 2, k2 = 2, k3 = e^-2 + 1
    batch = batch_of([[1]], sampler_logp=[[-1.0]], ref_logp=[[-3.0]])
    found = [
        float(rules.kl_penalty(spread([1.0], batch), batch, estimator=k, coef=0.5))
        for k in ("k1", "k2", "k3")
    ]
    assert found == pytest.approx([0.0, 0.0, 1 - 0.5 * (math.exp(-2) + 1)])


def test_kl_estimators_near_zero_agree():
    logp = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    for name in KL_ESTIMATORS:
        assert kl_estimator(name)(logp, logp).tolist() == [0.0, 0.0]
    gap = kl_estimator("k3")(logp, logp + 1e-6)
    torch.testing.assert_close(gap, kl_estimator("k2")(logp, logp + 1e-6), rtol=1e-3, atol=0)


def many_candidates():
    """60 rollouts of one token; the rewarded half is confident, so its 30 tokens lie in
    the band.
    """
    batch = batch_of(
        [[i] for i in range(60)], sampler_logp=[[-0.01 if i < 30 else -5.0] for i in range(60)]
    )
    return batch, spread([1.0] * 30 + [-1.0] * 30, batch)


def test_covariance_draws_its_share_from_the_band():
    batch, credit_NT = many_candidates()
    cov_NT = token_covariance(batch.sampler_logp_NT, credit_NT, batch.mask_NT)
    assert int(((cov_NT > 1) & (cov_NT < 5)).sum()) == 60
    counts = torch.zeros(60)
    for seed in range(300):
        found_NT = rules.covariance(
            credit_NT, batch, fraction=0.1, generator=seeded_generator(seed, 0, "draw")
        )
        dropped_N = (found_NT == 0).flatten()
        assert int(dropped_N.sum()) == 6  # floor(0.1 * 60)
        counts += dropped_N
    # each is drawn with probability 0.1: mean 30, standard deviation 5.2
    assert counts.min() > 30 - 5 * 5.2
    assert counts.max() < 30 + 5 * 5.2
    again = [
        rules.covariance(credit_NT, batch, fraction=0.1, generator=seeded_generator(1, 2, "draw"))
        for _ in range(2)
    ]
    assert torch.equal(*again)


def test_covariance_drops_at_least_one_and_none_outside_the_band():
    batch, credit_NT = many_candidates()
    assert int((rules.covariance(credit_NT, batch) == 0).sum()) == 1
    assert torch.equal(rules.covariance(credit_NT, batch, low=100.0, high=200.0), credit_NT)
    report = rules.covariance.report(credit_NT, rules.covariance(credit_NT, batch), batch)
    assert (float(report["dropped"]), float(report["band_frac"])) == (1.0, 1.0)


@pytest.mark.parametrize("level", [0.0, 0.3, 0.8, 1.0])
def test_pooled_quantile_equals_torch(level):
    value_NT = torch.rand(7, 11, dtype=torch.float64, generator=seeded_generator(0, 0, "q"))
    mask_NT = torch.rand(7, 11, generator=seeded_generator(0, 1, "q")) < 0.7
    torch.testing.assert_close(
        pooled_quantile(value_NT, mask_NT, level),
        torch.quantile(value_NT[mask_NT], level),
        rtol=0,
        atol=0,
    )


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
        entropy_NT = 3 * torch.rand(6, 40, generator=seeded_generator(seed, 0, "entropy"))
        mask_NT = torch.arange(40) < torch.randint(
            1, 41, (6, 1), generator=seeded_generator(seed, 0, "mask")
        )
        ones_NT = torch.ones(6, 40)
        batch = TokenBatch(
            ones_NT.long(),
            mask_NT,
            torch.zeros(6).long(),
            torch.zeros(6),
            -ones_NT,
            entropy_NT=entropy_NT,
        )
        theirs_NT = trl.GRPOTrainer.get_high_entropy_mask(Host(), entropy_NT, mask_NT, 1 - fraction)
        assert torch.equal(
            rules.top_entropy(ones_NT * mask_NT, batch, fraction=fraction) != 0, theirs_NT
        )
