"""Credit for turns: against loops, by hand (the numbers of the papers' formulas), one turn, chains
with token rules.
"""

from __future__ import annotations

import math

import pytest
import torch

import counterpoise as cp
from counterpoise import credit as rules
from counterpoise.advantages import group_mean, group_zscore, leave_one_out
from counterpoise.credit.scores import gains, smear
from counterpoise.maths.turns import by_turn, histories, returns, token_advantage, turns
from counterpoise.rollouts import RolloutBatch
from counterpoise.trainer.warn import flat_batches
from helpers.credit_cases import spread
from helpers.full_batch import make_batch
from helpers.replies import with_reply


def talk(reward, *, state=None, score=None, group=None, tokens=1, extra=None):
    """Rollouts from the rewards of their turns; ``tokens`` per turn, and a reply of one token
    between two turns.
    """
    width = max(map(len, reward))
    long = width * (tokens + 1) - 1
    turn = [
        [u if k < tokens else -1 for u in range(len(r)) for k in range(tokens + 1)] for r in reward
    ]
    turn_NT = torch.tensor([(row[:-1] + [-1] * long)[:long] for row in turn])
    fill = [[*row, *[0.0] * (width - len(row))] for row in reward]
    columns = {
        "state_NU": None if state is None else _pad(state, width, -1, torch.long),
        "turn_score_NU": None if score is None else _pad(score, width, math.nan, torch.float64),
    }
    reward_NU = torch.tensor(fill, dtype=torch.float64)
    return cp.TokenBatch(
        token_ids_NT=torch.arange(turn_NT.numel()).reshape(turn_NT.shape),
        mask_NT=turn_NT >= 0,
        group_N=torch.tensor(group or [0] * len(reward)),
        reward_N=reward_NU.sum(1),
        sampler_logp_NT=-torch.ones(turn_NT.shape, dtype=torch.float64),
        turn_NT=turn_NT,
        turn_reward_NU=reward_NU,
        turn_mask_NU=torch.tensor([[u < len(r) for u in range(width)] for r in reward]),
        extra=extra or {},
        **columns,
    )


def _pad(rows, width, fill, dtype):
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)


def of_turns(rule, batch, start=None):
    """The credit of each turn, as lists as long as the rollouts."""
    start = torch.zeros(batch.num_rollouts) if start is None else start
    credit_NT = rule(spread(start.tolist(), batch), batch)
    assert not credit_NT[~batch.mask_NT].any()
    played = turns(batch)
    out_NU = by_turn(credit_NT, played.turn_NT, played.mask_NU.shape[1])
    torch.testing.assert_close(
        credit_NT, torch.where(batch.mask_NT, out_NU.gather(1, played.turn_NT.clamp(min=0)), 0)
    )
    return [row[:n] for row, n in zip(out_NU.tolist(), played.mask_NU.sum(1).tolist())]


def assert_turns(got, expected, within=1e-5):
    assert [len(row) for row in got] == [len(row) for row in expected]
    for row, wanted in zip(got, expected):
        assert row == pytest.approx(wanted, abs=within)


# against loops


def ways():
    """A batch as lists: for each rollout its group, rewards, states, and its return at each turn
    under a discount.
    """
    batch = make_batch(turns=True, seed=3)
    played = turns(batch)
    num = played.mask_NU.sum(1).tolist()
    reward = [row[:n] for row, n in zip(played.reward_NU.tolist(), num)]
    state = [row[:n] for row, n in zip(played.state_NU.tolist(), num)]
    return batch, batch.group_N.tolist(), reward, state


def return_of(rewards, turn, discount):
    return sum(discount ** (k - turn) * r for k, r in enumerate(rewards) if k >= turn)


