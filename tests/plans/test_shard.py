from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import counterpoise as cp
from counterpoise.plans import shard
from helpers.reference_batches import batch_of, prompts


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    num_ranks=st.integers(1, 5),
    budget=st.none() | st.integers(1, 120),
    max_rows=st.none() | st.integers(1, 6),
    by_group=st.booleans(),
    data=st.data(),
)
def test_shard_holds_every_row_once_within_its_limits(
    lengths, num_ranks, budget, max_rows, by_group, data
):
    row_R = torch.tensor(
        data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
    )
    length_N, group_N = torch.tensor(lengths), torch.arange(len(lengths)) // 3
    ranks = shard(
        row_R,
        length_N,
        num_ranks=num_ranks,
        token_budget=budget,
        max_rows=max_rows,
        groups=group_N if by_group else None,
    )
    assert len(ranks) == num_ranks
    micro_batches = [micro for rank in ranks for micro in rank]
    assert sorted(torch.cat(micro_batches).tolist()) == sorted(row_R.tolist())
    for micro in micro_batches:
        assert len(micro) > 0
        assert max_rows is None or len(micro) <= max_rows
        assert (
            budget is None or len(micro) == 1 or len(micro) * int(length_N[micro].max()) <= budget
        )
    if by_group:
        owners = [{int(group_N[row]) for micro in rank for row in micro} for rank in ranks]
        assert not any(a & b for a, b in itertools.combinations(owners, 2))
    else:
        # the greedy bound: the fullest rank was the emptiest before its last row
        loads = [sum(int(length_N[micro].sum()) for micro in rank) for rank in ranks]
        assert max(loads) - min(loads) <= int(length_N[row_R].max())


def test_shard_by_hand():
    """Longest first: 9 -> rank 0, 8 -> rank 1, 3 -> rank 1 (8 < 9), 2 -> rank 0 (9 < 11).

    Budget 9: 2 rows of 9 or 8 are too many.
    """
    length_N = torch.tensor([9, 2, 3, 8])
    assert [
        [m.tolist() for m in rank]
        for rank in shard(torch.arange(4), length_N, num_ranks=2, token_budget=9)
    ] == [
        [[0], [1]],
        [[3], [2]],
    ]
    assert [[m.tolist() for m in rank] for rank in shard(torch.tensor([3, 1]), length_N)] == [
        [[3, 1]]
    ]
    assert [
        [m.tolist() for m in rank] for rank in shard(torch.arange(4), length_N, max_rows=3)
    ] == [[[0, 3, 2], [1]]]
    assert [
        [m.tolist() for m in rank] for rank in shard(torch.arange(4), length_N, token_budget=5)
    ] == [[[0], [3], [2], [1]]]
    assert shard(torch.tensor([2]), length_N, num_ranks=3)[1:] == [[], []]


def test_shard_cuts_change_no_gradient():
    """A update cut into ranks and micro-batches by positions gives the gradient of the whole update."""
    batch = batch_of(*prompts(6, 4))
    method = cp.method("grpo")
    rows = method.rows(batch, method.assign(batch), torch.arange(24))
    logp_NT = (
        torch.rand(
            batch.mask_NT.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        - 1.5
    ).requires_grad_()
    (method.loss(logp_NT, rows).loss_NT * rows.scale_NT).sum().backward()
    whole_NT, logp_NT.grad = logp_NT.grad, None
    for rank in shard(torch.arange(24), batch.length_N, num_ranks=3, token_budget=130):
        for pick_R in rank:
            cut = rows.select(pick_R)
            (method.loss(logp_NT[pick_R], cut).loss_NT * cut.scale_NT).sum().backward()
    assert whole_NT.abs().sum() > 0
    torch.testing.assert_close(logp_NT.grad, whole_NT, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be an integer >= 1, got 0"),
        ({"num_ranks": None}, "num_ranks must be an integer >= 1, got None"),
        ({"token_budget": 0}, "token_budget must be an integer >= 1 or None, got 0"),
        ({"max_rows": 1.5}, "max_rows must be an integer >= 1 or None, got 1.5"),
    ],
)
def test_shard_bad_parameters(params, message):
    with pytest.raises(ValueError, match=f"shard: {message}"):
        shard(torch.arange(2), torch.ones(2), **params)
