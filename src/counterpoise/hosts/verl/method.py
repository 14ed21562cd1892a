"""A method in verl's terms: what an estimator, the trainer and a policy loss can run of it, and one
line where they cannot.

verl splits a method. The advantage estimator sees rewards and prompt ids. A policy loss sees one
micro-batch of log-probs and advantages. Only the trainer, on the driver, can bring ids, prompts,
log-probs and entropies together. The reduction is verl's ``loss_agg_mode``.
"""

# verl lives in an environment of its own
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import counterpoise as cp
from counterpoise.catalogue.method import Method
from counterpoise.errors import nearest
from counterpoise.losses import reinforce
from counterpoise.reductions import per_token

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.trainer.config import AlgoConfig

PREFIX = "counterpoise/"
MODES = ("sync", "colocate_async", "separate_async")
SETTINGS = ("advantage", "credit", "plan", "controller", "seed", "success", "turns")
ELSEWHERE = "Use counterpoise.hosts.trl or counterpoise train."
# columns that TRL does not give either
NOWHERE = frozenset({"ref_kl_NT", "importance_NT"})
# columns that verl's queue holds after it has scored the rollouts
COLUMNS = frozenset({"entropy_NT", "trainer_logp_NT", "ref_logp_NT"})
# columns that an agent loop may give
TURNS = frozenset({"turn_score_NU"})
# reduction -> verl's loss_agg_mode; others are refused
AGG_MODES = {
    "per_token": "token-mean",
    "per_sequence": "seq-mean-token-mean",
    "constant_length": "seq-mean-token-sum-norm",
}


class Setup(NamedTuple):
    """A method with the axes of ``algorithm.counterpoise`` changed.

    Attributes:
        method: its loss and reduction are left out: verl takes them from
            ``actor.policy_loss.loss_mode`` and ``actor.loss_agg_mode``.
        has_own_plan: the method's plan chooses the rows of each update, not verl's order.
        seed: of plans and of rules that draw at random.
        success_key: the value of the reward function that decides success; None leaves it to the
            threshold.
        has_turns: agent loops say what each turn earned (``algorithm.counterpoise.turns``).
    """

    method: Method
    has_own_plan: bool
    seed: int
    success_key: str | None = None
    has_turns: bool = False


def setup(name: str, settings: dict[str, Any] | None = None) -> Setup:
    """The credit side of a method; ``settings`` is the mapping under ``algorithm.counterpoise``.

    >>> dapo = setup("dapo", {"plan": "query_preserved"})
    >>> dapo.method.reads_rewards_only, dapo.has_own_plan
    (True, True)
    """
    settings = dict(settings or {})
    for key in settings:
        if key not in SETTINGS:
            where = (
                " The loss is actor.policy_loss.loss_mode, the reduction actor.loss_agg_mode."
                if key in ("loss", "reduction")
                else ""
            )
            raise ValueError(
                f"algorithm.counterpoise has no setting {key!r}. {nearest(key, SETTINGS)}{where}"
            )
    seed = settings.pop("seed", 0)
    if not isinstance(seed, int):
        raise ValueError(f"algorithm.counterpoise.seed must be an integer, got {seed!r}.")
    has_turns = settings.pop("turns", None) is not None
    success = settings.pop("success", None)
    key = success if isinstance(success, str) else None
    threshold = None if isinstance(success, str) else success
    method = cp.method(name, success=threshold, **settings)
    method.check_sampling("verl")
    refuse(_update_trouble(method))
    method = dataclasses.replace(method, terms=(reinforce,), reduction=per_token)
    return Setup(method, not method.planner.has("shuffles_rows"), seed, key, has_turns)


def settings_of(config: DictConfig | AlgoConfig | dict[str, Any] | None) -> dict[str, Any]:
    """The mapping under ``algorithm.counterpoise`` of verl's configuration."""
    ours = config.get("counterpoise", None) if config is not None else None
    if ours is None:
        return {}
    if isinstance(ours, dict):
        return ours
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(ours, resolve=True)
    if not isinstance(plain, dict):
        raise ValueError(
            f"algorithm.counterpoise must be a mapping, got {plain!r}. For example"
            " +algorithm.counterpoise.seed=1."
        )
    return {str(key): value for key, value in plain.items()}


def rollouts_per_prompt(config: DictConfig | AlgoConfig | dict[str, Any] | None) -> int | None:
    """verl's ``rollout.n``, where its ``algorithm`` is a part of the whole configuration."""
    whole = getattr(config, "_get_root", dict)()
    rollout = (whole.get("actor_rollout_ref") or {}).get("rollout") or {}
    return rollout.get("n")


