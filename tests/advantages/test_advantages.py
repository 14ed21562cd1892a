from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import counterpoise as cp
from counterpoise.advantages import ADVANTAGES, overlong_penalty
from counterpoise.stage import call
from helpers import reference_advantages as reference
from helpers.reference_batches import on_ranks
from helpers.strategies import ragged_batches

many = settings(max_examples=50)
COMPARE = ["group_mean", "group_zscore", "leave_one_out", "group_mean_batch_std", "max_rl", "fade"]
ALONE = [
    "batch_whitened",
    "signs",
    "positives_only",
    "negatives_only",
    "weighted_signs",
    "constant",
]
REWARDS_ALONE = [*COMPARE, *ALONE]  # overlong reads lengths too: its tests are at the end
SETTINGS = [
    ("group_mean", {}),
    ("group_zscore", {}),
    ("group_zscore", {"eps": 0.01}),
    ("leave_one_out", {}),
    ("batch_whitened", {}),
    ("group_mean_batch_std", {}),
    ("signs", {}),
    ("positives_only", {}),
    ("negatives_only", {}),
    ("weighted_signs", {}),
    ("weighted_signs", {"positive": 2.5}),
    ("max_rl", {}),
]


def assert_close(got, expected):
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), rtol=1e-11, atol=1e-11)


def test_every_estimator_is_tested():
    assert {*REWARDS_ALONE, "overlong"} == set(ADVANTAGES)


@pytest.mark.parametrize(("name", "params"), SETTINGS)
@many
@given(batch=ragged_batches(min_group_size=2, max_group_size=5, rewards=(0.0, 0.25, 0.7, 1.0)))
def test_twin(name, params, batch):
    expected = getattr(reference, name)(batch.reward_N.tolist(), batch.group_N.tolist(), **params)
    assert_close(ADVANTAGES[name](batch.reward_N, batch.group_N, **params), expected)


@many
@given(
    batch=ragged_batches(min_group_size=2, max_group_size=6),
    alpha=st.sampled_from([0.5, 1.0, 1.5, 3.0]),
    delta=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_fade_twin(batch, alpha, delta):
    expected = reference.fade(batch.reward_N.tolist(), batch.group_N.tolist(), alpha, delta)
    assert_close(
        ADVANTAGES["fade"](batch.reward_N, batch.group_N, alpha=alpha, delta=delta), expected
    )


# Two prompts, rows interleaved. Prompt 4: rewards 1, 0, 0, 1 -> m = 1/2, s = sqrt(4 * 1/4 / 3) =
# sqrt(1/3). Prompt 9: all 1, constant.
REWARD_N = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
GROUP_N = torch.tensor([4, 9, 4, 9, 4, 4])


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("group_mean", {}, [0.5, 0, -0.5, 0, -0.5, 0.5]),
        # 0.5 / sqrt(1/3) = sqrt(3) / 2
        (
            "group_zscore",
            {"eps": 0.0},
            [3**0.5 / 2, 0, -(3**0.5) / 2, 0, -(3**0.5) / 2, 3**0.5 / 2],
        ),
        # 1 - (0 + 0 + 1) / 3 = 2/3
        ("leave_one_out", {}, [2 / 3, 0, -2 / 3, 0, -2 / 3, 2 / 3]),
        # mean 2/3, sum of squares 4 * 1/9 + 2 * 4/9 = 4/3, std = sqrt(4/15); (1/3) / sqrt(4/15) =
        # sqrt(15) / 6
        (
            "batch_whitened",
            {},
            [15**0.5 / 6, 15**0.5 / 6, -(15**0.5) / 3, 15**0.5 / 6, -(15**0.5) / 3, 15**0.5 / 6],
        ),
        # centred 0.5, 0, -0.5, 0, -0.5, 0.5: sum of squares 1, std = sqrt(1/5); 0.5 sqrt 5
        ("group_mean_batch_std", {}, [5**0.5 / 2, 0, -(5**0.5) / 2, 0, -(5**0.5) / 2, 5**0.5 / 2]),
        ("constant", {}, [-1] * 6),
        ("constant", {"value": 0.5}, [0.5] * 6),
        ("signs", {}, [1, 1, -1, 1, -1, 1]),
        ("positives_only", {}, [1, 1, 0, 1, 0, 1]),
        ("negatives_only", {}, [0, 0, -1, 0, -1, 0]),
        ("weighted_signs", {}, [0.1, 0.1, -1, 0.1, -1, 0.1]),
        # (1 - 1/2) / (1/2) = 1
        ("max_rl", {}, [1, 0, -1, 0, -1, 1]),
        # (1/2)^2 * 1/2 = 1/8; failures / 0.5
        ("fade", {"alpha": 3.0, "delta": 0.5}, [0.125, 0, -0.25, 0, -0.25, 0.125]),
    ],
)
def test_by_hand(name, params, expected):
    assert_close(ADVANTAGES[name](REWARD_N, GROUP_N, **params), expected)


