from __future__ import annotations

import json
import pickle

import pytest
import torch

import counterpoise as cp
from counterpoise.advantages import fade as fade_advantage
from counterpoise.controllers import CONTROLLERS, entropy_target, fade, stare
from helpers.reference_batches import on_ranks


def rollouts(rewards, entropy, group=None):
    """One token a rollout; ``entropy`` is a number for all, or one list a rollout."""
    rows = entropy if isinstance(entropy, list) else [[entropy]] * len(rewards)
    return cp.TokenBatch.from_lists(
        [[1] * len(row) for row in rows],
        group=group or [0] * len(rewards),
        reward=rewards,
        sampler_logp=[[-1.0] * len(row) for row in rows],
        entropy=rows,
        dtype=torch.float64,
    )


def after(batch, state=None, **params):
    controller = fade(**params)
    return controller(state or controller.start(), batch)


# rate = 1: p_hat is the batch's solve rate
@pytest.mark.parametrize(
    ("rewards", "alpha"),
    [
        ([0, 0, 0, 0], 3.0),  # p_hat 0
        ([1, 0, 0, 0], 3.0),  # 1.5 * 3 = 4.5, clipped
        ([1, 0, 0], 3.0),  # 1.5 * 2
        ([1, 0, 1, 0], 1.5),
        ([1, 1, 1, 0, 0], 1.0),  # 1.5 * 2/3
        ([1, 1, 1, 1], 1.0),
    ],
)
def test_alpha_by_solve_rate(rewards, alpha):
    assert after(rollouts(rewards, 1.0), rate=1.0).settings["advantage"]["alpha"] == pytest.approx(
        alpha, rel=1e-14
    )


# delta = clip(1 + H - target, 0.3, 1)
@pytest.mark.parametrize(
    ("entropy", "target", "delta"),
    [(0.5, 0.5, 1.0), (0.9, 0.5, 1.0), (0.3, 0.5, 0.8), (0.1, 1.5, 0.3)],
)
def test_delta_by_entropy(entropy, target, delta):
    got = after(rollouts([1, 0], entropy), target_entropy=target)
    assert got.settings["advantage"]["delta"] == pytest.approx(delta, rel=1e-14)


def test_two_batches_by_hand():
    """Solve rates 1/4 and 3/4, entropies 2 and 0.5, rate 0.1.

    p_hat 0.5 -> 0.475 -> 0.5025. H0 = 2 measured on the first batch, H_hat 2 -> 1.85; H_star = 1,
    so delta = 1 and stays 1 (1.85 >= 1). alpha = 1.5 * 0.525 / 0.475, then 1.5 * 0.4975 / 0.5025.
    """
    first = after(rollouts([1, 0, 0, 0], 2.0), rate=0.1)
    second = after(rollouts([1, 1, 1, 0], 0.5), first.state, rate=0.1)
    assert first.state == pytest.approx({"p_hat": 0.475, "H_hat": 2.0, "H0": 2.0})
    assert second.state == pytest.approx({"p_hat": 0.5025, "H_hat": 1.85, "H0": 2.0})
    assert first.settings["advantage"] == pytest.approx(
        {"alpha": 1.5 * 0.525 / 0.475, "delta": 1.0}
    )
    assert second.settings["advantage"] == pytest.approx(
        {"alpha": 1.5 * 0.4975 / 0.5025, "delta": 1.0}
    )


def test_default_rate_weighs_the_new_value_by_two_percent():
    assert after(rollouts([0, 0], 1.0)).state["p_hat"] == pytest.approx(0.49, rel=1e-14)


def test_entropy_is_a_mean_over_tokens_not_rollouts():
    batch = rollouts([1, 0], [[1.0, 1.0, 1.0], [5.0]])
    assert after(batch).state["H0"] == pytest.approx(2.0, rel=1e-14)


