"""What is wrong with a batch is said by column, rollout and token, with what was expected."""

from __future__ import annotations

import re

import pytest
import torch

from counterpoise import TokenBatch

NAN = float("nan")
GOOD = {
    "token_ids": [[5, 6, 7], [5, 8]],
    "group": [0, 0],
    "reward": [1.0, 0.0],
    "sampler_logp": [[-0.1, -0.2, -0.3], [-0.1, -2.0]],
}
WRONG = [
    ({"sampler_logp": [[-0.1, -0.2], [-1, -2]]}, "sampler_logp of rollout 0 has 2 numbers, expec"),
    (
        {"sampler_logp": [[-0.1, -0.2, -0.3]]},
        "sampler_logp has 1 list, expected 2, one per rollout",
    ),
    ({"entropy": [[1, 2, 3], [1]]}, "entropy of rollout 1 has 1 number, expected 2, one per token"),
    ({"group": [0]}, "group has 1 number, expected 2, one per rollout"),
    ({"reward": [1.0, 0.0, 1.0]}, "reward has 3 numbers, expected 2, one per rollout"),
    ({"reward": 1.0}, "reward must be a list with one number per rollout, got float 1.0"),
    ({"reward": [1.0, "0"]}, "reward of rollout 1 is str '0', expected a number"),
    ({"reward": [1.0, [0.0]]}, "reward of rollout 1 is list [0.0], expected a number"),
    ({"reward": [1.0, NAN]}, "reward_N is not finite, or beyond 1e+15, at rollouts [1] (the first"),
    ({"group": [0, 0.5]}, "group of rollout 1 is float 0.5, expected a whole number"),
    ({"group": ["a", "a"]}, "group of rollout 0 is str 'a', expected a whole number per rollout."),
    ({"token_ids": [5, 6, 7]}, "token_ids of rollout 0 must be a list with one number per token"),
    ({"token_ids": ["abc", "de"]}, "token_ids of rollout 0 must be a list with one number per"),
    ({"token_ids": None}, "token_ids must be a list of lists, one per rollout, got None"),
    ({"token_ids": [[5, 6.5, 7], [5, 8]]}, "token_ids at token 1 of rollout 0 is float 6.5, expec"),
    ({"token_ids": [[5, 6, 7], [5, None]]}, "token_ids at token 1 of rollout 1 is None, expected"),
    ({"token_ids": [[5, 6, 2**70], [5, 8]]}, "token_ids at token 2 of rollout 0 is int 118059"),
    ({"sampler_logp": [[-1, "x", -1], [-1, -1]]}, "sampler_logp at token 1 of rollout 0 is str"),
    ({"sampler_logp": [[-1, -1, -1], [-1, NAN]]}, "(nan at token 1 of rollout 1)"),
    ({"sampler_logp": [-0.1, -0.2]}, "sampler_logp of rollout 0 must be a list with one number"),
    ({"entropi": [[1, 2, 3], [1, 2]]}, "unknown column 'entropi'. Did you mean 'entropy'?"),
    ({"entropy_NT": [[1, 2, 3], [1, 2]]}, "given as entropy=[[...], [...]]"),
    ({"extra": [1]}, "extra must be a mapping of names to tensors, got list [1]"),
    ({"dtype": "float32"}, "dtype must be a floating point type"),
]


@pytest.mark.parametrize(("columns", "words"), WRONG)
def test_lists_that_are_wrong_say_where(columns, words):
    given = {**GOOD, **columns}
    with pytest.raises(ValueError, match=re.escape(words)) as raised:
        TokenBatch.from_lists(given.pop("token_ids"), **given)
    assert "\n" not in str(raised.value)


def test_whole_numbers_as_floats_and_columns_that_are_none_are_fine():
    given = {**GOOD, "group": [0.0, 0.0], "entropy": None}
    batch = TokenBatch.from_lists(given.pop("token_ids"), **given)
    assert batch.group_N.tolist() == [0, 0] and batch.entropy_NT is None


def test_tensors_of_the_wrong_kind_say_what_to_give():
    given = dict(GOOD)
    batch = TokenBatch.from_lists(given.pop("token_ids"), **given)
    with pytest.raises(ValueError, match=r"got torch.int64. Give reward_N.float\(\)"):
        batch.replace(reward_N=torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"got list. Give torch.tensor"):
        batch.replace(reward_N=[1.0, 0.0])
