"""The book of a batch, its table and summary, and the observer in the loop: it sees
everything and changes nothing.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import counterpoise as cp
from counterpoise.ledger import book
from counterpoise.ledger.book import Book, Settings
from counterpoise.ledger.measures.categories import name_tokens
from counterpoise.policy import token_logp
from counterpoise.run.files import write_table
from counterpoise.run.read import read_jsonl
from counterpoise.run.schema import SCHEMA_VERSION, TOKEN_COLUMNS
from counterpoise.trainer import loop
from counterpoise.trainer.config import parse_config
from counterpoise.types import TokenBatch
from helpers.reference_ledger import sharing_of
from helpers.tiny_models import tiny

PROMPTS = [[1, 2]] * 3 + [[3, 4, 5]] * 3
IDS = [[6, 7, 8], [6, 9], [6, 7, 2], [2, 2, 7], [2, 4, 1], [9]]
REWARD = [1.0, 0.0, 0.0, 1.0, 0.5, 0.0]
SMALL = {
    "model": "bundled",
    "num_batches": 3,
    "rollouts": {"prompts": 3, "group_size": 4, "max_new_tokens": 70},
    "optimizer": {"lr": 1e-5, "updates_per_batch": 2},
    "eval": {"every": 0},
    "checkpoint_every": 1,
    "trackers": [],
}


def batch_of(model) -> TokenBatch:
    mask_NT = torch.tensor([[t < len(ids) for t in range(3)] for ids in IDS])
    ids_NT = torch.tensor([ids + [0] * (3 - len(ids)) for ids in IDS])
    logp_NT = token_logp(model, PROMPTS, ids_NT, mask_NT).detach()
    return TokenBatch(
        ids_NT,
        mask_NT,
        torch.tensor([0, 0, 0, 1, 1, 1]),
        torch.tensor(REWARD),
        logp_NT,
        max_length=3,
    )


def letters(ids: list[int]) -> list[str]:
    return ["abcdefghijklmnopqrstuvwxyz"[i] for i in ids]


def vowels(texts) -> list[str]:
    return ["vowel" if text in "aeiou" else "consonant" for text in texts]


class Booked:
    """Two updates of dr_grpo on rollouts 0 1 2 and 3 4; rollout 5 is left out by the plan."""

    def __init__(self, model, optimizer=None, clip: float = 1.0, axes=("sign", "category")) -> None:
        self.model, self.batch, self.method = model, batch_of(model), cp.method("dr_grpo")
        self.optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.credit = self.method.assign(self.batch)
        self.book = Book(
            model,
            self.optimizer,
            self.batch,
            PROMPTS,
            self.credit,
            letters,
            Settings(axes=axes, categories=vowels),
        )
        self.rows, self.losses, self.logps = [], [], []
        for row_R in (torch.tensor([2, 0, 1]), torch.tensor([3, 4])):
            rows = self.method.rows(self.batch, self.credit, row_R)
            prompts = [PROMPTS[r] for r in row_R.tolist()]
            self.book.before()
            before_NT = token_logp(model, prompts, self.batch.token_ids_NT[row_R], rows.mask_NT)
            loss = self.method.loss(before_NT, rows)
            (clip * (loss.loss_NT * rows.scale_NT).sum()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            after_NT = token_logp(model, prompts, self.batch.token_ids_NT[row_R], rows.mask_NT)
            self.logps.append((before_NT.detach(), after_NT.detach()))
            self.rows.append(rows)
            self.losses.append(loss)
            self.book.after(rows, loss, clip)


@pytest.fixture(scope="module")
def booked() -> Booked:
    return Booked(tiny("llama"), clip=0.5)


@pytest.fixture(scope="module")
def table(booked, tmp_path_factory) -> dict[str, list]:
    path = tmp_path_factory.mktemp("tokens") / "batch_000007.parquet"
    write_table(path, booked.book.table(7))
    read = pq.read_table(path)
    assert read.schema.metadata[b"counterpoise_schema"] == str(SCHEMA_VERSION).encode()
    return {name: read.column(name).to_pylist() for name in read.column_names}


def at(table, rollout: int, position: int) -> int:
    return next(
        k
        for k in range(len(table["batch"]))
        if (table["rollout"][k], table["position"][k]) == (rollout, position)
    )


def test_one_row_a_token_in_the_order_of_the_schema(booked, table):
    assert list(table)[: len(TOKEN_COLUMNS)] == list(TOKEN_COLUMNS)
    parts = {f"part_sign_{name}" for name in ("positive", "negative", "zero", "rest")}
    parts |= {f"part_category_{name}" for name in ("vowel", "consonant", "rest")}
    assert set(list(table)[len(TOKEN_COLUMNS) :]) == parts
    assert list(zip(table["rollout"], table["position"])) == [
        (n, t) for n, ids in enumerate(IDS) for t in range(len(ids))
    ]
    assert table["token_id"] == [token for ids in IDS for token in ids]
    assert table["text"] == letters(table["token_id"])
    assert table["category"] == vowels(table["text"])
    assert set(table["batch"]) == {7}
    assert table["update"] == [0] * 8 + [1] * 6 + [None]
    assert table["loss_mask"] == [True] * 14 + [False]


def test_rollouts_left_out_by_the_plan_have_null_in_the_ledger_columns(table):
    last = {name: column[-1] for name, column in table.items()}
    assert last["reward"] == 0.0
    assert last["node_negative"] == 1
    for name in (
        "coef",
        "scale",
        "is_clipped",
        "delta",
        "change",
        "is_flip",
        "predicted",
        "own_head",
        "cancellation",
        "part_sign_positive",
        "kl",
    ):
        assert last[name] is None
        assert table[name][0] is not None


def test_values_are_those_of_the_step(booked, table):
    for rows, loss, (before_NT, after_NT) in zip(booked.rows, booked.losses, booked.logps):
        for i, n in enumerate(rows.row_R.tolist()):
            for t in range(len(IDS[n])):
                k = at(table, n, t)
                assert table["trainer_logp"][k] == pytest.approx(float(before_NT[i, t]), abs=1e-5)
                assert table["delta"][k] == pytest.approx(
                    float(after_NT[i, t] - before_NT[i, t]), abs=1e-5
                )
                assert table["coef"][k] == float(loss.coef_NT[i, t])
                assert table["scale"][k] == float(rows.scale_NT[i, t])
                assert table["credit"][k] == table["advantage"][k] == float(rows.advantage_N[i])
                assert table["sign"][k] == np.sign(table["advantage"][k])
                assert table["confidence"][k] == pytest.approx(np.exp(table["sampler_logp"][k]))


def test_changes_flips_and_parts_are_consistent(table):
    names = [name for name in table if name.startswith("part_")]
    for k in range(14):
        delta, floor = table["delta"][k], table["noise_floor"][k]
        assert table["change"][k] == (
            "unchanged" if abs(delta) <= floor else "boosted" if delta > 0 else "suppressed"
        )
        assert table["is_flip"][k] == (abs(delta) > floor and delta * table["advantage"][k] < 0)
        for axis in ("sign", "category"):
            parts = [table[name][k] for name in names if name.startswith(f"part_{axis}_")]
            assert sum(parts) == pytest.approx(table["predicted"][k], abs=1e-6)
        up, down, zero = (
            table[f"part_sign_{name}"][k] for name in ("positive", "negative", "zero")
        )
        assert table["cancellation"][k] == pytest.approx(
            1 - abs(up + down + zero) / (abs(up) + abs(down) + abs(zero)), abs=1e-5
        )
        if table["own"][k] is not None:
            assert table["own"][k] + table["others"][k] == pytest.approx(
                table["predicted"][k], abs=1e-6
            )
        assert table["part_sign_rest"][k] == pytest.approx(table["part_category_rest"][k], abs=1e-5)
    assert 0 < max(table["noise_floor"][:14]) < 1e-4


def test_nodes_equal_loops(booked, table):
    expected = sharing_of(IDS, [0, 0, 0, 1, 1, 1], booked.credit.advantage_N.tolist())
    columns = ("node_positive", "node_negative", "is_fully_shared", "is_fork")
    for (n, t), values in expected.items():
        assert tuple(table[name][at(table, n, t)] for name in columns) == values
    assert table["node"][at(table, 0, 0)] == table["node"][at(table, 2, 0)]
    assert table["node"][at(table, 0, 2)] != table["node"][at(table, 2, 2)]


def test_the_rest_of_the_first_adamw_step_is_nothing(table):
    """No momentum yet: the gradient of the batch, clip factor included, explains all of it."""
    first = [k for k in range(15) if table["update"][k] == 0]
    second = [k for k in range(15) if table["update"][k] == 1]
    scale = max(abs(table["predicted"][k]) for k in first)
    assert (
        max(abs(table["part_sign_rest"][k]) for k in first) < 1e-3 * scale
    )  # what is left is rounding of float32 weights
    assert max(abs(table["part_sign_rest"][k]) for k in second) > 1e-2 * scale


def test_summary_is_what_the_table_says(booked, table):
    found = booked.book.summary()
    frame = {name: np.array(column[:14]) for name, column in table.items()}
    positive, negative = frame["sign"] > 0, frame["sign"] < 0
    assert found["flip/positive"] == pytest.approx(frame["is_flip"][positive].mean())
    assert found["flip/negative"] == pytest.approx(frame["is_flip"][negative].mean())
    assert found["flip/all"] == pytest.approx(frame["is_flip"][positive | negative].mean())
    assert found["boosted/positive"] == pytest.approx(
        (frame["change"] == "boosted")[positive].mean()
    )
    assert found["suppressed/negative"] == pytest.approx(
        (frame["change"] == "suppressed")[negative].mean()
    )
    assert found["noise_floor"] == pytest.approx(frame["noise_floor"].max())
    assert found["predicted/correlation"] == pytest.approx(
        np.corrcoef(frame["predicted"].astype(float), frame["delta"].astype(float))[0, 1]
    )
    assert found["predicted/correlation"] > 0.99
    both = (frame["node_positive"] > 0) & (frame["node_negative"] > 0)
    assert found["cancellation/both_signs"] == pytest.approx(
        frame["cancellation"][both].astype(float).mean()
    )
    assert found["cancellation/one_sign"] == pytest.approx(
        frame["cancellation"][~both & (frame["sign"] != 0)].astype(float).mean()
    )
    assert found["cancellation/category/vowel"] == pytest.approx(
        frame["cancellation"][frame["category"] == "vowel"].astype(float).mean()
    )
    common = frame["node_positive"] + frame["node_negative"] > 1
    assert found["entropy/common"] == pytest.approx(frame["entropy"][common].astype(float).mean())
    assert found["entropy/single"] == pytest.approx(frame["entropy"][~common].astype(float).mean())
    drawn = np.array([own is not None for own in frame["own"]])
    own, others, head = (
        np.abs(frame[name][drawn].astype(float)) for name in ("own", "others", "own_head")
    )
    assert found["own/num"] == drawn.sum() == 8 + 3  # rollout 4 has no advantage
    assert found["own/frac"] == pytest.approx(np.median(own / (own + others)), rel=1e-5)
    assert found["own/head_frac"] == pytest.approx(np.median(head / own), rel=1e-5)
    up, down = (
        np.abs(frame[f"part_sign_{name}"].astype(float)).sum() for name in ("positive", "negative")
    )
    assert found["part/sign/positive"] == pytest.approx(up / (up + down), rel=1e-4)
    updates = [frame["update"] == k for k in (0, 1)]
    full = [
        frame["kl"][frame["is_fully_shared"] & both & in_update].astype(float).mean()
        for in_update in updates
        if (frame["is_fully_shared"] & both & in_update).any()
    ]
    assert found["tax/shared"] == pytest.approx(np.mean(full))
    assert found["residual/fully_shared"] == pytest.approx(0.0, abs=1e-6)


def test_an_unknown_optimizer_gets_the_predicted_change_and_a_note():
    model = tiny("llama")
    made = Booked(model, torch.optim.Adagrad(model.parameters(), lr=1e-4), axes=("sign",))
    table = made.book.table(0)
    assert table["own"].null_count == len(table["own"])
    assert not [name for name in table if name.startswith("part_")]
    assert made.book.summary()["predicted/correlation"] > 0.99
    assert len(made.book.notes) == 1
    assert "Adagrad" in made.book.notes[0]


class Blocked(nn.Module):
    """An MLP without forward mode."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return Blocked.Identity.apply(self.inner(x))


