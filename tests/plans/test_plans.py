from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import counterpoise as cp
from counterpoise.errors import ConfigError
from counterpoise.maths.reduce import seeded_generator
from counterpoise.plans import PLANS, audit, is_ready, manifest, quota
from counterpoise.rollouts import RolloutBatch
from counterpoise.stage import call
from counterpoise.types import Prompt
from helpers import reference_batches as reference
from helpers.reference_batches import batch_of, prompts
from helpers.strategies import ragged_batches

many = settings(max_examples=40)

# ---- plans

PLAN_SETTINGS = [(name, {}) for name in PLANS] + [
    ("reward_balanced", {"mode": mode}) for mode in ("per_query", "buffer")
]


def planned(name, table, num_updates, seed=0, **params):
    return call(
        PLANS[name](**params),
        *table,
        num_updates=num_updates,
        generator=seeded_generator(seed, 0, "plan"),
    )


@pytest.mark.parametrize(("name", "params"), PLAN_SETTINGS)
@many
@given(
    batch=ragged_batches(max_groups=8, max_group_size=5),
    num_updates=st.integers(1, 4),
    seed=st.integers(0, 5),
)
def test_plans_hold_no_row_twice_and_no_empty_step(name, params, batch, num_updates, seed):
    table = batch.group_N, batch.reward_N, batch.length_N
    if len(batch.group_N.unique()) < num_updates:
        return
    updates = planned(name, table, num_updates, seed, **params)
    rows = torch.cat(updates).tolist()
    assert len(updates) == num_updates
    assert len(rows) == len(set(rows))
    assert set(rows) <= set(range(batch.num_rollouts))
    assert min(map(len, updates)) > 0
    assert all(torch.equal(update, update.sort().values) for update in updates)
    if name not in ("reward_balanced", "dynamic_sampling"):
        assert len(rows) == batch.num_rollouts
    if name in ("random_rows", "length_sorted", "round_robin") or params.get("mode") == "buffer":
        assert max(map(len, updates)) - min(map(len, updates)) <= 1
    if name == "query_preserved" or (name == "reward_balanced" and params.get("mode") != "buffer"):
        owners = [set(batch.group_N[update].tolist()) for update in updates]
        assert not any(a & b for a, b in itertools.combinations(owners, 2))
    assert (
        json.loads(json.dumps(manifest(updates, batch.group_N)))["num_rows"] == batch.num_rollouts
    )


@pytest.mark.parametrize(("name", "params"), PLAN_SETTINGS)
def test_plans_are_seeded_by_the_generator_alone(name, params):
    table = prompts(16, 4)
    torch.manual_seed(1)
    first = planned(name, table, 4, **params)
    torch.manual_seed(2)
    again, other = planned(name, table, 4, **params), planned(name, table, 4, seed=1, **params)
    assert [s.tolist() for s in first] == [s.tolist() for s in again]
    draws = name not in ("length_sorted", "round_robin")
    assert ([s.tolist() for s in first] != [s.tolist() for s in other]) == draws


def test_query_preserved_levels_rows_of_unequal_groups():
    """Sizes 5, 3, 2, 2 into two updates: largest first, each to the smaller update:
    5 + 2 and 3 + 2, never 5 + 3.
    """
    group_N = torch.tensor([0] * 5 + [1] * 3 + [2] * 2 + [3] * 2)
    for seed in range(4):
        updates = planned("query_preserved", (group_N, torch.zeros(12), torch.ones(12)), 2, seed)
        assert sorted(map(len, updates)) == [5, 7]


def test_query_preserved_draws_every_split():
    """Three prompts, three updates: all six orders appear over seeds."""
    table = torch.tensor([0, 0, 1, 1, 2, 2]), torch.zeros(6), torch.ones(6)
    orders = {
        tuple(int(update[0]) for update in planned("query_preserved", table, 3, seed))
        for seed in range(60)
    }
    assert orders == set(itertools.permutations([0, 2, 4]))


def test_length_sorted_is_short_long_long_short():
    length_N = torch.tensor([50, 10, 40, 20, 80, 70, 30, 60])
    updates = planned("length_sorted", (torch.zeros(8), torch.zeros(8), length_N), 4)
    # sorted 10 .. 80; every second 10 30 50 70, the others back down 80 60 40 20
    assert [sorted(length_N[update].tolist()) for update in updates] == [
        [10, 30],
        [50, 70],
        [60, 80],
        [20, 40],
    ]


