"""Credit of turns through verl's own ``_compute_advantage``, from conversations that its worker put
into the queue.
"""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch

pytest.importorskip(
    "verl.trainer.ppo.v1",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

import counterpoise as cp
from counterpoise.hosts.verl import register, rows
from counterpoise.hosts.verl.checks import check_config
from counterpoise.hosts.verl.data import episode_of
from counterpoise.hosts.verl.trainer import CreditSync
from counterpoise.policy.bridge import Bridge
from counterpoise.sampling.play import Limits, Play
from counterpoise.tasks import task
from counterpoise.types import TokenBatch
from helpers.verl.cases import Rollout, batch_meta, config, trainer
from helpers.verl.turns import Server, bundled, play_rows, turn_config

pytestmark = [pytest.mark.hosts, pytest.mark.verl]
register()

GUESS = {"name": "guess", "n": 16, "turns": 3, "cost": 0.125}
NTF = {"credit": ["turn_baseline", "negative_token_filter"]}


@pytest.fixture(scope="module")
def policy():
    return bundled()


@pytest.fixture(scope="module")
def conversations(policy):
    """Three prompts, four conversations each, drawn by the model."""
    with pytest.MonkeyPatch.context() as patch:
        given = rows(GUESS, "train", num=3)
        given = [{**row, "raw_prompt": row["prompt"], "index": k} for k, row in enumerate(given)]
        got, _ = play_rows(patch, turn_config(GUESS), Server(policy, seed=11), given)
    gen = torch.Generator().manual_seed(0)
    for row in got:
        logp_T = row.fields["rollout_log_probs"]
        row.fields["old_log_probs"] = logp_T
        row.fields["entropy"] = torch.rand(len(logp_T), generator=gen)
    return got


@pytest.fixture
def talks(conversations):
    return copy.deepcopy(conversations)


def advantages(name, talks, queue_of, settings=None, metrics=None, **changed):
    """Credit as verl's queue has it afterwards."""
    made = config(f"counterpoise/{name}", {"turns": {}} | (settings or {}), **changed)
    queue, host = queue_of(talks), trainer(CreditSync, made)
    meta = host._compute_advantage(batch_meta(talks), {} if metrics is None else metrics)
    return queue.padded(meta.keys, "advantages")


def own_batch(talks, policy) -> TokenBatch:
    """The same conversations as counterpoise's own trainer sees them: the environment is played
    again with the tokens that were drawn.
    """
    known = [episode_of(row.fields) for row in talks]
    lengths = [len(row.fields["prompts"]) for row in talks]
    play = Play(
        task(GUESS),
        [prompt for prompt, _ in known],
        [seed for _, seed in known],
        lengths,
        limits=Limits(4, 4, 32, 200),
        bridge=Bridge(policy, False),
        decode=lambda ids: policy.tokenizer.decode(ids, skip_special_tokens=True),
        stop_ids=policy.stop_ids,
    )
    width = max(len(row.fields["responses"]) for row in talks)
    for k, row in enumerate(talks):
        ids = row.fields["responses"].tolist()
        for start, end in row.fields["extra_fields"]["turn_spans"]:
            assert play.rows[k].start == start
            play.hear(k, ids[:end])
            (answer,) = play.answers(wait=True)
            said = answer.token_ids or []
            assert ids[end : end + len(said)] == said
        assert answer.token_ids is None and end == len(ids)
    group = [int(row.prompt[1:]) for row in talks]
    columns = play.columns(width, group, [play.conversation(k) for k in range(len(talks))])
    columns = {
        name: value.float() if value.is_floating_point() else value
        for name, value in columns.items()
    }
    return TokenBatch(
        token_ids_NT=padded(talks, "responses", width),
        group_N=torch.tensor(group),
        reward_N=columns["turn_reward_NU"].sum(1),
        sampler_logp_NT=padded(talks, "rollout_log_probs", width),
        trainer_logp_NT=padded(talks, "old_log_probs", width),
        entropy_NT=padded(talks, "entropy", width),
        **columns,
    )


def padded(talks, name, width):
    parts = [row.fields[name] for row in talks]
    return torch.stack([torch.nn.functional.pad(part, (0, width - len(part))) for part in parts])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("turn_rloo", {}),
        ("gigpo", {}),
        ("mt_grpo", {}),
        ("igpo", {}),
        ("turn_credit", {}),
        ("turn_rloo", NTF),
        ("ktae", {}),
        ("rloo", {}),
    ],
)
def test_the_same_conversations_get_the_trainers_credit(name, settings, talks, policy, queue_of):
    got = advantages(name, talks, queue_of, settings)
    batch = own_batch(talks, policy)
    expected = cp.method(name, **settings).assign(batch, batch_number=1).credit_NT
    expected = expected.expand(batch.mask_NT.shape) * batch.mask_NT
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert expected.abs().sum() > 0 and (got[~batch.mask_NT] == 0).all()
    assert (~batch.mask_NT & (batch.token_ids_NT > 0)).any()  # replies among them


