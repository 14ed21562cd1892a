"""Noise by place: the generator against its reference numbers, moments, independence."""

from __future__ import annotations

import torch

from counterpoise.maths.noise import GOLDEN, ROWS, mixed_bits, normal_at


def test_bits_are_those_of_splitmix64():
    """The first numbers of the stream from seed 0, as published with the algorithm."""
    state_K = torch.arange(1, 4) * GOLDEN
    unsigned = [bits % 2**64 for bits in mixed_bits(state_K).tolist()]
    assert unsigned == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def places(num_rows: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    row_K = torch.arange(num_rows).repeat_interleave(num_columns)
    return row_K, torch.arange(num_columns).repeat(num_rows)


def noise(seed: int, rows: int = 200, columns: int = 50, size: int = 16) -> torch.Tensor:
    row_K, column_K = places(rows, columns)
    return normal_at(torch.full_like(row_K, seed), row_K, column_K, size)


def test_numbers_are_standard_normal():
    value = noise(3).flatten()
    assert len(value.unique()) == len(value) == 160_000
    assert abs(float(value.mean())) < 0.01
    assert abs(float(value.var()) - 1) < 0.015
    assert abs(float((value**3).mean())) < 0.03
    assert abs(float((value**4).mean()) - 3) < 0.08
    below = [float((value < at).double().mean()) for at in (-1.6449, 0.0, 1.6449)]
    torch.testing.assert_close(
        torch.tensor(below), torch.tensor([0.05, 0.5, 0.95]), rtol=0, atol=5e-3
    )


def test_neighbours_and_seeds_do_not_go_together():
    """Numbers of the next seed, row, column and axis: correlations as small as chance has them."""
    value = noise(0).view(200, 50, 16)
    pairs = [
        (value, noise(1).view_as(value)),
        (value[1:], value[:-1]),
        (value[:, 1:], value[:, :-1]),
        (value[..., 1:], value[..., :-1]),
    ]
    for left, right in pairs:
        both = torch.stack([left.flatten(), right.flatten()])
        assert abs(float(both.corrcoef()[0, 1])) < 4 / both.shape[1] ** 0.5


def test_a_token_has_its_numbers_wherever_it_stands():
    row_K, column_K = places(6, 7)
    seed_K = torch.full_like(row_K, 2**63 - 1)  # the largest of a purpose
    whole = normal_at(seed_K, row_K, column_K, 3)
    order_K = torch.randperm(len(row_K), generator=torch.Generator().manual_seed(0))
    some = normal_at(seed_K[order_K], row_K[order_K], column_K[order_K], 3)
    assert torch.equal(whole[order_K], some)
    assert torch.isfinite(
        normal_at(seed_K[:1], torch.tensor([ROWS]), torch.tensor([ROWS - 1]), 3)
    ).all()
