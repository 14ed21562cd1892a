"""What counterpoise cannot do inside verl, said in one line before any worker starts."""

# verl lives in an environment of its own
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import warnings
from typing import TYPE_CHECKING, Any

from counterpoise.errors import nearest
from counterpoise.hosts.verl.conversations import check_conversations
from counterpoise.hosts.verl.hooks import TESTED
from counterpoise.hosts.verl.method import (
    MODES,
    PREFIX,
    Setup,
    estimator_trouble,
    loss_method,
    refuse,
    settings_of,
    setup,
    trainer_trouble,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.workers.config import ActorConfig


def check_installed() -> None:
    """One line instead of a failing import deep inside."""
    if importlib.util.find_spec("verl") is None:
        raise ImportError(
            f"verl is not installed. pip install 'counterpoise[verl]' (verl {TESTED}) in an"
            " environment of its own."
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


def check_config(config: DictConfig, mode: str) -> tuple[Setup | None, Setup | None]:
    """(credit, plan): the setups that the trainer follows, None where verl's own code is left
    alone.

    An estimator of verl's own (``adv_estimator=grpo``) leaves credit to verl;
    ``algorithm.counterpoise.plan`` works beside it.
    """
    name, settings = str(config.algorithm.adv_estimator), settings_of(config.algorithm)
    is_ours = name.startswith(PREFIX)
    extra = sorted(set(settings) - {"plan", "seed", "success", "turns"})
    if not is_ours and extra:
        raise ValueError(
            f"algorithm.counterpoise.{extra[0]} needs an estimator of counterpoise, got"
            f" adv_estimator={name}. Set algorithm.adv_estimator={PREFIX}grpo or another of its"
            " methods."
        )
    ours = setup(name.removeprefix(PREFIX) if is_ours else "grpo", settings)
    if is_ours:
        _check_credit(config, ours)
    _check_loss(config)
    refuse(sequence_trouble(config.actor_rollout_ref.actor))
    if ours.has_own_plan:
        _check_plan(config, ours, mode)
    if ours.has_own_plan or (is_ours and not ours.method.reads_rewards_only):
        refuse(several_outputs_trouble(config))
    check_conversations(config)
    return ours if is_ours else None, ours if ours.has_own_plan else None


def check_own_trainer(config: DictConfig) -> None:
    """What one of verl's own trainers cannot do is an error at its start; what it does not read is
    said.
    """
    name, settings = str(config.algorithm.adv_estimator), settings_of(config.algorithm)
    unread = sorted(set(settings) - {"turns"})
    if name.startswith(PREFIX):
        ours = setup(name.removeprefix(PREFIX), settings)
        _check_credit(config, ours)
        refuse(estimator_trouble(ours))
        unread = ["plan"] if ours.has_own_plan else []
    _check_loss(config)
    check_conversations(config)
    if unread:
        mode = config.trainer.v1.trainer_mode
        warnings.warn(
            f"trainer.v1.trainer_mode={mode} is verl's own and does not read"
            f" {', '.join(f'algorithm.counterpoise.{key}' for key in unread)}. Set"
            f" trainer.v1.trainer_mode={PREFIX}{mode}.",
            stacklevel=3,
        )


def sequence_trouble(actor: DictConfig | ActorConfig) -> str | None:
    """Why a loss would see parts of sequences; ``actor`` is verl's actor configuration.

    Ulysses and Megatron's plain context parallelism bring the log-probs of whole sequences together
    before the loss.

    >>> sequence_trouble({"strategy": "torchtitan", "torchtitan": {"context_parallel_size": 2}})
    'actor.torchtitan.context_parallel_size=2: each rank sees a part of every sequence, which
    counterpoise does not support. Set it to 1.'
    """
    strategy = actor.get("strategy", "fsdp")
    engine = actor.get(strategy, None) or {}
    if strategy == "torchtitan" and engine.get("context_parallel_size", 1) > 1:
        where, fix = f"context_parallel_size={engine.get('context_parallel_size')}", "1"
    elif strategy == "megatron" and engine.get("dynamic_context_parallel", False):
        where, fix = "dynamic_context_parallel=True", "False"
    else:
        return None
    return (
        f"actor.{strategy}.{where}: each rank sees a part of every sequence, which counterpoise"
        f" does not support. Set it to {fix}."
    )


def several_outputs_trouble(config: DictConfig) -> str | None:
    """Why credit that reads tokens cannot work: the agent loop says that it returns a list."""
    agent = config.actor_rollout_ref.rollout.get("agent", None) or {}
    name = agent.get("default_agent_loop", None) or "single_turn_agent"
    run = getattr(_agent_loop(name, agent.get("agent_loop_config_path", None)), "run", None)
    returned = str(inspect.signature(run).return_annotation) if run else ""
    if not re.match(r"(typing\.)?(list|List|Sequence)\[", returned):
        return None
    return (
        f"agent loop {name!r} returns several outputs per session ({returned}), and plans and"
        " credit that reads tokens need one per rollout. Let it return one AgentLoopOutput, or use"
        " a method that reads rewards alone (counterpoise/dapo)."
    )


def _agent_loop(name: str, config_path: str | None) -> object:
    """The class of an agent loop; None if it is not known here."""
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.utils.import_utils import resolve_config_path

    known = dict(_agent_loop_registry)
    if config_path:
        own: Any = OmegaConf.load(resolve_config_path(config_path))
        known |= {one.name: one for one in own}
    module, _, kind = str(known.get(name, {}).get("_target_", "")).rpartition(".")
    return getattr(importlib.import_module(module), kind, None) if module else None


def _check_credit(config: DictConfig, setup: Setup) -> None:
    refuse(trainer_trouble(setup))
    needs, name = setup.method.needs, f"{PREFIX}{setup.method.name}"
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
    setup.method.check_group_size(
        config.actor_rollout_ref.rollout.n, f"{name} with actor_rollout_ref.rollout.n=1:"
    )


def _check_loss(config: DictConfig) -> None:
    loss_mode = str(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla"))
    if loss_mode.startswith(PREFIX):
        loss_method(loss_mode.removeprefix(PREFIX))


def _check_plan(config: DictConfig, setup: Setup, mode: str) -> None:
    actor, planner = config.actor_rollout_ref.actor, setup.method.planner
    if actor.shuffle:
        raise ValueError(
            "actor.shuffle=True shuffles the rows of every rank again after they were planned. Set"
            " it to False."
        )
    if planner.has("drops_rollouts"):
        raise ValueError(
            f"plan {planner} leaves out part of a prompt before verl has computed advantages."
            " Use mode 'groups' of reward_balanced, or another plan that takes whole prompts."
        )
    sync_every = config.trainer.v1.get(mode, {}).get("parameter_sync_step", 1)
    if config.data.train_batch_size // sync_every <= actor.ppo_mini_batch_size:
        warnings.warn(
            "the plan does nothing here: there is one update per batch"
            f" ({config.data.train_batch_size // sync_every} prompts,"
            f" actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}). Lower ppo_mini_batch_size"
            " for more.",
            stacklevel=4,
        )
