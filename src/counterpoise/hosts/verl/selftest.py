"""Two rollouts of two tokens through verl's own functions: what ``check_verl`` and ``doctor`` look
at.
"""

# verl lives in an environment of its own
# pyright: reportMissingImports=false

from __future__ import annotations

import warnings

import torch

from counterpoise.hosts.verl.checks import check_installed
from counterpoise.hosts.verl.method import PREFIX


def check_credit() -> str:
    """Prove that credit reaches verl's loss; raises where it does not.

    Rewards 1 and 0 give the credit 1/2 and -1/2, and at ratio 1 the gradient of the mean over four
    tokens is -credit / 4.
    """
    check_installed()
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    mask_NT, reward_NT = torch.ones(2, 2), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    credit_NT, _ = get_adv_estimator_fn(f"{PREFIX}dr_grpo")(
        token_level_rewards=reward_NT, response_mask=mask_NT, index=["a", "a"]
    )
    logp_NT = torch.full((2, 2), -1.0, requires_grad=True)
    total, _ = get_policy_loss_fn(f"{PREFIX}dapo")(
        logp_NT.detach(), logp_NT, credit_NT, mask_NT, loss_agg_mode="token-mean"
    )
    (grad_NT,) = torch.autograd.grad(total, logp_NT)
    expected_NT = torch.tensor([[-0.125, -0.125], [0.125, 0.125]])
    if not torch.equal(grad_NT, expected_NT):
        raise ValueError(
            f"credit does not reach verl's loss: its gradient is {grad_NT.tolist()}, expected"
            f" {expected_NT.tolist()}."
        )
    return "the gradient of verl's loss is the credit"


def check_unread() -> str:
    """Prove that a trainer of verl's own says at its start which settings it does not read."""
    from omegaconf import OmegaConf

    from counterpoise.hosts.verl.checks import check_own_trainer

    config = OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "grpo", "counterpoise": {"plan": "query_preserved"}},
            "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "vanilla"}}},
            "trainer": {"v1": {"trainer_mode": "sync"}},
        }
    )
    with warnings.catch_warnings(record=True) as lines:
        warnings.simplefilter("always")
        check_own_trainer(config)
    return f"a trainer of verl's own says at its start: {lines[0].message}"
