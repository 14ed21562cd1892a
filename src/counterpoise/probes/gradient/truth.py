"""The truth: the gradient of expected reward from very many rollouts, in two halves.

Axes: P parameters, C chunks, S numbers of a sketch.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.catalogue.registry import method as make_method
from counterpoise.probes.gradient.vectors import (
    Forward,
    coefficients,
    gradients,
    parameters_of,
    sketch,
    sketch_signs,
)
from counterpoise.probes.output import Rows
from counterpoise.rollouts import RolloutBatch
from counterpoise.run.files import write_atomically

# REINFORCE with the mean of the other rollouts as baseline, every token alike: on-policy it has no
# bias
PLAIN = make_method("dr_grpo", advantage="leave_one_out", loss="reinforce")


class Truth(NamedTuple):
    """Sums over chunks of (rollouts x mean gradient), [2, P] for the two halves; chunks one by one
    as sketches.
    """

    sum_2P: Tensor
    rollouts_C: list[int]
    sketch_C: list[Tensor]
    sign_P: Tensor

    @property
    def mean_2P(self) -> Tensor:
        num = [max(1, sum(self.rollouts_C[half::2])) for half in (0, 1)]
        return self.sum_2P / self.sum_2P.new_tensor(num)[:, None]


def empty_truth(model: PreTrainedModel) -> Truth:
    size, first = sum(p.numel() for p in parameters_of(model)), parameters_of(model)[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    sum_2P = torch.zeros(2, size, dtype=wide, device=first.device)
    return Truth(sum_2P, [], [], sketch_signs(size, first.device))


def plain_gradient(model: PreTrainedModel, collected: RolloutBatch, how: Forward) -> Tensor:
    """The unbiased estimate of the gradient of (minus) the expected reward from one batch."""
    # its coefficients do not depend on log-probs, so those of the sampler will do
    batch = collected.batch.replace(trainer_logp_NT=collected.batch.sampler_logp_NT)
    coef_NT = coefficients(PLAIN, batch, PLAIN.assign(batch))
    return next(gradients(model, collected, coef_NT[None], how)).to(
        torch.promote_types(coef_NT.dtype, torch.float32)
    )


def add_chunk(truth: Truth, model: PreTrainedModel, chunk: RolloutBatch, how: Forward) -> Truth:
    """With one more chunk; chunks go to the halves in turn."""
    gradient_P, num = plain_gradient(model, chunk, how), chunk.batch.num_rollouts
    sum_2P = truth.sum_2P.clone()
    sum_2P[len(truth.rollouts_C) % 2] += num * gradient_P
    return truth._replace(
        sum_2P=sum_2P,
        rollouts_C=[*truth.rollouts_C, num],
        sketch_C=[*truth.sketch_C, sketch(gradient_P, truth.sign_P).cpu()],
    )


def save_truth(path: Path, truth: Truth) -> None:
    """What ``load_truth`` goes on from."""
    tensors = {
        "sum_2P": truth.sum_2P.cpu(),
        "rollouts_C": torch.tensor(truth.rollouts_C),
        "sketch_CS": torch.stack(truth.sketch_C),
    }
    write_atomically(path, lambda temporary: save_file(tensors, temporary))


def load_truth(path: Path, start: Truth) -> Truth:
    """The truth as far as it was saved; ``start`` if nothing was."""
    if not path.is_file():
        return start
    tensors = load_file(path)
    return start._replace(
        sum_2P=tensors["sum_2P"].to(start.sum_2P.device),
        rollouts_C=tensors["rollouts_C"].tolist(),
        sketch_C=list(tensors["sketch_CS"]),
    )


def truth_rows(truth: Truth) -> Rows:
    """One row per chunk, with the product of the whole halves in each."""
    first_P, second_P = truth.mean_2P
    both = float(first_P @ second_P)
    return [
        {"chunk": c, "rollouts": num, "first_second": both, "sketch": numbers_S.numpy()}
        for c, (num, numbers_S) in enumerate(zip(truth.rollouts_C, truth.sketch_C))
    ]
