"""AdamW for little memory: weights in bfloat16 by stochastic rounding, moments of 8 bits.

Every update is computed in float32, a piece of a parameter at a time.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from counterpoise.errors import ConfigError
from counterpoise.maths.reduce import derived_seed

FIRST, SECOND = MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 256  # values that share a scale
SMALLEST = 4096  # values from which a tensor's moments have 8 bits, as in torchao and bitsandbytes
PIECE = 1 << 24  # values that are computed at once


class AdamW(torch.optim.Optimizer):
    """AdamW in float32 for weights of any precision.

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``w = round((1 - lr decay) w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps))``

    Weights in bfloat16 are rounded by chance (``stochastic_round``), others as torch does. The
    noise depends on ``seed``, the parameter's place and its update alone: it has no state that a
    checkpoint would have to keep, and torch's own random numbers stay as they are.

    Args:
        moments: ``float32``, or ``8bit``: block-wise codes of torchao for tensors of at least 4,096
            values in whole blocks of 256; smaller ones stay in float32.

    Reference: Dettmers et al. 2021, arXiv 2110.02861. Departs from it: a second moment is never
    rounded to 0, where the next step could be ``m / eps``.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = AdamW([weight], lr=0.5)
    >>> weight.grad = torch.tensor([3.0, -3.0])
    >>> optimizer.step()
    >>> weight.tolist()
    [0.5, 1.5]
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        moments: Literal["float32", "8bit"] = "float32",
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "amsgrad": False, "maximize": False})
        if moments == "8bit":
            check_8bit()
        self.moments, self.seed = moments, seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        places = ((group, p) for group in self.param_groups for p in group["params"])
        for place, (group, p) in enumerate(places):
            if p.grad is not None:
                self._update(place, group, p)
        return loss

    def _update(self, place: int, group: dict[str, Any], p: Tensor) -> None:
        state = self.state[p] = self.state[p] or empty_state(p, self.moments == "8bit")
        state["step"] += 1
        weight_P, grad_P = p.detach().view(-1), p.grad.reshape(-1)  # pyright: ignore[reportOptionalMemberAccess]
        generator = None
        if p.dtype == torch.bfloat16:
            noise_seed = derived_seed(self.seed, int(state["step"]), f"rounding/{place}")
            generator = torch.Generator(p.device).manual_seed(noise_seed)
        for span in pieces(len(weight_P)):
            new_P = new_weight(weight_P[span].float(), grad_P[span].float(), state, span, group)
            if generator is not None:
                new_P = stochastic_round(new_P, generator)
            weight_P[span] = new_P


def new_weight(
    weight_P: Tensor, grad_P: Tensor, state: dict[str, Tensor], span: slice, group: dict[str, Any]
) -> Tensor:
    """A piece of a parameter after its update; its moments are written into ``state``."""
    (beta1, beta2), lr, t = group["betas"], group["lr"], float(state["step"])
    first_P = read_moment(state, FIRST, span).lerp(grad_P, 1 - beta1)
    second_P = read_moment(state, SECOND, span).mul(beta2).addcmul_(grad_P, grad_P, value=1 - beta2)
    write_moment(state, FIRST, span, first_P)
    write_moment(state, SECOND, span, second_P)
    size_P = second_P.sqrt_().div_(math.sqrt(1 - beta2**t)).add_(group["eps"])
    decayed_P = weight_P.mul(1 - lr * group["weight_decay"])
    return decayed_P.addcdiv_(first_P, size_P, value=-lr / (1 - beta1**t))


def stochastic_round(value: Tensor, generator: torch.Generator) -> Tensor:
    """float32 to bfloat16, up or down by chance so that the mean is the value: noise on the 16 bits
    that are cut off. A value that bfloat16 holds stays.

    Round-to-nearest loses every step below half the spacing, 2^-9 to 2^-8 of the weight.

    >>> up = stochastic_round(torch.full((100_000,), 1 + 2**-9), torch.Generator().manual_seed(0))
    >>> up.unique().tolist(), round((up > 1).float().mean().item(), 2)
    ([1.0, 1.0078125], 0.25)
    """
    bits = value.contiguous().view(torch.int32)
    noise = torch.randint(
        1 << 16, bits.shape, generator=generator, device=value.device, dtype=torch.int32
    )
    return noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()


def empty_state(p: Tensor, is_8bit: bool) -> dict[str, Tensor]:
    """The state before the first update: moments of 0, in 8 bits where the tensor is large."""
    state = {"step": torch.tensor(0.0)}
    for name in MOMENTS:
        if is_8bit and p.numel() >= SMALLEST and p.numel() % BLOCK == 0:
            state[f"{name}_codes"] = torch.zeros(p.shape, dtype=torch.uint8, device=p.device)
            state[f"{name}_scales"] = torch.zeros(p.numel() // BLOCK, device=p.device)
        else:
            state[name] = torch.zeros(p.shape, device=p.device)
    return state


def moment(state: Mapping[str, Tensor], name: str) -> Tensor | None:
    """A moment of an Adam's parameter in its shape, decoded if it has 8 bits; None before the first
    update.
    """
    codes = state.get(f"{name}_codes")
    return state.get(name) if codes is None else read_moment(state, name).view(codes.shape)


def read_moment(state: Mapping[str, Tensor], name: str, span: slice = slice(None)) -> Tensor:
    """A piece of a moment in float32, flat."""
    if name in state:
        return state[name].view(-1)[span]
    codes_P, scales_B = _coded(state, name, span)
    return quantisation().dequant_with_qmap(codes_P, levels(name, codes_P.device), scales_B)


def write_moment(state: Mapping[str, Tensor], name: str, span: slice, value_P: Tensor) -> None:
    """The reverse of ``read_moment``, in place."""
    if name in state:
        state[name].view(-1)[span] = value_P
        return
    codes_P, scales_B = _coded(state, name, span)
    scaled_P, new_B = quantisation().scale_tensor(value_P, BLOCK)
    new_P = quantisation().quantize_8bit_with_qmap(scaled_P, levels(name, codes_P.device))
    codes_P.copy_(new_P.clamp_(min=1) if name == SECOND else new_P)  # 0 is the second moment 0
    scales_B.copy_(new_B)


def _coded(state: Mapping[str, Tensor], name: str, span: slice) -> tuple[Tensor, Tensor]:
    first, last, _ = span.indices(state[f"{name}_codes"].numel())
    scales_B = state[f"{name}_scales"][first // BLOCK : last // BLOCK]
    return state[f"{name}_codes"].view(-1)[span], scales_B


def pieces(num: int) -> Iterator[slice]:
    """Spans of at most ``PIECE`` values."""
    return (slice(start, min(start + PIECE, num)) for start in range(0, num, PIECE))


@lru_cache
def levels(name: str, device: torch.device) -> Tensor:
    """The 256 numbers between -1 (second moment: 0) and 1 that codes stand for, ascending."""
    return torch.tensor(quantisation().create_dynamic_map(signed=name == FIRST), device=device)


@lru_cache
def quantisation() -> Any:
    """torchao's functions between numbers and codes."""
    check_8bit()
    from torchao.optim import quant_utils  # pyright: ignore[reportMissingImports]

    return quant_utils


def check_8bit() -> None:
    """An error where moments of 8 bits cannot be made."""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "optimizer.moments: got '8bit', which needs torchao, and it is not installed. Run: pip"
            " install 'counterpoise[8bit]', or set it to float32."
        )
