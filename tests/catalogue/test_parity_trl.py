"""Our losses and reductions against TRL's ``GRPOTrainer._compute_loss`` on the same tensors,
float64: loss value and gradient.

TRL's method runs unchanged on a stand-in that has the attributes it reads; the stand-in's "model"
hands out the log-probs to differentiate.

loss type   ours
grpo        clipped, per_sequence
bnpo        clipped, per_token (one micro-batch)
dapo        clipped, per_token
dr_grpo     clipped, constant_length
cispo       detached_ratio (clip_high = epsilon_high - 1), per_token
sapo        soft_gate, per_sequence
luspo       clipped or sequence_ratio, constant_length(length=1)
vespo       no equal: its weight is a gamma function of the sequence product

``importance_sampling_level="sequence"`` is ``sequence_ratio`` for the clipped types; for cispo and
sapo we have no sequence form.
``beta`` is the term ``kl(estimator="k3", coef=beta)``, ``delta`` is ``dual_clip``,
``top_entropy_quantile`` a credit rule."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from counterpoise.losses import clipped, detached_ratio, kl, sequence_ratio, soft_gate
from counterpoise.reductions import constant_length, per_sequence, per_token
from helpers.loss_cases import assert_close, random_rows, value_and_gradient

grpo_trainer = pytest.importorskip(
    "trl.trainer.grpo_trainer", reason="TRL is not installed: pip install counterpoise[trl]"
)
pytestmark = pytest.mark.hosts

MAX_LENGTH = 9


def trl_loss(
    logp_NT,
    rows,
    *,
    loss_type,
    level="token",
    epsilon=(0.2, 0.2),
    beta=0.0,
    delta=None,
    accumulation=1,
    num_items=None,
):
    """TRL's loss of these rows as one micro-batch, and its gradient by the log-probs."""
    leaf_NT = logp_NT.clone().requires_grad_()
    mask_NT = rows.mask_NT.long()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (
            leaf_NT,
            torch.zeros_like(leaf_NT),
            None,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        loss_type=loss_type,
        epsilon_low=epsilon[0],
        epsilon_high=epsilon[1],
        beta=beta,
        use_vllm=False,
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=accumulation,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value
        ),
        args=SimpleNamespace(
            use_bias_correction_kl=False,
            delta=delta,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=accumulation,
        ),
    )
    inputs = {
        "prompt_ids": mask_NT[:, :1],
        "prompt_mask": mask_NT[:, :1],
        "completion_ids": mask_NT,
        "completion_mask": mask_NT,
        "advantages": rows.credit_NT,
        "old_per_token_logps": rows.sampler_logp_NT,
        "ref_per_token_logps": rows.ref_logp_NT,
        "num_items_in_batch": mask_NT.sum() if num_items is None else num_items,
    }
    total = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    return value_and_gradient(total, leaf_NT)


def our_loss(logp_NT, rows, terms, reduction):
    leaf_NT = logp_NT.clone().requires_grad_()
    scale_NT = reduction(rows.mask_NT, rows.credit_NT, rows.advantage_N)
    total = torch.stack([(term(leaf_NT, rows).loss_NT * scale_NT).sum() for term in terms]).sum()
    return value_and_gradient(total, leaf_NT)