@pytest.mark.parametrize("name", [*COMPARE, "batch_whitened"])
def test_seven_equal_rewards_are_exactly_zero(name):
    """0.7 is no float32: the mean of seven of them differs from each, and a small eps makes a large
    z-score of the rest.
    """
    value = 1.0 if name == "fade" else 0.7
    reward_N, group_N = torch.full((7,), value), torch.zeros(7, dtype=torch.long)
    params = {"eps": 1e-8} if name == "group_zscore" else {}
    assert ADVANTAGES[name](reward_N, group_N, **params).tolist() == [0.0] * 7


def test_naive_zscore_of_seven_equal_rewards_is_large():
    reward_N = torch.full((7,), 0.7)
    centred_N = reward_N - reward_N.sum() / 7
    assert centred_N[0] != 0
    assert (centred_N / (centred_N.square().sum().div(6).sqrt() + 1e-8)).abs().max() > 0.5


@pytest.mark.parametrize("name", COMPARE)
def test_one_rollout_a_prompt_is_an_error_that_names_what_works(name):
    with pytest.raises(ValueError, match=r"2 of 3 prompts have only one rollout") as error:
        ADVANTAGES[name](torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 1, 2, 2]))
    assert str(error.value).startswith(name)
    assert all(other in str(error.value) for other in set(ALONE) - {"constant"})
    assert "constant" not in str(error.value)


@pytest.mark.parametrize("name", ALONE)
def test_one_rollout_a_prompt_works(name):
    reward_N, group_N = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), torch.tensor([0, 1, 2])
    got_N = ADVANTAGES[name](reward_N, group_N)
    assert_close(got_N, getattr(reference, name)(reward_N.tolist(), group_N.tolist()))
    assert got_N.abs().sum() > 0


def test_a_batch_of_one_has_no_spread():
    with pytest.raises(
        ValueError,
        match="batch_whitened divides by the spread of the batch, but the batch has one rollout",
    ):
        ADVANTAGES["batch_whitened"](torch.tensor([1.0]), torch.tensor([0]))


@many
@given(batch=ragged_batches(min_group_size=2, max_group_size=5))
def test_special_cases(batch):
    reward_N, group_N = batch.reward_N, batch.group_N
    made = {name: fn(reward_N, group_N) for name, fn in ADVANTAGES.items() if name in REWARDS_ALONE}
    assert torch.equal(made["fade"], made["group_mean"])
    assert torch.equal(ADVANTAGES["weighted_signs"](reward_N, group_N, positive=1), made["signs"])
    assert torch.equal(
        ADVANTAGES["weighted_signs"](reward_N, group_N, positive=0), made["negatives_only"]
    )
    assert torch.equal(made["positives_only"] + made["negatives_only"], made["signs"])
    size_N = (group_N[:, None] == group_N).sum(1)
    torch.testing.assert_close(made["leave_one_out"], made["group_mean"] * size_N / (size_N - 1))


