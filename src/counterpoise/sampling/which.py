"""Which of the samplers works for a model: the bits of a run depend on it."""

from __future__ import annotations

from transformers import PreTrainedModel

from counterpoise.sampling.engine import engine_for
from counterpoise.sampling.kernels import cpu as kernels_cpu


def sampler_of(model: PreTrainedModel) -> str:
    """What draws a model's tokens, as far as rounding depends on it: ``generic``, ``torch``,
    ``triton``, or the C kernels with the hash of their build. After the first call of ``sample``.
    """
    engine = engine_for(model)
    if engine is None or engine.kernels is None:
        return "generic" if engine is None else "torch"
    return kernels_cpu.build_name() if engine.kernels is kernels_cpu else "triton"
