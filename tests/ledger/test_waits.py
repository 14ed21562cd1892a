"""The host waits for an accelerator once per update, and once more when it reads the table; what
it sends travels together.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import counterpoise as cp
from counterpoise.ledger.book import Book, Settings
from counterpoise.policy import pack, token_logp
from counterpoise.policy.backbone import backbone
from counterpoise.policy.prefix import causal_attention
from counterpoise.types import TokenBatch, TokenLoss
from helpers.tiny_models import tiny
from helpers.waits import accelerator

PROMPTS = [[3, 4, 5], [6, 7], [3, 4, 5], [6, 7], [3, 4, 5], [6, 7]]
LENGTHS = [7, 5, 6, 7, 2, 3]
UPDATES = ([0, 2, 4], [1, 3, 5])
MOST_SENDS = 10  # of an update whose rows are one pass


class Trained:
    """A book of a tiny model, and the updates it is to account for."""

    def __init__(self, model, columns: list[Tensor], fused: bool = False) -> None:
        """``columns``: token ids, mask, groups and rewards."""
        ids_NT, mask_NT, *_ = columns
        logp_NT = token_logp(model, PROMPTS, ids_NT, mask_NT).detach()
        self.model, self.method = model, cp.method("dr_grpo")
        self.batch = TokenBatch(*columns, logp_NT, max_length=7)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        self.credit = self.method.assign(self.batch)
        settings = Settings(axes=("sign", "sharing", "category"), own_tokens=3, token_budget=40)
        rollouts = (self.batch, PROMPTS, self.credit, lambda ids: [str(i) for i in ids])
        self.book = Book(model, self.optimizer, *rollouts, settings)

    def update(self, row_R: Tensor) -> tuple[cp.types.Rows, TokenLoss]:
        """One update; what it used, for the book."""
        self.book.before()
        rows = self.method.rows(self.batch, self.credit, row_R)
        prompts = [PROMPTS[row] for row in row_R.tolist()]
        ids_NT = self.batch.token_ids_NT[row_R]
        loss = self.method.loss(token_logp(self.model, prompts, ids_NT, rows.mask_NT), rows)
        (loss.loss_NT * rows.scale_NT).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return rows, TokenLoss(*(column.detach() for column in loss))


def columns_of() -> list[Tensor]:
    mask_NT = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    ids_NT = torch.randint(3, 29, (6, 7), generator=torch.Generator().manual_seed(0))
    reward_N = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.5])
    return [ids_NT * mask_NT, mask_NT, torch.tensor([0, 1, 0, 1, 0, 1]), reward_N]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_an_update_takes_one_wait(monkeypatch, name, tied):
    model, columns = tiny(name, tie_word_embeddings=tied), columns_of()
    with accelerator(monkeypatch) as device:
        device.put([*model.parameters(), *model.buffers(), *columns])
        trained = Trained(model, columns)
        waits, sends = [], []
        for rows in UPDATES * 2:
            row_R = torch.tensor(rows)
            device.put([row_R])
            used = trained.update(row_R)
            device.put(state["step"] for state in trained.optimizer.state.values())
            device.sends, device.fetches, device.faults = 0, 0, []
            trained.book.after(*used, clip_factor=0.5)
            waits.append((device.fetches, list(device.faults)))
            sends.append(device.sends)
        assert waits[1:] == [(1, [])] * 3  # the first one tries the model
        assert max(sends[1:]) <= MOST_SENDS
        device.fetches, device.faults = 0, []
        table, numbers = trained.book.columns, trained.book.taxes
        assert (device.fetches, device.faults) == (1, [])
    assert table["own"].isfinite().sum() == 2 * 3 and table["predicted"].abs().max() > 0
    assert len(numbers) == 4


def test_the_account_of_that_accelerator_is_that_of_a_cpu(monkeypatch):
    def account() -> dict[str, Tensor]:
        trained = Trained(tiny("llama"), columns_of())
        for rows in UPDATES:
            trained.book.after(*trained.update(torch.tensor(rows)))
        return trained.book.columns

    expected = account()
    with accelerator(monkeypatch):
        columns = account()
    assert columns.keys() == expected.keys()
    assert all(torch.equal(columns[k].nan_to_num(9), expected[k].nan_to_num(9)) for k in expected)


def test_a_book_that_measures_the_noise_waits_as_any_other(monkeypatch):
    model, columns = tiny("llama"), columns_of()
    with accelerator(monkeypatch) as device:
        device.put([*model.parameters(), *model.buffers(), *columns])
        for number in range(2):  # the first one tries the model
            trained = Trained(model, columns)
            row_R = torch.tensor(UPDATES[0])
            device.put([row_R])
            used = trained.update(row_R)
            device.put(state["step"] for state in trained.optimizer.state.values())
            device.fetches, device.faults = 0, []
            trained.book.after(*used)
            assert number == 0 or (device.fetches, device.faults) == (1, [])
        assert float(trained.book.columns["noise_floor"][0, 0]) > 0


def test_waits_are_seen(monkeypatch):
    with accelerator(monkeypatch) as device:
        here, there = torch.arange(3), torch.arange(3) * 2
        device.put([here])
        device.put([there], is_here=False)
        for act in (
            lambda: float(here.sum()),
            lambda: bool((here > 1).any()),
            lambda: (here + 1).tolist(),
            lambda: here.cpu(),
            lambda: here[here > 1],
            lambda: (here > 0).nonzero(),
            lambda: here.unique(),
            lambda: here + there,
            lambda: here[there.clamp(max=1)],
        ):
            device.faults = []
            act()
            assert device.faults
        device.faults = []
        assert (there[there > 1].tolist(), device.faults) == ([2, 4], [])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_whole_rows_need_no_question_about_their_positions(monkeypatch, name):
    ids_NT, mask_NT, *_ = columns_of()
    model = tiny(name).eval()
    rows = pack.pack_rows(PROMPTS, ids_NT, mask_NT, torch.device("cpu"))
    expected_MD = pack.hidden_of(backbone(model), rows)
    asked = []
    monkeypatch.setattr(
        "transformers.masking_utils.find_packed_sequence_indices",
        lambda position_ids: asked.append(position_ids),
    )
    pack.hidden_of(backbone(model), rows)
    assert len(asked) == 1
    monkeypatch.setattr(pack, "can_skip_masks", lambda decoder: True)
    assert torch.equal(pack.hidden_of(backbone(model), rows), expected_MD) and len(asked) == 1
    assert model.config._attn_implementation == "sdpa"
    with causal_attention(model.config), pytest.raises(KeyError):
        raise KeyError
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_cuda_sees_one_wait_per_update(name):
    columns = [column.cuda() for column in columns_of()]
    trained, waits = Trained(tiny(name).cuda(), columns, fused=True), []
    for rows in UPDATES * 2:
        used = trained.update(torch.tensor(rows, device="cuda"))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            trained.book.after(*used)
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing CUDA" in str(one.message) for one in told))
    assert waits[1:] == [1] * 3