def test_turn_credit_by_hand(talks, queue_of):
    """turn_rloo: the return from a turn on, minus the mean of the others that play that turn."""
    got = advantages("turn_rloo", talks, queue_of)
    earned = [row.fields["extra_fields"]["turn_rewards"] for row in talks]
    apart = 0
    for k, row in enumerate(talks):
        others = [
            earned[j] for j, other in enumerate(talks) if other.prompt == row.prompt and j != k
        ]
        by_turn = []
        for u, (start, end) in enumerate(row.fields["extra_fields"]["turn_spans"]):
            rest = [sum(one[u:]) for one in others if len(one) > u]
            by_turn.append(sum(earned[k][u:]) - (sum(rest) / len(rest) if rest else 0.0))
            expected = torch.full((end - start,), by_turn[-1])
            torch.testing.assert_close(got[k, start:end], expected, rtol=1e-5, atol=1e-6)
        apart += max(by_turn) - min(by_turn) > 1e-3
    assert apart > 0  # turns of one rollout are told apart


def test_turns_from_one_state_are_compared_whatever_came_before(talks, policy, queue_of):
    """All turns but the first begin in one state of their prompt; the same name in another prompt
    is another state.
    """
    batch = own_batch(talks, policy)
    for row in talks:
        extra = row.fields["extra_fields"]
        extra["turn_states"] = ["first", *["later"] * (len(extra["turn_states"]) - 1)]
    later_NU = (torch.arange(batch.turn_mask_NU.shape[1]) > 0).long().expand_as(batch.state_NU)
    state_NU = torch.where(batch.turn_mask_NU, 2 * batch.group_N[:, None] + later_NU, -1)
    expected = cp.method("gigpo").assign(batch.replace(state_NU=state_NU)).credit_NT
    torch.testing.assert_close(advantages("gigpo", talks, queue_of), expected, rtol=1e-5, atol=1e-6)
    plain = cp.method("gigpo").assign(batch).credit_NT
    assert (expected - plain).abs().max() > 1e-2


def test_without_turn_rewards_all_is_as_it_was(talks, policy, queue_of):
    """Turns are runs of the mask, and the reward came in the last; an empty ``turn_scores``, which
    verl's own loops leave, is none.
    """
    for row in talks:
        row.fields["extra_fields"] = {"turn_scores": [], "tool_rewards": []}
    made = config("counterpoise/turn_rloo")
    queue, host = queue_of(talks), trainer(CreditSync, made)
    keys = host._compute_advantage(batch_meta(talks), {}).keys
    expected = cp.method("turn_rloo").assign(batch_without_turns(talks)).credit_NT
    torch.testing.assert_close(queue.padded(keys, "advantages"), expected, rtol=1e-5, atol=1e-6)


def batch_without_turns(talks):
    width = max(len(row.fields["responses"]) for row in talks)
    return TokenBatch(
        token_ids_NT=padded(talks, "responses", width),
        mask_NT=padded(talks, "response_mask", width).bool(),
        group_N=torch.tensor([int(row.prompt[1:]) for row in talks]),
        reward_N=torch.stack([row.fields["rm_scores"].sum() for row in talks]),
        sampler_logp_NT=padded(talks, "rollout_log_probs", width),
    )