@many
@given(
    batch=ragged_batches(min_group_size=2, max_group_size=6),
    alpha=st.floats(0.5, 4.0),
    delta=st.floats(0.2, 2.0),
)
def test_fade_masses(batch, alpha, delta):
    """Sum of positive advantages over G is m (1 - m)^alpha, of negative ones that over delta."""
    advantage_N = ADVANTAGES["fade"](batch.reward_N, batch.group_N, alpha=alpha, delta=delta)
    for group in batch.group_N.unique():
        own_G, rate = (
            advantage_N[batch.group_N == group],
            float(batch.reward_N[batch.group_N == group].mean()),
        )
        mass = rate * (1 - rate) ** alpha
        assert float(own_G.clamp(min=0).sum() / len(own_G)) == pytest.approx(mass, abs=1e-13)
        assert float(-own_G.clamp(max=0).sum() / len(own_G)) == pytest.approx(
            mass / delta, abs=1e-13
        )


@pytest.mark.parametrize("name", REWARDS_ALONE)
@many
@given(data=st.data(), batch=ragged_batches(min_group_size=2))
def test_permuting_rollouts_permutes_advantages(name, data, batch):
    order_N = torch.tensor(data.draw(st.permutations(range(batch.num_rollouts))))
    before_N, permuted_N = ADVANTAGES[name](batch.reward_N, batch.group_N), batch.reward_N[order_N]
    torch.testing.assert_close(
        ADVANTAGES[name](permuted_N, batch.group_N[order_N]),
        before_N[order_N],
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("name", REWARDS_ALONE)
def test_ranks_pool_the_batch(name):
    """Two ranks of whole prompts, one of them constant, give what one process gives."""
    reward_N = torch.tensor([1, 0, 0, 1, 1, 1, 0, 1, 1], dtype=torch.float64)
    group_N = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    parts = [slice(0, 3), slice(3, 9)]
    got = on_ranks(
        [
            lambda reduce, part=part: call(
                ADVANTAGES[name], reward_N[part], group_N[part], reduce=reduce
            )
            for part in parts
        ]
    )
    torch.testing.assert_close(
        torch.cat(got), ADVANTAGES[name](reward_N, group_N), rtol=1e-12, atol=1e-12
    )


def test_a_constant_rank_is_not_a_constant_batch():
    got = on_ranks(
        [
            lambda reduce, value=value: ADVANTAGES["batch_whitened"](
                torch.full((2,), value), torch.arange(2), reduce=reduce
            )
            for value in (1.0, 0.0)
        ]
    )
    # deviations of 1/2, std sqrt(4 * 1/4 / 3)
    torch.testing.assert_close(torch.cat(got), torch.tensor([1.0, 1.0, -1.0, -1.0]) * 3**0.5 / 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", REWARDS_ALONE)
def test_narrow_rewards_are_widened(name, dtype):
    got_N = ADVANTAGES[name](REWARD_N.to(dtype), GROUP_N)
    assert got_N.dtype == torch.float32
    torch.testing.assert_close(got_N, ADVANTAGES[name](REWARD_N.float(), GROUP_N))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("group_zscore", {"eps": -1.0}, "group_zscore: eps must be a number >= 0, got -1.0"),
        ("group_zscore", {"eps": "small"}, "group_zscore: eps must be a number >= 0, got 'small'"),
        (
            "weighted_signs",
            {"positive": -0.1},
            "weighted_signs: positive must be a number >= 0, got -0.1",
        ),
        ("fade", {"alpha": 0.0}, "fade: alpha must be a number > 0, got 0.0"),
        ("fade", {"delta": float("inf")}, "fade: delta must be a number > 0, got inf"),
    ],
)
def test_bad_parameters(name, params, message):
    with pytest.raises(ValueError, match=message):
        ADVANTAGES[name](REWARD_N, GROUP_N, **params)


def test_unknown_parameter_is_caught_when_bound():
    with pytest.raises(ValueError, match="group_zscore has no parameter 'epsilon'"):
        ADVANTAGES["group_zscore"](epsilon=1e-4)


@pytest.mark.parametrize(
    "name", ["signs", "positives_only", "negatives_only", "weighted_signs", "fade"]
)
def test_rewards_count_only_as_successes_and_failures(name):
    group_N = torch.tensor([0, 0, 0])
    by_reward_N = ADVANTAGES[name](torch.tensor([1.0, 0.0, 0.0]), group_N)
    graded_N = ADVANTAGES[name](torch.tensor([0.7, 0.25, -3.0]), group_N)
    offered_N = ADVANTAGES[name](
        torch.tensor([2.0, 1.0, 1.0]), group_N, success_N=torch.tensor([True, False, False])
    )
    assert torch.equal(graded_N, by_reward_N)
    assert torch.equal(offered_N, by_reward_N)