@functools.cache
def loss_method(name: str) -> Method:
    """A method for its loss, built once per process; an error where verl cannot run that loss."""
    method = cp.method(name)
    refuse(loss_trouble(method))
    return method


def refuse(*troubles: str | None) -> None:
    """Raise the first trouble there is."""
    for trouble in troubles:
        if trouble:
            raise ValueError(trouble)


def estimator_trouble(setup: Setup) -> str | None:
    """Why verl's estimator alone cannot give this credit: it gets rewards and prompt ids, no
    tokens.
    """
    if setup.success_key is not None:
        return (
            f"algorithm.counterpoise.success={setup.success_key} names a value of the reward"
            " function, which verl does not hand to an estimator. Set"
            f" trainer.v1.trainer_mode={PREFIX}sync, or give a threshold (success=1.0)."
        )
    if setup.method.reads_rewards_only:
        return None
    return (
        f"{PREFIX}{setup.method.name}: its credit reads the tokens of each rollout, which verl does"
        f" not hand to an estimator. Set trainer.v1.trainer_mode={PREFIX}sync (or"
        f" {PREFIX}colocate_async, {PREFIX}separate_async)."
    )


def trainer_trouble(setup: Setup) -> str | None:
    """Why the trainer cannot give this credit either: a column that never leaves verl's workers."""
    missing = sorted(setup.method.needs - COLUMNS - (TURNS if setup.has_turns else set()))
    if not missing:
        return None
    if set(missing) <= TURNS:
        return (
            f"{PREFIX}{setup.method.name}: its credit reads {', '.join(missing)}, which an agent"
            " loop must give. Set +algorithm.counterpoise.turns.environment.name to an environment"
            " with scores, or +algorithm.counterpoise.turns={} where your own agent loop puts"
            " turn_rewards and turn_scores into extra_fields."
        )
    if setup.method.has_teacher:
        return (
            f"{PREFIX}{setup.method.name}: it has a teacher, who scores each rollout after another"
            " prompt. verl's workers score the rows of its queue, which hold rollouts after their"
            f" own prompts, and counterpoise adds no rows to it. {ELSEWHERE}"
        )
    instead = "Use counterpoise train." if NOWHERE & set(missing) else ELSEWHERE
    methods = [cp.method(name) for name in cp.methods()]
    others = [method.name for method in methods if method.rules and method.needs <= COLUMNS]
    return (
        f"{PREFIX}{setup.method.name}: its credit reads {', '.join(missing)}, and verl's workers"
        f" send back log-probs and entropies alone. {instead} Methods whose credit works in verl:"
        f" {', '.join(others)}."
    )


def loss_trouble(method: Method) -> str | None:
    """Why verl cannot run this loss: it hands a policy loss one micro-batch, without ids, prompts,
    rewards or a reference.
    """
    needed = sorted(frozenset().union(*(term.needs for term in method.terms)))
    if method.needs_update_logp:
        return _update_trouble(method)
    if needed:
        return (
            f"{PREFIX}{method.name}: a term of its loss reads {', '.join(needed)}, which verl does"
            " not hand to a policy loss. For a KL term leave it out and set"
            " actor.use_kl_loss=True."
        )
    if agg_mode(method) is None:
        return (
            f"{PREFIX}{method.name}: its reduction {method.describe()['reduction']}"
            " has no loss_agg_mode in verl. Use the loss of another method beside this estimator,"
            f" for example loss_mode={PREFIX}dapo with loss_agg_mode=token-mean."
        )
    return None


def agg_mode(method: Method) -> str | None:
    """verl's name of a method's reduction, None if it has none.

    >>> [agg_mode(cp.method(name)) for name in ("dapo", "gspo", "dr_grpo", "tpo", "ibpo")]
    ['token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum-norm', 'seq-mean-token-sum', None]
    """
    reduction = method.describe()["reduction"]
    if reduction.get("count", "mask") != "mask":
        return None
    one = reduction.get("length") == 1
    return "seq-mean-token-sum" if one else AGG_MODES.get(reduction["name"])


def _update_trouble(method: Method) -> str | None:
    if not method.needs_update_logp:
        return None
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    names = [term["name"] for term in method.describe()["loss"]]
    own = next((name for name in names if name in POLICY_LOSS_REGISTRY), None)
    instead = (
        f" verl has a loss_mode={own} of its own, which chooses its tokens in each micro-batch."
        if own
        else ""
    )
    return (
        f"{PREFIX}{method.name}: its loss ({', '.join(names)}) must see the log-probs of a whole"
        " update before it is cut, and verl hands a policy loss one micro-batch."
        f" {ELSEWHERE}{instead}"
    )