def test_an_agent_loop_of_ones_own_gives_what_it_has(talks, policy, queue_of):
    """Rewards alone, as an array: turns are the runs of the mask."""
    expected = advantages("turn_rloo", talks, queue_of)
    for row in talks:
        extra = row.fields["extra_fields"]
        row.fields["extra_fields"] = {"turn_rewards": torch.tensor(extra["turn_rewards"])}
    assert torch.equal(advantages("turn_rloo", talks, queue_of), expected)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda extra: extra.update(turn_rewards=extra["turn_rewards"] + [0.5]),
            r"rollout p0_1_0: the agent loop gave \d turn_rewards, expected \d: its response_mask"
            r" has \d turns\. Give one per turn",
        ),
        (
            lambda extra: extra.update(turn_rewards=[]),
            "rollout p0_1_0: the agent loop gave 0 turn_rewards",
        ),
        (
            lambda extra: extra.update(turn_states=["a"] * 9),
            "rollout p0_1_0: the agent loop gave 9 turn_states",
        ),
        (
            lambda extra: extra.update(turn_spans=[[0, 1]], turn_rewards=[0.0]),
            r"rollout p0_1_0: turn_spans \[\[0, 1\]\] are not the tokens with response_mask 1",
        ),
    ],
)
def test_turns_that_do_not_fit_are_one_clear_error(talks, queue_of, change, line):
    change(talks[1].fields["extra_fields"])
    with pytest.raises(ValueError, match=line):
        advantages("turn_rloo", talks, queue_of)


@pytest.mark.parametrize("name", ["turn_rloo", "gigpo", "rloo", "dapo", "ktae"])
@pytest.mark.parametrize("how", ["failed", "not finite"])
def test_a_failed_row_gets_nothing_and_changes_nothing(talks, queue_of, name, how):
    expected = advantages(name, [*talks[:2], *talks[3:]], queue_of)
    extra = talks[2].fields["extra_fields"]
    if how == "failed":
        extra.update(end_reason="failed", failure="the environment raised")
        talks[2].fields["response_mask"] = torch.zeros_like(talks[2].fields["response_mask"])
    else:
        extra["turn_rewards"][0] = math.nan
    talks[2].fields["rm_scores"][-1] = 7.0
    got = advantages(name, talks, queue_of)
    assert (got[2] == 0).all()
    width = expected.shape[1]
    torch.testing.assert_close(torch.cat([got[:2], got[3:]])[:, :width], expected)


def test_over_half_of_a_batch_is_an_error(talks, queue_of):
    for row in talks[:7]:
        row.fields["extra_fields"].update(end_reason="timed out", failure="it took more than 1 s")
    with pytest.raises(ValueError, match="failed in 7 of 12 rollouts. First, rollout p0_0_0: it"):
        advantages("turn_rloo", talks, queue_of)


def test_a_filler_carries_the_fields_of_another_rollout(talks, queue_of):
    """verl copies a row and cuts its tokens."""
    expected = advantages("turn_rloo", talks, queue_of)
    fields = {
        name: value[:1] * 0 if isinstance(value, torch.Tensor) else value
        for name, value in talks[0].fields.items()
    }
    filler = Rollout(key="pad0_0_0", fields=fields | {"uid": "pad0"})
    got = advantages("turn_rloo", [*talks, filler], queue_of)
    assert torch.equal(got[:-1], expected) and (got[-1] == 0).all()