@pytest.mark.parametrize("over", ["alive", "all"])
@pytest.mark.parametrize("exclude_own", [True, False])
@pytest.mark.parametrize("discount", [0.0, 0.7, 1.0])
def test_turn_baseline_by_loops(over, exclude_own, discount):
    batch, group, reward, _ = ways()
    expected = []
    for i, mine in enumerate(reward):
        row = []
        for turn in range(len(mine)):
            others = [
                return_of(theirs, turn, discount)
                for j, theirs in enumerate(reward)
                if group[j] == group[i]
                and not (exclude_own and j == i)
                and (over == "all" or len(theirs) > turn)
            ]
            row.append(return_of(mine, turn, discount) - sum(others) / max(1, len(others)))
        expected.append(row)
    rule = rules.turn_baseline(over=over, exclude_own=exclude_own, discount=discount)
    assert_turns(of_turns(rule, batch), expected, 1e-12)


@pytest.mark.parametrize("exclude_own", [True, False])
def test_turn_index_baseline_by_loops(exclude_own):
    batch, group, reward, _ = ways()

    def mean(i, turn):
        rewards = [
            theirs[turn]
            for j, theirs in enumerate(reward)
            if group[j] == group[i] and len(theirs) > turn and not (exclude_own and j == i)
        ]
        return sum(rewards) / max(1, len(rewards))

    expected = [
        [
            sum(0.9 ** (k - turn) * (mine[k] - mean(i, k)) for k in range(turn, len(mine)))
            for turn in range(len(mine))
        ]
        for i, mine in enumerate(reward)
    ]
    rule = rules.turn_index_baseline(discount=0.9, exclude_own=exclude_own)
    assert_turns(of_turns(rule, batch), expected, 1e-12)


@pytest.mark.parametrize("mode", ["zscore", "mean"])
@pytest.mark.parametrize("exclude_own", [True, False])
def test_state_groups_by_loops(mode, exclude_own):
    batch, group, reward, state = ways()
    start_N = group_mean(batch.reward_N, batch.group_N)
    expected, num_shared = [], 0
    for i, mine in enumerate(reward):
        row = []
        for turn, key in enumerate(state[i]):
            there = [
                (j, return_of(theirs, k, 0.95))
                for j, theirs in enumerate(reward)
                for k in range(len(theirs))
                if group[j] == group[i] and state[j][k] == key
            ]
            base = [q for j, q in there if not (exclude_own and j == i)]
            part = return_of(mine, turn, 0.95) - sum(base) / max(1, len(base))
            if len(there) == 1 or not base:
                part = 0.0
            elif mode == "zscore":
                every = torch.tensor([q for _, q in there], dtype=torch.float64)
                part = part / (float(every.std()) + 1e-6)
            num_shared += len(there) > 1
            row.append(float(start_N[i]) + 0.5 * part)
        expected.append(row)
    assert num_shared > 10
    rule = rules.state_groups(weight=0.5, mode=mode, exclude_own=exclude_own)
    assert_turns(of_turns(rule, batch, start_N), expected, 1e-9)


# by hand


def test_one_stops_one_goes_on():
    batch = talk([[1.0], [1.0, 1.0]])
    assert_turns(of_turns(rules.turn_baseline, batch), [[-1.0], [1.0, 1.0]])
    assert_turns(of_turns(rules.turn_baseline(over="all"), batch), [[-1.0], [1.0, 1.0]])
    assert_turns(of_turns(rules.turn_index_baseline, batch), [[0.0], [0.0, 0.0]])


def test_where_nobody_else_got_to_the_baseline_is_0():
    batch = talk([[0.0, 0.0, 5.0], [1.0]])
    assert_turns(of_turns(rules.turn_baseline, batch), [[4.0, 5.0, 5.0], [-4.0]])
    metrics = cp.method("turn_rloo").assign(batch).metrics
    assert metrics["credit/turn_baseline/alone_frac"] == pytest.approx(2 / 4)


def test_equal_returns_give_exactly_0():
    """Seven times 0.7 leaves a rest in floating point."""
    batch = talk([[0.0, 0.7]] * 7, state=[[1, 2]] * 7)
    every = [rules.turn_baseline, rules.turn_baseline(over="all"), rules.turn_index_baseline]
    every += [rules.mt_grpo, rules.state_groups, rules.state_groups(count="turns")]
    for rule in every:
        assert not rule(spread([0.0] * 7, batch), batch).any(), rule.name


