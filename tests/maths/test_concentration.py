"""Gini coefficient and effective share of credit: known values, the double sum, laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import counterpoise as cp
from counterpoise.maths.concentration import concentration, effective_frac, gini
from helpers.credit_cases import batch_of, on_two_ranks
from helpers.full_batch import make_batch

ROWS = [[1.0, 1.0, 1.0, 1.0], [4.0, 0.0, 0.0, 0.0], [1.0, 3.0]]


def ragged(rows):
    width = max(map(len, rows))
    size_NT = torch.tensor([row + [9.0] * (width - len(row)) for row in rows]).double()
    return size_NT, torch.arange(width) < torch.tensor([[len(row)] for row in rows])


def test_known_values():
    assert gini(*ragged(ROWS)).tolist() == pytest.approx([0, 0.75, 0.25])
    assert effective_frac(*ragged(ROWS)).tolist() == pytest.approx([1, 0.25, 0.8])


@given(rows=st.lists(st.lists(st.integers(0, 5).map(float), min_size=1, max_size=6), min_size=1))
def test_gini_is_the_double_sum_and_holes_count_for_nothing(rows):
    size_NT, mask_NT = ragged(rows)
    order_T = torch.randperm(size_NT.shape[1], generator=torch.Generator().manual_seed(0))
    for row, one, two, share in zip(
        rows,
        gini(size_NT, mask_NT).tolist(),
        gini(size_NT[:, order_T], mask_NT[:, order_T]).tolist(),
        effective_frac(size_NT, mask_NT).tolist(),
    ):
        total, n = math.fsum(row), len(row)
        pairs = math.fsum(abs(a - b) for a in row for b in row)
        assert one == pytest.approx(pairs / (2 * n * total) if total else 0, abs=1e-12)
        assert two == pytest.approx(one, abs=1e-12)
        squares = math.fsum(w * w for w in row)
        assert share == pytest.approx(total**2 / (n * squares) if total else 0, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_the_scale_of_credit_does_not_matter(scale):
    size_NT, mask_NT = ragged(ROWS)
    assert gini(scale * size_NT, mask_NT).tolist() == pytest.approx([0, 0.75, 0.25])
    assert effective_frac(scale * size_NT, mask_NT).tolist() == pytest.approx([1, 0.25, 0.8])


def test_rollouts_without_credit_are_left_out_and_signs_do_not_matter():
    size_NT, mask_NT = ragged([*ROWS, [0.0, 0.0]])
    sign_N1 = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]])
    numbers = concentration(sign_N1 * size_NT, mask_NT)
    assert float(numbers["gini"]) == pytest.approx(1 / 3)
    assert float(numbers["effective_frac"]) == pytest.approx(2.05 / 3)
    nothing = concentration(0 * size_NT, mask_NT)
    assert {key: float(value) for key, value in nothing.items()} == {"gini": 0, "effective_frac": 0}


def test_two_ranks_log_the_numbers_of_one():
    batch = batch_of([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2]])
    credit_NT, _ = ragged(ROWS)

    def rule(credit_NT, batch, *, reduce):
        return torch.stack([*concentration(credit_NT, batch.mask_NT, reduce).values()])

    for numbers in on_two_ranks(rule, credit_NT, batch, torch.tensor([True, False, False])):
        assert numbers.tolist() == pytest.approx([1 / 3, 2.05 / 3])


@pytest.mark.parametrize("name", ["grpo", "top_entropy", "delta"])
def test_every_method_logs_them_from_the_credit_that_the_loss_uses(name):
    batch = make_batch()
    credit = cp.method(name).assign(batch)
    expected = concentration(credit.credit_NT, batch.mask_NT)
    for key, value in expected.items():
        assert credit.metrics[f"credit/{key}"] == float(value)
    if name == "grpo":
        assert credit.metrics["credit/gini"] == pytest.approx(0, abs=1e-12)
        assert credit.metrics["credit/effective_frac"] == pytest.approx(1)
    assert "credit/gini" not in cp.method(name).assign(batch, report=False).metrics
