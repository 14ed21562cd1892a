"""value_baseline: the regression against least squares, what it may know, its memory, its scale."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
import yaml

import counterpoise as cp
from counterpoise import credit as rules
from counterpoise.cli import dispatch
from counterpoise.credit.value_baseline import no_fit, sibling_mean, surprise, unseen
from counterpoise.maths.ridge import gram, ridge_fit
from counterpoise.policy import load_model, measure
from counterpoise.run.checkpoint import read_state
from counterpoise.run.read import checkpoints, read_jsonl
from helpers.credit_cases import spread
from helpers.full_batch import make_batch
from helpers.replies import with_reply, without_reply
from helpers.tiny_run import go, recipe


def draws(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def credit_of(batch):
    return cp.method("dapo").assign(batch).credit_NT


def judged(batch, seen, **params):
    """Credit and state of a batch after others."""
    state = no_fit()
    for one in seen:
        _, state = rules.value_baseline(state, credit_of(one), one, **params)
    return rules.value_baseline(state, credit_of(batch), batch, **params)


# the regression


def test_the_fit_is_least_squares_with_rows_for_the_penalty():
    """The same minimum from a stacked least-squares problem; sums of two halves add up."""
    feature_MF, ridge = draws(50, 4) * torch.tensor([1.0, 10.0, 0.1, 3.0]) + 2.0, 0.3
    target_M = feature_MF[:, 0] - 0.2 * feature_MF[:, 1] + draws(50, seed=1)
    whole = gram(feature_MF, target_M)
    halves = gram(feature_MF[:20], target_M[:20]) + gram(feature_MF[20:], target_M[20:])
    torch.testing.assert_close(whole, halves)
    centred_MF = feature_MF - feature_MF.mean(0)
    penalty_FF = (50 * ridge * centred_MF.square().mean(0)).sqrt().diag()
    left, right = (
        torch.cat([centred_MF, penalty_FF]),
        torch.cat([target_M - target_M.mean(), torch.zeros(4, dtype=torch.float64)]),
    )
    slope_F = torch.linalg.lstsq(left, right[:, None]).solution[:, 0]
    fit = ridge_fit(whole, ridge)
    torch.testing.assert_close(fit.slope_F, slope_F)
    torch.testing.assert_close(
        fit.predict(feature_MF), target_M.mean() + centred_MF @ slope_F, rtol=1e-9, atol=1e-9
    )


def test_the_scale_of_a_feature_does_not_matter_and_a_constant_one_is_left_out():
    feature_MF, target_M = draws(40, 3), draws(40, seed=1)
    plain = ridge_fit(gram(feature_MF, target_M), 0.1).predict(feature_MF)
    other_MF = feature_MF * torch.tensor([1e-3, 1.0, 1e3])
    other_MF = torch.cat([other_MF, torch.full((40, 1), 5.0)], 1)
    scaled = ridge_fit(gram(other_MF, target_M), 0.1)
    assert scaled.slope_F[-1] == 0
    torch.testing.assert_close(scaled.predict(other_MF), plain, rtol=1e-8, atol=1e-8)


# what it may know


def test_the_hidden_state_of_a_token_does_not_know_the_token():
    """Another token t changes the hidden states after it and none up to it."""
    policy, prompts = load_model("bundled"), [[5, 6, 7]]
    one, other = torch.tensor([[10, 11, 12, 13]]), torch.tensor([[10, 11, 20, 13]])
    mask_NT = torch.ones(1, 4, dtype=torch.bool)
    first, second = (
        measure(policy.model, prompts, ids, mask_NT, {"hidden_NTD"})["hidden_NTD"][0]
        for ids in (one, other)
    )
    torch.testing.assert_close(first[:3], second[:3])
    assert (first[3] - second[3]).abs().max() > 1e-2


@pytest.mark.parametrize("lam", [1.0, 0.9])
def test_a_batch_is_judged_by_other_batches_alone(lam):
    """Another reward of one rollout changes its own credit, and the rest by the scale alone."""
    seen, batch = [make_batch(seed=1), make_batch(seed=2)], make_batch()
    reward_N = batch.reward_N.clone()
    reward_N[3] = 7.0
    plain_NT, _ = judged(batch, seen, lam=lam)
    other_NT, _ = judged(batch.replace(reward_N=reward_N), seen, lam=lam)
    others = torch.arange(batch.num_rollouts) != 3
    ratio_M = (other_NT / plain_NT)[others][batch.mask_NT[others]]
    torch.testing.assert_close(ratio_M, ratio_M[:1].expand_as(ratio_M))
    assert not torch.allclose(other_NT[3] / plain_NT[3], ratio_M[0])


def test_before_the_first_fit_nothing_changes():
    batch = make_batch()
    credit_NT = credit_of(batch)
    same_NT, state = rules.value_baseline(no_fit(), credit_NT, batch)
    assert torch.equal(same_NT, credit_NT)
    assert state["unseen"] == {}


def test_rewards_that_hidden_states_tell_leave_no_surprise():
    """The reward is a line in the hidden state: R2 near 1, and what is left is a small part."""

    def batch(seed):
        plain = make_batch(num_groups=8, size=8, seed=seed)
        hidden_NTD = plain.hidden_NTD[:, :1].expand_as(plain.hidden_NTD).contiguous()
        reward_N = (hidden_NTD[:, 0] @ draws(5, seed=9)) + 0.01 * draws(64, seed=seed)
        return plain.replace(hidden_NTD=hidden_NTD, reward_N=reward_N)

    _, state = judged(batch(0), [batch(1), batch(2)], ridge=1e-6)
    assert all(state["unseen"][f"r2{at}"] > 0.99 for at in ("", "_first", "_middle", "_last"))
    assert state["unseen"]["r2_siblings"] < 0.2
    nothing = judged(make_batch(num_groups=8, size=8), [make_batch(num_groups=8, size=8, seed=1)])
    assert nothing[1]["unseen"]["r2"] < 0.1


def test_r2_of_siblings_and_of_the_batch_mean():
    """Loops: siblings without the rollout itself; the batch's mean has R2 0, the reward 1."""
    batch = make_batch()
    reward, group = batch.reward_N.tolist(), batch.group_N.tolist()
    for i, value in enumerate(sibling_mean(batch).tolist()):
        others = [reward[j] for j in range(16) if group[j] == group[i] and j != i]
        assert value == pytest.approx(sum(others) / len(others))
    length_N = batch.length_N.double()
    mean = (batch.reward_N * length_N).sum() / length_N.sum()
    flat = unseen(torch.full_like(batch.entropy_NT, float(mean)), batch)
    assert flat["r2"] == pytest.approx(0, abs=1e-12)
    truth = unseen(batch.reward_N[:, None].expand_as(batch.entropy_NT), batch)
    assert [truth[f"r2{at}"] for at in ("", "_first", "_middle", "_last")] == [1, 1, 1, 1]
    equal = batch.replace(reward_N=torch.ones(16))
    assert unseen(batch.entropy_NT, equal) == {}