def test_a_model_without_forward_mode_gets_the_table_without_predictions():
    model = tiny("llama")
    model.model.layers[0].mlp = Blocked(model.model.layers[0].mlp)
    made = Booked(model)
    table = made.book.table(0)
    assert table["predicted"].null_count == len(table["predicted"])
    assert table["delta"].null_count == 1
    assert "flip/all" in made.book.summary()
    assert "predicted/correlation" not in made.book.summary()
    assert len(made.book.notes) == 1
    assert "no forward-mode path" in made.book.notes[0]
    assert "attn_implementation" in made.book.notes[0]


def test_a_model_without_a_plain_head_gets_no_kl_and_no_own_head():
    model = tiny("llama")
    model.lm_head = nn.Sequential(model.lm_head)  # get_output_embeddings is no nn.Linear any more
    made = Booked(model, axes=("sign",))
    table, found = made.book.table(0), made.book.summary()
    assert table["kl"].null_count == table["own_head"].null_count == len(table["own"])
    assert table["own"].null_count == 1 + 3, "a rollout without advantage, one left out"
    assert found["predicted/correlation"] > 0.99
    assert not [key for key in found if key.startswith("tax/")]
    assert [note for note in made.book.notes if "not a plain linear layer" in note]


def test_a_head_that_is_not_trained_has_no_own_head_and_says_so():
    model = tiny("llama")
    model.lm_head.weight.requires_grad_(False)
    live = [p for p in model.parameters() if p.requires_grad]
    made = Booked(model, torch.optim.AdamW(live, lr=1e-3), axes=("sign",))
    table = made.book.table(0)
    assert table["own_head"].null_count == len(table["own"])
    assert table["own"].null_count == table["others"].null_count == 1 + 3
    assert table["kl"].null_count == table["predicted"].null_count == 1, (
        "the rollout that the plan left out"
    )
    assert len(made.book.notes) == 1 and "head is not trained" in made.book.notes[0]


