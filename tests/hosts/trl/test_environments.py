"""Our environments inside TRL: with tool calls by TRL's own loop (``as_trl``)."""

from __future__ import annotations

import math

import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
import counterpoise as cp
from counterpoise.hosts.trl import as_trl
from counterpoise.hosts.trl.environment import BROKEN, OVER, PlayedByTools, told_by_calls
from counterpoise.hosts.trl.live import loss_mask
from counterpoise.maths.turns import runs
from counterpoise.run.read import open_run
from counterpoise.run.rollouts import read_rollouts
from helpers import trl_acts, trl_tiny
from helpers.trl_acts import call_of

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(trl.__version__ < "1.16", reason="environments of TRL 1.16"),
    pytest.mark.filterwarnings("ignore:The tokenizer has a legacy:FutureWarning"),
]
METHODS = ("turn_rloo", "gigpo", "mt_grpo", "igpo", "turn_credit")


def trained(folder, environment, **args):
    """One generation; the trainer, TRL's dict, the messages of each rollout and the dataset row."""
    seen, outputs = [], []

    def nothing(completions, episode, **columns):
        seen.append((completions, episode))
        return [0.0] * len(completions)

    trainer = trl_tiny.ours(
        folder,
        args=trl_acts.TOOLS | {"max_steps": 1} | args,
        processing_class=trl_acts.tokenizer(),
        reward_funcs=nothing,
        **as_trl(environment, num_prompts=48),
    )
    take = trainer._take_batch
    trainer._take_batch = lambda output: outputs.append(dict(output)) or take(output)
    trainer.train()
    return trainer, outputs[0], *seen[0]


def replayed(environment, prompt, messages, num_ran):
    """Rewards, states before and scores after each message of the model: a fresh episode steps
    through the calls that ran.
    """
    episode = environment.start(prompt, 0)
    state, is_over, rows = environment.first_state(prompt), False, []
    for message in messages:
        if message["role"] != "assistant":
            continue
        before, reward, score = state, 0.0, math.nan
        for call in message.get("tool_calls") or []:
            text = call["function"]["arguments"].get("text")
            if call["function"]["name"] != "act" or text is None or num_ran == 0:
                continue
            num_ran -= 1
            if is_over:
                continue
            reply = episode.step(text)
            reward, state, is_over = reward + reply.reward, reply.state, reply.is_done
            score = math.nan if reply.score is None else reply.score
        rows.append((reward, before, score))
    return rows