def test_max_rl_wants_rewards_of_one_sign():
    with pytest.raises(ValueError, match=r"max_rl: rewards must be >= 0, got -1.0 at rollout 1"):
        ADVANTAGES["max_rl"](torch.tensor([1.0, -1.0]), torch.tensor([0, 0]))


@pytest.mark.parametrize("name", REWARDS_ALONE)
def test_picklable_and_inputs_unchanged(name):
    reward_N, group_N = REWARD_N.clone(), GROUP_N.clone()
    again = pickle.loads(pickle.dumps(ADVANTAGES[name]()))
    assert torch.equal(again(reward_N, group_N), ADVANTAGES[name](reward_N, group_N))
    assert torch.equal(reward_N, REWARD_N)
    assert torch.equal(group_N, GROUP_N)


# ---- overlong shaping


def test_the_overlong_penalty_of_the_paper():
    length_N = torch.tensor([10, 16384, 18432, 20480])
    assert overlong_penalty(length_N, limit=20480, buffer=4096).tolist() == [0, 0, -0.5, -1]
    assert overlong_penalty(length_N, limit=20480).tolist() == [0, 0, -0.5, -1]
    assert overlong_penalty(length_N, limit=20480, factor=2.0).tolist() == [0, 0, -1, -2]


@pytest.mark.parametrize("rule", ["group_zscore", "leave_one_out", "batch_whitened"])
@many
@given(
    batch=ragged_batches(min_group_size=2, max_group_size=5),
    buffer=st.integers(1, 4),
    factor=st.sampled_from([0.5, 1.0]),
)
def test_overlong_twin(rule, batch, buffer, factor):
    """The advantage inside, of rewards with the penalty of each rollout taken off in a loop."""
    shaped = []
    for reward, length in zip(batch.reward_N.tolist(), batch.length_N.tolist()):
        beyond = length - (6 - buffer)
        shaped.append(reward - factor * beyond / buffer if beyond > 0 else reward)
    expected = getattr(reference, rule)(shaped, batch.group_N.tolist())
    method = cp.method(
        "dapo", advantage={"name": "overlong", "rule": rule, "buffer": buffer, "factor": factor}
    )
    got_N = method.assign(batch.replace(max_length=6)).advantage_N
    assert_close(got_N, expected)


def test_success_is_that_of_the_reward_without_the_penalty():
    """All solved, the second at the limit: signs see two successes, the z-score tells them apart,
    and half of the rollouts have a mean penalty of -1.
    """
    batch = cp.TokenBatch.from_lists(
        [[1], [1] * 10], group=[0, 0], reward=[1.0, 1.0], sampler_logp=[[-0.1], [-0.1] * 10]
    )
    batch = batch.replace(max_length=10)
    by_sign = cp.method("dapo", advantage={"name": "overlong", "rule": "signs"})
    assert by_sign.assign(batch).advantage_N.tolist() == [1, 1]
    out = cp.method("dapo", advantage="overlong").assign(batch)
    torch.testing.assert_close(out.advantage_N, torch.tensor([0.5, -0.5]) / (0.5**0.5 + 1e-4))
    assert out.metrics["advantage/overlong/penalised_frac"] == 0.5
    assert out.metrics["advantage/overlong/penalty"] == -0.5


def test_overlong_says_what_is_missing():
    batch = cp.TokenBatch.from_lists(
        [[1], [1]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-0.1]] * 2
    )
    method = cp.method("dapo", advantage="overlong")
    with pytest.raises(ValueError, match=r"overlong: the batch has no max_length. .*limit"):
        method.assign(batch)
    with pytest.raises(ValueError, match=r"buffer must be at most the limit \(4 tokens\), got 5"):
        cp.method("dapo", advantage={"name": "overlong", "buffer": 5, "limit": 4}).assign(batch)
    with pytest.raises(ValueError, match="group_size is 1. overlong compares"):
        method.check_group_size(1, "rollouts.group_size is 1.")
