"""A TokenBatch says what is wrong with a column before any rule reads it."""

from __future__ import annotations

import pytest
import torch

from counterpoise.types import TokenBatch


def columns(**changed):
    given = {
        "token_ids_NT": torch.tensor([[5, 6], [5, 7]]),
        "mask_NT": torch.ones(2, 2),
        "group_N": torch.tensor([0, 0]),
        "reward_N": torch.tensor([1.0, 0.0]),
        "sampler_logp_NT": torch.full((2, 2), -0.5),
    }
    return given | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward_N": [1.0, 0.0]}, "reward_N must be a tensor, got list.*from_lists"),
        ({"mask_NT": None}, "mask_NT must be a tensor, got NoneType"),
        ({"token_ids_NT": torch.full((2, 2), torch.inf)}, "token_ids_NT must hold whole numbers"),
        ({"group_N": torch.tensor([True, False])}, "group_N must hold whole numbers"),
        ({"reward_N": torch.tensor([1, 0])}, "reward_N must hold floating point, got torch.int64"),
        ({"entropy_NT": torch.ones(2, 2).to(torch.complex64)}, "entropy_NT must hold floating"),
        ({"extra": {"mine": [1, 2]}}, r"extra\['mine'\] must be a tensor, got list"),
        ({"reward_N": torch.tensor([1e30, 0.0])}, r"beyond 1e\+15, at rollouts \[0\]"),
        ({"max_length": 0}, "max_length must be a whole number >= 1 or None, got 0"),
    ],
)
def test_a_column_of_the_wrong_kind_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        TokenBatch(**columns(**changed))


def test_a_mask_may_be_of_any_number():
    assert TokenBatch(**columns()).mask_NT.dtype == torch.bool
