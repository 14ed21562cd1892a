"""Rows of like length are read together, and nothing of what is read changes."""

from __future__ import annotations

import pytest
import torch

from counterpoise.arena import texts as module
from counterpoise.arena.stack import Stack, stack_of
from counterpoise.arena.texts import Texts, by_length, pad_questions, stack_logp, texts_of
from helpers.tiny_models import tiny

NUM_MEMBERS, NUM_ROWS = 3, 16


@pytest.fixture(scope="module")
def stack() -> Stack:
    return stack_of(tiny("llama"), NUM_MEMBERS)


def texts_with(length_SN: torch.Tensor) -> Texts:
    """Answers of these lengths to prompts of 2 to 9 tokens, two answers each."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        [list(range(3, 5 + (s + p) % 8)) for p in range(NUM_ROWS // 2)] for s in range(NUM_MEMBERS)
    ]
    size = (NUM_MEMBERS, NUM_ROWS, 20)
    ids_SNT = torch.randint(3, 29, size, generator=generator)
    logp_SNT = -torch.rand(size, generator=generator)
    return texts_of(pad_questions(prompts, torch.device("cpu")), 2, ids_SNT, length_SN, logp_SNT)


def ragged() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 21, (NUM_MEMBERS, NUM_ROWS), generator=generator)


def test_log_probs_and_gradients_are_those_of_rows_read_all_together(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, found = texts_with(ragged()), []
    pull_SNT = torch.randn(texts.mask_SNT.shape, generator=torch.Generator().manual_seed(2))
    for least in (NUM_ROWS + 1, 8):  # in one piece, then in several
        monkeypatch.setattr(module, "LEAST_ROWS", least)
        stack.grad_SP.zero_()
        logp_SNT = stack_logp(stack, stack.weights, texts, 0.7)
        (logp_SNT * pull_SNT).sum().backward()
        found.append((logp_SNT.detach(), stack.grad_SP.clone()))
    assert len(by_length(texts)[1]) > 1
    for whole, pieces in zip(*found):
        assert whole.abs().max() > 0
        torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=5e-5)


def test_a_piece_is_as_wide_as_its_longest_row() -> None:
    texts = texts_with(ragged())
    order_SN, pieces = by_length(texts)
    ends_SN = (texts.start_SN + texts.mask_SNT.sum(2)).gather(1, order_SN)
    assert [rows.start for rows, *_ in pieces] == [0, *(rows.stop for rows, *_ in pieces[:-1])]
    assert pieces[-1][0].stop == NUM_ROWS
    for rows, width, num_tokens in pieces:
        assert width == int(ends_SN[:, rows].max())
        assert num_tokens >= int(texts.mask_SNT.sum(2).gather(1, order_SN)[:, rows].max())
    read = sum((rows.stop - rows.start) * width for rows, width, _ in pieces)
    assert read < 0.9 * NUM_ROWS * texts.ids_SNL.shape[2]


def test_rows_of_one_length_are_one_piece() -> None:
    _, pieces = by_length(texts_with(torch.full((NUM_MEMBERS, NUM_ROWS), 20)))
    assert len(pieces) <= 2  # prompts differ in length
    few = texts_with(ragged()).select(torch.zeros(NUM_MEMBERS, 7, dtype=torch.long))
    assert len(by_length(few)[1]) == 1