def test_an_unknown_axis_is_an_error_that_names_the_nearest():
    model = tiny("llama")
    with pytest.raises(
        ValueError, match="ledger.decompose: unknown axis 'sgin'. Did you mean 'sign'"
    ):
        Booked(model, axes=("sgin",))


def test_every_axis_adds_up():
    made = Booked(tiny("llama"), axes=("sharing", "confidence", "sign"))
    columns = made.book.columns
    for axis in ("sharing", "confidence", "sign"):
        total_NT = sum(value for name, value in columns.items() if name.startswith(f"part_{axis}_"))
        torch.testing.assert_close(
            total_NT, columns["predicted"], rtol=1e-4, atol=1e-6, equal_nan=True
        )


def run(tmp_path: Path, name: str, **more) -> Path:
    config = parse_config({**SMALL, "run_dir": str(tmp_path / name), **more})
    return loop.train(
        config, resume=more.get("num_batches") == 4 and (tmp_path / name).exists()
    ).run_dir


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    last = sorted((run_dir / "checkpoints").glob("batch_*"))[-1]
    return load_file(last / "model.safetensors") | load_file(last / "optimizer.safetensors")


def without_ledger(run_dir: Path) -> list[dict]:
    return [
        {key: value for key, value in row.items() if not key.startswith("ledger/")}
        for row in read_jsonl(run_dir / "metrics.jsonl")
    ]


