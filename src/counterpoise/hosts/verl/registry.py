"""counterpoise inside verl: estimators, policy losses and trainers under
``counterpoise/<name>``.

    algorithm.adv_estimator=counterpoise/ktae       credit; the estimator alone is enough where
                                                    rewards and prompts are
    actor_rollout_ref.actor.policy_loss.loss_mode=counterpoise/dapo     the loss
    trainer.v1.trainer_mode=counterpoise/sync       credit that reads tokens, and plans
    +algorithm.counterpoise.plan=query_preserved    axes: advantage, credit, plan, controller; seed

verl finds them by its entry point ``verl.plugins``, in the driver and in every worker. It hides a
plug-in that fails; ``registration`` tells.
"""

# verl lives in an environment of its own
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import counterpoise as cp
from counterpoise.hosts.verl import hooks
from counterpoise.hosts.verl.checks import check_installed
from counterpoise.hosts.verl.method import MODES, PREFIX

ENTRY_POINTS = "verl.plugins"
PLUGIN = "counterpoise.hosts.verl.plugin"
TRAINER = "counterpoise.hosts.verl.trainer"
AGENT_LOOP = "counterpoise.hosts.verl.agent_loop"
ALL_HOOKS = hooks.LOSSES | hooks.TRAINERS


class Registration(NamedTuple):
    """What of counterpoise is in verl's registries, what is wrong, each with its fix, and what was
    looked at of verl.
    """

    version: str | None
    estimators: list[str]
    losses: list[str]
    trainers: list[str]
    problems: list[str]
    checked: str = ""


def register() -> None:
    """Put every method into verl's registries. May be called twice.

    Of another version than the tested one the functions that we stand on are looked at first. A
    part that cannot be registered is named in a warning.
    """
    check_installed()
    import verl
    from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss

    from counterpoise.hosts.verl.estimators import estimator
    from counterpoise.hosts.verl.loss import policy_loss

    version, is_tested = verl.__version__, verl.__version__ == hooks.TESTED
    line = "" if is_tested else hooks.line_on(version, hooks.LOSSES)
    for name in cp.methods():
        register_adv_est(PREFIX + name)(estimator(name))
        register_policy_loss(PREFIX + name)(policy_loss(name))
    try:
        line = "" if is_tested else hooks.line_on(version, ALL_HOOKS)
        importlib.import_module(TRAINER)
        importlib.import_module(AGENT_LOOP)
    except (ImportError, ValueError) as error:
        warnings.warn(_no_trainer(error), stacklevel=2)
    if line:
        warnings.warn(f"{line}. `counterpoise doctor verl` tries it.", stacklevel=2)


def registration() -> Registration:
    """Look into verl's registries as ``import verl`` left them; nothing is registered here.

    Run it in a process that has not called ``register`` itself. verl swallows what a plug-in
    raises: where names are missing the plug-in is imported once more, and what it raises becomes a
    line of ``problems``.
    """
    try:
        check_installed()
    except ImportError as error:
        return Registration(None, [], [], [], [str(error)])
    import verl

    try:
        from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    except ImportError as error:
        return Registration(
            verl.__version__,
            [],
            [],
            [],
            [f"verl.trainer.ppo.core_algos does not import: {error!r}."],
        )
    estimators, losses, trainers = (
        _ours(ADV_ESTIMATOR_REGISTRY),
        _ours(POLICY_LOSS_REGISTRY),
        _trainers(),
    )
    expected = {PREFIX + name for name in cp.methods()}
    problems = [] if expected <= set(estimators) & set(losses) else _causes(verl.__version__)
    if not problems and len(trainers) < len(MODES):
        problems = _trainer_causes()
    checked = "" if problems else hooks.line_on(verl.__version__, ALL_HOOKS)
    return Registration(verl.__version__, estimators, losses, trainers, problems, checked)


def _ours(registry: Iterable[str]) -> list[str]:
    return sorted(name for name in registry if name.startswith(PREFIX))


def _trainers() -> list[str]:
    """The trainers, where verl's own package of them can be imported."""
    try:
        from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
    except ImportError:
        return []
    return _ours(TRAINER_REGISTRY)


def _causes(version: str) -> list[str]:
    """Why verl does not know our estimators and losses."""
    import verl

    policy, points = (
        os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower(),
        importlib.metadata.entry_points(group=ENTRY_POINTS),
    )
    if not any(point.value == PLUGIN for point in points):
        return [
            f"no entry point {PLUGIN} in the group {ENTRY_POINTS}: the installed counterpoise is"
            " incomplete. pip install it again."
        ]
    if policy != "auto" and "counterpoise" not in policy.split(","):
        return [
            f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading counterpoise. Unset it, or"
            " add counterpoise to it."
        ]
    if ENTRY_POINTS not in inspect.getsource(verl):
        return [
            f"verl {version} looks for no plug-ins. Set VERL_USE_EXTERNAL_MODULES={PLUGIN} on"
            " every node; it brings estimators and losses, for trainers take verl >= 0.9."
        ]
    try:
        importlib.import_module(PLUGIN)
    except Exception as error:
        return [f"verl {version} swallowed a failure of {PLUGIN}: {error!r}."]
    return [
        f"verl {version} had not loaded {PLUGIN}, which imports without a failure now. Run the"
        " check in a fresh process."
    ]


def _trainer_causes() -> list[str]:
    try:
        hooks.look_at(hooks.TRAINERS)
        importlib.import_module(TRAINER)
    except (ImportError, ValueError) as error:
        return [_no_trainer(error)]
    return [
        f"verl had not loaded {TRAINER}, which imports without a failure now. Run the check in a"
        " fresh process."
    ]


def _no_trainer(error: ImportError | ValueError) -> str:
    return (
        f"verl's trainers (trainer_mode={PREFIX}sync) are not available: {error!r}. Estimators and"
        f" losses are. pip install 'verl[verl-core]=={hooks.TESTED}' brings what verl's own"
        " trainers import, TransferQueue among it."
    )
