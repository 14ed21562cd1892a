"""Tensors that travel together: one block of bytes, and each of them back."""

from __future__ import annotations

import pytest
import torch

from counterpoise.maths import transfer

PARTS = [
    torch.tensor([True, False, True]),
    torch.arange(5),
    torch.tensor(2.5, dtype=torch.float64),
    torch.zeros(0, 3),
    torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).T,
    torch.arange(6, dtype=torch.int16)[::2],
    torch.tensor([1.0, -0.0, float("nan")]).bfloat16().expand(2, 3),
    torch.zeros(0, dtype=torch.long),
]


@pytest.mark.parametrize(
    ("join", "split"),
    [(transfer.pack_bytes, transfer.unpack_bytes), (transfer.join_bytes, transfer.split_bytes)],
)
def test_a_block_gives_back_what_went_in(join, split):
    for parts in (PARTS, PARTS[::-1], PARTS[:1], PARTS[3:4]):
        found = split(join(parts), parts)
        assert [part.dtype for part in found] == [part.dtype for part in parts]
        for part, expected in zip(found, parts):
            assert part.is_contiguous() and part.shape == expected.shape
            assert torch.equal(part.nan_to_num(9), expected.nan_to_num(9))


def test_tensors_of_a_packed_block_start_where_kernels_want_them():
    block = transfer.pack_bytes(PARTS)
    starts = [part.storage_offset() * part.itemsize for part in transfer.unpack_bytes(block, PARTS)]
    assert all(start % transfer.GRAIN == 0 for start in starts)


def test_a_cpu_takes_the_tensors_as_they_are():
    parts = PARTS[:2]
    cpu = torch.device("cpu")
    for out in (transfer.send_all(parts, cpu), transfer.fetch(parts)):
        assert all(part is own for part, own in zip(out, parts))
    assert transfer.send_all([], cpu) == transfer.fetch([]) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_there_and_back():
    sent = transfer.send_all([*PARTS, PARTS[1].cuda()], torch.device("cuda"))
    assert all(part.is_cuda for part in sent)
    for part, expected in zip(transfer.fetch([*sent, PARTS[0]]), [*PARTS, PARTS[1], PARTS[0]]):
        assert not part.is_cuda and part.dtype == expected.dtype
        assert torch.equal(part.nan_to_num(9), expected.nan_to_num(9))