def test_round_robin_spreads_every_prompt():
    updates = planned("round_robin", prompts(2, 4), 2)
    assert [update.tolist() for update in updates] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("name", ["query_preserved", "reward_balanced"])
def test_fewer_prompts_than_steps_says_how_many_there_are(name):
    with pytest.raises(ValueError, match=f"{name}: 4 updates need at least 4 prompts, got 3"):
        planned(name, prompts(3, 4), 4)


@pytest.mark.parametrize("name", ["random_rows", "length_sorted", "round_robin"])
def test_fewer_rollouts_than_steps(name):
    with pytest.raises(ValueError, match=f"{name}: 4 updates need at least 4 rollouts, got 3"):
        planned(name, prompts(1, 3), 4)


def test_num_updates_is_a_positive_integer():
    with pytest.raises(
        ValueError, match="query_preserved: num_updates must be a whole number >= 1, got 0"
    ):
        planned("query_preserved", prompts(3, 4), 0)


# ---- reward balance


@pytest.mark.parametrize(
    ("num_pos", "num_neg", "ready", "taken"),
    [
        (400, 800, True, (400, 624)),
        (2634, 6582, True, (640, 384)),
        (383, 2000, False, None),
        (384, 384, True, (384, 384)),
    ],
)
def test_buffer_table(num_pos, num_neg, ready, taken):
    """B = 1024: ceil(3/8 B) = 384, floor(5/8 B) = 640; the table holds with the signs exchanged."""
    assert is_ready(num_pos, num_neg, 1024) is ready
    assert is_ready(num_neg, num_pos, 1024) is ready
    if taken:
        assert quota(num_pos, num_neg, 1024) == taken
        assert quota(num_neg, num_pos, 1024) == taken[::-1]


@many
@given(
    num_pos=st.integers(0, 60),
    num_neg=st.integers(0, 60),
    size=st.integers(1, 80) | st.sampled_from([8, 16, 40, 80]),
)
def test_quota_never_takes_more_than_there_is(num_pos, num_neg, size):
    take_pos, take_neg = quota(num_pos, num_neg, size)
    assert 0 <= take_pos <= num_pos
    assert 0 <= take_neg <= num_neg
    assert take_pos + take_neg == min(size, num_pos + num_neg)
    if is_ready(num_pos, num_neg, size) and num_pos + num_neg >= size and size % 8 == 0:
        assert 3 * size // 8 <= min(take_pos, take_neg)


def test_buffer_plan_takes_the_quota_and_levels_every_step():
    """400 positives and 800 negatives, four updates of 256: 400 / 624, so 100 and 156 a update."""
    reward_N = torch.cat([torch.ones(400), torch.zeros(800)])[
        torch.randperm(1200, generator=torch.Generator().manual_seed(3))
    ]
    table = torch.arange(1200) // 8, reward_N, torch.ones(1200)
    updates = planned("reward_balanced", table, 4, mode="buffer", update_size=256)
    assert [int(reward_N[update].sum()) for update in updates] == [100] * 4
    assert [len(update) for update in updates] == [256] * 4


def test_buffer_plan_without_a_size_takes_the_largest_balanced_batch():
    """30 positives of 200: 30 / (3/8) = 80 rows, 30 + 50."""
    reward_N = torch.cat([torch.ones(30), torch.zeros(170)])
    updates = planned(
        "reward_balanced", (torch.arange(200) // 8, reward_N, torch.ones(200)), 2, mode="buffer"
    )
    assert [len(update) for update in updates] == [40, 40]
    assert [int(reward_N[update].sum()) for update in updates] == [15, 15]


def test_buffer_plan_of_one_sign_takes_all_rows():
    updates = planned(
        "reward_balanced",
        (torch.arange(20) // 4, torch.zeros(20), torch.ones(20)),
        2,
        mode="buffer",
    )
    assert sorted(torch.cat(updates).tolist()) == list(range(20))


def test_per_query_keeps_as_many_of_each_sign():
    group_N = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    reward_N = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1, 1])
    (update,) = planned("reward_balanced", (group_N, reward_N, torch.ones(12)), 1, mode="per_query")
    kept = {
        (g, r): int(((group_N[update] == g) & (reward_N[update] == r)).sum())
        for g in range(3)
        for r in (0, 1)
    }
    # prompt 0: 2 and 3 -> 2 and 2; prompt 1: 1 and 3 -> 1 and 1; prompt 2: no negative -> left out
    assert kept == {(0, 0): 2, (0, 1): 2, (1, 0): 1, (1, 1): 1, (2, 0): 0, (2, 1): 0}


