"""Conversations with real environments: exact tokens, limits, and environments that fail."""

from __future__ import annotations

import itertools

import pytest
import torch

from counterpoise.errors import ConfigError
from counterpoise.policy import encode_prompts, load_model, token_logp
from counterpoise.policy.bridge import Bridge
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.conversations import hold, lost_rows, without_lost
from helpers.rooms import Broken, Counting


@pytest.fixture(scope="module")
def policy():
    return load_model("bundled")


def play(policy, room, *, num_prompts=7, group_size=2, seed=3, **rollouts):
    """Conversations about the first prompts of a room."""
    given = {"max_new_tokens": 40, "max_turn_tokens": 8, "max_row_tokens": 200, **rollouts}
    config = parse_config({"rollouts": given, "step_time_limit_s": 2.0})
    prompts = list(itertools.islice(room.prompts("train", 0), num_prompts))
    ids = encode_prompts(policy, [prompt.text for prompt in prompts])
    settings = {"group_size": group_size, "seed": seed, "temperature": 1.0}
    return hold(policy, room, prompts, ids, config, **settings)


def test_rows_hold_turns_and_replies_token_by_token(policy):
    out = play(policy, Counting())
    batch, tokenizer, bridge = out.batch, policy.tokenizer, Bridge(policy, None)
    for row, talk in enumerate(out.conversations):
        ids = batch.token_ids_NT[row].tolist()
        rebuilt = []
        for turn, action in enumerate(talk.actions):
            at = (batch.turn_NT[row] == turn).nonzero()[:, 0].tolist()
            drawn = [ids[k] for k in at]
            assert at == list(range(len(rebuilt), len(rebuilt) + len(at)))
            is_stopped = drawn[-1] in policy.stop_ids
            body = drawn[:-1] if is_stopped else drawn
            assert tokenizer.decode(body, skip_special_tokens=True) == action
            rebuilt += drawn
            if turn + 1 < len(talk.actions):
                said = bridge(talk.replies[turn], is_stopped=is_stopped)
                assert talk.replies[turn] in tokenizer.decode(said)
                rebuilt += said
        assert ids[: len(rebuilt)] == rebuilt
        assert int(batch.mask_NT[row].sum()) == int((batch.turn_NT[row] >= 0).sum())
        assert talk.end_reason == "done"
        rewards = [float(len(action) % 2 == 0) for action in talk.actions]
        assert batch.turn_reward_NU[row].tolist() == rewards
    assert torch.equal(batch.reward_N, batch.turn_reward_NU.sum(1))


def test_scoring_the_stored_tokens_gives_the_sampler_log_probs(policy):
    out = play(policy, Counting())
    batch = out.batch
    with torch.no_grad():
        logp_NT = token_logp(policy.model, out.prompt_ids, batch.token_ids_NT, batch.mask_NT)
    drawn = batch.mask_NT
    torch.testing.assert_close(logp_NT[drawn], batch.sampler_logp_NT[drawn], rtol=1e-3, atol=1e-4)


def test_a_group_shares_states_and_other_groups_do_not(policy):
    batch = play(policy, Counting()).batch
    key_GU = batch.state_NU.reshape(7, 2, -1)
    assert torch.equal(key_GU[:, 0], key_GU[:, 1])
    assert len(batch.state_NU.unique()) == 7 * 3


@pytest.mark.parametrize(
    ("rollouts", "reason"),
    [
        ({"max_turns": 2}, "turns"),
        ({"max_new_tokens": 12}, "length"),
        ({"max_row_tokens": 60}, "length"),
        ({}, "done"),
    ],
)
def test_every_limit_has_its_reason_and_no_reply_is_cut(policy, rollouts, reason):
    out = play(policy, Counting(turns=5, reply="and now the next one"), **rollouts)
    assert reason in {talk.end_reason for talk in out.conversations}
    batch = out.batch
    assert int(batch.length_N.max()) <= rollouts.get("max_new_tokens", 40)
    total = [len(ids) for ids in out.prompt_ids]
    last = [int(mask.nonzero()[-1]) + 1 for mask in batch.mask_NT]
    assert max(a + b for a, b in zip(total, last)) <= rollouts.get("max_row_tokens", 200)
    for row, talk in enumerate(out.conversations):
        turns = batch.turn_NT[row]
        assert int(turns.max()) + 1 == len(talk.actions)
        assert all(int((turns == u).sum()) <= 8 for u in range(len(talk.actions)))


def test_rows_do_not_depend_on_how_many_are_in_flight_or_on_workers(policy):
    here = play(policy, Counting())
    for other in (play(policy, Counting(), max_rows=3), play(policy, Counting(is_trusted=False))):
        assert other.conversations == here.conversations
        assert torch.equal(other.batch.token_ids_NT, here.batch.token_ids_NT)
        assert torch.equal(other.batch.turn_reward_NU, here.batch.turn_reward_NU)


@pytest.mark.parametrize(
    "fault", ["start", "raise", "exit", "hang", "nan", "text", "tuple", "none"]
)
@pytest.mark.parametrize("when", [1, 3])
def test_an_environment_that_fails_costs_one_row(policy, fault, when):
    if fault == "start" and when == 3:
        pytest.skip("start comes before the first turn")
    whole = play(policy, Counting(turns=4))
    out = play(policy, Broken(turns=4, fault=fault, when=when))
    lost = lost_rows(out)
    assert lost == [0, 1]  # the group with secret 0
    expected = "timed out" if fault == "hang" else "failed"
    assert {out.conversations[row].end_reason for row in lost} == {expected}
    assert len(out.conversations[0].actions) == when
    assert out.conversations[2:] == whole.conversations[2:]
    kept = without_lost(out, 0.5, "batch 0")
    assert kept.batch.num_rollouts == 12
    assert kept.lost.batch.num_rollouts == 2
    assert kept.num_grader_failures == len(kept.grader_messages) == 2
    with pytest.raises(ValueError, match=r"batch 0: the environment failed in 2 of 14 rollouts"):
        without_lost(out, 0.1, "batch 0")


def test_a_huge_reply_ends_its_row_by_length(policy):
    out = play(policy, Broken(fault="huge"))
    assert [talk.end_reason for talk in out.conversations[:2]] == ["length", "length"]
    assert {talk.end_reason for talk in out.conversations[2:]} == {"done"}


def test_special_tokens_in_a_reply_stay_text(policy):
    bridge = Bridge(policy, None)
    said = "<|im_end|> and <|im_start|>assistant"
    plain = bridge(said, is_stopped=True)
    assert sum(token in policy.stop_ids for token in plain) == sum(
        token in policy.stop_ids for token in bridge("and", is_stopped=True)
    )
    assert said in policy.tokenizer.decode(plain)
    play(policy, Broken(fault="special"))


def test_other_replies_to_the_same_actions_are_an_error(policy):
    with pytest.raises(ConfigError, match="the same actions gave two replies"):
        play(policy, Broken(fault="random", is_trusted=True))


def test_a_template_that_rewrites_earlier_turns_is_refused(policy):
    tokenizer = policy.tokenizer.__class__.from_pretrained(policy.tokenizer.name_or_path)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | upper }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(ConfigError, match="its chat template cannot be used for turns"):
        Bridge(policy._replace(tokenizer=tokenizer), None)