def expected_batch(environment, trainer, output, completions, episodes):
    prompts = list(zip(range(48), environment.prompts("train", 0)))
    rows = [
        replayed(environment, prompts[e][1], messages, len(one._calls))
        for e, messages, one in zip(episodes, completions, trainer.environments)
    ]
    most, mask_NT = max(map(len, rows)), loss_mask(output)
    names = sorted({(k // 4, row[1]) for k, own in enumerate(rows) for row in own})

    def padded(values, fill):
        return torch.tensor([[*row, *[fill] * (most - len(row))] for row in values])

    batch = cp.TokenBatch(
        token_ids_NT=output["completion_ids"],
        mask_NT=mask_NT,
        group_N=torch.arange(len(rows)) // 4,
        reward_N=torch.tensor([sum(row[0] for row in own) for own in rows]),
        sampler_logp_NT=torch.zeros(mask_NT.shape),
        turn_NT=runs(mask_NT),
        turn_reward_NU=padded([[row[0] for row in own] for own in rows], 0.0),
        turn_mask_NU=padded([[True] * len(own) for own in rows], False),
        turn_score_NU=padded([[row[2] for row in own] for own in rows], math.nan),
    )
    if environment.told:
        keys = [[names.index((k // 4, row[1])) for row in own] for k, own in enumerate(rows)]
        batch = batch.replace(state_NU=padded(keys, -1))
    return batch


@pytest.mark.parametrize("told", [True, False], ids=["states", "no states"])
@pytest.mark.parametrize("method", METHODS)
def test_credit_of_episodes_played_by_tools(method, told, tmp_path):
    """The core's, on turns that a fresh episode gives for the same calls."""
    environment = trl_acts.Words(told)
    trainer, output, completions, episodes = trained(tmp_path, environment, method=method)
    batch = expected_batch(environment, trainer, output, completions, episodes)
    assert (batch.turn_reward_NU[:, :-1] != 0).any()
    assert batch.turn_mask_NU.sum(1).unique().numel() > 1
    expected = cp.method(method).assign(batch)
    torch.testing.assert_close(output["cp_credit"], expected.credit_NT, rtol=0, atol=2e-6)
    assert (output["cp_credit"][~batch.mask_NT] == 0).all()
    assert [episodes[k] for k in range(0, 32, 4)] == [episodes[k + 3] for k in range(0, 32, 4)]


def test_the_run_folder(tmp_path):
    """Whole generations with the ledger; stored rollouts give the credit again."""
    environment = trl_acts.Words()
    _, output, completions, _ = trained(
        tmp_path, environment, method="gigpo", max_steps=8, ledger_every=1
    )
    folder = tmp_path / "counterpoise"
    run = open_run(folder)
    assert run.problems == []
    rollouts = read_rollouts(folder / "rollouts" / "batch_000000.parquet")
    again = cp.method("gigpo").assign(rollouts.batch).credit_NT
    torch.testing.assert_close(again, output["cp_credit"][:, : again.shape[1]], rtol=0, atol=2e-6)
    assert rollouts.conversations[0].states[0] == "start"
    said = [message["content"] for message in completions[0] if message["role"] == "assistant"]
    assert list(rollouts.conversations[0].actions) == said
    assert {"turns/mean", "turns/reward_1", "environment/repeats"} <= set(run.metrics.columns)


def test_uniform_is_plain_trl(tmp_path):
    settings = {"processing_class": trl_acts.tokenizer(), "reward_funcs": None}
    args = trl_acts.TOOLS | {"max_steps": 4}
    plain = trl_tiny.plain(
        tmp_path / "a", args=args, **settings | as_trl(trl_acts.Words(), num_prompts=48)
    )
    plain.train()
    ours = trl_tiny.ours(
        tmp_path / "b",
        args=args | {"ledger_every": 1},
        **settings | as_trl(trl_acts.Words(), num_prompts=48),
    )
    ours.train()
    trl_tiny.assert_identical(trl_tiny.weights(plain), trl_tiny.weights(ours))
    assert any("rewards/Words/mean" in row for row in ours.state.log_history)


def said(*words):
    calls = {"tool_calls": [call_of(word) for word in words]} if words else {}
    return {"role": "assistant", "content": ""} | calls


HEARD = {"role": "tool", "name": "act", "content": ""}


def played(*words):
    """An episode of ``Words`` after these actions; its goal is w3."""
    episode = as_trl(trl_acts.Words(), num_prompts=3)["environment_factory"]()
    episode.reset(episode=0, prompt=[])
    return episode, [episode.act(word) for word in words]


def test_calls_belong_to_the_message_that_made_them():
    """Several in one; one with a wrong argument, which never reached ``act``; one of another
    tool.
    """
    episode, _ = played("w3", "w5", "w3")
    told = told_by_calls(
        episode, [said("w3", "w5"), HEARD, HEARD, said("w9", "w11", "w3"), HEARD, said()]
    )
    assert told.rewards == [0.75, 1.0, 0]
    assert told.states == ["start", "w3/w5", "w3/w3/w5"]
    assert told.scores[:2] == [0.5, 0.5] and math.isnan(told.scores[2])
    assert (told.end_reason, told.metrics) == ("done", {"repeats": pytest.approx(1 / 3)})


def test_a_result_that_was_taken_back_is_paid():
    """TRL drops an overlong result after the call ran: the message is the last."""
    episode, _ = played("w3")
    assert told_by_calls(episode, [said("w3")]).rewards == [1.0]
    assert episode.get_reward() == 1.0


def test_a_call_that_never_ran():
    """The last iteration: nothing is paid for it."""
    episode, _ = played("w5")
    told = told_by_calls(episode, [said("w5"), HEARD, said("w3")])
    assert (told.rewards, told.end_reason) == ([-0.25, 0], "turns")


def test_after_the_end_act_says_so():
    episode, replies = played("w5", "w7", "w3", "w3")
    assert replies == ["w4", "w4", f"w1 w2\n{OVER}", OVER]
    assert episode.get_reward() == 0.5
    assert told_by_calls(episode, [said("w5", "w7", "w3", "w3"), HEARD]).rewards == [0.5]
    episode.reset(episode=1)
    assert (episode.get_reward(), episode.act("w5")) == (0, "w1 w2")  # the goal of row 1


def test_one_public_tool():
    public = [name for name in vars(PlayedByTools) if not name.startswith("_")]
    assert sorted(public) == ["act", "get_reward", "reset"]


def test_an_environment_that_fails_costs_its_rollouts(tmp_path):
    trainer, output, completions, episodes = trained(
        tmp_path, trl_acts.Failing(), method="turn_rloo"
    )
    failed = [one._end == "failed" for one in trainer.environments]
    assert 0 < sum(failed) < 16
    assert trainer.state.log_history[0]["credit/left_out_frac"] == sum(failed) / 32
    assert (output["cp_credit"][torch.tensor(failed)] == 0).all()
    assert BROKEN in str(completions)


def test_an_environment_that_fails_always_is_an_error(tmp_path):
    message = (
        r"the environment failed in \d+ of 32 rollouts. First, rollout \d+: .*KeyError: 'goal'"
    )
    with pytest.raises(ValueError, match=message):
        trained(tmp_path, trl_acts.Broken(), method="turn_rloo")


class Sleeper(trl_acts.Words):
    """Not trusted: it is played in processes that can be killed."""

    is_trusted = False


def test_workers_play_the_same(tmp_path):
    """In processes apart, episodes side by side."""
    factories = [
        as_trl(kind(), num_prompts=6)["environment_factory"] for kind in (trl_acts.Words, Sleeper)
    ]
    heard = []
    for factory in factories:
        episodes = [factory() for _ in range(4)]
        for k, one in enumerate(episodes):
            one.reset(episode=k)
        heard.append([one.act(word) for word in ("w3", "w5", "w7") for one in episodes])
        episodes[0]._table.close()
    assert heard[0] == heard[1]


@pytest.mark.parametrize(
    ("named", "params", "message"),
    [
        ("arithmetic", {}, "no turns"),
        (trl_acts.Words(), {"n": 3}, "parameters of an environment that is built already"),
        ("gues", {}, "Did you mean 'guess'"),
        ("guess", {"m": 3}, "no parameter 'm'"),
    ],
)
def test_what_is_no_environment(named, params, message):
    with pytest.raises(ValueError, match=message):
        as_trl(named, **params)
