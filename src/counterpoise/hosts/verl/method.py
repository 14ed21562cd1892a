"""A method in verl's terms: what of it an estimator, the trainer and a policy loss can run there,
and one line where they cannot.

verl splits a method: the advantage estimator sees rewards and prompt ids, a policy loss sees one
micro-batch of log-probs and advantages, and only the trainer, on the driver, can bring ids,
prompts, log-probs and entropies together. The reduction is verl's ``loss_agg_mode``."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any, NamedTuple

import counterpoise as cp
from counterpoise.catalogue.method import Method
from counterpoise.catalogue.registry import FAMILIES
from counterpoise.errors import nearest
from counterpoise.losses import reinforce
from counterpoise.reductions import per_token
from counterpoise.stage import describe

PREFIX = "counterpoise/"
SUPPORTED = "0.9.1"
MODES = ("sync", "colocate_async", "separate_async")
SETTINGS = ("advantage", "credit", "plan", "controller", "seed")
ELSEWHERE = "Use counterpoise.hosts.trl or counterpoise train."
# columns that verl's queue holds after it has scored the rollouts
COLUMNS = frozenset({"entropy_NT", "trainer_logp_NT", "ref_logp_NT"})
AGG_MODES = {
    "per_token": "token-mean",
    "per_sequence": "seq-mean-token-mean",
    "constant_length": "seq-mean-token-sum-norm",
}


def check_version(version: str) -> None:
    """The hooks were written for one version of verl, which changes its trainer between minor
    versions.
    """
    if version != SUPPORTED:
        raise ValueError(
            f"counterpoise.hosts.verl works with verl {SUPPORTED}, found {version}. pip install"
            f" 'verl=={SUPPORTED}'"
        )


def check_installed() -> None:
    """One line instead of a failing import deep inside."""
    if importlib.util.find_spec("verl") is None:
        raise ImportError(
            f"verl is not installed. pip install 'counterpoise[verl]' (verl {SUPPORTED}) in an"
            " environment of its own."
        )


class Setup(NamedTuple):
    """A method with the axes of ``algorithm.counterpoise`` changed.

    Attributes:
        method: its loss and reduction are left out: verl takes them from
            ``actor.policy_loss.loss_mode`` and ``actor.loss_agg_mode``.
        has_own_plan: the rows of each update are chosen by the method's plan instead of
            verl's order.
        seed: of plans and of rules that draw at random.
    """

    method: Method
    has_own_plan: bool
    seed: int

    @property
    def is_reward_only(self) -> bool:
        """Whether every token of a rollout gets the same credit, known from rewards and prompts
        alone.
        """
        return self.method.reads_rewards_only


def setup(name: str, settings: dict[str, Any] | None = None) -> Setup:
    """The credit side of a method; ``settings`` is the mapping under ``algorithm.counterpoise``.

    >>> made = setup("dapo", {"plan": "query_preserved"})
    >>> made.is_reward_only, made.has_own_plan
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
    made = cp.method(name, **settings)
    trouble = _update_loss(made)
    if trouble:
        raise ValueError(trouble)
    made = dataclasses.replace(made, terms=(reinforce,), reduction=per_token)
    return Setup(made, not made.planner.has("shuffles_rows"), seed)


@functools.cache
def whole_method(name: str) -> Method:
    """A preset or a registered method, built once a process."""
    return cp.method(name)


def estimator_trouble(made: Setup) -> str | None:
    """Why verl's estimator alone cannot give this credit: it gets rewards and prompt ids, no
    tokens.
    """
    if made.is_reward_only:
        return None
    return (
        f"{PREFIX}{made.method.name}: its credit reads the tokens of each rollout, which verl does"
        f" not hand to an estimator. Set trainer.v1.trainer_mode={PREFIX}sync (or"
        f" {PREFIX}colocate_async, {PREFIX}separate_async)."
    )


def trainer_trouble(made: Setup) -> str | None:
    """Why the trainer cannot give this credit either: a column that never leaves verl's workers."""
    missing = sorted(made.method.needs - COLUMNS)
    if not missing:
        return None
    return (
        f"{PREFIX}{made.method.name}: its credit reads {', '.join(missing)}, and verl's workers"
        f" send back log-probs and entropies alone. {ELSEWHERE} Credit that works in verl without"
        " hidden states: ktae, gtpo, ibpo, top_entropy, ar, stapo."
    )


def loss_trouble(made: Method) -> str | None:
    """Why verl cannot run this loss: it hands a policy loss one micro-batch, without ids, prompts,
    rewards or a reference.
    """
    needed = sorted(frozenset().union(*(term.needs for term in made.terms)))
    if _update_loss(made):
        return _update_loss(made)
    if needed:
        return (
            f"{PREFIX}{made.name}: a term of its loss reads {', '.join(needed)}, which verl does"
            " not hand to a policy loss. For a KL term leave it out and set"
            " actor.use_kl_loss=True."
        )
    if agg_mode(made) is None:
        return (
            f"{PREFIX}{made.name}: its reduction {describe(FAMILIES['reduction'], made.reduction)}"
            " has no loss_agg_mode in verl. Use the loss of another method beside this estimator,"
            f" for example loss_mode={PREFIX}dapo with loss_agg_mode=token-mean."
        )
    return None


def sequence_trouble(actor: Any) -> str | None:
    """Why a loss would see parts of sequences; ``actor`` is verl's actor configuration.

    Ulysses and Megatron's plain context parallelism bring the log-probs of whole sequences together
    before the loss.

    >>> sequence_trouble({"strategy": "torchtitan", "torchtitan": {"context_parallel_size": 2}})
    'actor.torchtitan.context_parallel_size=2: each rank sees a part of every sequence, which
    counterpoise does not support. Set it to 1.'"""
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


def agg_mode(made: Method) -> str | None:
    """verl's name of a method's reduction, None if it has none.

    >>> [agg_mode(cp.method(name)) for name in ("dapo", "gspo", "dr_grpo", "tpo", "ibpo")]
    ['token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum-norm', 'seq-mean-token-sum', None]
    """
    name, how = describe(FAMILIES["reduction"], made.reduction)["name"], made.reduction.params
    if how.get("count", "mask") != "mask":
        return None
    return "seq-mean-token-sum" if how.get("length") == 1 else AGG_MODES.get(name)


def _update_loss(made: Method) -> str | None:
    if not made.needs_update_logp:
        return None
    names = [describe(FAMILIES["loss"], term)["name"] for term in made.terms]
    own = next((name for name in names if name in ("clip_cov", "kl_cov")), None)
    instead = (
        f" verl has a loss_mode={own} of its own, which chooses its tokens in each micro-batch."
        if own
        else ""
    )
    return (
        f"{PREFIX}{made.name}: its loss ({', '.join(names)}) must see the log-probs of a whole"
        " update before it is cut, and verl hands a policy loss one micro-batch."
        f" {ELSEWHERE}{instead}"
    )