def test_falling_entropy_lowers_delta_to_its_floor():
    """H0 = 2, then entropy 0 for ever: H_hat -> 0, H_star = 1: delta falls from 1 to 1 + 0 - 1 = 0,
    clipped at 0.3.
    """
    state, deltas = after(rollouts([1, 0], 2.0), rate=0.5).state, []
    for _ in range(8):
        control = after(rollouts([1, 0], 0.0), state, rate=0.5)
        state, deltas = control.state, [*deltas, control.settings["advantage"]["delta"]]
    # H_hat 1, 1/2, 1/4, ...
    assert deltas == pytest.approx([1.0, 0.5] + [0.3] * 6)


def test_normalised_delta_does_not_depend_on_the_scale_of_the_entropy():
    def deltas(scale, normalised):
        first = after(rollouts([1, 0], 1.0 * scale), rate=0.5, normalised=normalised)
        second = after(rollouts([1, 0], 0.1 * scale), first.state, rate=0.5, normalised=normalised)
        third = after(rollouts([1, 0], 0.1 * scale), second.state, rate=0.5, normalised=normalised)
        return [control.settings["advantage"]["delta"] for control in (first, second, third)]

    # H_hat / H0: 1, 0.55, 0.325; minus 1/2
    assert deltas(1.0, True) == pytest.approx([1.0, 1.0, 0.825])
    assert deltas(0.1, True) == pytest.approx(deltas(1.0, True))
    assert deltas(0.1, False) == pytest.approx([1.0, 1.0, 0.9825])


def test_no_entropy_at_the_start_is_not_divided_by():
    assert after(rollouts([1, 0], 0.0), normalised=True).settings["advantage"]["delta"] == 1.0


def test_masses_are_those_of_the_advantage():
    """m_S and m_F equal the mean over prompts of what the advantage gives successes and
    failures.
    """
    group = [0, 0, 0, 0, 5, 5, 5, 5, 7, 7, 7, 7]
    batch = rollouts([1, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0], 1.0, group)
    control = after(batch, rate=1.0, target_entropy=1.4)
    advantage_N = fade_advantage(batch.reward_N, batch.group_N, **control.settings["advantage"])
    assert control.settings["advantage"] == pytest.approx(
        {"alpha": 1.5 * 2, "delta": 0.6}
    )  # 4 of 12 solved
    # alpha 3: (1/4 (3/4)^3 + 3/4 (1/4)^3) / 3
    assert control.metrics["m_S"] == pytest.approx((27 / 256 + 3 / 256) / 3, rel=1e-13)
    assert control.metrics["m_S"] == pytest.approx(
        float(advantage_N.clamp(min=0).sum() / 12), rel=1e-13
    )
    assert control.metrics["m_F"] == pytest.approx(
        float(-advantage_N.clamp(max=0).sum() / 12), rel=1e-13
    )
    assert set(control.metrics) == {"alpha", "delta", "p_hat", "H_hat", "H0", "m_S", "m_F"}


def test_fade_pools_over_ranks():
    rewards, group, entropy = (
        [1, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
        [[0.5], [1.0, 2.0], [0.1], [0.2, 0.3, 0.4], [3.0]],
    )
    whole = after(rollouts(rewards, entropy, group), target_entropy=1.5)
    parts = [slice(0, 2), slice(2, 5)]
    got = on_ranks(
        [
            lambda reduce, part=part: fade(
                fade.start(),
                rollouts(rewards[part], entropy[part], group[part]),
                target_entropy=1.5,
                reduce=reduce,
            )
            for part in parts
        ]
    )
    for rank in got:
        assert rank.metrics == pytest.approx(whole.metrics, rel=1e-12)
        assert rank.state == pytest.approx(whole.state, rel=1e-12)


def test_fade_as_a_method_keeps_its_state_through_json():
    method, batch = cp.method("fade"), rollouts([1, 0, 0, 0], 2.0)
    assert "entropy_NT" in method.needs
    first = method.assign(batch)
    second = method.assign(rollouts([1, 1, 1, 0], 0.5), json.loads(json.dumps(first.state)))
    p_hat = 0.98 * (0.98 * 0.5 + 0.02 * 0.25) + 0.02 * 0.75
    assert second.metrics["controller/fade/p_hat"] == pytest.approx(p_hat, rel=1e-14)
    alpha = 1.5 * (1 - p_hat) / p_hat
    # m = 3/4: A+ = (1/4)^(alpha - 1) * 1/4, delta 1
    assert second.advantage_N.tolist() == pytest.approx([0.25**alpha] * 3 + [-3 * 0.25**alpha])


def test_fade_reads_successes_and_wants_entropy():
    graded = rollouts([2.5, 1.0], 1.0).replace(success=2.0)
    assert after(graded) == after(rollouts([1.0, 0.0], 1.0))
    with pytest.raises(ValueError, match="entropy_NT"):
        after(rollouts([1.0, 0.0], 1.0).replace(entropy_NT=None))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"rate": 0.0}, r"rate must be a number > 0 and <= 1, got 0.0"),
        ({"rate": 1.5}, r"rate must be a number > 0 and <= 1, got 1.5"),
        ({"target_entropy": -1.0}, "target_entropy must be a number >= 0 or None, got -1.0"),
        ({"alpha_scale": 0.0}, "alpha_scale must be a number > 0, got 0.0"),
        ({"alpha_low": 4.0}, "alpha_high must be a number >= 4, got 3.0"),
        ({"delta_low": 0.0}, "delta_low must be a number > 0, got 0.0"),
    ],
)
def test_fade_bad_parameters(params, message):
    with pytest.raises(ValueError, match=f"fade controller: {message}"):
        after(rollouts([1, 0], 1.0), **params)
    with pytest.raises(ValueError, match="fade has no parameter 'speed'"):
        fade(speed=1)


