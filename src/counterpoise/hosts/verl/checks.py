"""What counterpoise cannot do with a verl configuration, said in one line before any worker starts."""

from __future__ import annotations

import warnings
from typing import Any

from counterpoise.errors import nearest
from counterpoise.hosts.verl.estimators import settings_of
from counterpoise.hosts.verl.loss import check_method
from counterpoise.hosts.verl.method import (
    MODES,
    PREFIX,
    Setup,
    sequence_trouble,
    setup,
    trainer_trouble,
)


def mode_of(trainer_mode: str) -> str:
    """verl's own trainer under one of ours.

    >>> mode_of("counterpoise/sync")
    'sync'
    """
    mode = trainer_mode.removeprefix(PREFIX)
    if mode not in MODES:
        raise ValueError(
            f"unknown trainer_mode {trainer_mode!r}."
            f" {nearest(trainer_mode, [PREFIX + mode for mode in MODES])}"
        )
    return mode


def check_config(config: Any, mode: str) -> tuple[Setup | None, Setup | None]:
    """(credit, plan): the setups that the trainer follows, None where verl's own code is left
    alone.

    An estimator of verl's own (``adv_estimator=grpo``) leaves credit to verl;
    ``algorithm.counterpoise.plan`` works beside it."""
    name, settings = str(config.algorithm.adv_estimator), settings_of(config.algorithm)
    is_ours = name.startswith(PREFIX)
    extra = sorted(set(settings) - {"plan", "seed"})
    if not is_ours and extra:
        raise ValueError(
            f"algorithm.counterpoise.{extra[0]} needs an estimator of counterpoise, got"
            f" adv_estimator={name}. Set algorithm.adv_estimator={PREFIX}grpo or another of its"
            " methods."
        )
    made = setup(name.removeprefix(PREFIX) if is_ours else "grpo", settings)
    if is_ours:
        _check_credit(config, made)
    _check_loss(config)
    trouble = sequence_trouble(config.actor_rollout_ref.actor)
    if trouble:
        raise ValueError(trouble)
    if made.has_own_plan:
        _check_plan(config, made, mode)
    return made if is_ours else None, made if made.has_own_plan else None


def _check_credit(config: Any, made: Setup) -> None:
    trouble, needs, name = trainer_trouble(made), made.method.needs, f"{PREFIX}{made.method.name}"
    if trouble:
        raise ValueError(trouble)
    correction = config.algorithm.get("rollout_correction", None) or {}
    if "entropy_NT" in needs and correction.get("bypass_mode", False):
        raise ValueError(
            f"{name} reads entropies, and rollout_correction.bypass_mode=True skips the pass that"
            " measures them. Set it to False."
        )
    actor = config.actor_rollout_ref.actor
    if "ref_logp_NT" in needs and not (actor.use_kl_loss or config.algorithm.use_kl_in_reward):
        raise ValueError(
            f"{name} reads the reference's log-probs, which verl computes only with a KL term. Set"
            " actor.use_kl_loss=True (kl_loss_coef=0 keeps it out of the loss)."
        )
    made.method.check_group_size(
        config.actor_rollout_ref.rollout.n, f"{name} with actor_rollout_ref.rollout.n=1:"
    )


def _check_loss(config: Any) -> None:
    loss_mode = str(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla"))
    if loss_mode.startswith(PREFIX):
        check_method(loss_mode.removeprefix(PREFIX))


def _check_plan(config: Any, made: Setup, mode: str) -> None:
    actor, planner = config.actor_rollout_ref.actor, made.method.planner
    if actor.shuffle:
        raise ValueError(
            "actor.shuffle=True shuffles the rows of every rank again after they were planned. Set"
            " it to False."
        )
    if planner.has("drops_rollouts"):
        raise ValueError(
            f"plan {planner} leaves out part of a prompt before verl has computed advantages. Use"
            " one that takes whole prompts (reward_balanced: mode 'groups')."
        )
    sync_every = config.trainer.v1.get(mode, {}).get("parameter_sync_step", 1)
    if config.data.train_batch_size // sync_every <= actor.ppo_mini_batch_size:
        warnings.warn(
            "the plan does nothing here: there is one update a batch"
            f" ({config.data.train_batch_size // sync_every} prompts,"
            f" actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}). Lower ppo_mini_batch_size"
            " for more.",
            stacklevel=4,
        )
