"""Batches that no run has trained on: sampled by the policy as it is, for probes that need more
than the saved one, and for the memory of methods that have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.catalogue.method import Method
from counterpoise.maths.reduce import derived_seed
from counterpoise.policy import REFERENCE, load_model
from counterpoise.policy.measure import TOKEN_BUDGET, measure
from counterpoise.policy.precision import autocast
from counterpoise.probes.methods import APART, assign, methods_of
from counterpoise.probes.scene import Scene
from counterpoise.rollouts import RolloutBatch
from counterpoise.trainer.collect import RolloutSampler
from counterpoise.trainer.update import budget_that_fits
from counterpoise.trainer.warn import said_by_us

WARMUP = 4  # batches before the first, for methods with state


class Forward(NamedTuple):
    """How the model reads a batch; a reference only for methods with a KL term."""

    temperature: float = 1.0
    token_budget: int = TOKEN_BUDGET
    reference: PreTrainedModel | None = None


def with_columns(
    model: PreTrainedModel, collected: RolloutBatch, needs: frozenset[str], how: Forward
) -> RolloutBatch:
    """The batch with the log-probs of the model and every column in ``needs``, in one forward."""
    batch = collected.batch
    missing = {name for name in needs | {"trainer_logp_NT"} if getattr(batch, name, None) is None}
    with autocast(model):
        columns = measure(
            model,
            collected.prompt_ids,
            batch.token_ids_NT,
            batch.mask_NT,
            missing,
            temperature=how.temperature,
            token_budget=how.token_budget,
            ref_model=how.reference,
        )
    return collected._replace(batch=batch.replace(**columns))


def read_as_run(scene: Scene, methods: Mapping[str, Method]) -> Forward:
    """How the run reads a batch, with its reference where a method needs one."""
    reference, model = scene.reference, scene.policy.model
    if reference is None and any(method.needs & REFERENCE for method in methods.values()):
        reference = load_model(scene.config.model, dtype=torch.float32, device=model.device).model
    budget = budget_that_fits(model, scene.config)
    return Forward(scene.config.rollouts.temperature, budget, reference)


def warm_states(
    scene: Scene, methods: Mapping[str, Method], how: Forward, rollouts: int, seed: int
) -> dict[str, Any]:
    """The run's state for the run's own method; others that have one get it from ``WARMUP`` batches
    by the policy as it is, unless they read what those batches do not have (``APART``).
    """
    own = scene.method.describe()
    states = {label: scene.state.method for label, m in methods.items() if m.describe() == own}
    others = {
        label: method
        for label, method in methods.items()
        if label not in states and has_state(method) and not method.needs & APART
    }
    needs = frozenset().union(*(method.needs for method in others.values()))
    batches = (fresh_batch(scene, "warmup", seed, k, rollouts, needs) for k in range(WARMUP))
    return states | states_after(scene.policy.model, batches, others, how)


def scene_credits(scene: Scene, methods: str) -> dict[str, Tensor]:
    """The credit that each method, with a memory where it has one, gives the saved batch."""
    chosen, rollouts = methods_of(methods), scene.config.rollouts
    how = read_as_run(scene, {label: m for label, m in chosen.items() if has_state(m)})
    states = warm_states(scene, chosen, how, rollouts.prompts * rollouts.group_size, seed=0)
    return {label: one.credit.credit_NT for label, one in assign(scene, chosen, states).items()}


def fresh_batch(
    scene: Scene,
    purpose: str,
    seed: int,
    number: int,
    rollouts: int,
    needs: frozenset[str] = frozenset(),
) -> RolloutBatch:
    """Rollouts by the policy as it is, of train prompts in an order of their own: not those of the
    run, and none twice unless the task has no more.
    """
    size = max(2, scene.config.rollouts.group_size)
    prompts = max(1, rollouts // size)
    settings = scene.config.rollouts.model_copy(update={"prompts": prompts, "group_size": size})
    stream = derived_seed(seed, scene.batch_number, purpose) % 2**31
    config = scene.config.model_copy(update={"rollouts": settings, "seed": stream})
    sampler = RolloutSampler(
        scene.policy, scene.task, config, number, start=number * prompts, needs=needs
    )
    with torch.random.fork_rng():
        return sampler.more()


def states_after(
    model: PreTrainedModel,
    batches: Iterable[RolloutBatch],
    methods: Mapping[str, Method],
    how: Forward,
) -> dict[str, dict[str, Any] | None]:
    """The state of methods that have one after some batches by the policy as it is."""
    own = {label: method for label, method in methods.items() if has_state(method)}
    states: dict[str, dict[str, Any] | None] = dict.fromkeys(own)
    needs = frozenset().union(*(method.needs for method in own.values()))
    for number, collected in enumerate(batches if own else ()):
        batch = with_columns(model, collected, needs, how).batch
        with said_by_us():
            for label, method in own.items():
                credit = method.assign(batch, states[label], seed=number, batch_number=number)
                states[label] = credit.state
    return states


def has_state(method: Method) -> bool:
    """Whether a stage of the method remembers earlier batches.

    >>> import counterpoise as cp
    >>> has_state(cp.method("fade")), has_state(cp.method("dapo"))
    (True, False)
    """
    start = method.init()
    return start["controller"] is not None or any(rule is not None for rule in start["rules"])
