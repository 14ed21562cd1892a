"""The account of rollouts with environment replies: context in every forward, never a row."""

from __future__ import annotations

import pytest
import torch

import counterpoise as cp
from counterpoise.ledger.book import Book, Settings
from counterpoise.ledger.measures.sharing import sharing
from counterpoise.policy import token_logp
from helpers.replies import with_reply, without_reply
from helpers.tiny_models import tiny

REPLY = [3, 8]
PROMPTS = [[1, 2]] * 3 + [[3, 4, 5]] * 3
IDS = [[6, 7, 8], [6, 9, 9], [6, 7, 2], [2, 2, 7], [2, 4, 1], [9, 1, 1]]


def batch_of(ids: list[list[int]]) -> cp.TokenBatch:
    return cp.TokenBatch.from_lists(
        ids,
        group=[0, 0, 0, 1, 1, 1],
        reward=[1.0, 0.0, 0.0, 1.0, 0.5, 0.0],
        sampler_logp=[[-1.0] * len(row) for row in ids],
        max_length=3,
    )


def booked(batch: cp.TokenBatch, prompts: list[list[int]]) -> tuple[Book, torch.Tensor]:
    """The book of one update over all rollouts, and how far it moved every token."""
    model = tiny("llama")
    # a large eps: the first update of AdamW is otherwise the sign of each gradient, noise included
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.1)
    logp_NT = token_logp(model, prompts, batch.token_ids_NT, batch.mask_NT)
    batch = batch.replace(sampler_logp_NT=logp_NT)
    method = cp.method("dr_grpo")
    credit = method.assign(batch)
    settings = Settings(axes=("sign", "sharing"))
    book = Book(
        model, optimizer, batch, prompts, credit, lambda ids: [str(i) for i in ids], settings
    )
    rows = method.rows(batch, credit, torch.arange(6))
    book.before()
    loss = method.loss(logp_NT, rows)
    (loss.loss_NT * rows.scale_NT).sum().backward()
    optimizer.step()
    after_NT = token_logp(model, prompts, batch.token_ids_NT, batch.mask_NT)
    book.after(rows, loss)
    return book, (after_NT - logp_NT).detach()


def numbers(book: Book, at: int = 0, length: int = 0) -> dict[str, torch.Tensor]:
    return {
        name: without_reply(value_NT, at, length)
        for name, value_NT in book.columns.items()
        if name != "vocabulary_index"
    }


def test_what_the_model_reads_first_is_accounted_for_like_a_prompt():
    """The same rollouts, the reply once at the end of the prompt, once at the start of the row."""
    expected, _ = booked(batch_of(IDS), [prompt + REPLY for prompt in PROMPTS])
    got, _ = booked(with_reply(batch_of(IDS), 0, [REPLY] * 6), PROMPTS)
    columns = numbers(expected)
    assert {"predicted", "own", "own_head", "kl", "part_sign_positive"} <= set(columns)
    for name, value_NT in numbers(got, 0, len(REPLY)).items():
        torch.testing.assert_close(
            value_NT, columns[name], rtol=1e-3, atol=2e-6, equal_nan=True, msg=name
        )
    assert got.summary() == pytest.approx(expected.summary(), rel=2e-2, abs=1e-5, nan_ok=True)
    rows = {name: list(values) for name, values in got.table(0).items()}
    assert len(rows["token_id"]) == 18
    for name in ("token_id", "node_positive", "node_negative", "is_fully_shared", "is_fork"):
        assert rows[name] == list(expected.table(0)[name]), name


def test_an_account_with_replies_inside_adds_up():
    replies = [[3, 8], [3, 8], [4, 8], [1, 1], [1, 1], [1, 1]]
    batch = with_reply(batch_of(IDS), 2, replies)
    book, change_NT = booked(batch, PROMPTS)
    columns, mask_NT = book.columns, batch.mask_NT
    torch.testing.assert_close(columns["delta"][mask_NT], change_NT[mask_NT], rtol=0, atol=1e-5)
    for axis in ("sign", "sharing"):
        total_NT = sum(value for name, value in columns.items() if name.startswith(f"part_{axis}_"))
        torch.testing.assert_close(
            total_NT[mask_NT], columns["predicted"][mask_NT], rtol=1e-4, atol=1e-6
        )
    drawn_NT = mask_NT & ~columns["own"].isnan()
    assert int(drawn_NT.sum()) == 8  # Settings.own_tokens
    torch.testing.assert_close(
        (columns["own"] + columns["others"])[drawn_NT],
        columns["predicted"][drawn_NT],
        rtol=1e-4,
        atol=1e-6,
    )
    assert len(book.table(0)["token_id"]) == 18


def test_replies_tell_contexts_apart():
    """Two rollouts that read the same word part after it; the third read another one."""
    ids_NT = torch.tensor([[6, 3, 7], [6, 3, 8], [6, 4, 7]])
    mask_NT = torch.tensor([[True, False, True]] * 3)
    out = sharing(ids_NT, mask_NT, torch.zeros(3).long(), torch.tensor([[1.0], [-1.0], [-1.0]]))
    assert out.is_full_NT.tolist() == [[True, False, False]] * 3
    assert out.is_fork_NT.tolist() == [[False, False, True]] * 2 + [[False] * 3]
    assert out.positive_NT.tolist() == [[1, 0, 1], [1, 0, 0], [1, 0, 0]]
    assert out.negative_NT.tolist() == [[2, 0, 0], [2, 0, 1], [2, 0, 1]]
    assert (out.node_NT >= 0).tolist() == mask_NT.tolist()
