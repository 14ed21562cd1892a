"""What the ledger carries along a run: snapshots, jitter, solution drift, categories."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from counterpoise.ledger.calculus.snapshot import restore, snapshot
from counterpoise.ledger.measures.categories import CATEGORIES, categories, load_categories
from counterpoise.ledger.measures.drift import drift, fill_bank
from counterpoise.ledger.measures.jitter import jitter
from helpers.reference_ledger import clean_gpt2


def trained(model, optimizer, updates: int) -> None:
    for _ in range(updates):
        model(torch.randn(4, 3, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_restore_is_bit_exact_and_training_goes_on_as_if_nothing_happened(steps_before, make):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
    ).double()
    optimizer = make(
        model.parameters(),
        lr=1e-2,
        weight_decay=0.01,
        **({"momentum": 0.9} if make is torch.optim.SGD else {}),
    )
    trained(model, optimizer, steps_before)
    model[2].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    saved = snapshot(model, optimizer)
    endings = []
    for rate in (0.1, 0.3):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = rate
        trained(model.train(), optimizer, 2)
        restore(saved, model, optimizer)
        assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
        optimizer.zero_grad()
        trained(model, optimizer, 4)
        endings.append(
            {name: value.clone() for name, value in model.state_dict().items()}
            | {"rng": torch.rand(3)}
        )
        restore(saved, model, optimizer)
    assert all(torch.equal(endings[0][name], endings[1][name]) for name in endings[0])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert [module.training for module in model.modules()] == [True, True, True, False, True]
    assert len(optimizer.state) == (4 + 2 if steps_before else 0)


def test_snapshot_of_a_language_model_with_adamw():
    """Weights (tied ones too), both moments and the batch count come back bit for bit."""
    model = clean_gpt2(tied=True, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor([[1, 2, 3, 4]])

    def take_update() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    take_update()
    saved = snapshot(model, optimizer)
    weights = [p.detach().clone() for p in model.parameters()]
    moments = [
        {key: value.clone() for key, value in optimizer.state[p].items()}
        for p in model.parameters()
    ]
    take_update()
    assert any(not torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    restore(saved, model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    assert all(
        torch.equal(kept[key], optimizer.state[p][key])
        for kept, p in zip(moments, model.parameters())
        for key in kept
    )
    assert model.lm_head.weight is model.transformer.wte.weight


@given(st.lists(st.floats(-10, 10), min_size=0, max_size=12))
def test_jitter_equals_numpy(values):
    state, found = None, {}
    for value in values:
        found, state = jitter(state, {"x": value})
        state = json.loads(json.dumps(state))
    if len(values) < 3:
        assert found == {}
    else:
        assert found["x"] == pytest.approx(float(np.mean(np.diff(values, n=2) ** 2)), abs=1e-9)


def test_the_bank_takes_distinct_verified_solutions_and_stays_frozen():
    names = ["a", "a", "a", "b", "b", "c", "c", "c"]
    prompts = [[1], [1], [1], [2], [2], [3], [3], [3]]
    solutions = [[5], [5], [6], [7], [7], [8], [9], [10]]
    good = [True, True, True, True, True, True, False, True]
    bank = fill_bank([], 1, names, prompts, solutions, good)
    assert [(entry["prompt_id"], entry["solutions"]) for entry in bank] == [("a", [[5], [6]])]
    bank = fill_bank(
        bank, 3, names, prompts, solutions, good
    )  # b has one distinct solution, c two verified ones
    assert [(entry["prompt_id"], entry["solutions"]) for entry in bank] == [
        ("a", [[5], [6]]),
        ("c", [[8], [10]]),
    ]
    again = fill_bank(bank, 3, ["a", "a"], [[1], [1]], [[40], [41]], [True, True])
    assert again == bank
    assert (
        len(
            fill_bank([], 1, ["a"] * 9, [[1]] * 9, [[k] for k in range(9)], [True] * 9)[0][
                "solutions"
            ]
        )
        == 4
    )


def test_drift_by_hand():
    """s = (-1, -3) at the start: log-odds 2. Then (-2, -2): log-odds 0, entropy log 2.

    The change is 2.
    """
    bank = fill_bank([], 1, ["a", "a"], [[1], [1]], [[5], [6]], [True, True])
    scores = iter([torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0])])
    seen = []

    def score(prompts, solutions):
        seen.append((prompts, solutions))
        return next(scores)

    first, bank = drift(bank, score)
    p = 1 / (1 + math.exp(-2))
    assert first["log_odds_change"] == 0
    assert first["entropy"] == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    second, bank = drift(json.loads(json.dumps(bank)), score)
    assert second["log_odds_change"] == pytest.approx(2.0)
    assert second["entropy"] == pytest.approx(math.log(2))
    assert second["entropy_change"] == pytest.approx(math.log(2) - first["entropy"])
    assert seen == [([[1], [1]], [[5], [6]])] * 2
    assert drift([], score) == ({}, [])


def test_drift_tells_sharpening_from_a_walk():
    """Five prompts whose log-odds grow by half; one that is scored for the first time counts in no
    slope, and swapping the two solutions of a prompt changes nothing.
    """
    start = [2.0, -1.0, 0.5, 3.0, -4.0]
    bank = [
        {"prompt_id": str(k), "prompt_ids": [1], "solutions": [[5], [6]], "start": [odds, 0.0]}
        for k, odds in enumerate(start)
    ]
    bank.append({"prompt_id": "new", "prompt_ids": [1], "solutions": [[5], [6]], "start": None})
    now = torch.tensor([[1.5 * odds, 0.0] for odds in [*start, 9.0]]).flatten()
    numbers, _ = drift(bank, lambda prompts, solutions: now)
    assert numbers["slope"] == pytest.approx(0.5)
    assert numbers["slope_low"] == pytest.approx(0.5) == numbers["slope_high"]
    swapped = [entry | {"start": entry["start"] and entry["start"][::-1]} for entry in bank]
    back, _ = drift(swapped, lambda prompts, solutions: now.view(-1, 2).flip(1).flatten())
    assert back["slope"] == pytest.approx(0.5)
    assert "slope" not in drift(bank[:2], lambda prompts, solutions: now[:4])[0]


def test_categories_of_the_built_in_task():
    """An answer of the arithmetic task, word by word with the space before it, digits alone."""
    text = (
        "I| will| keep| a| running| total|.| Start| with| 7|.| Then| subtract| 1|2| to| get| -|5|.|"
        " So| the| answer| is| -|5|.|<eos>"
    )
    expected = {
        "template": [".", " answer", "<eos>"],
        "connective": [" Then", " So"],
        "number": [" 7", " 1", "2", "5"],
        "operator": [" -"],
        "reasoning": [" keep", " running", " total", " Start", " subtract", " get"],
        "other": ["I", " will", " a", " with", " to", " the", " is"],
    }
    pieces = text.split("|")
    found: dict[str, list[str]] = {}
    for piece, name in zip(pieces, categories(pieces)):
        if piece not in found.setdefault(name, []):
            found[name].append(piece)
    assert found == expected


def test_categories_of_other_vocabularies():
    """Byte-level and sentencepiece spellings, LaTeX, markdown, chat marks, pieces of words, other
    scripts.
    """
    expected = {
        "ĠTherefore": "connective",
        "▁however": "connective",
        "Ċ": "template",
        "ĊĊ": "template",
        "**": "template",
        "###": "template",
        "<|im_end|>": "template",
        "\\boxed": "template",
        "\\times": "operator",
        "Ġ=": "operator",
        "≤": "operator",
        "Ġ3.14": "number",
        "1,000": "number",
        "Ġtwelve": "number",
        "ĠWait": "reasoning",
        "Ġverify": "reasoning",
        "subtr": "other",
        "Ġapples": "other",
        "答": "other",
        "": "template",
        "�": "template",
    }
    assert dict(zip(expected, categories(list(expected)))) == expected
    assert set(expected.values()) == set(CATEGORIES)


def upper(texts):
    return ["upper" if text.isupper() else "lower" for text in texts]


def test_categories_are_pluggable(monkeypatch):
    assert load_categories(None) is categories
    assert load_categories(f"{__name__}:upper")(["A", "b"]) == ["upper", "lower"]
    with pytest.raises(ValueError, match="your.module:name"):
        load_categories("no_colon")
    with pytest.raises(ValueError, match="cannot import"):
        load_categories("not_a_module_here:fn")
    with pytest.raises(ValueError, match="has no 'uper'.*Did you mean 'upper'"):
        load_categories(f"{__name__}:uper")