X, Y, Z, W = 1, 2, 3, 4


def test_gigpo_by_hand():
    """a = X(0) Y(1), b = X(0) Z(0): A_E is +-.5, at X the returns are .95 and 0."""
    batch = talk([[0.0, 1.0], [0.0, 0.0]], state=[[X, Y], [X, Z]])
    start_N = group_mean(batch.reward_N, batch.group_N)
    for exclude_own, first in ((False, 0.475), (True, 0.95)):
        rule = rules.state_groups(mode="mean", exclude_own=exclude_own)
        assert_turns(of_turns(rule, batch, start_N), [[0.5 + first, 0.5], [-0.5 - first, -0.5]])
    half = rules.state_groups(mode="mean", weight=0.5)
    assert_turns(of_turns(half, batch, start_N), [[0.7375, 0.5], [-0.7375, -0.5]])
    scaled = of_turns(rules.state_groups, batch, start_N)
    assert_turns(scaled, [[0.5 + 0.5**0.5, 0.5], [-0.5 - 0.5**0.5, -0.5]])


def test_gigpo_counts_rollouts_or_turns():
    """b has 4 turns of states of its own: the mean reward is 1/3 by turns, 1/2 by rollouts."""
    batch = talk([[0.0, 1.0], [0.0] * 4], state=[[X, Y], [W, 5, 6, 7]])
    start_N = group_mean(batch.reward_N, batch.group_N)
    by_rollouts = of_turns(rules.state_groups(mode="mean"), batch, start_N)
    assert_turns(by_rollouts, [[1 / 2] * 2, [-1 / 2] * 4])
    by_turns = of_turns(rules.state_groups(mode="mean", count="turns"), batch, start_N)
    assert_turns(by_turns, [[2 / 3] * 2, [-1 / 3] * 4])


def test_gigpo_and_a_rollout_that_comes_back():
    """Its own later return is in its baseline, unless own turns are left out."""
    batch = talk([[0.0, 1.0]], state=[[X, X]])
    assert_turns(of_turns(rules.state_groups(mode="mean", discount=0.5), batch), [[-0.25, 0.25]])
    alone = rules.state_groups(mode="mean", discount=0.5, exclude_own=True)
    assert_turns(of_turns(alone, batch), [[0.0, 0.0]])


def test_a_state_of_another_prompt_is_another_state():
    batch = talk([[1.0], [0.0]], state=[[X], [X]], group=[0, 1])
    assert_turns(of_turns(rules.state_groups(mode="mean"), batch), [[0.0], [0.0]])