def steered(entropies, **params):
    """The factors that STARE uses for batches of these entropies, one after another."""
    controller = stare(**params)
    state, used = controller.start(), []
    for entropy in entropies:
        control = controller(json.loads(json.dumps(state)), rollouts([1, 0], entropy))
        state, used = control.state, [*used, tuple(control.settings["credit"].values())]
    return used


def test_stare_boosts_only_below_the_target():
    assert steered([0.29, 0.3, 0.31]) == [(1.1, 1.0), (1.0, 1.0), (1.0, 1.0)]
    assert steered([0.29, 0.31], damp=0.9) == [(1.1, 0.9), (1.0, 1.0)]


def test_adaptive_stare_moves_its_factors_by_the_sign_of_the_gap():
    moved = steered([0.1, 0.1, 0.9, 0.1, 0.3, 0.1], adaptive=True, damp=0.9)
    expected = [(1.11, 0.89), (1.12, 0.88), (1, 1), (1.12, 0.88), (1, 1), (1.13, 0.87)]
    assert [pair for both in moved for pair in both] == pytest.approx(
        [pair for both in expected for pair in both]
    )
    assert steered([0.1] * 60, adaptive=True, damp=0.9)[-1] == (1.5, 0.5)
    assert steered([0.9] * 60 + [0.1], adaptive=True, damp=0.9)[-1] == pytest.approx((1.01, 0.99))
    assert steered([0.1] * 3, adaptive=True)[-1] == pytest.approx((1.13, 1.0))


def test_stare_as_a_method_changes_the_most_surprising_rewarded_tokens():
    batch = cp.TokenBatch.from_lists(
        [[1, 2, 3, 4], [5]],
        group=[0, 0],
        reward=[1, 0],
        sampler_logp=[[-0.1, -2.0, -0.5, -3.0], [-9.0]],
        entropy=[[0.1] * 4, [0.1]],
        dtype=torch.float64,
    )
    method = cp.method("stare", credit={"share": 0.25})
    weight_NT = method.assign(batch).weight_NT
    assert weight_NT.tolist() == [pytest.approx([1, 1, 1, 1.1]), [1, 0, 0, 0]]
    undecided = method.assign(batch.replace(entropy_NT=batch.column("entropy_NT") + 1))
    assert undecided.weight_NT.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert undecided.metrics["controller/stare/is_on"] == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"target": -0.1}, "target must be a number >= 0, got -0.1"),
        ({"boost": 2.0}, "boost must be a number >= 1 and <= 1.5, got 2.0"),
        ({"damp": 0.1}, "damp must be a number >= 0.5 and <= 1 or None, got 0.1"),
        ({"step": 0}, "step must be a number > 0, got 0"),
    ],
)
def test_stare_bad_parameters(params, message):
    with pytest.raises(ValueError, match=f"stare controller: {message}"):
        steered([0.1], **params)