CONSTANT, SUM = constant_length(length=MAX_LENGTH), constant_length(length=1)
REDUCTIONS = {
    "grpo": per_sequence,
    "bnpo": per_token,
    "dapo": per_token,
    "dr_grpo": CONSTANT,
    "luspo": SUM,
}
EPSILON = (0.2, 0.28)
CLIP = clipped(clip_low=EPSILON[0], clip_high=EPSILON[1])


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_clipped_types_at_token_level(loss_type, beta):
    logp_NT, rows = random_rows(seed=0)
    expected, expected_grad = trl_loss(
        logp_NT, rows, loss_type=loss_type, epsilon=EPSILON, beta=beta
    )
    terms = [CLIP, kl(coef=beta)] if beta else [CLIP]
    got, got_grad = our_loss(logp_NT, rows, terms, REDUCTIONS[loss_type])
    assert clipped(logp_NT, rows).clipped_NT.any()
    assert_close(got, expected)
    assert_close(got_grad, expected_grad)


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_clipped_types_at_sequence_level(loss_type, beta):
    logp_NT, rows = random_rows(seed=1, spread=0.1, uniform=True)
    epsilon = (0.03, 0.04)
    expected, expected_grad = trl_loss(
        logp_NT, rows, loss_type=loss_type, level="sequence", epsilon=epsilon, beta=beta
    )
    loss = sequence_ratio(clip_low=epsilon[0], clip_high=epsilon[1])
    got, got_grad = our_loss(
        logp_NT, rows, [loss, kl(coef=beta)] if beta else [loss], REDUCTIONS[loss_type]
    )
    assert 0 < loss(logp_NT, rows).clipped_NT.any(1).sum() < 6
    assert_close(got, expected)
    assert_close(got_grad, expected_grad)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_cispo(beta):
    logp_NT, rows = random_rows(seed=2, spread=1.0)
    expected, expected_grad = trl_loss(
        logp_NT, rows, loss_type="cispo", epsilon=(0.2, 1.5), beta=beta
    )
    loss = detached_ratio(clip_high=0.5)
    got, got_grad = our_loss(logp_NT, rows, [loss, kl(coef=beta)] if beta else [loss], per_token)
    assert loss(logp_NT, rows).clipped_NT.any()
    assert_close(got, expected)
    assert_close(got_grad, expected_grad)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_sapo(beta):
    logp_NT, rows = random_rows(seed=3, spread=1.0)
    expected, expected_grad = trl_loss(logp_NT, rows, loss_type="sapo", beta=beta)
    got, got_grad = our_loss(
        logp_NT, rows, [soft_gate, kl(coef=beta)] if beta else [soft_gate], per_sequence
    )
    # TRL builds its temperatures by torch.where of two Python floats, which are float32: 1.05 is
    # off by 4.8e-8 there
    assert_close(got, expected, rtol=1e-6, atol=1e-7)
    assert_close(got_grad, expected_grad, rtol=1e-6, atol=1e-7)


def test_delta_is_the_dual_clip():
    logp_NT, rows = random_rows(seed=4, spread=1.5)
    loss = clipped(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    over_NT = (loss(logp_NT, rows).ratio_NT > 3) & (rows.credit_NT < 0)
    assert over_NT.any()
    expected, expected_grad = trl_loss(logp_NT, rows, loss_type="dapo", epsilon=EPSILON, delta=3.0)
    got, got_grad = our_loss(logp_NT, rows, [loss], per_token)
    assert_close(got, expected)
    assert_close(got_grad, expected_grad)


def test_sequence_level_with_credit_by_token_differs_on_purpose():
    """TRL spreads the row's mean credit evenly over its tokens; here each token keeps its own.

    A row's total is the same.
    """
    logp_NT, rows = random_rows(seed=5, spread=0.1)
    wide = (9.0, 9.0)
    _, trl_grad = trl_loss(logp_NT, rows, loss_type="grpo", level="sequence", epsilon=wide)
    _, our_grad = our_loss(
        logp_NT, rows, [sequence_ratio(clip_low=9.0, clip_high=9.0)], per_sequence
    )
    length_N1 = rows.mask_NT.sum(1, keepdim=True)
    mean_credit_NT = (rows.credit_NT.sum(1, keepdim=True) / length_N1) * rows.mask_NT
    weight_NT = -our_grad / torch.where(rows.credit_NT == 0, 1, rows.credit_NT)
    sequence_N1 = weight_NT.amax(1, keepdim=True)
    assert_close(trl_grad, -sequence_N1 * mean_credit_NT)
    assert_close(our_grad, -sequence_N1 * rows.credit_NT)
    assert_close(trl_grad.sum(1), our_grad.sum(1))
    assert (trl_grad - our_grad).abs().max() > 0.01


def test_micro_batches_of_a_step():
    """dapo, grpo and dr_grpo accumulate to our batch; bnpo divides each micro-batch by its own
    tokens, and a cut changes its gradient.
    """
    logp_NT, rows = random_rows(seed=7)
    cuts = [torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])]
    tokens = [int(rows.mask_NT[cut].sum()) for cut in cuts]
    assert tokens[0] != tokens[1]
    grads = {}
    for loss_type in ("dapo", "grpo", "dr_grpo", "bnpo"):
        parts = [
            trl_loss(
                logp_NT[cut],
                rows.select(cut),
                loss_type=loss_type,
                epsilon=EPSILON,
                accumulation=2,
                num_items=rows.mask_NT.sum(),
            )[1]
            for cut in cuts
        ]
        grads[loss_type] = torch.cat(parts)
    for loss_type in ("dapo", "grpo", "dr_grpo"):
        assert_close(grads[loss_type], our_loss(logp_NT, rows, [CLIP], REDUCTIONS[loss_type])[1])
    ours = our_loss(logp_NT, rows, [CLIP], per_token)[1]
    for cut, count in zip(cuts, tokens):
        assert_close(grads["bnpo"][cut], ours[cut] * sum(tokens) / (2 * count))