def test_without_states_equal_histories_are_one():
    """The first turn is shared, the second by those that said and read the same."""
    batch = talk([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
    ids_NT = torch.tensor([[5, 8, 6], [5, 8, 7], [5, 9, 7]])
    batch = batch.replace(token_ids_NT=ids_NT)
    rule = rules.state_groups(mode="mean", discount=1.0)
    assert_turns(of_turns(rule, batch), [[2 / 3, 1 / 2], [-1 / 3, -1 / 2], [-1 / 3, 0.0]])
    known = batch.replace(state_NU=torch.tensor([[7, -1], [7, -1], [8, -1]]))
    assert_turns(of_turns(rule, known), [[1 / 2, 1 / 2], [-1 / 2, -1 / 2], [0.0, 0.0]])
    metrics = cp.method("gigpo").assign(known).metrics
    assert metrics["credit/state_groups/known_frac"] == pytest.approx(1 / 2)
    assert metrics["credit/state_groups/shared_frac"] == pytest.approx(4 / 6)


def test_histories_begin_at_the_first_token_of_a_turn():
    batch = talk([[0.0, 1.0], [0.0, 0.0]], tokens=2)
    ids_NT = torch.tensor([[5, 5, 8, 6, 6], [5, 5, 8, 7, 7]])
    history_NU = histories(batch.replace(token_ids_NT=ids_NT), batch.turn_NT, 2)
    assert history_NU[0].tolist() == history_NU[1].tolist()
    split = batch.turn_NT.clone()
    split[:, 3] = 0  # the first turn goes on after the reply
    later_NU = histories(batch.replace(token_ids_NT=ids_NT), split, 2)
    assert later_NU[:, 0].tolist() == [0, 0] and later_NU[0, 1] != later_NU[1, 1]


def test_mt_grpo_by_hand():
    """Turn rewards 1, 0, 0 and outcomes 0, 1, 1 of two turns: z = (x - mean) / (std + 1e-4)."""
    batch = talk([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    high, low = (2 / 3) / (3**-0.5 + 1e-4), (1 / 3) / (3**-0.5 + 1e-4)
    assert_turns(
        of_turns(rules.mt_grpo, batch), [[high - high, -high], [0.0, low], [0.0, low]], 1e-12
    )
    assert_turns(of_turns(rules.mt_grpo(weight=0.5), batch)[:1], [[-high / 2, -high]], 1e-12)


def test_mt_grpo_without_a_second_turn_takes_the_whole_reward():
    batch = talk([[1.0, 1.0], [0.0, 1.0], [1.0]])
    outcome = group_zscore(torch.tensor([1.0, 1.0, 1.0]).double(), batch.group_N)
    turn = group_zscore(torch.tensor([1.0, 0.0, 0.0]).double(), batch.group_N)
    whole = group_zscore(torch.tensor([2.0, 1.0, 1.0]).double(), batch.group_N)
    first = (outcome + turn).tolist()
    expected = [[first[0], float(outcome[0])], [first[1], float(outcome[1])], [float(whole[2])]]
    assert_turns(of_turns(rules.mt_grpo, batch), expected, 1e-12)


def test_igpo_by_hand():
    """p = .1, .3, .6 and an outcome of .5: rewards .2, .3, .5, returns 1, .8, .5."""
    start_N = torch.tensor([0.1], dtype=torch.float64)
    batch = talk([[0.0, 0.0, 0.5]], score=[[0.3, 0.6, 0.9]], extra={"start_score_N": start_N})
    gain_NU = gains(batch.turn_score_NU, batch.turn_mask_NU, start_N)
    assert gain_NU[0, :2].tolist() == pytest.approx([0.2, 0.3])
    assert_turns(of_turns(rules.information_gain, batch), [[1.0, 0.8, 0.5]])
    assert returns(torch.tensor([[0.2, 0.3, 0.5]]))[0].tolist() == pytest.approx([1.0, 0.8, 0.5])


def test_igpo_does_not_need_the_first_probability():
    reward, score = [[0.0, 1.0], [0.0, 0.0]], [[0.3, 0.6], [0.2, 0.1]]
    plain = talk(reward, score=score)
    told = plain.replace(extra={"start_score_N": torch.full((2,), 0.17, dtype=torch.float64)})
    one, other = (of_turns(rules.information_gain, batch) for batch in (plain, told))
    assert_turns(one, other, 1e-12)
    assert_turns(one, [[1.1, 1.0], [-1.1, -1.0]])


def test_turn_credit_by_hand():
    """phi = (1, 3, none, 2), discount .5."""
    phi = torch.tensor([[1.0, 3.0, math.nan, 2.0]], dtype=torch.float64)
    gain_NU = gains(phi, torch.ones(1, 4).bool())
    assert gain_NU.tolist() == [[0.0, 2.0, 0.0, -1.0]]
    smeared = [0.6, 1.2, -0.26667, -0.53333]
    assert smear(gain_NU, 0.5)[0].tolist() == pytest.approx(smeared, abs=1e-5)
    batch = talk([[0.0, 0.0, 0.0, 1.0]], score=phi.tolist())
    assert_turns(
        of_turns(rules.turn_credit(discount=0.5), batch), [[0.35, 0.95, -0.51667, -0.78333]]
    )


def test_turn_credit_keeps_the_mean_of_a_rollout():
    """A = R + what the score gained, minus its mean over the group; turns of any length."""
    batch = make_batch(turns=True)
    credit_NT = rules.turn_credit(spread([0.0] * 16, batch), batch)
    gain_N = gains(batch.turn_score_NU, batch.turn_mask_NU).sum(1)
    expected = group_mean(batch.reward_N + gain_N, batch.group_N)
    torch.testing.assert_close(credit_NT.sum(1) / batch.length_N, expected, rtol=0, atol=1e-12)
    none = batch.replace(turn_score_NU=torch.full_like(batch.turn_score_NU, math.nan))
    for rule, seen in ((rules.turn_credit, none), (rules.turn_credit(beta=0.0), none)):
        plain_NT = spread(group_mean(batch.reward_N, batch.group_N).tolist(), batch)
        torch.testing.assert_close(rule(0 * plain_NT, seen), plain_NT, rtol=0, atol=1e-12)


def test_turn_credit_needs_scores():
    with pytest.raises(ValueError, match=r"turn_credit reads turn_score_NU.*Reply.score"):
        cp.method("turn_credit").assign(talk([[1.0], [0.0]]))


# one turn is the rule of single turns


def one_turn():
    """Rewards that leave rests in floating point, replies inside of the one turn."""
    batch = make_batch()
    batch = batch.replace(reward_N=batch.reward_N * 0.7 + torch.arange(16) % 3 * 0.1)
    holed = with_reply(batch, 1, [[2, 2]] * 16)
    return holed.replace(turn_NT=torch.where(holed.mask_NT, 0, -1))


@pytest.mark.parametrize(
    ("rule", "advantage"),
    [
        (rules.turn_baseline, leave_one_out),
        (rules.turn_baseline(over="all", discount=0.3), leave_one_out),
        (rules.turn_baseline(exclude_own=False), group_mean),
        (rules.turn_index_baseline, group_mean),
        (rules.mt_grpo, group_zscore),
        (rules.information_gain, leave_one_out),
        (rules.turn_credit, group_mean),
        (rules.state_groups(weight=0.0), leave_one_out),
        (rules.state_groups(weight=0.0, count="turns", mode="mean"), group_mean),
    ],
    ids=repr,
)
def test_one_turn_is_the_single_turn_rule(rule, advantage):
    batch = one_turn()
    batch = batch.replace(turn_score_NU=torch.full((16, 1), 0.3, dtype=torch.float64))
    expected_N = advantage(batch.reward_N, batch.group_N)
    start_NT = spread(leave_one_out(batch.reward_N, batch.group_N).tolist(), batch)
    expected_NT = torch.where(batch.mask_NT, expected_N[:, None], 0)
    torch.testing.assert_close(rule(start_NT, batch), expected_NT, rtol=0, atol=1e-15)
    single = batch.replace(reward_N=batch.reward_N.float())
    got_NT = rules.turn_baseline(start_NT.float(), single)
    exact_N = leave_one_out(single.reward_N, batch.group_N)
    assert torch.equal(got_NT, torch.where(batch.mask_NT, exact_N[:, None], 0)), "bit for bit"


def test_holes_are_turns_where_nothing_else_is_known():
    """The tools of a host: the reward came in the last turn."""
    batch = make_batch()
    holed = with_reply(batch, 1, [[2, 2]] * 16)
    credit = cp.method("turn_rloo").assign(holed)
    assert credit.advantage_NU.shape == (16, 2)
    expected_N = leave_one_out(batch.reward_N, batch.group_N)
    assert torch.equal(credit.credit_NT, torch.where(holed.mask_NT, expected_N[:, None], 0))


# what a method makes of it


def test_the_advantage_of_turns_and_the_weight_go_by_turn():
    batch = talk([[0.0, 1.0], [1.0, 0.0]], tokens=2)
    batch = batch.replace(
        sampler_logp_NT=torch.tensor([[-1.0, -2.0, 0.0, -3.0, -1.0], [-1, -2, 0, -1, -3]]).double()
    )
    plain = cp.method("turn_rloo").assign(batch)
    assert plain.advantage_NU.tolist() == [[0.0, 1.0], [0.0, -1.0]]
    assert plain.weight_NT.tolist() == [[1, 1, 0, 1, 1]] * 2
    assert token_advantage(plain, batch).tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, -1, -1]]
    filtered = cp.method(
        "turn_rloo", credit=["turn_baseline", {"name": "negative_token_filter", "fraction": 0.5}]
    ).assign(batch)
    assert filtered.advantage_NU.tolist() == plain.advantage_NU.tolist()
    assert filtered.credit_NT.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]
    assert filtered.weight_NT.tolist() == [[1, 1, 0, 1, 1], [1, 1, 0, 0, 1]]


def test_without_such_a_rule_there_is_no_advantage_of_turns():
    batch = make_batch(turns=True)
    out = cp.method("crf_ntf").assign(batch)
    assert out.advantage_NU is None
    rows = cp.method("crf_ntf").rows(batch, out, torch.arange(16))
    assert rows.advantage_NT is None
    assert torch.equal(rows.sign_NT, out.advantage_N.sign()[:, None])


def test_equal_rewards_may_teach():
    """Both earn 1, one of them later: nothing for GRPO, something for the second turn."""
    batch = talk([[1.0, 0.0], [0.0, 1.0]])
    rollouts = RolloutBatch([], [], [], [], batch, 0, [])
    grpo, turn_rloo = cp.method("grpo"), cp.method("turn_rloo")
    assert flat_batches(1, grpo, rollouts, grpo.assign(batch)) == 2
    assert flat_batches(1, turn_rloo, rollouts, turn_rloo.assign(batch)) == 0
    same = talk([[1.0, 0.0], [1.0, 0.0]])
    assert flat_batches(1, turn_rloo, rollouts, turn_rloo.assign(same)) == 2


def test_rules_of_turns_come_first():
    with pytest.raises(ValueError, match="turn_baseline gives one number per turn and comes first"):
        cp.method("grpo", credit=["top_entropy", "turn_baseline"])
    both = cp.method("turn_rloo", credit=["focal", "turn_baseline", "soften_negatives"])
    assert both.assign(make_batch(turns=True)).advantage_NU is not None
    kept = cp.method("gigpo", credit=[rules.keep_mass(rule=rules.state_groups())])
    assert kept.assign(make_batch(turns=True)).advantage_NU is not None


BAD = [
    (rules.turn_baseline, {"over": "some"}, "over must be one of alive, all, got 'some'"),
    (rules.turn_baseline, {"discount": 1.5}, "discount must be a number >= 0 and <= 1, got 1.5"),
    (rules.turn_index_baseline, {"discount": -1}, "turn_index_baseline: discount must be a number"),
    (rules.mt_grpo, {"weight": -1.0}, "mt_grpo: weight must be a number >= 0, got -1.0"),
    (rules.state_groups, {"mode": "z"}, "mode must be one of zscore, mean, got 'z'"),
    (rules.state_groups, {"count": "tokens"}, "count must be one of rollouts, turns"),
    (rules.information_gain, {"over": "x"}, "information_gain: over must be one of alive, all"),
    (rules.turn_credit, {"beta": -0.1}, "turn_credit: beta must be a number >= 0, got -0.1"),
]


@pytest.mark.parametrize(("rule", "params", "message"), BAD, ids=lambda v: getattr(v, "name", None))
def test_bad_parameters_say_what_is_wrong(rule, params, message):
    batch = talk([[1.0], [0.0]], score=[[1.0], [1.0]])
    with pytest.raises(ValueError, match=message):
        rule(spread([1.0, -1.0], batch), batch, **params)
