"""Conversations: the engine equals sampling every turn from the prompt and all that was said."""

from __future__ import annotations

import pytest
import torch

from helpers.conversations import PROMPTS, Script, assert_equal_conversations, play
from helpers.tiny_models import tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["c", "torch"])
@pytest.mark.parametrize("max_rows", [1024, 4, 1])
@pytest.mark.parametrize(
    "script",
    [{}, {"delay": 5}, {"longest": 60}, {"longest": 0}, {"num_turns": 1}],
    ids=["prompt", "late", "long", "silent", "one-turn"],
)
def test_the_engine_equals_turns_sampled_afresh(dtype, max_rows, script):
    model = tiny(max_position_embeddings=256).to(dtype)
    slow = play(model, engine=False, script=Script(**script))
    fast = play(model, engine=True, max_rows=max_rows, script=Script(**script))
    assert_equal_conversations(fast, slow)
    assert max(len(ids) for _, ids in fast[1].heard) > 3 or script.get("num_turns") == 1


def test_log_probs_are_those_of_the_turns_sampled_afresh():
    model = tiny(max_position_embeddings=256)
    slow, fast = (play(model, engine=engine)[0] for engine in (False, True))
    drawn_NT = slow.sampler_logp_NT != 0
    for name in ("sampler_logp_NT", "entropy_NT"):
        a, b = getattr(slow, name), getattr(fast, name)
        torch.testing.assert_close(a[drawn_NT], b[drawn_NT], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 4}, {"top_p": 0.8}])
def test_other_ways_to_draw(settings):
    model = tiny(max_position_embeddings=256)
    slow, fast = (play(model, engine=engine, **settings) for engine in (False, True))
    assert_equal_conversations(fast, slow)


def test_one_turn_is_sampling(monkeypatch):
    """Without an answer a conversation draws what ``sample`` draws."""
    from counterpoise.sampling import sample

    model = tiny(max_position_embeddings=256)

    class Silent(Script):
        def first_limit(self, row):
            return 20

    once = play(model, engine=True, script=Silent(num_turns=1), max_tokens=20)[0]
    plain = sample(model, PROMPTS, stop_ids=[2], seed=5, max_new_tokens=20)
    for name in ("token_ids_NT", "mask_NT", "sampler_logp_NT", "entropy_NT"):
        assert torch.equal(getattr(once, name), getattr(plain, name)), name
    assert once.stop_reason == plain.stop_reason


def test_hidden_states_and_candidates_come_along():
    model = tiny(max_position_embeddings=256)
    needs = {"hidden_NTD", "topk_ids_NTK", "topk_logp_NTK"}
    rollouts, _ = play(model, engine=True, needs=needs, topk=3)
    out = model.model(
        torch.tensor([PROMPTS[3] + rollouts.token_ids_NT[3][rollouts.mask_NT[3]].tolist()])
    ).last_hidden_state[0]
    start, num = len(PROMPTS[3]) - 1, int(rollouts.mask_NT[3].sum())
    # the engine reads every token of a row but the last
    torch.testing.assert_close(
        rollouts.hidden_NTD[3, :num], out[start : start + num], rtol=1e-3, atol=1e-4
    )