HOLD = {"path": "advantage.positive", "start": 0.5, "lo": 0.0, "hi": 1.0, "rate": 0.25}


def test_entropy_target_by_hand():
    """Target = first entropy 2.

    Entropies 2, 1, 0.5 at rate 0.25: 0.5, 0.5 + 0.25, 0.75 + 0.375 clipped at 1.
    """
    controller = entropy_target(**HOLD)
    state, values, errors = controller.start(), [], []
    for entropy in (2.0, 1.0, 0.5):
        control = controller(json.loads(json.dumps(state)), rollouts([1, 0], entropy))
        state = control.state
        values.append(control.settings["advantage"]["positive"])
        errors.append(control.metrics["error"])
    assert values == [0.5, 0.75, 1.0]
    assert errors == [0.0, 1.0, 1.5]
    assert state == {"value": 1.0, "first_entropy": 2.0}


def test_entropy_target_finds_the_value_that_holds_the_entropy():
    """A plant whose entropy is 1 + 2 * value: the target 1.8 is held at value 0.4, from either
    side.
    """
    for start in (0.0, 1.0):
        controller = entropy_target(**{**HOLD, "start": start, "target": 1.8})
        state = controller.start()
        for _ in range(60):
            state = controller(state, rollouts([1, 0], 1 + 2 * state["value"])).state
        assert state["value"] == pytest.approx(0.4, abs=1e-9)


def test_entropy_target_sets_the_parameter_of_a_method():
    method = cp.method("w_reinforce", controller=entropy_target(**{**HOLD, "target": 3.0}))
    out = method.assign(rollouts([1, 0], 2.0))
    assert out.advantage_N.tolist() == [0.75, -1.0]
    assert out.metrics["controller/entropy_target/value"] == 0.75
    rule = cp.method(
        "top_entropy",
        controller=entropy_target(
            path="credit.fraction", start=0.2, lo=0.1, hi=1.0, rate=0.3, target=3.0
        ),
    )
    # the fraction becomes 0.2 + 0.3 * (3 - 2) = 0.5: one of two tokens keeps its credit
    out = rule.assign(rollouts([1, 0], [[1.0], [3.0]]))
    assert (out.credit_NT != 0).tolist() == [[False], [True]]


def test_entropy_target_pools_over_ranks():
    got = on_ranks(
        [
            lambda reduce, entropy=entropy: entropy_target(
                {"value": 0.5, "first_entropy": 2.0},
                rollouts([1, 0], entropy),
                reduce=reduce,
                **HOLD,
            )
            for entropy in ([[1.0], [1.0]], [[4.0, 2.0], [2.0]])
        ]
    )
    # mean over five tokens 2, so no error; a rank alone would see 1 or 8/3
    assert [rank.settings["advantage"]["positive"] for rank in got] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"path": "positive"}, "path must be 'advantage.<parameter>' or 'credit.<parameter>'"),
        ({"path": "loss.clip_high"}, "a controller reaches no other axis"),
        ({"lo": 0.6}, "start must be a number >= 0.6 and <= 1, got 0.5"),
        ({"rate": 0.0}, "rate 0 would never move the parameter"),
        ({"rate": float("nan")}, "rate must be a finite number, got nan"),
        ({"target": "high"}, "target must be a finite number or None, got 'high'"),
    ],
)
def test_entropy_target_bad_parameters(params, message):
    with pytest.raises(ValueError, match=message):
        entropy_target(
            {"value": 0.5, "first_entropy": None}, rollouts([1, 0], 1.0), **{**HOLD, **params}
        )


@pytest.mark.parametrize(("name", "params"), [("fade", {}), ("entropy_target", HOLD)])
def test_controllers_pickle(name, params):
    controller = CONTROLLERS[name](**params)
    again = pickle.loads(pickle.dumps(controller))
    batch = rollouts([1, 0], 1.0)
    assert again(again.start(), batch) == controller(controller.start(), batch)
