"""One saved batch under several methods: which, and the credit that each assigns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from counterpoise.catalogue.method import Method
from counterpoise.catalogue.registry import method as make_method
from counterpoise.catalogue.registry import methods as known_methods
from counterpoise.policy import REFERENCE, load_model
from counterpoise.probes.scene import Scene
from counterpoise.rollouts import RolloutBatch
from counterpoise.text import load_yaml
from counterpoise.trainer.collect import RolloutSampler, collect, measure_columns
from counterpoise.trainer.importance import score_tokens
from counterpoise.trainer.loop import load_policy
from counterpoise.trainer.teacher import Teacher, check_sources, load_teacher, measure_teacher
from counterpoise.types import Credit, TokenBatch, cut_width

ALL = "all"  # every preset that any batch will do for, those of plug-ins too
# what neither the model nor a batch of rollouts alone can give
APART = frozenset({"turn_score_NU", "value_NT", "teacher_logp_NT", "importance_NT"})


class Assigned(NamedTuple):
    """A method, the batch with the columns that it needs, and the credit that it assigns."""

    method: Method
    batch: TokenBatch
    credit: Credit


def methods_of(text: str) -> dict[str, Method]:
    """A list as YAML writes it, ``dapo, {name: dapo, plan: ...}``; ``all`` in it stands for
    ``every_preset``.

    >>> list(methods_of("dapo, {name: grpo, credit: [top_entropy]}"))
    ['dapo', 'grpo, credit top_entropy']
    >>> len(methods_of("all, {name: dapo, plan: query_preserved}")) == len(every_preset()) + 1
    True
    """
    where = f"methods {text!r}"
    specs: list[Any] = [
        spec
        for item in load_yaml(f"[{text}]", where)
        for spec in (every_preset() if item == ALL else [item])
    ]
    methods = [method_of(spec, where) for spec in specs]
    labels = [method.label for method in methods]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if not methods or twice:
        problem = f"{twice!r} is there twice" if twice else "no method"
        raise ValueError(
            f"{where}: {problem}. Expected each method once; all stands for every preset."
        )
    return dict(zip(labels, methods))


def every_preset() -> list[str]:
    """The presets that every batch has the columns for, or the policy can measure them."""
    known = known_methods().items()
    return [name for name, info in known if not APART & set(info["needs"])]


def named_method(spec: str) -> tuple[str, Method]:
    """``dapo`` or ``{name: dapo, plan: query_preserved}``, with the text as its label."""
    return spec, method_of(load_yaml(spec, f"--method {spec!r}"), f"--method {spec!r}")


def method_of(axes: Any, where: str) -> Method:
    """The method of a name, or of a mapping with ``name`` and axes."""
    if isinstance(axes, str):
        axes = {"name": axes}
    if not isinstance(axes, dict) or not isinstance(axes.get("name"), str):
        raise ValueError(
            f"{where}: expected a name, or a mapping with name, for example '{{name: dapo, credit:"
            " [top_entropy]}'."
        )
    return make_method(**axes)


def assign(
    scene: Scene, methods: Mapping[str, Method], states: Mapping[str, Any] | None = None
) -> dict[str, Assigned]:
    """The credit of each method; a column that several need is measured once.

    A method gets its state from ``states`` (``fresh.warm_states``); where it has none there, the
    run's own method gets the run's and others their first. Another method that samples more
    does so (with the scene's policy, seed and batch number), and the rollouts that it adds, which
    change the credit of those that are there, are left out of what is returned.
    """
    collected, reference = scene.collected, scene.reference
    out = {}
    for label, method in methods.items():
        if reference is None and method.needs & REFERENCE:
            device = scene.policy.model.device
            reference = load_model(scene.config.model, dtype=torch.float32, device=device).model
        is_own = method.describe() == scene.method.describe()
        samples_more = bool(method.collectors) and not is_own
        rollouts = sample_more(scene, method) if samples_more else collected
        rollouts = measure_columns(scene.policy, method, scene.config, rollouts, reference)
        teacher = scene.teacher if is_own else first_teacher(scene, method)
        rollouts, _ = measure_teacher(teacher, scene.policy, method, scene.config, rollouts)
        rollouts, _ = score_tokens(
            scene.policy, method, scene.task, scene.config, rollouts, scene.batch_number
        )
        credit = method.assign(
            rollouts.batch,
            (states or {}).get(label, scene.state.method if is_own else None),
            seed=scene.config.seed,
            batch_number=scene.batch_number,
        )
        if not samples_more:
            collected = rollouts
        out[label] = first_rows(
            Assigned(method, rollouts.batch, credit), scene.collected.batch.mask_NT.shape
        )
    return out


def first_teacher(scene: Scene, method: Method) -> Teacher | None:
    """The teacher that another method would start with, None without one."""
    if not method.has_teacher:
        return None
    check_sources(method, scene.task, scene.config)
    return load_teacher(method, scene.policy, initial=load_policy(scene.config, method)[0])


def sample_more(scene: Scene, method: Method) -> RolloutBatch:
    """The saved batch with what the method's ``collect`` hooks add to it."""
    sampler = RolloutSampler(
        scene.policy,
        scene.task,
        scene.config,
        scene.batch_number,
        start=scene.state.num_prompts,
        needs=method.needs,
        success=method.success,
    )
    sampler.num_rounds = 1  # the saved batch is the first
    with torch.random.fork_rng():
        return collect(method, sampler, scene.collected)


def first_rows(one: Assigned, shape: torch.Size) -> Assigned:
    """Credit of the first rollouts, cut to their width; nothing changes where there are no more."""
    num, width = shape
    if one.batch.mask_NT.shape == shape:
        return one
    row_R = torch.arange(num, device=one.batch.mask_NT.device)
    credit = one.credit._replace(
        advantage_N=one.credit.advantage_N[:num],
        advantage_NU=None if one.credit.advantage_NU is None else one.credit.advantage_NU[:num],
        weight_NT=one.credit.weight_NT[:num, :width],
        credit_NT=one.credit.credit_NT[:num, :width],
    )
    return Assigned(one.method, cut_width(one.batch.select(row_R), width), credit)
