"""AdamW for little memory: rounding by chance, moments of 8 bits."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor, nn

from counterpoise.errors import ConfigError
from counterpoise.maths import adamw as module
from counterpoise.maths.adamw import FIRST, SECOND, AdamW, moment, stochastic_round

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao (counterpoise[8bit])"
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradients(num: int, *shape: int) -> list[Tensor]:
    """Around a mean of their own, so that first moments are not all noise."""
    mean = torch.randn(shape, generator=generator(99))
    return [mean + torch.randn(shape, generator=generator(k)) for k in range(num)]


def train(optimizer: torch.optim.Optimizer, weight: Tensor, grads: list[Tensor]) -> Tensor:
    for grad in grads:
        weight.grad = grad.to(weight.dtype)
        optimizer.step()
    return weight.detach()


# float32 is torch's


def test_in_float32_it_is_torchs_adamw_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 512)
    start = torch.randn(40, 30, generator=generator())
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    grads = gradients(5, 40, 30)
    train(AdamW([ours], **options), ours, grads)
    train(torch.optim.AdamW([theirs], **options, foreach=False), theirs, grads)
    assert torch.equal(ours, theirs)


# rounding by chance


def test_rounding_is_right_on_average() -> None:
    """The mean of n draws lies within four standard errors; a draw is a neighbour in bfloat16."""
    num = 20_000
    for value in (0.1, -0.1, 1 + 2**-9, -3.14159, 1e-6, 123456.0):
        exact = torch.tensor(value)
        draws = stochastic_round(exact.expand(num), generator()).double()
        low, high = draws.min(), draws.max()
        share = (exact.double() - low) / (high - low)
        error = (high - low) * (share * (1 - share) / num).sqrt()
        assert low < exact < high and len(draws.unique()) == 2
        assert abs(draws.mean() - exact) < 4 * error


def test_what_bfloat16_holds_stays() -> None:
    held = torch.randn(1000, generator=generator()).bfloat16().float()
    held[:4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    assert torch.equal(stochastic_round(held, generator()).float(), held)


def test_small_steps_move_bfloat16_weights_only_by_chance() -> None:
    """Rate 1e-6, 20 updates with gradient 1: Adam's step is the rate, so weights of 1 should be
    1 - 2e-5. Below 1 numbers are 2^-8 apart: a weight falls with p = 1e-6 * 2^8 in each update.
    """
    num, rate, updates = 1 << 18, 1e-6, 20
    grads = [torch.ones(num)] * updates
    nearest = nn.Parameter(torch.ones(num, dtype=torch.bfloat16))
    chance = nn.Parameter(nearest.detach().clone())
    train(torch.optim.AdamW([nearest], lr=rate, weight_decay=0.0), nearest, grads)
    train(AdamW([chance], lr=rate), chance, grads)
    change = chance.detach().double().mean() - 1
    error = 2**-8 * (updates * rate * 2**8 / num) ** 0.5
    assert (nearest == 1).all()
    assert abs(change + updates * rate) < 4 * error and error < 0.05 * updates * rate


def test_moments_of_bfloat16_weights_are_float32() -> None:
    """In bfloat16 a second moment would never fall: 0.999 of it rounds to itself."""
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = AdamW([weight], lr=1e-3)
    train(optimizer, weight, [torch.ones(8), torch.zeros(8)])
    second = optimizer.state[weight][SECOND]
    assert second.dtype == torch.float32
    torch.testing.assert_close(second, torch.full((8,), 1e-3 * 0.999))


def test_noise_depends_on_seed_place_and_update_alone() -> None:
    def moved(seed: int, skip: int = 0) -> list[Tensor]:
        weights = [nn.Parameter(torch.ones(512, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = AdamW(weights, lr=1e-3, seed=seed)
        torch.rand(skip)  # others' draws
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        first = [weight.detach().clone() for weight in weights]
        optimizer.step()
        return [*first, weights[0].detach() - first[0]]

    before = torch.get_rng_state()
    a, b, other = moved(0), moved(0, skip=0), moved(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, a, b)) and all(map(torch.equal, a, moved(0, skip=3)))
    assert not torch.equal(a[0], other[0])
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(a[0] - 1, a[2])


# 8 bits


@needs_torchao
def test_8bit_is_torchaos_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights as torchao's own function, cut into pieces or not; elements differ whose
    second moment it rounds to 0.
    """
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    monkeypatch.setattr(module, "PIECE", 2048)
    start, grads = torch.randn(128, 64, generator=generator()), gradients(6, 128, 64)
    ours, theirs = nn.Parameter(start.clone()), start.clone()
    train(AdamW([ours], lr=1e-2, weight_decay=0.1, moments="8bit"), ours, grads)
    first, second = (OptimState8bit.zeros(start.shape, signed) for signed in (True, False))
    for k, grad in enumerate(grads, 1):
        rate, step = torch.tensor(1e-2), torch.tensor(float(k))
        single_param_adam(
            *(theirs, grad, step, first, second, None, rate), *(0.9, 0.999, 0.1, 1e-8, True, False)
        )
    same = torch.isclose(ours, theirs, rtol=0, atol=1e-6)
    assert same.float().mean() > 0.999


@needs_torchao
def test_8bit_moments_are_near_float32s() -> None:
    """Levels of the first moment are 0.014 of a block's largest apart, and every update rounds."""
    grads = gradients(20, 64, 64)
    exact, coarse = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    wide, narrow = AdamW([exact], lr=1e-2), AdamW([coarse], lr=1e-2, moments="8bit")
    train(wide, exact, grads)
    train(narrow, coarse, grads)
    cosine = torch.cosine_similarity(exact.flatten(), coarse.flatten(), dim=0)
    for name in (FIRST, SECOND):
        want, got = (moment(opt.state[p], name) for opt, p in ((wide, exact), (narrow, coarse)))
        assert want is not None and got is not None and got.shape == (64, 64)
        assert ((got - want).abs() / want.abs()).median() < 0.05
    assert cosine > 0.999


@needs_torchao
def test_a_second_moment_of_8_bits_is_never_0() -> None:
    """A gradient of 1e-4 beside one of 1 has a share of 1e-8 in the second moment, below the
    smallest level, and one of 1e-4 in the first. With 0 in its place the next update, without
    gradients, would move by 9e-6 / 1e-8 of the rate.
    """
    weight = nn.Parameter(torch.zeros(4096))
    grad = torch.full((4096,), 1e-4)
    grad[::256] = 1.0
    optimizer = AdamW([weight], lr=1.0, moments="8bit")
    train(optimizer, weight, [grad])
    start = weight.detach().clone()
    second = moment(optimizer.state[weight], SECOND)
    assert second is not None and (second > 0).all()
    train(optimizer, weight, [torch.zeros(4096)])
    assert (weight - start).abs().max() < 1


@needs_torchao
def test_small_and_odd_tensors_keep_float32_moments() -> None:
    shapes = {(64, 64): True, (4095,): False, (4100,): False, (16,): False}
    for shape, is_8bit in shapes.items():
        weight = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        optimizer = AdamW([weight], lr=1e-2, moments="8bit")
        train(optimizer, weight, [torch.ones(shape)])
        assert (f"{FIRST}_codes" in optimizer.state[weight]) == is_8bit
        assert is_8bit or optimizer.state[weight][FIRST].dtype == torch.float32


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"optimizer.moments: got '8bit'.*pip install 'counterpoise\[8bit\]'"
    ):
        AdamW([nn.Parameter(torch.zeros(2))], lr=1.0, moments="8bit")
