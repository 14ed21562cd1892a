"""What a stack measures is what the trainer measures of each member by itself."""

from __future__ import annotations

import pytest
import torch

from counterpoise.arena import importance
from counterpoise.arena.importance import stack_importance
from counterpoise.arena.measure import measure_stack
from counterpoise.arena.stack import stack_of
from counterpoise.arena.texts import Texts, pad_questions, texts_of
from counterpoise.policy import measure, measure_importance
from helpers.stacks import put_member
from helpers.tiny_models import tiny

PROMPTS = [[3, 4, 5, 6], [8]]
RESPONSES = [[7, 9, 4, 20, 2], [1, 20, 21], [5, 17], [3, 9, 11, 13]]  # two per prompt
LENGTHS = torch.tensor([len(row) for row in RESPONSES])
WIDTH = 5
IDS_NT = torch.tensor([row + [0] * (WIDTH - len(row)) for row in RESPONSES])
ROW_PROMPTS = [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2
# a member's answers begin at other tokens than the next one's; 0: nothing comes before it
ANSWERS = torch.tensor([[3, 2, 1, -1], [1, 0, 1, 2], [-1] * 4])


def three_members(kind: str):
    """A stack whose members differ, the models they are, the model they started from, and texts."""
    model, texts = tiny(kind), three_texts()
    stack = stack_of(model, 3)
    start_P = stack.theta_SP[0].clone()
    torch.manual_seed(1)
    with torch.no_grad():
        stack.theta_SP.add_(0.05 * torch.randn_like(stack.theta_SP))
    own = [tiny(kind) for _ in range(3)]
    for s, one in enumerate(own):
        put_member(stack, s, one)
    return stack, start_P, own, model, texts


def three_texts() -> Texts:
    asked = pad_questions([PROMPTS] * 3, torch.device("cpu"))
    parts = (IDS_NT, LENGTHS, torch.zeros(4, WIDTH))
    return texts_of(asked, 2, *(part.expand(3, *part.shape) for part in parts))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_log_probs_and_kl_are_the_trainers(kind: str) -> None:
    stack, start_P, own, model, texts = three_members(kind)
    needs = {"trainer_logp_NT", "ref_logp_NT", "ref_kl_NT"}
    columns = measure_stack(stack, start_P, texts, frozenset(needs), 0.7)
    assert columns.keys() == needs
    rows = ROW_PROMPTS, IDS_NT, texts.mask_SNT[0]
    for s, one in enumerate(own):
        expected = measure(one, *rows, needs, temperature=0.7, ref_model=model)
        assert expected["ref_kl_NT"].max() > 1e-3
        for name, value_NT in expected.items():
            torch.testing.assert_close(columns[name][s], value_NT, atol=2e-6, rtol=1e-4)


def test_nothing_is_measured_that_nobody_reads() -> None:
    stack, start_P, *_, texts = three_members("llama")
    assert measure_stack(stack, start_P, texts, frozenset({"entropy_NT"}), 1.0) == {}


@pytest.mark.parametrize(("num_rows", "chunk"), [(4, 1 << 24), (3, 1), (1, 1 << 24)])
def test_importance_is_the_trainers(num_rows: int, chunk: int, monkeypatch) -> None:
    """Of three members in another order; one has no answers at all. The cut into forwards and
    logits changes nothing.
    """
    monkeypatch.setattr(importance, "CHUNK_LOGITS", chunk)
    stack, _, own, _, texts = three_members("llama")
    members, seeds = [0, 2, 1], [11, 12, 13]
    got_SNT = stack_importance(
        stack,
        members,
        texts.of_members(members),
        ANSWERS[torch.tensor(members)],
        seeds=seeds,
        temperature=0.7,
        num_rows=num_rows,
    )
    for s, seed, got_NT in zip(members, seeds, got_SNT):
        rows = ROW_PROMPTS, IDS_NT, texts.mask_SNT[s], ANSWERS[s]
        expected_NT = measure_importance(own[s], *rows, seed=seed, temperature=0.7)
        assert (expected_NT > 0).any() == (s != 2)
        assert torch.equal(got_NT < 0, expected_NT < 0)
        largest = expected_NT.abs().max()
        torch.testing.assert_close(got_NT / largest, expected_NT / largest, atol=2e-3, rtol=0)
