from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoise.reductions import REDUCTIONS
from counterpoise.stage import call
from helpers import reference_batches as reference
from helpers.reference_batches import on_ranks
from helpers.strategies import ragged_batches


@st.composite
def steps_of(draw):
    """A update's mask, credit (with zeros) and advantage (with zeros)."""
    batch = draw(ragged_batches())
    n, t = batch.mask_NT.shape
    advantage_N = torch.tensor(
        draw(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 2.0]), min_size=n, max_size=n)),
        dtype=torch.float64,
    )
    keep = draw(st.lists(st.booleans(), min_size=n * t, max_size=n * t))
    credit_NT = torch.where(
        batch.mask_NT & torch.tensor(keep).reshape(n, t), advantage_N[:, None], 0
    )
    return batch.mask_NT, credit_NT, advantage_N


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("per_token", {}),
        ("per_token", {"count": "credited"}),
        ("per_sequence", {}),
        ("per_sequence", {"count": "credited"}),
        ("constant_length", {}),
        ("constant_length", {"length": 7}),
        ("side_means", {}),
    ],
)
@settings(max_examples=40)
@given(update=steps_of())
def test_reduction_twin(name, params, update):
    mask_NT, credit_NT, advantage_N = update
    lengths = mask_NT.sum(1).tolist()
    expected_NT = torch.zeros_like(credit_NT)
    for i, row in enumerate(
        getattr(reference, name)(lengths, credit_NT.tolist(), advantage_N.tolist(), **params)
    ):
        expected_NT[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    got_NT = REDUCTIONS[name](mask_NT, credit_NT, advantage_N, **params)
    assert got_NT.dtype == credit_NT.dtype
    torch.testing.assert_close(got_NT, expected_NT, rtol=1e-13, atol=0)
    assert (got_NT[~mask_NT] == 0).all()


@pytest.mark.parametrize("name", list(REDUCTIONS))
@pytest.mark.parametrize("count", [None, "credited"])
def test_reductions_pool_over_ranks(name, count):
    """Ranks of 2, 0 and 1 rows: the denominators are those of the whole update."""
    mask_NT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    advantage_N = torch.tensor([1.0, -1.0, -2.0], dtype=torch.float64)
    credit_NT = (
        advantage_N[:, None] * mask_NT * torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [1, 0, 0, 0]])
    )
    params = {"count": count} if count and name in ("per_token", "per_sequence") else {}
    parts = [slice(0, 2), slice(2, 2), slice(2, 3)]
    got = on_ranks(
        [
            lambda reduce, p=part: call(
                REDUCTIONS[name], mask_NT[p], credit_NT[p], advantage_N[p], reduce=reduce, **params
            )
            for part in parts
        ]
    )
    torch.testing.assert_close(
        torch.cat(got),
        REDUCTIONS[name](mask_NT, credit_NT, advantage_N, **params),
        rtol=1e-14,
        atol=0,
    )


def test_side_means_by_hand():
    """Two positives of 2 and 4 tokens, one negative of 1, one of advantage 0: 1/2 * 1/2 * 1/2, 1/2
    * 1/2 * 1/4, 1/2 * 1/1 * 1/1, 0.
    """
    mask_NT = torch.arange(4) < torch.tensor([[2], [4], [1], [3]])
    advantage_N = torch.tensor([1.0, 1.0, -1.0, 0.0])
    got_NT = REDUCTIONS["side_means"](mask_NT, torch.zeros(4, 4), advantage_N)
    assert [row[0] for row in got_NT.tolist()] == [0.125, 0.0625, 0.5, 0.0]
    one_sided_NT = REDUCTIONS["side_means"](mask_NT[:2], torch.zeros(2, 4), advantage_N[:2])
    torch.testing.assert_close(one_sided_NT, got_NT[:2], rtol=0, atol=0)


def test_empty_cases_are_zero():
    mask_NT, none_NT = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    for name in ("per_token", "per_sequence"):
        assert (
            REDUCTIONS[name](mask_NT, none_NT, torch.zeros(2), count="credited").tolist()
            == none_NT.tolist()
        )
    assert REDUCTIONS["side_means"](mask_NT, none_NT, torch.zeros(2)).tolist() == none_NT.tolist()


def test_constant_length_prefers_its_parameter_then_the_limit_then_the_longest():
    update = torch.tensor([[True, True], [True, False]]), torch.zeros(2, 2), torch.ones(2)
    first = [
        float(REDUCTIONS["constant_length"](*update, **params)[0, 0])
        for params in ({"length": 5, "max_length": 4}, {"max_length": 4}, {})
    ]
    assert first == pytest.approx([1 / 10, 1 / 8, 1 / 4])


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "per_token",
            {"count": "tokens"},
            "per_token: count must be one of mask, credited, got 'tokens'",
        ),
        (
            "per_sequence",
            {"count": None},
            "per_sequence: count must be one of mask, credited, got None",
        ),
        (
            "constant_length",
            {"length": 0},
            "constant_length: length must be a whole number >= 1 or None, got 0",
        ),
        (
            "constant_length",
            {"length": 2.5},
            "constant_length: length must be a whole number >= 1 or None, got 2.5",
        ),
    ],
)
def test_reduction_bad_parameters(name, params, message):
    with pytest.raises(ValueError, match=message):
        REDUCTIONS[name](
            torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1), torch.ones(1), **params
        )


def test_side_means_of_turns():
    """A rollout with turns of both signs is on both sides: two rollouts are positive, with 2 and 1
    tokens there, one negative with 1; an advantage of 0 is on no side.
    """
    mask_NT = torch.tensor([[True, True, False, True], [True, False, False, True]])
    advantage_NT = torch.tensor([[2.0, 2.0, 0.0, -1.0], [3.0, 0.0, 0.0, 0.0]])
    scale_NT = REDUCTIONS["side_means"](
        mask_NT, advantage_NT, torch.tensor([1.0, 1.0]), advantage_NT=advantage_NT
    )
    assert scale_NT.tolist() == [[1 / 8, 1 / 8, 0, 1 / 2], [1 / 4, 0, 0, 0]]
    one_N1 = torch.tensor([[1.0], [-1.0]])
    by_rollout_NT = REDUCTIONS["side_means"](mask_NT, advantage_NT, one_N1[:, 0])
    by_turn_NT = REDUCTIONS["side_means"](
        mask_NT, advantage_NT, one_N1[:, 0], advantage_NT=one_N1 * mask_NT
    )
    assert torch.equal(by_rollout_NT, by_turn_NT)


@pytest.mark.parametrize("name", list(REDUCTIONS))
def test_reductions_pickle(name):
    stage = REDUCTIONS[name]
    assert pickle.loads(pickle.dumps(stage())) == stage