def test_siblings_help_where_prompts_differ():
    """Prompts of very different difficulty, hidden states that say nothing of it."""

    def batch(seed):
        plain = make_batch(num_groups=8, size=8, seed=seed)
        chance_N = torch.linspace(0, 1, 8).double()[plain.group_N]
        reward_N = torch.bernoulli(chance_N, generator=torch.Generator().manual_seed(seed))
        return plain.replace(reward_N=reward_N)

    scores = [
        judged(batch(0), [batch(k) for k in (1, 2, 3)], siblings=siblings)[1]["unseen"]["r2"]
        for siblings in (False, True)
    ]
    assert scores[1] > scores[0] + 0.2
    assert rules.value_baseline(siblings=True).has("needs_groups")
    assert not rules.value_baseline().has("needs_groups")


# differences of values


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_surprise_by_loops_with_holes(lam):
    mask_NT = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    value_NT, reward_N = draws(2, 5), torch.tensor([1.0, 0.0]).double()
    got = surprise(reward_N, value_NT, mask_NT, lam)
    for row, places in enumerate([[0, 2, 3], [0, 1, 2, 3, 4]]):
        values = [*value_NT[row, places].tolist(), float(reward_N[row])]
        steps = [after - before for before, after in itertools.pairwise(values)]
        for k, at in enumerate(places):
            expected = sum(lam**j * step for j, step in enumerate(steps[k:]))
            assert float(got[row, at]) == pytest.approx(expected)
    assert not got[~mask_NT].any()


# scale, memory, holes


