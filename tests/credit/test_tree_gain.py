"""TEMPO: values of prefixes from the group alone, by hand and by twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import counterpoise as cp
from counterpoise import credit as rules
from helpers import reference_credit as reference
from helpers.credit_cases import as_lists, assert_rows, batch_of, credited_batches, laws


def test_three_rollouts_by_hand():
    batch = batch_of([[1, 2], [1, 3], [4, 5]], reward=[1.0, 0.0, 0.0])
    advantage_N = cp.advantages.group_mean(batch.reward_N, batch.group_N)
    credit_NT = rules.tree_gain(advantage_N[:, None] * batch.mask_NT, batch, std=False)
    assert_rows(credit_NT, [[5 / 6, 7 / 6], [-1 / 6, -5 / 6], [-2 / 3, -1 / 3]])


@laws
@given(data=credited_batches())
@pytest.mark.parametrize("std", [False, True])
def test_tree_gain_equals_its_twin(data, std):
    batch, credit_NT = data
    expected = reference.tree_gain(
        as_lists(credit_NT, batch), reference.Rollouts(batch), std, eps=1e-6
    )
    assert_rows(rules.tree_gain(credit_NT, batch, std=std), expected)


def test_a_rollout_alone_has_plain_grpo():
    """Different from the first token on: the first has the whole gain, the rest GRPO's credit."""
    batch = batch_of([[1, 2, 3], [4, 2, 3]], reward=[1.0, 0.0])
    credit_NT = cp.method("tempo").assign(batch).credit_NT
    plain_NT = cp.method("grpo", advantage={"eps": 1e-6}).assign(batch).credit_NT
    assert torch.equal(credit_NT[:, 1:], plain_NT[:, 1:])
    torch.testing.assert_close(credit_NT[:, 0], 2 * plain_NT[:, 0])


def test_a_reply_that_differs_is_no_gain_of_the_model():
    """Equal actions, another reply and another reward: what parted them was not the model."""
    batch = batch_of([[1, 7, 2], [1, 8, 2]], reward=[1.0, 0.0])
    batch = batch.replace(mask_NT=torch.tensor([[True, False, True]] * 2))
    zero_NT = torch.zeros(2, 3, dtype=torch.float64)
    assert not rules.tree_gain(zero_NT, batch).any()


def test_constant_groups_get_nothing():
    batch = batch_of([[1, 2], [1, 3]], reward=[1.0, 1.0])
    assert not cp.method("tempo").assign(batch).credit_NT.any()
