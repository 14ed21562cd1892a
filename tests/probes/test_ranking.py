"""Weighted ranks, correlations and AUROC against loops over pairs and against scipy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from counterpoise.probes.ranking import (
    auroc,
    cosine,
    draw_weights,
    mid_rank,
    place,
    rank_correlation,
    share,
)

few = st.lists(st.integers(-3, 3), min_size=3, max_size=9)


@given(few, st.randoms(use_true_random=False))
def test_auroc_is_the_share_of_pairs_in_order(score: list[int], random):
    is_hit = [random.random() < 0.5 for _ in score]
    weight = [random.randint(1, 4) for _ in score]
    pairs = [
        (weight[i] * weight[j], (score[i] > score[j]) + 0.5 * (score[i] == score[j]))
        for i, j in itertools.product(range(len(score)), repeat=2)
        if is_hit[i] and not is_hit[j]
    ]
    ours = auroc(score, is_hit, np.array([weight], float))[0]
    if pairs:
        assert ours == pytest.approx(sum(w * x for w, x in pairs) / sum(w for w, _ in pairs))
    else:
        assert np.isnan(ours)


@given(few, st.randoms(use_true_random=False))
def test_a_whole_weight_is_that_many_equal_tokens(x: list[int], random):
    """Spearman of scipy on the tokens written out as often as they weigh."""
    y = [random.randint(-2, 2) for _ in x]
    weight = [random.randint(1, 3) for _ in x]
    written = [np.repeat(column, weight) for column in (x, y)]
    ours = rank_correlation(x, y, np.array([weight], float))[0]
    if np.ptp(x) and np.ptp(y):
        assert ours == pytest.approx(
            float(np.asarray(spearmanr(written[0], written[1])[0])), abs=1e-9
        )
    else:
        assert np.isnan(ours)


def test_each_draw_is_computed_on_its_own():
    rng = np.random.default_rng(0)
    x, y, hit = rng.normal(size=30).round(1), rng.normal(size=30), rng.random(30) < 0.3
    weight_BM = draw_weights(rng.random(30), np.arange(30) % 5)
    for b in (0, 1, 7, 2000):
        alone = weight_BM[b : b + 1]
        assert rank_correlation(x, y, weight_BM)[b] == pytest.approx(rank_correlation(x, y, alone))
        assert auroc(x, hit, weight_BM)[b] == pytest.approx(auroc(x, hit, alone)[0])
        assert cosine(x, y, weight_BM)[b] == pytest.approx(cosine(x, y, alone)[0])


def test_a_prompt_is_drawn_whole_and_few_prompts_have_no_draws():
    weight_BM = draw_weights([1.0, 2.0, 3.0, 4.0], [0, 0, 1, 2])
    assert weight_BM[0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert np.array_equal(weight_BM[:, 1], 2 * weight_BM[:, 0])
    assert np.isnan(draw_weights([1.0, 2.0], [0, 1])[1:]).all()
    assert np.isnan(
        rank_correlation([1, 2, 3], [1, 2, 3], draw_weights([1] * 3, [0, 0, 1]))[1:]
    ).all()


def test_shares_by_hand():
    assert share([1.0, 3.0], [True, False], np.array([[1.0, 1.0], [3.0, 1.0]])).tolist() == [
        0.25,
        0.5,
    ]
    assert np.isnan(share([0.0, 0.0], [True, False], np.ones((1, 2)))[0])
    assert mid_rank([1.0, 1.0], np.array([[3.0, 1.0]])).tolist() == [[2.0, 2.0]]


@given(few, st.integers(0, 8))
def test_a_tokens_place_is_the_mean_over_all_orders_of_its_ties(score: list[int], at: int):
    score, at = score[:6], at % len(score[:6])
    orders = [
        order
        for order in itertools.permutations(range(len(score)))
        if all(score[a] >= score[b] for a, b in itertools.pairwise(order))
    ]
    row = torch.tensor([[*score, 99]], dtype=torch.float64)
    mask = torch.tensor([[True] * len(score) + [False]])
    percentile, reciprocal = place(row, mask, torch.tensor([at]))
    ranks = [order.index(at) + 1 for order in orders]
    assert float(reciprocal) == pytest.approx(np.mean([1 / rank for rank in ranks]))
    expected = np.mean([(len(score) - rank) / (len(score) - 1) for rank in ranks])
    assert float(percentile) == pytest.approx(expected)