def test_the_reward_decides_and_the_rest_is_the_last_turns(talks, queue_of, monkeypatch):
    row = talks[0].fields
    row["extra_fields"]["turn_rewards"][-1] += 2.0
    row["rm_scores"][-1] += 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = advantages("turn_rloo", copy.deepcopy(talks), queue_of)
    row["extra_fields"]["turn_rewards"][-1] -= 2.0
    monkeypatch.setattr("counterpoise.hosts.verl.turns._SAID", [])
    with pytest.warns(UserWarning, match="rollout p0_0_0: its turn_rewards add up to .*last turn"):
        got = advantages("turn_rloo", talks, queue_of)
    torch.testing.assert_close(got, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        assert torch.equal(advantages("turn_rloo", talks, queue_of), got)


def test_kl_in_the_reward_is_counted_in_its_turn(talks, policy, queue_of):
    from verl.trainer.ppo.core_algos import FixedKLController

    gen = torch.Generator().manual_seed(1)
    for row in talks:
        logp_T = row.fields["old_log_probs"]
        row.fields["ref_log_prob"] = logp_T - torch.rand(len(logp_T), generator=gen)
    made = config(
        "counterpoise/turn_rloo",
        {"turns": {}},
        algorithm__use_kl_in_reward=True,
        algorithm__kl_penalty="kl",
    )
    queue, host = queue_of(talks), trainer(CreditSync, made)
    host.kl_ctrl_in_reward = FixedKLController(0.1)
    keys = host._compute_advantage(batch_meta(talks), {}).keys
    batch = own_batch(talks, policy)
    reward_NU = batch.turn_reward_NU.clone()
    for k, row in enumerate(talks):
        kl_T = row.fields["old_log_probs"] - row.fields["ref_log_prob"]
        for u, (start, end) in enumerate(row.fields["extra_fields"]["turn_spans"]):
            reward_NU[k, u] -= 0.1 * kl_T[start:end].sum()
    batch = batch.replace(turn_reward_NU=reward_NU, reward_N=reward_NU.sum(1))
    expected = cp.method("turn_rloo").assign(batch).credit_NT
    torch.testing.assert_close(queue.padded(keys, "advantages"), expected, rtol=1e-4, atol=1e-5)


def test_turns_are_logged(talks, queue_of):
    metrics = {}
    advantages("turn_rloo", talks, queue_of, metrics=metrics)
    extra = [row.fields["extra_fields"] for row in talks]
    mean = sum(len(own["turn_rewards"]) for own in extra) / len(extra)
    assert metrics["counterpoise/turns/mean"] == pytest.approx(mean)
    assert metrics["counterpoise/turns/end_done"] == 1.0
    assert "counterpoise/environment/malformed" in metrics


@pytest.mark.parametrize("name", ["igpo", "turn_credit"])
def test_methods_that_read_scores_ask_for_them(talks, queue_of, name):
    with pytest.raises(ValueError, match=r"reads turn_score_NU, which an agent loop must give"):
        check_config(config(f"counterpoise/{name}"), "sync")
    for row in talks:
        row.fields["extra_fields"]["turn_scores"] = []
    with pytest.raises(ValueError, match="no rollout of this batch has turn_scores"):
        advantages(name, talks, queue_of)


def test_conversations_that_nobody_held_are_an_error(talks, queue_of):
    for row in talks:
        row.fields["extra_fields"] = {}
    with pytest.raises(ValueError, match="no rollout of this batch has turn_rewards. Make the"):
        advantages("turn_rloo", talks, queue_of)


class Several:
    """An agent loop that says that it returns several outputs."""

    async def run(self, sampling_params, **kwargs) -> list[object]:
        return []


def test_several_outputs_are_refused_before_training(tmp_path):
    """Where the agent loop's own annotation says so; methods that read rewards alone may."""
    path = tmp_path / "loops.yaml"
    path.write_text(f"- {{name: several, _target_: {__name__}.Several}}\n")
    agent = {"default_agent_loop": "several", "agent_loop_config_path": str(path)}
    changed = {"actor_rollout_ref__rollout__agent": agent}
    with pytest.raises(
        ValueError, match="agent loop 'several' returns several outputs per session"
    ):
        check_config(config("counterpoise/turn_rloo", **changed), "sync")
    with pytest.raises(ValueError, match="returns several outputs"):
        check_config(config(counterpoise={"plan": "query_preserved"}, **changed), "sync")
    assert check_config(config("counterpoise/dapo", **changed), "sync")[0] is not None
    agent["default_agent_loop"] = "counterpoise_turns"
    assert check_config(config("counterpoise/turn_rloo", **changed), "sync")[0] is not None
