"""OAR's rule: the book's values, constant and missing scores, holes, the preset."""

from __future__ import annotations

import math

import pytest
import torch

import counterpoise as cp
from counterpoise import credit as rules
from counterpoise.credit.influence import row_quantile
from helpers.credit_cases import assert_rows, batch_of, spread

RAW = (0.1, 2 / 3, 1.2, 2.0)


def scored(importance: list[list[float]]) -> cp.TokenBatch:
    return batch_of([list(range(len(row))) for row in importance], importance=importance)


def test_values_of_the_book():
    """I = (0, .25, .5, 1), tau = .375: raw (.1, .66667, 1.2, 2), times 4 / 3.96667."""
    batch = scored([[math.expm1(x) for x in (0.0, 0.25, 0.5, 1.0)]])
    credit_NT = rules.answer_influence(spread([1.0], batch), batch, quantile=0.5, beta=1.0)
    assert credit_NT[0].tolist() == pytest.approx([0.10084, 0.67227, 1.21008, 2.01681], abs=5e-6)
    assert_rows(credit_NT, [[4 * x / sum(RAW) for x in RAW]])


def test_the_answer_is_left_alone_and_the_rest_keeps_its_sum():
    """The two last tokens have no score; the others are the book's, on the side of the credit."""
    scores = [math.expm1(x) for x in (0.0, 0.25, 0.5, 1.0)]
    batch = scored([[*scores, -1.0, -1.0]])
    credit_NT = rules.answer_influence(spread([-3.0], batch), batch)
    assert_rows(credit_NT, [[*(-12 * x / sum(RAW) for x in RAW), -3.0, -3.0]])
    assert float(credit_NT.sum()) == pytest.approx(-18)


@pytest.mark.parametrize(
    "row",
    [[0.3] * 3, [0.0] * 3, [-1.0] * 3, [0.7, -1.0, -1.0], [1e-9, 0.0, 5e-9], [-1.0, 0.2, 0.2]],
)
def test_constant_and_missing_scores_change_no_bit(row):
    batch = scored([row])
    credit_NT = spread([0.7], batch)
    assert torch.equal(rules.answer_influence(credit_NT, batch), credit_NT)


def test_ends_of_the_quantile():
    """q = 0: tau is the least, nothing is damped; q = 1: tau is the largest, nothing is raised."""
    batch = scored([[math.expm1(x) for x in (0.0, 0.5, 1.0)]])
    ones_NT = spread([1.0], batch)
    assert_rows(rules.answer_influence(ones_NT, batch, quantile=0.0), [[2 / 3, 1, 4 / 3]])
    assert_rows(
        rules.answer_influence(ones_NT, batch, quantile=1.0), [[0.3 / 1.6, 1.5 / 1.6, 3 / 1.6]]
    )


def test_environment_tokens_are_not_there():
    """A hole in the mask changes neither the scale nor the quantile, whatever its score."""
    whole, without = scored([[0.1, 9.0, 0.4, 0.2]]), scored([[0.1, 0.4, 0.2]])
    mask_NT = torch.tensor([[True, False, True, True]])
    holed = whole.replace(mask_NT=mask_NT)
    got_NT = rules.answer_influence(spread([1.0], holed), holed)
    expected_NT = rules.answer_influence(spread([1.0], without), without)
    torch.testing.assert_close(got_NT[mask_NT], expected_NT[0])
    assert got_NT[0, 1] == 0


def test_a_quantile_of_each_row_is_torch_quantile():
    gen = torch.Generator().manual_seed(0)
    value_NT = torch.rand(6, 9, generator=gen, dtype=torch.float64)
    mask_NT = torch.rand(6, 9, generator=gen) < 0.6
    mask_NT[0] = False
    for level in (0.0, 0.1, 0.5, 0.75, 1.0):
        got_N = row_quantile(value_NT, mask_NT, level)[:, 0]
        assert got_N[0] == 0
        for row in range(1, 6):
            torch.testing.assert_close(
                got_N[row], torch.quantile(value_NT[row, mask_NT[row]], level)
            )


def test_the_scale_of_small_scores_does_not_matter():
    """Noise of another size scales all scores of a rollout alike, and log1p hardly bends them."""
    row = [1e-6, 4e-6, 9e-6, 2e-5]
    one, ten = scored([row]), scored([[10 * x for x in row]])
    torch.testing.assert_close(
        *(rules.answer_influence(spread([1.0], b), b) for b in (one, ten)), rtol=1e-3, atol=0
    )


def test_the_preset_and_its_numbers():
    method = cp.method("oar")
    assert method.needs == {"importance_NT"}
    assert method.describe()["reduction"] == {"name": "per_sequence"}
    assert [term["name"] for term in method.describe()["loss"]] == ["clipped"]
    importance = [[0.0, 0.3, -1.0], [-1.0] * 3]
    batch = batch_of([[1, 2, 3], [1, 2, 4]], reward=[1.0, 0.0], importance=importance)
    credit = method.assign(batch)
    assert credit.metrics["credit/answer_influence/scored_frac"] == 0.5
    assert credit.metrics["credit/answer_influence/tau"] == 0.5
    assert credit.weight_NT[1].tolist() == pytest.approx([1.0] * 3)


def test_a_missing_column_says_how_to_measure_it():
    with pytest.raises(ValueError, match=r"importance_NT.*measure_importance"):
        cp.method("oar").assign(batch_of([[1, 2], [1, 3]], reward=[1.0, 0.0]))
    with pytest.raises(ValueError, match="importance_NT is not finite on response tokens"):
        scored([[0.1, math.nan]])
