"""How near does the update of one batch come to the true policy gradient, method by method, and how
many plain rollouts is that worth?

The truth is the gradient of expected reward over the task's prompts, from very many rollouts by the
policy as it is, in two independent halves. Every method then gets the same fresh batches.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from counterpoise.catalogue.method import Method
from counterpoise.errors import nearest
from counterpoise.probes.fresh import Forward, fresh_batch, read_as_run, states_after, warm_states
from counterpoise.probes.gradient.batches import batch_rows
from counterpoise.probes.gradient.numbers import LEAST_BATCHES, numbers_of
from counterpoise.probes.gradient.show import figure, sheet
from counterpoise.probes.gradient.truth import (
    Truth,
    add_chunk,
    empty_truth,
    load_truth,
    save_truth,
    truth_rows,
)
from counterpoise.probes.gradient.vectors import coefficients, moments_of
from counterpoise.probes.methods import method_of, methods_of
from counterpoise.probes.output import Frame, Output
from counterpoise.probes.scene import Scene
from counterpoise.rollouts import RolloutBatch

__all__ = ["coefficients", "compare_gradients", "figure", "probe", "sheet", "summarise"]

CHUNKS = 32  # of the truth, for its noise and for going on after a stop
SAVE_SECONDS = 30


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
                fresh_batch(scene, "gradient/batches", seed, number, rollouts, needs),
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
    """The truth in ``CHUNKS`` chunks; what an earlier call saved is not sampled again.

    It is as large as two models, so it is saved when ``SAVE_SECONDS`` of work would be lost, and at
    the end.
    """
    model, file = scene.policy.model, truth_file(output)
    known, saved_at = load_truth(file, empty_truth(model)), time.monotonic()
    for number in output.track(range(CHUNKS), "chunks of the truth"):
        if number < len(known.rollouts_C):
            continue
        chunk = fresh_batch(scene, "gradient/truth", seed, number, rollouts // CHUNKS)
        known = add_chunk(known, model, chunk, how)
        if number == CHUNKS - 1 or time.monotonic() - saved_at >= SAVE_SECONDS:
            save_truth(file, known)
            saved_at = time.monotonic()
    return known


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
    return read_as_run(scene, methods)


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
