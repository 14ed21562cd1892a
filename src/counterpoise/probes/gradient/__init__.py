"""How near does the update of one batch come to the true policy gradient, method by method, and how
many plain rollouts is that worth?

The truth is the gradient of expected reward over the task's prompts, from very many rollouts by the
policy as it is, in two independent halves. Every method then gets the same fresh batches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from counterpoise.catalogue.method import Method
from counterpoise.errors import nearest
from counterpoise.maths.reduce import derived_seed
from counterpoise.policy import REFERENCE, load_model
from counterpoise.probes.gradient.batches import batch_rows, states_after
from counterpoise.probes.gradient.figure import figure, sheet
from counterpoise.probes.gradient.numbers import LEAST_BATCHES, numbers_of
from counterpoise.probes.gradient.truth import (
    Truth,
    add_chunk,
    empty_truth,
    load_truth,
    save_truth,
    truth_rows,
)
from counterpoise.probes.gradient.vectors import Forward, coefficients, moments_of
from counterpoise.probes.methods import method_of, methods_of
from counterpoise.probes.output import Frame, Output
from counterpoise.probes.scene import Scene
from counterpoise.rollouts import RolloutBatch
from counterpoise.trainer.collect import RolloutSampler
from counterpoise.trainer.update import budget_that_fits

__all__ = ["coefficients", "compare_gradients", "figure", "probe", "sheet", "summarise"]

WARMUP = 4  # batches before the first, for methods with state
CHUNKS = 32  # of the truth, for its noise and for going on after a stop


def compare_gradients(
    model: PreTrainedModel,
    truth: Iterable[RolloutBatch],
    batches: Iterable[RolloutBatch],
    methods: Mapping[str, Method],
    *,
    control: str = "dr_grpo",
    temperature: float = 1.0,
    optimizer: torch.optim.Optimizer | None = None,
    warmup: Iterable[RolloutBatch] = (),
) -> dict[str, Any]:
    """The numbers of the probe for batches of one's own, sampled by this model.

    Args:
        truth: many batches of prompts of the same kind, two or more rollouts per prompt; each is
            read once and let go, so a generator may make them.
        batches: three or more batches of one size, independent of the truth.
        methods: label -> method, the control among them.
        optimizer: an AdamW that has taken updates, for the numbers of its steps.
        warmup: batches from which methods with state get it; their first state otherwise.
    """
    import pandas as pd

    check_control(control, methods)
    how = Forward(temperature)
    known, moments = empty_truth(model), optimizer and moments_of(model, optimizer)
    for chunk in truth:
        known = add_chunk(known, model, chunk, how)
    states = states_after(model, warmup, methods, how)
    tables = {"truth": pd.DataFrame(truth_rows(known))}
    for number, batch in enumerate(batches):
        rows = batch_rows(
            *(model, known, batch, methods, control, how),
            moments=moments,
            number=number,
            states=states,
        )
        tables[f"batch_{number:04d}"] = pd.DataFrame(rows)
    check_sizes(len(known.rollouts_C), len(tables) - 1)
    return numbers_of(tables, control)


def probe(
    scene: Scene,
    output: Output,
    *,
    methods: str = "all",
    control: str = "dr_grpo",
    truth: int = 16384,
    batches: int = 32,
    rollouts: int = 128,
    seed: int = 0,
) -> None:
    """``truth`` rollouts for the true gradient, then ``batches`` batches of ``rollouts`` rollouts
    under every method. ``control`` joins the methods if it is not one of them.
    """
    check_sizes(CHUNKS, batches)
    control, chosen = with_control(methods, control)
    how = forward_of(scene, chosen)
    # made when the first missing table asks for it
    whole = functools.cache(lambda: gather_truth(scene, output, how, truth, seed))
    states = functools.cache(lambda: warm_states(scene, chosen, how, rollouts, seed))
    output.table("truth", lambda: truth_rows(whole()))
    needs = frozenset().union(*(method.needs for method in chosen.values()))
    for number in output.track(range(batches), "batches"):
        output.table(
            f"batch_{number:04d}",
            lambda number=number: batch_rows(
                scene.policy.model,
                whole(),
                fresh_batch(scene, "batches", seed, number, rollouts, needs),
                chosen,
                control,
                how,
                moments=moments_of(scene.policy.model, scene.optimizer),
                number=number,
                states=states(),
            ),
        )
    truth_file(output).unlink(missing_ok=True)  # large, and the tables hold what the numbers need


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """The numbers; the control is the first method of every batch."""
    return numbers_of(tables, str(tables["batch_0000"]["method"].iloc[0]))


def truth_file(output: Output) -> Path:
    return output.folder / "truth.safetensors"


def gather_truth(scene: Scene, output: Output, how: Forward, rollouts: int, seed: int) -> Truth:
    """The truth in ``CHUNKS`` chunks; what an earlier call saved is not sampled again."""
    model, file = scene.policy.model, truth_file(output)
    known = load_truth(file, empty_truth(model))
    for number in output.track(range(CHUNKS), "chunks of the truth"):
        if number >= len(known.rollouts_C):
            chunk = fresh_batch(scene, "truth", seed, number, rollouts // CHUNKS)
            known = add_chunk(known, model, chunk, how)
            save_truth(file, known)
    return known


def warm_states(
    scene: Scene, methods: Mapping[str, Method], how: Forward, rollouts: int, seed: int
) -> dict[str, Any]:
    """The run's state for the run's own method; others get theirs from ``WARMUP`` batches by the
    policy as it is.
    """
    own = scene.method.describe()
    states = {label: scene.state.method for label, m in methods.items() if m.describe() == own}
    others = {label: method for label, method in methods.items() if label not in states}
    needs = frozenset().union(*(method.needs for method in others.values()))
    batches = (fresh_batch(scene, "warmup", seed, k, rollouts, needs) for k in range(WARMUP))
    return states | states_after(scene.policy.model, batches, others, how)


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
    stream = derived_seed(seed, scene.batch_number, f"gradient/{purpose}") % 2**31
    config = scene.config.model_copy(update={"rollouts": settings, "seed": stream})
    sampler = RolloutSampler(
        scene.policy, scene.task, config, number, start=number * prompts, needs=needs
    )
    with torch.random.fork_rng():
        return sampler.more()


def forward_of(scene: Scene, methods: Mapping[str, Method]) -> Forward:
    """How the run reads a batch, with its reference where a method needs one."""
    taught = [label for label, method in methods.items() if method.has_teacher]
    if taught:
        raise ValueError(
            f"gradient: {taught[0]} has a teacher, and this probe samples batches that no teacher"
            " has read. Take methods without one."
        )
    scored = [label for label, method in methods.items() if "importance_NT" in method.needs]
    if scored:
        raise ValueError(
            f"gradient: {scored[0]} reads importance_NT, which this probe does not measure in the"
            " batches that it samples. Take other methods."
        )
    reference, model = scene.reference, scene.policy.model
    if reference is None and any(method.needs & REFERENCE for method in methods.values()):
        reference = load_model(scene.config.model, dtype=torch.float32, device=model.device).model
    budget = budget_that_fits(model, scene.config)
    return Forward(scene.config.rollouts.temperature, budget, reference)


def with_control(text: str, control: str) -> tuple[str, dict[str, Method]]:
    """The control's label, and the methods with it."""
    method = method_of(control, f"control {control!r}")
    return method.label, {method.label: method, **methods_of(text)}


def check_control(control: str, methods: Mapping[str, Method]) -> None:
    if control not in methods:
        raise ValueError(
            f"gradient: the control {control!r} is not one of the methods."
            f" {nearest(control, methods)}"
        )


def check_sizes(num_chunks: int, num_batches: int) -> None:
    if num_chunks < 4 or num_batches < LEAST_BATCHES:
        raise ValueError(
            f"gradient: got {num_chunks} chunks of the truth and {num_batches} batches; expected 4"
            f" chunks or more (two per half) and {LEAST_BATCHES} batches or more."
        )