def test_the_ledger_never_changes_training(tmp_path):
    """The same run with and without it: weights, optimizer, RNG and every other number are equal
    bit for bit.
    """
    seen = run(tmp_path, "seen", ledger={"every": 2, "decompose": ["sign", "category"], "bank": 2})
    unseen = run(tmp_path, "unseen", ledger={"every": 0})
    one, other = weights(seen), weights(unseen)
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert without_ledger(seen) == without_ledger(unseen)
    assert [path.name for path in sorted((seen / "tokens").iterdir())] == [
        "batch_000000.parquet",
        "batch_000002.parquet",
    ]
    assert not (unseen / "tokens").exists()
    first, second, third = read_jsonl(seen / "metrics.jsonl")
    assert first["ledger/predicted/correlation"] > 0.95
    assert not [key for key in second if key.startswith("ledger/")]
    assert third["ledger/jitter/reward"] == pytest.approx(
        (first["reward/mean"] - 2 * second["reward/mean"] + third["reward/mean"]) ** 2
    )
    assert third["ledger/tax/cumulative_other"] > third["ledger/tax/other"]
    assert not [
        key
        for row in read_jsonl(unseen / "metrics.jsonl")
        for key in row
        if key.startswith("ledger/")
    ]


def test_a_resumed_run_carries_the_ledger_on(tmp_path):
    ledger = {"every": 1, "decompose": ["sign"], "bank": 2}
    whole = run(tmp_path, "whole", ledger=ledger, num_batches=4)
    cut = run(tmp_path, "cut", ledger=ledger, num_batches=2)
    cut = run(tmp_path, "cut", ledger=ledger, num_batches=4)
    assert read_jsonl(cut / "metrics.jsonl") == read_jsonl(whole / "metrics.jsonl")
    tables = [
        pq.read_table(path / "tokens" / "batch_000003.parquet").to_pydict() for path in (whole, cut)
    ]
    assert tables[0] == tables[1]
    state = json.loads(
        (sorted((cut / "checkpoints").glob("batch_*"))[-1] / "state.json").read_text()
    )["ledger"]
    assert state["jitter"]["reward"][2] == 2
    assert len(state["bank"]) == 2