def shares(updates, reward_N):
    return [float(reward_N[update].mean()) for update in updates]


def test_groups_mode_leaves_out_constant_prompts_and_levels_the_rest():
    """Shares 1/4, 1/4, 3/4, 3/4 and two constant prompts: each update gets one of each kind, share
    1/2.
    """
    rows = [[1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
    group_N, reward_N = (
        torch.arange(6).repeat_interleave(4),
        torch.tensor(rows, dtype=torch.float64).flatten(),
    )
    for seed in range(5):
        updates = planned("reward_balanced", (group_N, reward_N, torch.ones(24)), 2, seed)
        assert shares(updates, reward_N) == [0.5, 0.5]
        assert manifest(updates, group_N)["left_out"] == list(range(16, 24))


def test_groups_mode_decides_constancy_on_rewards():
    """Rewards 0.7 .. 0.9 are all positives but differ, so the prompt has an advantage and stays."""
    reward_N = torch.tensor([0.7, 0.9, 0.0, 0.1, 0.7, 0.7])
    (update,) = planned(
        "reward_balanced", (torch.tensor([0, 0, 1, 1, 2, 2]), reward_N, torch.ones(6)), 1
    )
    assert update.tolist() == [0, 1, 2, 3]


def test_groups_mode_leaves_out_as_few_one_sided_prompts_as_needed():
    """Six prompts of share 1/8 and four of 1/2: with k of the former (k + 16) / (8 k + 32) >= 3/8
    needs k <= 2.
    """
    group_N = torch.arange(10).repeat_interleave(8)
    reward_N = torch.tensor(
        [[1] + [0] * 7] * 6 + [[1] * 4 + [0] * 4] * 4, dtype=torch.float64
    ).flatten()
    (update,) = planned("reward_balanced", (group_N, reward_N, torch.ones(80)), 1)
    assert len(update) == 48
    assert shares([update], reward_N) == [18 / 48]
    assert set(range(48, 80)) < set(update.tolist())


def test_groups_mode_keeps_every_mixed_prompt_where_the_band_is_out_of_reach():
    group_N = torch.arange(6).repeat_interleave(8)
    reward_N = torch.tensor([[1] + [0] * 7] * 6, dtype=torch.float64).flatten()
    updates = planned("reward_balanced", (group_N, reward_N, torch.ones(48)), 2)
    assert [len(update) for update in updates] == [24, 24]


@pytest.mark.parametrize("mode", ["groups", "per_query"])
def test_too_few_usable_prompts_fall_back_to_whole_prompts_of_all_rows(mode):
    group_N = torch.arange(4).repeat_interleave(3)
    for reward_N in (torch.zeros(12), torch.tensor([1.0] + [0.0] * 11)):
        updates = planned("reward_balanced", (group_N, reward_N, torch.ones(12)), 2, mode=mode)
        assert sorted(torch.cat(updates).tolist()) == list(range(12))
        assert [len(update) for update in updates] == [6, 6]


@pytest.mark.parametrize(("num_prompts", "num_updates"), [(6, 2), (6, 3), (8, 4), (9, 4)])
def test_groups_mode_against_all_deals(num_prompts, num_updates):
    """Where some deal of all mixed prompts lies in the band (by trying every one), the plan finds a
    deal of all of them, nearly always.
    """
    generator, found, possible = torch.Generator().manual_seed(0), 0, 0
    for seed in range(40):
        num_pos_P = torch.randint(1, 8, (num_prompts,), generator=generator)
        reward_N = (torch.arange(8) < num_pos_P[:, None]).double().flatten()
        if not _some_deal_fits(num_pos_P.tolist(), num_updates):
            continue
        group_N = torch.arange(num_prompts).repeat_interleave(8)
        updates = planned(
            "reward_balanced", (group_N, reward_N, torch.ones(len(reward_N))), num_updates, seed
        )
        assert all(3 / 8 <= share <= 5 / 8 for share in shares(updates, reward_N))
        possible, found = possible + 1, found + (len(torch.cat(updates)) == len(reward_N))
    assert possible > 10
    assert found >= 0.9 * possible


def _some_deal_fits(num_pos, num_updates):
    """Every way to deal prompts of eight rollouts into updates whose sizes differ by at most one
    prompt.
    """
    base, more = divmod(len(num_pos), num_updates)

    def fits(left, sizes):
        if not sizes:
            return True
        return any(
            3 * len(hand) <= sum(num_pos[p] for p in hand) <= 5 * len(hand)
            and fits(left - set(hand), sizes[1:])
            for hand in itertools.combinations(sorted(left), sizes[0])
        )

    return fits(frozenset(range(len(num_pos))), [base + 1] * more + [base] * (num_updates - more))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mode": "rows"}, "mode must be one of groups, per_query, buffer, got 'rows'"),
        ({"low": 0.6}, "low must be a number > 0 and <= 0.5, got 0.6"),
        (
            {"mode": "buffer", "update_size": 0},
            "update_size must be a whole number >= 1 or None, got 0",
        ),
        ({"update_size": 8}, "update_size belongs to mode 'buffer', got mode 'groups'"),
    ],
)
def test_reward_balanced_bad_parameters(params, message):
    with pytest.raises(ValueError, match=f"reward_balanced: {message}"):
        planned("reward_balanced", prompts(4, 4), 2, **params)


