"""One batch under every method: the products of its gradients with the truth and with each other.

Axes: N rollouts, T response tokens, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.catalogue.method import Method
from counterpoise.probes.fresh import Forward, with_columns
from counterpoise.probes.gradient.truth import PLAIN, Truth
from counterpoise.probes.gradient.vectors import (
    Moments,
    adamw_step,
    coefficients,
    gradients,
    likenesses,
    sketch,
)
from counterpoise.probes.output import Rows
from counterpoise.rollouts import RolloutBatch
from counterpoise.trainer.warn import said_by_us

GRADIENT, ADAMW = METRICS = ("gradient", "adamw")
YARDSTICK = "plain rollouts"  # the label of PLAIN in the tables


def batch_rows(
    model: PreTrainedModel,
    truth: Truth,
    collected: RolloutBatch,
    methods: Mapping[str, Method],
    control: str,
    how: Forward,
    *,
    moments: Moments | None = None,
    number: int = 0,
    states: Mapping[str, dict[str, Any] | None] | None = None,
) -> Rows:
    """One row per method and metric: the gradient, and AdamW's step where its ``moments`` are
    given. A method whose coefficients are another's times a factor
    (``scale``) has the other's name in ``like`` and its numbers.
    """
    everyone = {control: methods[control], **methods, YARDSTICK: PLAIN}
    needs = frozenset().union(*(method.needs for method in everyone.values()))
    collected = with_columns(model, collected, needs, how)
    coefs = {
        label: method_coefficients(method, collected, (states or {}).get(label), number)
        for label, method in everyone.items()
    }
    alike = likenesses(coefs)
    distinct = [label for label in coefs if alike[label].like == label]
    vectors = gradients(model, collected, torch.stack([coefs[x] for x in distinct]), how)
    own = product_rows(truth, distinct, vectors, moments)
    facts = {"batch": number, "rollouts": collected.batch.num_rollouts}
    return [
        {**facts, "method": label, **like._asdict(), **own_row(row, is_own=label == like.like)}
        for label, like in alike.items()
        for row in own[like.like]
    ]


def own_row(row: dict[str, Any], *, is_own: bool) -> dict[str, Any]:
    """A sketch is written once; AdamW's step has no scale."""
    out = row if is_own else {**row, "sketch": row["sketch"][:0]}
    return out if row["metric"] == GRADIENT else {**out, "scale": 1.0}


def method_coefficients(
    method: Method, collected: RolloutBatch, state: dict[str, Any] | None, number: int
) -> Tensor:
    """The coefficients of a method that assigns credit to this batch."""
    with said_by_us():
        credit = method.assign(collected.batch, state, seed=number, batch_number=number)
    return coefficients(method, collected.batch, credit, seed=number)


def product_rows(
    truth: Truth, labels: Sequence[str], vectors: Iterable[Tensor], moments: Moments | None
) -> dict[str, Rows]:
    """Products of every gradient with the halves of the truth, with itself and with the first one,
    which is the control's; the same for AdamW's steps.
    """
    first_P, second_P = truth.mean_2P
    control: dict[str, Tensor] = {}
    out: dict[str, Rows] = {label: [] for label in labels}
    for label, gradient_P in zip(labels, vectors):
        gradient_P = gradient_P.to(first_P.dtype)
        seen = {GRADIENT: gradient_P}
        if moments:
            seen[ADAMW] = adamw_step(gradient_P, moments)
        for metric, vector_P in seen.items():
            control.setdefault(metric, vector_P.clone())
            others = {"first": first_P, "second": second_P}
            others |= {"square": vector_P, "control": control[metric]}
            products = {name: float(vector_P @ other_P) for name, other_P in others.items()}
            numbers_S = sketch(vector_P, truth.sign_P).cpu().numpy()
            out[label].append({"metric": metric, **products, "sketch": numbers_S})
    return out