def test_an_empty_bank_is_said_once_and_the_run_goes_on(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="counterpoise.ledger"):
        out = run(
            tmp_path,
            "hard",
            task={"name": "arithmetic", "difficulty": "hard"},
            ledger={"every": 1, "bank": 2},
            num_batches=2,
        )
    said = [
        record.getMessage() for record in caplog.records if "solution bank" in record.getMessage()
    ]
    assert len(said) == 1
    assert "no prompt so far has two distinct verified solutions" in said[0]
    assert len(read_jsonl(out / "metrics.jsonl")) == 2


def test_out_of_memory_costs_the_batch_its_account_and_not_the_run(tmp_path, caplog, monkeypatch):
    """The second batch has no memory for its account: it has no table, training is what it is
    without the ledger, the third batch has one.
    """
    calls = []

    def account(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:  # two updates a batch
            raise torch.OutOfMemoryError("no memory")
        return real(*args, **kwargs)

    real = book.account
    monkeypatch.setattr(book, "account", account)
    with caplog.at_level(logging.WARNING, logger="counterpoise.ledger"):
        seen = run(tmp_path, "seen", ledger={"every": 1, "bank": 0})
    unseen = run(tmp_path, "unseen", ledger={"every": 0})
    assert [path.name for path in sorted((seen / "tokens").iterdir())] == [
        "batch_000000.parquet",
        "batch_000002.parquet",
    ]
    (said,) = [
        record.getMessage()
        for record in caplog.records
        if "no memory to account" in record.getMessage()
    ]
    assert "Lower the token budget (optimizer.token_budget of a recipe)" in said
    assert without_ledger(seen) == without_ledger(unseen)
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (lambda texts: {}[0], "raised KeyError: 0"),
        (lambda texts: ["a"], "gave 1 names for 3 tokens"),
        (lambda texts: ["a", None, "b"], "gave None as a name"),
        (lambda texts: ["a", "rest", "b"], "gave 'rest' as a name"),
    ],
)
def test_categories_that_cannot_be_used_give_way_to_the_default_ones(rule, why):
    names, note = name_tokens(rule, ["7", " so", "."])
    assert names == ["number", "connective", "template"]
    assert note is not None and why in note and "default rules are used" in note