# ---- audit


def test_audit_of_plans_at_128_prompts_of_8():
    """Two of 1024 rows meet in one of four updates of 256 with probability 255 / 1023 = 0.249."""
    table = prompts(128, 8)
    batch = batch_of(*table)
    kept = {
        name: audit(planned(name, table, 4), batch)
        for name in ("random_rows", "query_preserved", "round_robin")
    }
    assert kept["random_rows"].pairs_kept == pytest.approx(255 / 1023, abs=0.02)
    assert kept["random_rows"].prompts_split == 128
    assert kept["query_preserved"].pairs_kept == 1.0
    assert kept["query_preserved"].prompts_split == 0
    # rows i and i + 4 of a prompt meet
    assert kept["round_robin"].prompts_split_frac == 1.0
    assert kept["round_robin"].pairs_kept < 0.25


@many
@given(
    batch=ragged_batches(max_groups=4, max_group_size=5),
    num_updates=st.integers(1, 4),
    data=st.data(),
)
def test_audit_twin(batch, num_updates, data):
    """Rows land in random updates or nowhere."""
    where = data.draw(
        st.lists(
            st.integers(0, num_updates), min_size=batch.num_rollouts, max_size=batch.num_rollouts
        )
    )
    rows = [[i for i, k in enumerate(where) if k == update] for update in range(num_updates)]
    if not all(rows):
        return
    advantage_N = torch.arange(batch.num_rollouts, dtype=torch.float64)
    got = audit([torch.tensor(update) for update in rows], batch, advantage_N)
    groups, is_positive = (
        batch.group_N.tolist(),
        [reward > 0.5 for reward in batch.reward_N.tolist()],
    )
    met, total = reference.pairs_kept(rows, groups, is_positive)
    split = sum(
        len({k for k, update in enumerate(rows) for i in update if groups[i] == g}) > 1
        for g in set(groups)
    )
    assert (got.num_pairs, got.pairs_kept) == (total, met / total if total else 1.0)
    assert (got.prompts_split, got.prompts_split_frac) == (split, split / len(set(groups)))
    assert got.num_left_out == where.count(num_updates)
    assert got.rows == [len(update) for update in rows]
    assert got.tokens == [sum(int(batch.length_N[i]) for i in update) for update in rows]
    assert got.positive_frac == pytest.approx(
        [sum(is_positive[i] for i in update) / len(update) for update in rows]
    )
    assert got.advantage_sum == [float(sum(update)) for update in rows]
    assert json.loads(json.dumps(got.as_dict()))["pairs_kept"] == got.pairs_kept


def test_audit_takes_a_plan_of_a_method():
    batch = batch_of(*prompts(8, 4))
    method = cp.method("dr_grpo", plan="query_preserved")
    plan = method.plan(batch, num_updates=2, seed=0)
    got = cp.audit(plan, batch, method.assign(batch).advantage_N)
    assert got.pairs_kept == 1.0
    # group means come off whole prompts, so every update sums to 0
    assert got.advantage_sum == pytest.approx([0.0, 0.0], abs=1e-12)
    assert plan.manifest["left_out"] == []
    assert sorted(plan.manifest["groups"][0] + plan.manifest["groups"][1]) == list(range(8))


