"""Weights in bfloat16 and moments of 8 bits in the trainer: runs, resume, the ledger, bytes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow.parquet import read_table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config

from counterpoise.ledger.calculus.optimizers import response
from counterpoise.maths import adamw as maths
from counterpoise.maths.adamw import AdamW, empty_state
from counterpoise.policy import load_model
from counterpoise.policy.load import add_lora
from counterpoise.run.read import checkpoints, read_jsonl
from counterpoise.trainer.config import ConfigError, Optimizer
from counterpoise.trainer.update import adamw
from helpers.tiny_run import TINY, go

DOCS = Path(__file__).parents[2] / "docs"
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao (counterpoise[8bit])"
)
EIGHT = pytest.param({"moments": "8bit"}, marks=needs_torchao, id="8bit")
EIGHT_AND_HALF = pytest.param(
    {"moments": "8bit", "dtype": "bfloat16"}, marks=needs_torchao, id="8bit, bfloat16"
)
HALF = pytest.param({"dtype": "bfloat16"}, id="bfloat16")


def recipe(moments: str = "float32", dtype: str = "float32", **more: Any) -> dict[str, Any]:
    optimizer = {**TINY["optimizer"], "moments": moments, "weight_decay": 0.01}
    return {"dtype": dtype, "optimizer": optimizer, "num_batches": 4, **more}


def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer of the last checkpoint."""
    files = sorted(checkpoints(run_dir)[-1].glob("*.safetensors"))
    return {f"{file.name}/{k}": v for file in files for k, v in load_file(file).items()}


# which optimizer


def test_float32_trains_with_torchs_adamw() -> None:
    model = load_model("bundled", dtype=torch.float32, device="cpu").model
    assert type(adamw(model, Optimizer())) is torch.optim.AdamW


def test_bfloat16_trains_with_rounding_by_chance() -> None:
    model = load_model("bundled", dtype=torch.bfloat16, device="cpu").model
    optimizer = adamw(model, Optimizer(weight_decay=0.1, betas=(0.8, 0.9)), seed=3)
    assert isinstance(optimizer, AdamW) and optimizer.seed == 3
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_adapters_of_a_model_in_bfloat16_are_float32_and_torchs() -> None:
    pytest.importorskip("peft")
    model = add_lora(load_model("bundled", dtype=torch.bfloat16, device="cpu").model, r=4)
    optimizer = adamw(model, Optimizer())
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    assert type(optimizer) is torch.optim.AdamW
    assert {p.dtype for p in trained} == {torch.float32}


def test_without_torchao_nothing_is_written(tmp_path: Path, monkeypatch) -> None:
    def find_spec(name: str, *args: Any) -> Any:
        return None if name == "torchao" else whole(name, *args)

    whole = maths.importlib.util.find_spec
    monkeypatch.setattr(maths.importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError, match=r"optimizer.moments: got '8bit'.*counterpoise\[8bit\]"):
        go(tmp_path / "run", **recipe("8bit"))
    assert not (tmp_path / "run").exists()


# runs


@pytest.mark.parametrize("settings", [HALF, EIGHT, EIGHT_AND_HALF])
def test_a_run_and_its_resumed_twin_have_the_same_bits(tmp_path: Path, settings) -> None:
    """Stopped after two of four batches, both of which moved weights."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    go(whole, **recipe(**settings))
    go(cut, **recipe(**settings, num_batches=2))
    before = tensors(cut)
    go(cut, resume=True, **recipe(**settings))
    a, b = tensors(whole), tensors(cut)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)
    weights = [name for name in a if name.startswith("model.safetensors")]
    assert weights and any(not torch.equal(a[name], before[name]) for name in weights)
    has_codes = any(name.endswith(".exp_avg_codes") for name in a)
    assert has_codes == (settings.get("moments") == "8bit")
    assert read_jsonl(whole / "metrics.jsonl") == read_jsonl(cut / "metrics.jsonl")


def test_another_seed_rounds_otherwise() -> None:
    model = load_model("bundled", dtype=torch.bfloat16, device="cpu").model
    other = load_model("bundled", dtype=torch.bfloat16, device="cpu").model
    for seed, one in enumerate((model, other)):
        for p in one.parameters():
            p.grad = torch.ones_like(p)
        adamw(one, Optimizer(lr=1e-4), seed).step()
    pairs = list(zip(model.parameters(), other.parameters()))
    assert any(not torch.equal(p, q) for p, q in pairs)


@needs_torchao
def test_adapters_train_with_8_bits(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    go(tmp_path / "run", **recipe("8bit", lora={"r": 64}))
    assert any(name.endswith("exp_avg_codes") for name in tensors(tmp_path / "run"))


# the ledger


@pytest.mark.parametrize("settings", [HALF, EIGHT_AND_HALF])
def test_the_ledger_has_all_its_columns(tmp_path: Path, settings) -> None:
    """The update's response is known: nothing is left out, and predictions go with changes."""
    more = {"ledger": {"every": 1, "bank": 0}, "num_batches": 2}
    go(tmp_path / "run", **recipe(**settings, **more))
    table = read_table(tmp_path / "run" / "tokens" / "batch_000001.parquet").to_pandas()
    assert table["own_head"].notna().all() and table["own"].notna().any()
    assert np.isfinite(table[["delta", "predicted", "own_head"]]).all(axis=None)
    assert np.corrcoef(table["delta"], table["predicted"])[0, 1] > 0.5


@needs_torchao
def test_the_ledger_reads_moments_of_8_bits_as_they_are_kept() -> None:
    """Its response is near that of float32's moments; where a second moment is too small for its
    block, smaller and finite.
    """
    answers = []
    for moments in ("float32", "8bit"):
        weight = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = AdamW([weight], lr=1e-3, moments=moments)  # type: ignore[arg-type]
        for k in range(10):
            weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(k))
            optimizer.step()
        answer = response(optimizer, {"weight": weight})["weight"]
        assert isinstance(answer, torch.Tensor)
        answers.append(answer)
    exact, coarse = answers
    ratio = coarse / exact
    assert abs(ratio.median() - 1) < 0.01
    assert ratio.flatten().quantile(0.9) < 1.1 and ratio.flatten().quantile(0.1) > 0.9
    assert coarse.max() < 2 * exact.max()


# bytes


SETTINGS = {
    "`dtype: float32`": (torch.float32, False),
    "`dtype: float32`, `optimizer.moments: 8bit`": (torch.float32, True),
    "`dtype: bfloat16`": (torch.bfloat16, False),
    "`dtype: bfloat16`, `optimizer.moments: 8bit`": (torch.bfloat16, True),
}


def test_the_documented_bytes_are_those_of_the_tensors() -> None:
    """Qwen2.5-1.5B's shape, without memory."""
    shape = Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        parameters = list(AutoModelForCausalLM.from_config(shape).parameters())
    num = sum(p.numel() for p in parameters)
    page = (DOCS / "results" / "performance.md").read_text()
    assert f"{num:,}" in page
    for name, (dtype, is_8bit) in SETTINGS.items():
        weights = num * dtype.itemsize
        states = [empty_state(p, is_8bit) for p in parameters]
        moments = sum(
            value.numel() * value.itemsize
            for state in states
            for key, value in state.items()
            if key != "step"
        )
        total = 2 * weights + moments
        row = (
            f"| {name} | {weights / num:.2f} | {weights / num:.2f} | {moments / num:.2f} |"
            f" {total / num:.2f} | {total / 1e9:.1f} GB |"
        )
        assert row in page, row
