from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import counterpoise as cp
from counterpoise.credit import mismatch_weight
from helpers.strategies import ragged_batches

many = settings(max_examples=40)
MODES = ["none", "tis", "icepop", "mis", "geo"]


def batch_of(*weights, reward=None):
    """Rollouts of one prompt whose tokens have these weights p_trainer / p_sampler."""
    sampler = [[-5.0] * len(row) for row in weights]
    trainer = [[-5.0 + math.log(w) for w in row] for row in weights]
    return cp.TokenBatch.from_lists(
        [[7] * len(row) for row in weights],
        group=[0] * len(weights),
        reward=reward or [1.0] + [0.0] * (len(weights) - 1),
        sampler_logp=sampler,
        trainer_logp=trainer,
        dtype=torch.float64,
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", [1, 1]),
        ("tis", [2, 0.3]),
        ("icepop", [4, 0]),
        ("mis", [1.2, 1.2]),  # 4 * 0.3, inside [0.5, 2]
        ("geo", [0, 0]),  # sqrt(1.2) = 1.095 is above 1.001
    ],
)
def test_weights_by_hand(mode, expected):
    batch = batch_of([4, 0.3])
    got_NT = mismatch_weight(torch.ones(1, 2, dtype=torch.float64), batch, mode=mode)
    torch.testing.assert_close(got_NT, torch.tensor([expected], dtype=torch.float64))


def twin(gaps, mode, low, high):
    """The weight of each token of one rollout, in loops."""
    out = []
    for gap in gaps:
        if mode == "none":
            out.append(1.0)
            continue
        log_weight = {"mis": sum(gaps), "geo": sum(gaps) / len(gaps)}.get(mode, gap)
        weight = math.exp(max(-20.0, min(20.0, log_weight)))
        if mode == "tis":
            out.append(min(weight, high))
        else:
            out.append(weight if low <= weight <= high else 0.0)
    return out


@pytest.mark.parametrize("mode", MODES)
@many
@given(batch=ragged_batches(), low=st.sampled_from([0.1, 0.9]), high=st.sampled_from([1.5, 50.0]))
def test_twin(mode, batch, low, high):
    assert batch.trainer_logp_NT is not None
    ones_NT = torch.ones_like(batch.sampler_logp_NT)
    got_NT = mismatch_weight(ones_NT, batch, mode=mode, low=low, high=high)
    for row, num in enumerate(batch.length_N.tolist()):
        gaps = (batch.trainer_logp_NT - batch.sampler_logp_NT)[row, :num].tolist()
        expected = torch.tensor(twin(gaps, mode, low, high), dtype=got_NT.dtype)
        torch.testing.assert_close(got_NT[row, :num], expected, rtol=1e-11, atol=1e-11)
    assert not got_NT[~batch.mask_NT].any()


def gradient(method, batch, trainer_logp_NT):
    credit = method.assign(batch)
    rows = method.rows(batch, credit, torch.arange(batch.num_rollouts))
    return method.loss(trainer_logp_NT, rows), rows


def test_ratios_start_from_the_trainer():
    """Before the first update the trainer is its own anchor: every ratio is 1, and nothing is
    clipped whatever the gap. Without the rule the ratio is the gap.
    """
    batch = batch_of([4, 0.3], [1, 1])
    assert batch.trainer_logp_NT is not None
    plain, _ = gradient(cp.method("dapo"), batch, batch.trainer_logp_NT)
    torch.testing.assert_close(plain.ratio_NT[0], torch.tensor([4, 0.3], dtype=torch.float64))
    method = cp.method("dapo", credit=[{"name": "mismatch_weight", "mode": "tis"}])
    loss, rows = gradient(method, batch, batch.trainer_logp_NT)
    assert torch.equal(loss.ratio_NT, torch.ones(2, 2, dtype=torch.float64))
    assert not loss.clipped_NT.any()
    torch.testing.assert_close(loss.coef_NT, rows.credit_NT)
    advantage = float(rows.advantage_N[0])
    torch.testing.assert_close(
        loss.coef_NT[0], torch.tensor([2, 0.3], dtype=torch.float64) * advantage
    )


def test_unbounded_weights_give_the_gradient_of_the_sampler_s_ratio_before_the_first_update():
    batch = batch_of([4, 0.3], [0.8, 1.1])
    assert batch.trainer_logp_NT is not None
    wide = {"clip_low": math.inf, "clip_high": math.inf}
    plain, _ = gradient(cp.method("dapo", loss=wide), batch, batch.trainer_logp_NT)
    rule = {"name": "mismatch_weight", "high": math.inf}
    ours, _ = gradient(cp.method("dapo", loss=wide, credit=[rule]), batch, batch.trainer_logp_NT)
    torch.testing.assert_close(plain.coef_NT, ours.coef_NT)


@pytest.mark.parametrize("reduction", ["per_token", "per_sequence", "constant_length"])
def test_dropped_rollouts_leave_the_denominator(reduction):
    """Rollout 1 has a product of 9: with mis the others have the scale of an update without it.
    IcePop's tokens stay in it.
    """
    batch = batch_of([1, 1.1], [3, 3], [0.9])
    rule = {"name": "mismatch_weight", "mode": "mis"}
    method = cp.method("dapo", credit=[rule], reduction=reduction)
    _, rows = gradient(method, batch, batch.column("trainer_logp_NT"))
    assert not rows.scale_NT[1].any()
    kept = cp.method("dapo", reduction=reduction)
    rest = batch.select(torch.tensor([0, 2]))
    alone = kept.rows(rest, kept.assign(rest), torch.arange(2))
    torch.testing.assert_close(rows.scale_NT[[0, 2]], alone.scale_NT)
    method = cp.method("dapo", credit=[{**rule, "mode": "icepop"}], reduction=reduction)
    _, rows = gradient(method, batch, batch.column("trainer_logp_NT"))
    assert (rows.scale_NT[batch.mask_NT] > 0).all()


def test_an_update_without_a_kept_rollout_is_empty():
    batch = batch_of([3, 3], [3, 3])
    rule = {"name": "mismatch_weight", "mode": "mis"}
    for reduction in ("per_token", "per_sequence", "constant_length", "side_means"):
        method = cp.method("dapo", credit=[rule], reduction=reduction)
        loss, rows = gradient(method, batch, batch.column("trainer_logp_NT"))
        assert not rows.scale_NT.any() and torch.isfinite(loss.loss_NT).all()


def test_numbers():
    """Weights 4 and 0.3 under TIS: mean (2 + 0.3) / 2, one of two outside, KL -log 1.2."""
    method = cp.method("reinforce_pp", credit=["mismatch_weight"])
    metrics = method.assign(batch_of([4, 0.3], [1, 1])).metrics
    numbers = {key.rpartition("/")[2]: value for key, value in metrics.items()}
    assert numbers["weight_mean"] == pytest.approx((2 + 0.3 + 1 + 1) / 4)
    assert numbers["outside_frac"] == pytest.approx(1 / 4)
    assert numbers["sequence_kl"] == pytest.approx(-math.log(1.2) / 2)


@pytest.mark.parametrize("host", ["TRL", "verl"])
def test_hosts_that_correct_by_themselves_refuse(host):
    method = cp.method("dapo", credit=["mismatch_weight"])
    with pytest.raises(ValueError, match=f"mismatch_weight corrects .* which {host} does"):
        method.check_sampling(host)