def test_the_scale_is_that_of_the_credit_or_one():
    batch, seen = make_batch(), [make_batch(seed=1)]
    kept_NT, _ = judged(batch, seen)
    unit_NT, _ = judged(batch, seen, scale="unit")
    expected = credit_of(batch).square().sum()
    torch.testing.assert_close(kept_NT.square().sum(), expected)
    torch.testing.assert_close(unit_NT[batch.mask_NT].square().mean(), torch.ones(()).double())
    nothing_NT, _ = rules.value_baseline(judged(batch, seen)[1], spread([0.0] * 16, batch), batch)
    assert not nothing_NT.any()


def test_groups_that_are_all_right_get_credit_too():
    batch = make_batch()
    out_NT, _ = judged(batch, [make_batch(seed=1)])
    assert not credit_of(batch)[batch.group_N == 0].any()
    assert out_NT[batch.group_N == 0].any()


def test_the_memory_is_json_and_fades():
    batches = [make_batch(seed=seed) for seed in range(3)]
    _, state = judged(batches[2], batches[:2], decay=0.5)
    grams = [
        gram(b.hidden_NTD[b.mask_NT], b.reward_N.repeat_interleave(b.length_N)) for b in batches
    ]
    expected = grams[2] + 0.5 * grams[1] + 0.25 * grams[0]
    torch.testing.assert_close(
        torch.tensor(state["gram_QQ"]).double(), expected, rtol=1e-6, atol=1e-6
    )
    assert json.loads(json.dumps(state)) == state


def test_a_wide_hidden_state_leaves_a_small_state():
    batch = make_batch()
    wide = batch.replace(hidden_NTD=draws(*batch.mask_NT.shape, 300))
    _, state = judged(wide, [wide], features=8)
    assert len(state["gram_QQ"]) == 10


def test_a_reply_is_no_token():
    """The numbers of the second batch are those without the reply."""
    plain, seen = make_batch(), make_batch(seed=1)
    method = cp.method("dapo", credit=[rules.value_baseline(), rules.soften_negatives()])
    reply = [[2, 1, 1]] * 16
    expected = method.assign(plain, method.assign(seen).state)
    got = method.assign(
        with_reply(plain, 1, reply), method.assign(with_reply(seen, 1, reply)).state
    )
    torch.testing.assert_close(without_reply(got.credit_NT, 1, 3), expected.credit_NT)
    assert got.metrics == pytest.approx(expected.metrics)
    assert got.metrics["credit/value_baseline/r2"] < 1


def test_hidden_states_that_are_not_finite_never_join_the_sums():
    batch = make_batch()
    hidden_NTD = batch.hidden_NTD.clone()
    hidden_NTD[2, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="value_baseline: hidden_NTD is not finite"):
        judged(batch.replace(hidden_NTD=hidden_NTD), [])


BAD = [
    ({"decay": 1.5}, "decay must be a number >= 0 and <= 1, got 1.5"),
    ({"ridge": 0}, "ridge must be a number > 0, got 0"),
    ({"features": 0}, "features must be a whole number >= 1"),
    ({"lam": -1}, "lam must be a number >= 0 and <= 1"),
    ({"scale": "rms"}, "scale must be one of credit, unit, got 'rms'"),
]


@pytest.mark.parametrize(("params", "message"), BAD)
def test_a_wrong_parameter_shows_before_training(params, message):
    with pytest.raises(ValueError, match="method 'dapo'.*") as error:
        cp.method("dapo", credit=[{"name": "value_baseline", **params}])
    assert message in str(error.value)


# in the trainer


METHOD = {"name": "dapo", "credit": ["value_baseline", "soften_negatives"]}


def test_a_run_reports_r2_and_resumes_bit_for_bit(tmp_path):
    """The whole run by the command line, the other one stopped after two batches."""
    (tmp_path / "recipe.yaml").write_text(
        yaml.safe_dump(recipe(tmp_path / "whole", method=METHOD, num_batches=3))
    )
    with pytest.raises(SystemExit) as end:
        dispatch(["train", str(tmp_path / "recipe.yaml")])
    assert not end.value.code
    go(tmp_path / "cut", method=METHOD, num_batches=2)
    go(tmp_path / "cut", method=METHOD, num_batches=3, resume=True)
    whole, cut = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    assert whole == cut
    assert "credit/value_baseline/r2" not in whole[0]
    assert {"credit/value_baseline/r2", "credit/value_baseline/r2_siblings"} <= whole[1].keys()
    states = [
        read_state(checkpoints(tmp_path / name)[-1] / "state.json").method
        for name in ("whole", "cut")
    ]
    assert states[0] == states[1]
