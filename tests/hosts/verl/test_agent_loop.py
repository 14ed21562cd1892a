"""Conversations through verl's own agent loop worker: what it puts into its queue."""

from __future__ import annotations

import asyncio
import time

import pytest
import torch

pytest.importorskip(
    "verl.trainer.ppo.v1",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

from counterpoise.environments.episodes import Asked
from counterpoise.hosts.verl import register, rows, write_rows
from counterpoise.hosts.verl.checks import check_config
from counterpoise.hosts.verl.data import episode_of
from counterpoise.hosts.verl.episodes import Players
from counterpoise.policy import load_model, locate
from helpers.rooms import Broken, Counting
from helpers.verl.turns import Scripted, Server, bundled, play_rows, read_rows, turn_config

pytestmark = [pytest.mark.hosts, pytest.mark.verl]
register()

GUESS = {"name": "guess", "n": 16, "turns": 3}
ROOM = "helpers.rooms:"


@pytest.fixture(scope="module")
def policy():
    return bundled()


def played(monkeypatch, config, server, num=2, task=None):
    task = task or config.algorithm.counterpoise.turns.environment
    return play_rows(monkeypatch, config, server, verl_rows(task, num))


def verl_rows(task, num):
    """Rows as verl's data set gives them."""
    given = rows(task if isinstance(task, str) else dict(task), "train", num=num)
    return [{**row, "raw_prompt": row["prompt"], "index": k} for k, row in enumerate(given)]


def text(policy, ids):
    return policy.tokenizer.decode(ids, skip_special_tokens=True)


def test_the_data_file_is_what_verl_reads(tmp_path, policy):
    path, config = tmp_path / "data" / "train.parquet", turn_config(GUESS)
    write_rows(path, GUESS, "train", num=20, seed=3)
    got = read_rows(path, config, policy.tokenizer)
    from counterpoise.tasks import task

    prompts = task(GUESS).prompts("train", 3)
    for k, row in enumerate(got):
        prompt, _ = episode_of(row)
        assert prompt == next(prompts) and row["index"] == k
        assert row["raw_prompt"] == [{"role": "user", "content": prompt.text}]
        assert row["agent_name"] == "counterpoise_turns"
    seeds = [episode_of(row)[1] for row in got]
    assert len(set(seeds)) == 20 and seeds == [
        episode_of(row)[1] for row in rows(GUESS, "train", num=20, seed=3)
    ]


def test_a_prompt_that_does_not_survive_json_is_an_error():
    class Odd(Counting):
        def prompts(self, split, seed, start=0):
            for prompt in super().prompts(split, seed, start):
                yield prompt._replace(meta={"secret": {1, 2}})

    with pytest.raises(ValueError, match="its meta does not survive JSON, got {'secret': {1, 2}}"):
        rows(Odd(), "train", num=1)


def test_a_row_without_its_episode_is_an_error():
    with pytest.raises(ValueError, match="row 7 of the data set has no extra_info.episode"):
        episode_of({"extra_info": {"index": 7}})


def test_a_conversation_as_the_queue_has_it(monkeypatch, policy):
    """Guesses 1, 2, 3 of a secret from 1 to 16: drawn tokens keep their ids and log-probs, replies
    have mask 0, and turns earn what the environment says.
    """
    server = Scripted(policy, "1;", "2;", "3;")
    got, status = played(monkeypatch, turn_config(GUESS), server, num=16)
    assert set(status.values()) == {"finished"} and len(got) == 64
    hits = 0
    for row in got:
        fields, extra = row.fields, row.fields["extra_fields"]
        prompt, _ = episode_of(fields)
        num = min(prompt.meta["secret"], 3)
        hits += prompt.meta["secret"] <= 3
        said = ">".join(["1;", "2;", "3;"][:num])
        assert text(policy, fields["responses"]) == said.replace(";", "")
        assert fields["responses"].tolist() == policy.tokenizer(said)["input_ids"]
        mask = [1, 1, 0, 1, 1, 0, 1, 1][: 3 * num - 1]
        assert fields["response_mask"].tolist() == mask
        assert fields["rollout_log_probs"].tolist() == [-0.5 * one for one in mask]
        reward = float(prompt.meta["secret"] <= 3)
        assert extra["turn_rewards"] == [0.0] * (num - 1) + [reward]
        assert extra["turn_states"] == ["1-16/3", "2-16/2", "3-16/1"][:num]
        assert extra["turn_spans"] == [[0, 2], [3, 5], [6, 8]][:num]
        assert extra["end_reason"] == "done" and fields["num_turns"] == 2 * num
        assert fields["rm_scores"].tolist() == [0.0] * (len(mask) - 1) + [reward]
    assert hits == 3 * 4


def test_each_turn_goes_on_from_the_ids_that_were_drawn(monkeypatch, policy):
    """The server reads prompt and history, token by token; scoring the row afterwards gives the
    log-probs with which it was drawn.
    """
    server = Server(policy)
    got, _ = played(monkeypatch, turn_config(GUESS), server, num=2)
    asked = [tuple(ids) for ids, _ in server.asked]
    for row in got:
        prompt, ids = row.fields["prompts"].tolist(), row.fields["responses"].tolist()
        for start, end in row.fields["extra_fields"]["turn_spans"]:
            assert tuple(prompt + ids[:start]) in asked and end - start <= 4
        with torch.no_grad():
            logp_TV = policy.model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
        logp_T = logp_TV[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]
        mask_T = row.fields["response_mask"].bool()
        torch.testing.assert_close(
            row.fields["rollout_log_probs"][mask_T], logp_T[mask_T], rtol=1e-4, atol=1e-5
        )
    assert {settings["max_tokens"] for _, settings in server.asked} == {4}
    assert server.asked[0][1]["stop_token_ids"] == list(policy.stop_ids)
    # the version of the weights of the first turn, and of the last
    assert all(row.tag["min_global_steps"] < row.tag["max_global_steps"] for row in got)


def test_a_cut_turn_gets_its_stop_token_from_the_environment(monkeypatch, policy):
    config = turn_config(f"{ROOM}Counting", algorithm__counterpoise__turns__max_turn_tokens=2)
    server = Scripted(policy, "123;")
    (row, *_), _ = played(monkeypatch, config, server, num=1)
    ids, mask = row.fields["responses"].tolist(), row.fields["response_mask"].tolist()
    reply = policy.tokenizer(";go on 2")["input_ids"]
    assert ids[2 : 2 + len(reply)] == reply and mask[: 2 + len(reply)] == [1, 1] + [0] * len(reply)
    assert row.fields["extra_fields"]["turn_actions"] == ["12"] * 3


def test_a_chat_is_what_the_template_makes_of_it(monkeypatch):
    """Prompt, turns and replies, token by token."""
    policy = load_model("bundled")
    changed = {
        "algorithm__counterpoise__turns__chat": True,
        "algorithm__counterpoise__turns__max_turn_tokens": 8,
        "actor_rollout_ref__model__path": locate("bundled").place,
        "actor_rollout_ref__rollout__prompt_length": 64,
        "actor_rollout_ref__rollout__response_length": 64,
    }
    stop = policy.tokenizer.decode([policy.stop_ids[0]])
    server = Scripted(policy, f"Then 12{stop}", f"So 7.{stop}")
    got, _ = played(monkeypatch, turn_config(f"{ROOM}Counting", **changed), server, num=1)
    said = [("user", "What is 2 + 3?"), ("assistant", "Then 12"), ("user", "go on 7")]
    said += [("assistant", "So 7."), ("user", "go on 5"), ("assistant", "Then 12")]
    messages = [{"role": role, "content": words} for role, words in said]
    whole = policy.tokenizer.apply_chat_template(messages, tokenize=False)
    ids = policy.tokenizer(whole, add_special_tokens=False)["input_ids"]
    for row in got:
        row_ids = row.fields["input_ids"].tolist()
        # the template may say more after the last turn
        assert row_ids == ids[: len(row_ids)] and len(row_ids) >= len(ids) - 1
        assert row.fields["extra_fields"]["turn_actions"] == ["Then 12", "So 7.", "Then 12"]


@pytest.mark.parametrize(
    ("changed", "end_reason", "num_turns"),
    [
        ({}, "done", 3),
        ({"algorithm__counterpoise__turns__max_turns": 2}, "turns", 2),
        # 2 drawn + 7 said + 2 drawn; the next reply has no room
        ({"actor_rollout_ref__rollout__response_length": 13}, "length", 2),
        ({"actor_rollout_ref__rollout__response_length": 2}, "length", 1),
        # four tokens of the prompt less
        ({"actor_rollout_ref__rollout__max_model_len": 25}, "length", 2),
    ],
)
def test_every_limit_has_its_end_reason(monkeypatch, policy, changed, end_reason, num_turns):
    config = turn_config(f"{ROOM}Counting", **changed)
    got, _ = played(monkeypatch, config, Scripted(policy, "12;"), num=1)
    for row in got:
        extra = row.fields["extra_fields"]
        assert (extra["end_reason"], len(extra["turn_rewards"])) == (end_reason, num_turns)
        assert len(row.fields["responses"]) <= config.actor_rollout_ref.rollout.response_length
        assert row.fields["response_mask"][-1] == 1  # no reply at the end


@pytest.mark.parametrize(
    ("fault", "end_reason", "message"),
    [
        ("raise", "failed", "the environment raised RuntimeError: the door is locked"),
        ("start", "failed", "the environment raised RuntimeError: no room"),
        ("exit", "failed", "the environment ended its process"),
        ("nan", "failed", "the reward of a Reply must be a finite number"),
        ("hang", "timed out", "the environment took more than 1 s"),
    ],
)
def test_an_environment_that_fails_marks_its_rows(monkeypatch, policy, fault, end_reason, message):
    """In processes of its own, in turn 2 of the prompt whose secret is 0; other rows go on."""
    task = {"name": f"{ROOM}Broken", "fault": fault, "when": 2}
    config = turn_config(task, algorithm__counterpoise__turns__step_time_limit_s=1.0)
    got, status = played(monkeypatch, config, Scripted(policy, "12;"), num=2)
    assert set(status.values()) == {"finished"} and len(got) == 8
    for row in got:
        extra = row.fields["extra_fields"]
        if row.prompt == "p1":
            assert extra["end_reason"] == "done" and extra["turn_rewards"] == [1.0] * 3
            continue
        assert extra["end_reason"] == end_reason and message in extra["failure"]
        assert not row.fields["response_mask"].any() and len(row.fields["responses"]) >= 2


def test_a_hanging_environment_does_not_stop_the_loop(policy):
    """While one episode hangs, the event loop turns and other episodes are played."""
    room = Broken(fault="hang", when=1)
    players = Players(room, num=2)
    prompts = room.prompts("train", 0)
    asked = [Asked(call, 0, next(prompts), 0, ("12",)) for call in range(2)]

    async def play():
        hanging = asyncio.create_task(players.play(asked[0], 3.0))
        start, num = time.monotonic(), 0
        replies = await players.play(asked[1], 60.0)
        while not hanging.done():
            await asyncio.sleep(0.02)
            num += 1
        return replies, await hanging, num, time.monotonic() - start

    try:
        replies, fault, num, _ = asyncio.run(play())
    finally:
        players.close()
    assert replies[0].text == "go on 2" and fault.kind == "timed out" and num > 5


def test_an_episode_whose_process_was_killed_is_played_again():
    room = Broken(fault="exit", when=1)
    players = Players(room, num=1)
    prompts = room.prompts("train", 0)
    bad, good = next(prompts), next(prompts)

    async def play():
        first = await players.play(Asked(0, 0, good, 0, ("1",)), 60.0)
        fault = await players.play(Asked(1, 0, bad, 0, ("1",)), 60.0)
        return first, fault, await players.play(Asked(0, 0, good, 0, ("1", "12")), 60.0)

    try:
        first, fault, again = asyncio.run(play())
    finally:
        players.close()
    assert fault.kind == "failed" and len(first) == 1 and len(again) == 2
    assert again[0] == first[0] and again[1].text == "go on 2"


def test_an_environment_whose_replies_differ_is_an_error(monkeypatch, policy, caplog):
    """Every conversation is played again here, one in a hundred otherwise. verl logs what an agent
    loop raises, and drops the prompt.
    """
    monkeypatch.setattr("counterpoise.hosts.verl.agent_loop.CHECKED", 1)
    config = turn_config({"name": f"{ROOM}Broken", "fault": "random", "when": 2})
    got, status = played(monkeypatch, config, Scripted(policy, "12;"), num=2)
    assert status == {"p0": "failure", "p1": "finished"} and {row.prompt for row in got} == {"p1"}
    assert "the same actions gave two replies to turn 1" in caplog.text


def test_a_server_that_draws_nothing_marks_the_row(monkeypatch, policy):
    got, status = played(monkeypatch, turn_config(GUESS), Scripted(policy, ""), num=1)
    assert set(status.values()) == {"finished"}
    for row in got:
        assert row.fields["response_mask"].tolist() == [0]
        assert row.fields["extra_fields"]["end_reason"] == "failed"
        assert "the server drew no token" in row.fields["extra_fields"]["failure"]


@pytest.mark.parametrize(
    ("task", "changed", "line"),
    [
        ("gess", {}, "unknown task 'gess'. Did you mean 'guess'"),
        ("arithmetic", {}, "is graded once, not played in turns"),
        (GUESS, {"algorithm__counterpoise__turns__max_turn": 3}, "Did you mean 'max_turns'"),
        (GUESS, {"algorithm__counterpoise__turns__max_turns": 0}, "a whole number >= 1"),
        (GUESS, {"algorithm__counterpoise__turns": 4}, "turns must be a mapping, got 4"),
    ],
)
def test_what_cannot_work_is_said_before_any_worker_starts(task, changed, line):
    with pytest.raises(ValueError, match=line):
        check_config(turn_config(task, **changed), "sync")


def test_a_template_without_turns_is_refused_before_any_worker_starts():
    changed = {
        "algorithm__counterpoise__turns__chat": True,
        "actor_rollout_ref__model__custom_chat_template": "{{ messages[-1]['content'] }}",
    }
    with pytest.raises(ValueError, match="its chat template cannot be used for turns"):
        check_config(turn_config(GUESS, **changed), "sync")


def test_settings_that_fit_are_accepted():
    credit, _ = check_config(turn_config(GUESS), "sync")
    assert credit is not None and credit.has_turns
