"""Policy losses against those in verl's own registry, value and gradient, and inside verl's
``ppo_loss``.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip(
    "verl.trainer.ppo.core_algos",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig

import counterpoise as cp
from counterpoise.catalogue import registry
from counterpoise.hosts.verl import register
from counterpoise.hosts.verl.method import agg_mode
from helpers.loss_cases import assert_close, random_rows

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.verl,
    pytest.mark.filterwarnings("ignore:counterpoise/"),
]
register()

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
# method -> (verl's loss, settings of verl's actor with which it is the same, spread of log-probs,
# credit constant along a rollout)
SAME = {
    "grpo": (
        "vanilla",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e9},
        0.6,
        False,
    ),
    "dapo": (
        "vanilla",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9},
        0.6,
        False,
    ),
    "delta": (
        "vanilla",
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0},
        2.0,
        False,
    ),
    "gspo": ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, 1e-3, False),
    "cispo": ("cispo", {"clip_ratio_low": 1e9, "clip_ratio_high": 4.0}, 1.5, False),
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, 0.6, False),
    "gmpo": ("geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}, 0.6, True),
}
ONE_MODE = ("sapo", "gmpo")  # verl's loss reads no mode: it is always the mean over each rollout
PAIRS = [(name, mode) for name in SAME for mode in (MODES[2:3] if name in ONE_MODE else MODES)]


def actor(loss_mode="vanilla", mode="token-mean", shared=None, **settings):
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
        loss_agg_mode=mode,
        global_batch_info=shared or {"loss_scale_factor": 9},
        **settings,
    )


def run(
    name,
    logp_NT,
    rows,
    mode="token-mean",
    shared=None,
    weight_NT=None,
    mask_type=torch.float64,
    **settings,
):
    """(value, gradient by the log-probs, metrics) of a registered loss, called as verl calls it."""
    leaf_NT = logp_NT.clone().requires_grad_()
    total, metrics = core_algos.get_policy_loss_fn(name)(
        old_log_prob=rows.sampler_logp_NT,
        log_prob=leaf_NT,
        advantages=rows.credit_NT,
        response_mask=rows.mask_NT.to(mask_type),
        loss_agg_mode=mode,
        config=actor(name, mode, shared, **settings),
        rollout_is_weights=weight_NT,
    )
    return total.detach(), torch.autograd.grad(total, leaf_NT)[0], metrics


def assert_same(got, expected, rtol=1e-12, atol=1e-12):
    assert_close(got[0], expected[0], rtol=rtol, atol=atol)
    assert_close(got[1], expected[1], rtol=rtol, atol=atol)


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_same_value_and_gradient_as_verls_own(name, mode):
    theirs, settings, spread, uniform = SAME[name]
    logp_NT, rows = random_rows(seed=1, spread=spread, uniform=uniform)
    expected = run(theirs, logp_NT, rows, mode, **settings)
    # verl adds 1e-8 to counts of tokens where it takes means over a rollout
    tolerance = (
        {"rtol": 1e-7, "atol": 1e-9} if "token-mean" in mode and mode != "token-mean" else {}
    )
    assert_same(run(f"counterpoise/{name}", logp_NT, rows, mode), expected, **tolerance)
    assert expected[1].abs().sum() > 0
    assert name == "sapo" or 0 < expected[2]["actor/pg_clipfrac"] < 1


def test_metrics_are_verls():
    logp_NT, rows = random_rows(seed=1, spread=0.6)
    expected = run("vanilla", logp_NT, rows, **SAME["dapo"][1])[2]
    got = run("counterpoise/dapo", logp_NT, rows)[2]
    assert 0 < expected["actor/pg_clipfrac"] < 1
    assert got == pytest.approx(
        {name: expected[name] for name in ("actor/pg_clipfrac", "actor/ppo_kl")}, rel=1e-6
    )


def test_weights_of_rollout_correction_are_applied():
    logp_NT, rows = random_rows(seed=2, spread=0.6)
    weight_NT = torch.rand(
        rows.mask_NT.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    expected = run("vanilla", logp_NT, rows, weight_NT=weight_NT, **SAME["dapo"][1])
    got = run("counterpoise/dapo", logp_NT, rows, weight_NT=weight_NT)
    assert_same(got, expected)
    assert (got[0] - run("counterpoise/dapo", logp_NT, rows)[0]).abs() > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_a_cut_step_adds_up_to_the_whole(mode):
    """verl tells every micro-batch the counts of the whole batch: the pieces' gradients are the
    whole's, on two ranks as on one.
    """
    logp_NT, rows = random_rows(seed=3, spread=0.6)
    shared = {
        "batch_num_tokens": int(rows.mask_NT.sum()),
        "global_batch_size": 6,
        "loss_scale_factor": 9,
    }
    _, whole_NT, _ = run("counterpoise/dapo", logp_NT, rows, mode, shared | {"dp_size": 1})
    cuts = torch.arange(6).split(2)
    pieces = [
        run("counterpoise/dapo", logp_NT[cut], rows.select(cut), mode, shared | {"dp_size": 2})
        for cut in cuts
    ]
    assert_close(torch.cat([piece[1] for piece in pieces]) / 2, whole_NT)


def test_inside_verls_ppo_loss():
    """verl's own loss function of the actor, on nested tensors with prompts, finds ours by name and
    trains as with its own.
    """
    from verl.workers.utils.losses import ppo_loss

    logp_NT, rows = random_rows(seed=4, spread=0.5)
    lengths, prompt = rows.mask_NT.sum(1).tolist(), 3

    def nested(column_NT, extra=0):
        parts = [
            torch.cat([column_NT.new_zeros(extra), row[:n]]) for row, n in zip(column_NT, lengths)
        ]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    def total_and_gradient(loss_mode, **settings):
        # verl's model output has the log-prob of token t at t - 1, over prompt and response
        leaf = torch.cat(
            [
                torch.cat([torch.zeros(prompt - 1), row[:n], torch.zeros(1)])
                for row, n in zip(logp_NT, lengths)
            ]
        )
        leaf.requires_grad_()
        offsets = torch.tensor([0, *[n + prompt for n in lengths]]).cumsum(0)
        data = TensorDict(
            {
                "prompts": torch.nested.as_nested_tensor(
                    [torch.ones(prompt)] * 6, layout=torch.jagged
                ),
                "responses": nested(rows.mask_NT.long()),
                "response_mask": nested(rows.mask_NT.long()),
                "old_log_probs": nested(rows.sampler_logp_NT),
                "advantages": nested(rows.credit_NT),
            },
            batch_size=6,
        )
        counts = {"dp_size": 1, "batch_num_tokens": sum(lengths), "global_batch_size": 6}
        for name, value in counts.items():
            data.set_non_tensor(name, value)
        log_probs = torch.nested.nested_tensor_from_jagged(leaf, offsets)
        total, metrics = ppo_loss(
            actor(loss_mode, shared={}, **settings), {"log_probs": log_probs}, data
        )
        return total.detach(), torch.autograd.grad(total, leaf)[0], metrics

    got, expected = (
        total_and_gradient("counterpoise/dapo"),
        total_and_gradient("vanilla", **SAME["dapo"][1]),
    )
    assert_same(got, expected)
    assert got[1].abs().sum() > 0
    assert got[2]["actor/pg_clipfrac"].aggregate() == pytest.approx(
        expected[2]["actor/pg_clipfrac"].aggregate()
    )


def test_a_row_without_tokens_and_narrow_types():
    logp_NT, rows = random_rows(seed=5, spread=0.5)
    rows = rows._replace(mask_NT=rows.mask_NT.clone().index_fill(0, torch.tensor(5), False))
    for name in ("dapo", "gspo", "gmpo", "ctpo"):
        total, grad_NT, _ = run(f"counterpoise/{name}", logp_NT, rows, mask_type=torch.bool)
        assert torch.isfinite(total) and (grad_NT[5] == 0).all() and grad_NT[:5].abs().sum() > 0
    half = rows._replace(
        sampler_logp_NT=rows.sampler_logp_NT.bfloat16(), credit_NT=rows.credit_NT.float()
    )
    got = run("counterpoise/dapo", logp_NT.bfloat16(), half, mask_type=torch.bool)
    assert got[0].item() == pytest.approx(
        run("counterpoise/dapo", logp_NT, rows)[0].item(), abs=0.05
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("dfpo_min", r"its loss \(dfpo\) must see the log-probs of a whole update.*hosts.trl"),
        ("dfpo_orth", "one micro-batch"),
        ("tpo", r"\(target\)"),
        ("clip_cov", "loss_mode=clip_cov of its own"),
        ("ibpo", "'count': 'credited'.*no loss_agg_mode.*loss_mode=counterpoise/dapo"),
        ("crf_ntf", "side_means"),
        ("spo_chain", "'count': 'credited'.*no loss_agg_mode"),
        ("vine_ppo", "ref_logp_NT.*actor.use_kl_loss=True"),
        ("vimpo", "a term of its loss reads ref_kl_NT, ref_logp_NT, which verl does not hand"),
    ],
)
def test_a_loss_that_verl_cannot_run_says_why(name, line):
    logp_NT, rows = random_rows()
    with pytest.raises(ValueError, match=line):
        run(f"counterpoise/{name}", logp_NT, rows)


def test_a_rank_that_sees_parts_of_sequences_is_refused():
    from counterpoise.hosts.verl.loss import policy_loss

    one, parts = (
        torch.ones(1, 1),
        {"strategy": "torchtitan", "torchtitan": {"context_parallel_size": 2}},
    )
    with pytest.raises(ValueError, match="actor.torchtitan.context_parallel_size=2"):
        policy_loss("dapo")(-one, -one, one, one, config=parts)


def test_every_method_either_trains_or_says_why():
    logp_NT, rows = random_rows(seed=6, spread=0.3)
    refused = set()
    for name in cp.methods():
        try:
            assert run(f"counterpoise/{name}", logp_NT, rows)[1].abs().sum() > 0
        except ValueError:
            refused.add(name)
    whole_update = {"dfpo_min", "dfpo_orth", "tpo", "clip_cov"}
    denominator = {"ibpo", "crf_ntf", "ict", "spo_chain", "sdpo", "opsd", "top_d"}
    assert refused == whole_update | denominator | {"vine_ppo", "vimpo"}


def test_a_term_that_reads_a_reference_is_refused(monkeypatch):
    made = dataclasses.replace(cp.method("dapo", loss=["clipped", "kl"]), name="with_kl_in_verl")
    monkeypatch.setitem(registry._registered, "with_kl_in_verl", made)
    from counterpoise.hosts.verl.loss import policy_loss

    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="ref_logp_NT.*actor.use_kl_loss=True"):
        policy_loss("with_kl_in_verl")(-one, -one, one, one)


def test_registered_methods_of_ones_own_train(monkeypatch):
    made = dataclasses.replace(
        cp.method("dapo", loss={"clip_high": math.inf}), name="unclipped_in_verl"
    )
    monkeypatch.setitem(registry._registered, "unclipped_in_verl", made)
    register()
    logp_NT, rows = random_rows(seed=1, spread=0.6)
    wide = SAME["dapo"][1] | {"clip_ratio_high": 1e9}
    assert_same(
        run("counterpoise/unclipped_in_verl", logp_NT, rows), run("vanilla", logp_NT, rows, **wide)
    )
    for table in (core_algos.POLICY_LOSS_REGISTRY, core_algos.ADV_ESTIMATOR_REGISTRY):
        monkeypatch.delitem(table, "counterpoise/unclipped_in_verl")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("mode", "shared", "settings", "line"),
    [
        (
            "seq-mean-token-sum",
            None,
            {},
            "its reduction is loss_agg_mode=token-mean, the actor has seq-mean-token-sum",
        ),
        (
            "seq-mean-token-sum-norm",
            {"dp_size": 1},
            {},
            "longest response of each micro-batch.*data.max_response_length",
        ),
        (
            "token-mean",
            None,
            {"clip_ratio_high": 0.4},
            r"ignored: actor \{'clip_ratio_high': 0.4\}",
        ),
    ],
)
def test_settings_that_are_not_what_they_seem_are_warned_about(mode, shared, settings, line):
    logp_NT, rows = random_rows()
    with pytest.warns(UserWarning, match=line):
        run("counterpoise/dapo", logp_NT, rows, mode, shared, **settings)


@pytest.mark.filterwarnings("error")
def test_the_methods_own_mode_is_silent():
    logp_NT, rows = random_rows()
    for name in ("dapo", "gspo", "dr_grpo"):
        run(f"counterpoise/{name}", logp_NT, rows, agg_mode(cp.method(name)))