@pytest.mark.parametrize("name", list(PLANS))
def test_plans_pickle(name):
    stage = PLANS[name]
    assert pickle.loads(pickle.dumps(stage())) == stage


# ---- dynamic sampling


class Stream:
    """Rounds of two prompts with two rollouts each, by their rewards."""

    def __init__(self, *rounds: Sequence[float]) -> None:
        self.rounds, self.num = list(rounds), 0

    def more(self) -> RolloutBatch:
        reward = self.rounds[self.num]
        self.num += 1
        prompts = [Prompt(f"{self.num}{k}", "") for k in range(2)]
        batch = cp.TokenBatch.from_lists(
            [[1]] * 4, group=[0, 0, 1, 1], reward=reward, sampler_logp=[[-0.1]] * 4
        )
        texts = [f"{prompts[g].id}" for g in (0, 0, 1, 1)]
        return RolloutBatch(prompts, [[1]] * 4, texts, ["stop"] * 4, batch, 0, [])


def filled(stream, **params):
    stage = PLANS["dynamic_sampling"](**params)
    assert stage.collect is not None
    return call(stage.collect, stream.more(), stream, **stage.settings)


def test_dynamic_sampling_fills_the_batch_and_drops_the_surplus():
    """Round 1 has no mixed prompt, round 2 one, round 3 two: of those the first fills the batch of
    two, and the second is dropped. The plan then takes the two mixed ones.
    """
    stream = Stream([1, 1, 0, 0], [0, 1, 1, 1], [1, 0, 0, 1], [1, 0, 1, 0])
    rollouts = filled(stream, max_rounds=5)
    assert stream.num == 3
    assert [prompt.id for prompt in rollouts.prompts] == ["10", "11", "20", "21", "30"]
    assert rollouts.texts == ["10", "10", "11", "11", "20", "20", "21", "21", "30", "30"]
    plan = cp.method("dapo", plan="dynamic_sampling").plan(rollouts.batch, num_updates=1)
    assert [update.tolist() for update in plan] == [[4, 5, 8, 9]]


def test_dynamic_sampling_goes_by_success_and_not_by_a_shaped_reward():
    """Both solved, one longer than the other: rewards 1 and 0.6 are two successes."""
    rounds = [1, 0.6, 0, 1], [1, 0, 1, 1]
    assert len(filled(Stream(*rounds), max_rounds=2).prompts) == 3
    assert len(filled(Stream(*rounds), max_rounds=2, metric="reward").prompts) == 2


def test_dynamic_sampling_that_cannot_fill_the_batch_says_what_to_do():
    stream = Stream([1, 1, 0, 0], [0, 1, 1, 1])
    with pytest.raises(ConfigError, match="2 rounds gave 1 of 2 prompts .* raise max_rounds"):
        filled(stream, max_rounds=2)


def test_one_rollout_per_prompt_is_kept():
    table = torch.arange(4), torch.tensor([1.0, 1, 1, 0]), torch.ones(4)
    (update,) = planned("dynamic_sampling", table, 1)
    assert update.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ["random_rows", "query_preserved", "round_robin"])
@many
@given(batch=ragged_batches(max_groups=6, max_group_size=4), seed=st.integers(0, 3))
def test_dynamic_sampling_cuts_the_mixed_prompts_as_its_order_does(order, batch, seed):
    success = batch.is_success_N.tolist()
    mixed = [
        row
        for row, group in enumerate(batch.group_N.tolist())
        for own in [[success[k] for k in range(len(success)) if batch.group_N[k] == group]]
        if len(own) == 1 or 0 < sum(own) < len(own)
    ]
    if len({int(batch.group_N[row]) for row in mixed}) < 2:
        return
    table = batch.group_N, batch.reward_N, batch.length_N
    rest = [column[mixed] for column in table]
    updates = planned("dynamic_sampling", table, 2, seed, order=PLANS[order])
    inner = planned(order, rest, 2, seed)
    assert [u.tolist() for u in updates] == [[mixed[k] for k in u.tolist()] for u in inner]


def test_one_round_of_dynamic_sampling_samples_nothing_more():
    plan = {"name": "dynamic_sampling", "max_rounds": 1, "order": "query_preserved"}
    method = cp.method("dapo", plan=plan)
    assert method.collectors == [] and method.planner.has("keeps_prompts_whole")
    assert cp.method(**method.describe()).describe() == method.describe()
    assert method.label == "dapo, plan dynamic_sampling(max_rounds=1, order=query_preserved)"
