from __future__ import annotations

import itertools
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import counterpoise as cp
import reference_batches as reference
from counterpoise.batches import PLANS, REDUCTIONS, audit, is_ready, manifest, quota, shard
from counterpoise.build import call
from counterpoise.numerics import seeded
from reference_batches import on_ranks
from strategies import ragged_batches

untimed = settings(max_examples=60, deadline=None)


# ---- reductions


@st.composite
def steps_of(draw):
    """A step's mask, credit (with zeros) and advantage (with zeros)."""
    batch = draw(ragged_batches())
    n, t = batch.mask_NT.shape
    advantage_N = torch.tensor(draw(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 2.0]), min_size=n, max_size=n)), dtype=torch.float64)
    keep = draw(st.lists(st.booleans(), min_size=n * t, max_size=n * t))
    credit_NT = torch.where(batch.mask_NT & torch.tensor(keep).reshape(n, t), advantage_N[:, None], 0)
    return batch.mask_NT, credit_NT, advantage_N


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("per_token", {}),
        ("per_token", {"count": "credited"}),
        ("per_sequence", {}),
        ("per_sequence", {"count": "credited"}),
        ("constant_length", {}),
        ("constant_length", {"length": 7}),
        ("side_means", {}),
    ],
)
@untimed
@given(step=steps_of())
def test_reduction_twin(name, params, step):
    mask_NT, credit_NT, advantage_N = step
    lengths = mask_NT.sum(1).tolist()
    expected_NT = torch.zeros_like(credit_NT)
    for i, row in enumerate(getattr(reference, name)(lengths, credit_NT.tolist(), advantage_N.tolist(), **params)):
        expected_NT[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    got_NT = REDUCTIONS[name](mask_NT, credit_NT, advantage_N, **params)
    assert got_NT.dtype == credit_NT.dtype
    torch.testing.assert_close(got_NT, expected_NT, rtol=1e-13, atol=0)
    assert (got_NT[~mask_NT] == 0).all()


@pytest.mark.parametrize("name", list(REDUCTIONS))
@pytest.mark.parametrize("count", [None, "credited"])
def test_reductions_pool_over_ranks(name, count):
    """Ranks of 2, 0 and 1 rows: the denominators are those of the whole step."""
    mask_NT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    advantage_N = torch.tensor([1.0, -1.0, -2.0], dtype=torch.float64)
    credit_NT = advantage_N[:, None] * mask_NT * torch.tensor([[1, 0, 1, 1], [0, 1, 0, 0], [1, 0, 0, 0]])
    params = {"count": count} if count and name in ("per_token", "per_sequence") else {}
    parts = [slice(0, 2), slice(2, 2), slice(2, 3)]
    got = on_ranks(
        [
            lambda reduce, p=part: call(REDUCTIONS[name], mask_NT[p], credit_NT[p], advantage_N[p], reduce=reduce, **params)
            for part in parts
        ]
    )
    torch.testing.assert_close(torch.cat(got), REDUCTIONS[name](mask_NT, credit_NT, advantage_N, **params), rtol=1e-14, atol=0)


def test_side_means_by_hand():
    """Two positives of 2 and 4 tokens, one negative of 1, one of advantage 0: 1/2 * 1/2 * 1/2, 1/2 * 1/2 * 1/4, 1/2 * 1/1 * 1/1, 0."""
    mask_NT = torch.arange(4) < torch.tensor([[2], [4], [1], [3]])
    advantage_N = torch.tensor([1.0, 1.0, -1.0, 0.0])
    got_NT = REDUCTIONS["side_means"](mask_NT, torch.zeros(4, 4), advantage_N)
    assert [row[0] for row in got_NT.tolist()] == [0.125, 0.0625, 0.5, 0.0]
    one_sided_NT = REDUCTIONS["side_means"](mask_NT[:2], torch.zeros(2, 4), advantage_N[:2])
    torch.testing.assert_close(one_sided_NT, got_NT[:2], rtol=0, atol=0)


def test_empty_cases_are_zero():
    mask_NT, none_NT = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    for name in ("per_token", "per_sequence"):
        assert REDUCTIONS[name](mask_NT, none_NT, torch.zeros(2), count="credited").tolist() == none_NT.tolist()
    assert REDUCTIONS["side_means"](mask_NT, none_NT, torch.zeros(2)).tolist() == none_NT.tolist()


def test_constant_length_prefers_its_parameter_then_the_limit_then_the_longest():
    step = torch.tensor([[True, True], [True, False]]), torch.zeros(2, 2), torch.ones(2)
    first = [
        float(REDUCTIONS["constant_length"](*step, **params)[0, 0])
        for params in ({"length": 5, "max_length": 4}, {"max_length": 4}, {})
    ]
    assert first == pytest.approx([1 / 10, 1 / 8, 1 / 4])


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("per_token", {"count": "tokens"}, "per_token: count must be one of mask, credited, got 'tokens'"),
        ("per_sequence", {"count": None}, "per_sequence: count must be one of mask, credited, got None"),
        ("constant_length", {"length": 0}, "constant_length: length must be an integer >= 1 or None, got 0"),
        ("constant_length", {"length": 2.5}, "constant_length: length must be an integer >= 1 or None, got 2.5"),
    ],
)
def test_reduction_bad_parameters(name, params, message):
    with pytest.raises(ValueError, match=message):
        REDUCTIONS[name](torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1), torch.ones(1), **params)


# ---- plans

PLAN_SETTINGS = [(name, {}) for name in PLANS] + [("reward_balanced", {"mode": mode}) for mode in ("per_query", "buffer")]


def prompts(num, size, seed=0, share=0.4):
    """``num`` prompts of ``size`` rollouts each, rewards 0 / 1, lengths 1..60."""
    generator = torch.Generator().manual_seed(seed)
    group_N = torch.arange(num).repeat_interleave(size)
    reward_N = (torch.rand(num * size, generator=generator) < share).double()
    return group_N, reward_N, torch.randint(1, 61, (num * size,), generator=generator)


def batch_of(group_N, reward_N, length_N):
    ids = [[1] * int(length) for length in length_N]
    return cp.TokenBatch.from_lists(
        ids, group=group_N.tolist(), reward=reward_N.tolist(), sampler_logp=[[-1.0] * len(row) for row in ids], dtype=torch.float64
    )


def planned(name, table, num_steps, seed=0, **params):
    return call(PLANS[name](**params), *table, num_steps=num_steps, generator=seeded(seed, 0, "plan"))


@pytest.mark.parametrize(("name", "params"), PLAN_SETTINGS)
@untimed
@given(batch=ragged_batches(max_groups=8, max_group_size=5), num_steps=st.integers(1, 4), seed=st.integers(0, 5))
def test_plans_hold_no_row_twice_and_no_empty_step(name, params, batch, num_steps, seed):
    table = batch.group_N, batch.reward_N, batch.length_N
    if len(batch.group_N.unique()) < num_steps:
        return
    steps = planned(name, table, num_steps, seed, **params)
    rows = torch.cat(steps).tolist()
    assert len(steps) == num_steps
    assert len(rows) == len(set(rows))
    assert set(rows) <= set(range(batch.num_rollouts))
    assert min(map(len, steps)) > 0
    assert all(torch.equal(step, step.sort().values) for step in steps)
    if name != "reward_balanced":
        assert len(rows) == batch.num_rollouts
    if name in ("random_rows", "length_sorted", "round_robin") or params.get("mode") == "buffer":
        assert max(map(len, steps)) - min(map(len, steps)) <= 1
    if name == "query_preserved" or (name == "reward_balanced" and params.get("mode") != "buffer"):
        owners = [set(batch.group_N[step].tolist()) for step in steps]
        assert not any(a & b for a, b in itertools.combinations(owners, 2))
    assert json.loads(json.dumps(manifest(steps, batch.group_N)))["num_rows"] == batch.num_rollouts


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
    """Sizes 5, 3, 2, 2 into two steps: largest first, each to the smaller step: 5 + 2 and 3 + 2, never 5 + 3."""
    group_N = torch.tensor([0] * 5 + [1] * 3 + [2] * 2 + [3] * 2)
    for seed in range(4):
        steps = planned("query_preserved", (group_N, torch.zeros(12), torch.ones(12)), 2, seed)
        assert sorted(map(len, steps)) == [5, 7]


def test_query_preserved_draws_every_split():
    """Three prompts, three steps: all six orders appear over seeds."""
    table = torch.tensor([0, 0, 1, 1, 2, 2]), torch.zeros(6), torch.ones(6)
    orders = {tuple(int(step[0]) for step in planned("query_preserved", table, 3, seed)) for seed in range(60)}
    assert orders == set(itertools.permutations([0, 2, 4]))


def test_length_sorted_is_short_long_long_short():
    length_N = torch.tensor([50, 10, 40, 20, 80, 70, 30, 60])
    steps = planned("length_sorted", (torch.zeros(8), torch.zeros(8), length_N), 4)
    # sorted 10 .. 80; every second 10 30 50 70, the others back down 80 60 40 20
    assert [sorted(length_N[step].tolist()) for step in steps] == [[10, 30], [50, 70], [60, 80], [20, 40]]


def test_round_robin_spreads_every_prompt():
    steps = planned("round_robin", prompts(2, 4), 2)
    assert [step.tolist() for step in steps] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("name", ["query_preserved", "reward_balanced"])
def test_fewer_prompts_than_steps_says_how_many_there_are(name):
    with pytest.raises(ValueError, match=f"{name}: 4 optimizer steps need at least 4 prompts, got 3"):
        planned(name, prompts(3, 4), 4)


@pytest.mark.parametrize("name", ["random_rows", "length_sorted", "round_robin"])
def test_fewer_rollouts_than_steps(name):
    with pytest.raises(ValueError, match=f"{name}: 4 optimizer steps need at least 4 rollouts, got 3"):
        planned(name, prompts(1, 3), 4)


def test_num_steps_is_a_positive_integer():
    with pytest.raises(ValueError, match="query_preserved: num_steps must be an integer >= 1, got 0"):
        planned("query_preserved", prompts(3, 4), 0)


# ---- reward balance


@pytest.mark.parametrize(
    ("num_pos", "num_neg", "ready", "taken"),
    [(400, 800, True, (400, 624)), (2634, 6582, True, (640, 384)), (383, 2000, False, None), (384, 384, True, (384, 384))],
)
def test_buffer_table(num_pos, num_neg, ready, taken):
    """B = 1024: ceil(3/8 B) = 384, floor(5/8 B) = 640; the table holds with the signs exchanged."""
    assert is_ready(num_pos, num_neg, 1024) is ready
    assert is_ready(num_neg, num_pos, 1024) is ready
    if taken:
        assert quota(num_pos, num_neg, 1024) == taken
        assert quota(num_neg, num_pos, 1024) == taken[::-1]


@untimed
@given(num_pos=st.integers(0, 60), num_neg=st.integers(0, 60), size=st.integers(1, 80) | st.sampled_from([8, 16, 40, 80]))
def test_quota_never_takes_more_than_there_is(num_pos, num_neg, size):
    take_pos, take_neg = quota(num_pos, num_neg, size)
    assert 0 <= take_pos <= num_pos
    assert 0 <= take_neg <= num_neg
    assert take_pos + take_neg == min(size, num_pos + num_neg)
    if is_ready(num_pos, num_neg, size) and num_pos + num_neg >= size and size % 8 == 0:
        assert 3 * size // 8 <= min(take_pos, take_neg)


def test_buffer_plan_takes_the_quota_and_levels_every_step():
    """400 positives and 800 negatives, four steps of 256: 400 / 624, so 100 and 156 a step."""
    reward_N = torch.cat([torch.ones(400), torch.zeros(800)])[torch.randperm(1200, generator=torch.Generator().manual_seed(3))]
    table = torch.arange(1200) // 8, reward_N, torch.ones(1200)
    steps = planned("reward_balanced", table, 4, mode="buffer", step_size=256)
    assert [int(reward_N[step].sum()) for step in steps] == [100] * 4
    assert [len(step) for step in steps] == [256] * 4


def test_buffer_plan_without_a_size_takes_the_largest_balanced_batch():
    """30 positives of 200: 30 / (3/8) = 80 rows, 30 + 50."""
    reward_N = torch.cat([torch.ones(30), torch.zeros(170)])
    steps = planned("reward_balanced", (torch.arange(200) // 8, reward_N, torch.ones(200)), 2, mode="buffer")
    assert [len(step) for step in steps] == [40, 40]
    assert [int(reward_N[step].sum()) for step in steps] == [15, 15]


def test_buffer_plan_of_one_sign_takes_all_rows():
    steps = planned("reward_balanced", (torch.arange(20) // 4, torch.zeros(20), torch.ones(20)), 2, mode="buffer")
    assert sorted(torch.cat(steps).tolist()) == list(range(20))


def test_per_query_keeps_as_many_of_each_sign():
    group_N = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    reward_N = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1, 1])
    (step,) = planned("reward_balanced", (group_N, reward_N, torch.ones(12)), 1, mode="per_query")
    kept = {(g, r): int(((group_N[step] == g) & (reward_N[step] == r)).sum()) for g in range(3) for r in (0, 1)}
    # prompt 0: 2 and 3 -> 2 and 2; prompt 1: 1 and 3 -> 1 and 1; prompt 2: no negative -> left out
    assert kept == {(0, 0): 2, (0, 1): 2, (1, 0): 1, (1, 1): 1, (2, 0): 0, (2, 1): 0}


def shares(steps, reward_N):
    return [float(reward_N[step].mean()) for step in steps]


def test_groups_mode_leaves_out_constant_prompts_and_levels_the_rest():
    """Shares 1/4, 1/4, 3/4, 3/4 and two constant prompts: each step gets one of each kind, share 1/2."""
    rows = [[1, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]
    group_N, reward_N = torch.arange(6).repeat_interleave(4), torch.tensor(rows, dtype=torch.float64).flatten()
    for seed in range(5):
        steps = planned("reward_balanced", (group_N, reward_N, torch.ones(24)), 2, seed)
        assert shares(steps, reward_N) == [0.5, 0.5]
        assert manifest(steps, group_N)["left_out"] == list(range(16, 24))


def test_groups_mode_decides_constancy_on_rewards():
    """Rewards 0.7 .. 0.9 are all positives but differ, so the prompt has an advantage and stays."""
    reward_N = torch.tensor([0.7, 0.9, 0.0, 0.1, 0.7, 0.7])
    (step,) = planned("reward_balanced", (torch.tensor([0, 0, 1, 1, 2, 2]), reward_N, torch.ones(6)), 1)
    assert step.tolist() == [0, 1, 2, 3]


def test_groups_mode_leaves_out_as_few_one_sided_prompts_as_needed():
    """Six prompts of share 1/8 and four of 1/2: with k of the former (k + 16) / (8 k + 32) >= 3/8 needs k <= 2."""
    group_N = torch.arange(10).repeat_interleave(8)
    reward_N = torch.tensor([[1] + [0] * 7] * 6 + [[1] * 4 + [0] * 4] * 4, dtype=torch.float64).flatten()
    (step,) = planned("reward_balanced", (group_N, reward_N, torch.ones(80)), 1)
    assert len(step) == 48
    assert shares([step], reward_N) == [18 / 48]
    assert set(range(48, 80)) < set(step.tolist())


def test_groups_mode_keeps_every_mixed_prompt_where_the_band_is_out_of_reach():
    group_N = torch.arange(6).repeat_interleave(8)
    reward_N = torch.tensor([[1] + [0] * 7] * 6, dtype=torch.float64).flatten()
    steps = planned("reward_balanced", (group_N, reward_N, torch.ones(48)), 2)
    assert [len(step) for step in steps] == [24, 24]


@pytest.mark.parametrize("mode", ["groups", "per_query"])
def test_too_few_usable_prompts_fall_back_to_whole_prompts_of_all_rows(mode):
    group_N = torch.arange(4).repeat_interleave(3)
    for reward_N in (torch.zeros(12), torch.tensor([1.0] + [0.0] * 11)):
        steps = planned("reward_balanced", (group_N, reward_N, torch.ones(12)), 2, mode=mode)
        assert sorted(torch.cat(steps).tolist()) == list(range(12))
        assert [len(step) for step in steps] == [6, 6]


@pytest.mark.parametrize(("num_prompts", "num_steps"), [(6, 2), (6, 3), (8, 4), (9, 4)])
def test_groups_mode_against_all_deals(num_prompts, num_steps):
    """Where some deal of all mixed prompts lies in the band (by trying every one), the plan finds a deal of all of them, nearly always."""
    generator, found, possible = torch.Generator().manual_seed(0), 0, 0
    for seed in range(40):
        num_pos_P = torch.randint(1, 8, (num_prompts,), generator=generator)
        reward_N = (torch.arange(8) < num_pos_P[:, None]).double().flatten()
        if not _some_deal_fits(num_pos_P.tolist(), num_steps):
            continue
        group_N = torch.arange(num_prompts).repeat_interleave(8)
        steps = planned("reward_balanced", (group_N, reward_N, torch.ones(len(reward_N))), num_steps, seed)
        assert all(3 / 8 <= share <= 5 / 8 for share in shares(steps, reward_N))
        possible, found = possible + 1, found + (len(torch.cat(steps)) == len(reward_N))
    assert possible > 10
    assert found >= 0.9 * possible


def _some_deal_fits(num_pos, num_steps):
    """Every way to deal prompts of eight rollouts into steps whose sizes differ by at most one prompt."""
    base, more = divmod(len(num_pos), num_steps)

    def fits(left, sizes):
        if not sizes:
            return True
        return any(
            3 * len(hand) <= sum(num_pos[p] for p in hand) <= 5 * len(hand) and fits(left - set(hand), sizes[1:])
            for hand in itertools.combinations(sorted(left), sizes[0])
        )

    return fits(frozenset(range(len(num_pos))), [base + 1] * more + [base] * (num_steps - more))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mode": "rows"}, "mode must be one of groups, per_query, buffer, got 'rows'"),
        ({"low": 0.6}, "expected 0 < low <= 1/2 <= high < 1, got low=0.6"),
        ({"threshold": float("inf")}, "threshold must be a finite number, got inf"),
        ({"mode": "buffer", "step_size": 0}, "step_size must be an integer >= 1 or None, got 0"),
        ({"step_size": 8}, "step_size belongs to mode 'buffer', got mode 'groups'"),
    ],
)
def test_reward_balanced_bad_parameters(params, message):
    with pytest.raises(ValueError, match=f"reward_balanced: {message}"):
        planned("reward_balanced", prompts(4, 4), 2, **params)


# ---- audit


def test_audit_of_plans_at_128_prompts_of_8():
    """Two of 1024 rows meet in one of four steps of 256 with probability 255 / 1023 = 0.249."""
    table = prompts(128, 8)
    batch = batch_of(*table)
    kept = {name: audit(planned(name, table, 4), batch) for name in ("random_rows", "query_preserved", "round_robin")}
    assert kept["random_rows"].pairs_kept == pytest.approx(255 / 1023, abs=0.02)
    assert kept["random_rows"].prompts_split == 128
    assert kept["query_preserved"].pairs_kept == 1.0
    assert kept["query_preserved"].prompts_split == 0
    # rows i and i + 4 of a prompt meet
    assert kept["round_robin"].prompts_split_frac == 1.0
    assert kept["round_robin"].pairs_kept < 0.25


@untimed
@given(batch=ragged_batches(max_groups=4, max_group_size=5), num_steps=st.integers(1, 4), data=st.data())
def test_audit_twin(batch, num_steps, data):
    """Rows land in random steps or nowhere."""
    where = data.draw(st.lists(st.integers(0, num_steps), min_size=batch.num_rollouts, max_size=batch.num_rollouts))
    rows = [[i for i, k in enumerate(where) if k == step] for step in range(num_steps)]
    if not all(rows):
        return
    advantage_N = torch.arange(batch.num_rollouts, dtype=torch.float64)
    got = audit([torch.tensor(step) for step in rows], batch, advantage_N)
    groups, is_positive = batch.group_N.tolist(), [reward > 0.5 for reward in batch.reward_N.tolist()]
    met, total = reference.pairs_kept(rows, groups, is_positive)
    split = sum(len({k for k, step in enumerate(rows) for i in step if groups[i] == g}) > 1 for g in set(groups))
    assert (got.num_pairs, got.pairs_kept) == (total, met / total if total else 1.0)
    assert (got.prompts_split, got.prompts_split_frac) == (split, split / len(set(groups)))
    assert got.num_left_out == where.count(num_steps)
    assert got.rows == [len(step) for step in rows]
    assert got.tokens == [sum(int(batch.length_N[i]) for i in step) for step in rows]
    assert got.positive_frac == pytest.approx([sum(is_positive[i] for i in step) / len(step) for step in rows])
    assert got.advantage_sum == [float(sum(step)) for step in rows]
    assert json.loads(json.dumps(got.as_dict()))["pairs_kept"] == got.pairs_kept


def test_audit_takes_a_plan_of_a_method():
    batch = batch_of(*prompts(8, 4))
    method = cp.method("dr_grpo", plan="query_preserved")
    plan = method.plan(batch, num_steps=2, seed=0)
    got = cp.audit(plan, batch, method.assign(batch).advantage_N)
    assert got.pairs_kept == 1.0
    # group means come off whole prompts, so every step sums to 0
    assert got.advantage_sum == pytest.approx([0.0, 0.0], abs=1e-12)
    assert plan.manifest["left_out"] == []
    assert sorted(plan.manifest["groups"][0] + plan.manifest["groups"][1]) == list(range(8))


# ---- shard


@untimed
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    num_ranks=st.integers(1, 5),
    budget=st.none() | st.integers(1, 120),
    max_rows=st.none() | st.integers(1, 6),
    by_group=st.booleans(),
    data=st.data(),
)
def test_shard_holds_every_row_once_within_its_limits(lengths, num_ranks, budget, max_rows, by_group, data):
    row_R = torch.tensor(data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True)))
    length_N, group_N = torch.tensor(lengths), torch.arange(len(lengths)) // 3
    ranks = shard(
        row_R, length_N, num_ranks=num_ranks, token_budget=budget, max_rows=max_rows, groups=group_N if by_group else None
    )
    assert len(ranks) == num_ranks
    micro_batches = [micro for rank in ranks for micro in rank]
    assert sorted(torch.cat(micro_batches).tolist()) == sorted(row_R.tolist())
    for micro in micro_batches:
        assert len(micro) > 0
        assert max_rows is None or len(micro) <= max_rows
        assert budget is None or len(micro) == 1 or len(micro) * int(length_N[micro].max()) <= budget
    if by_group:
        owners = [{int(group_N[row]) for micro in rank for row in micro} for rank in ranks]
        assert not any(a & b for a, b in itertools.combinations(owners, 2))
    else:
        # the greedy bound: the fullest rank was the emptiest before its last row
        loads = [sum(int(length_N[micro].sum()) for micro in rank) for rank in ranks]
        assert max(loads) - min(loads) <= int(length_N[row_R].max())


def test_shard_by_hand():
    """Longest first: 9 -> rank 0, 8 -> rank 1, 3 -> rank 1 (8 < 9), 2 -> rank 0 (9 < 11). Budget 9: 2 rows of 9 or 8 are too many."""
    length_N = torch.tensor([9, 2, 3, 8])
    assert [[m.tolist() for m in rank] for rank in shard(torch.arange(4), length_N, num_ranks=2, token_budget=9)] == [
        [[0], [1]],
        [[3], [2]],
    ]
    assert [[m.tolist() for m in rank] for rank in shard(torch.tensor([3, 1]), length_N)] == [[[3, 1]]]
    assert [[m.tolist() for m in rank] for rank in shard(torch.arange(4), length_N, max_rows=3)] == [[[0, 3, 2], [1]]]
    assert [[m.tolist() for m in rank] for rank in shard(torch.arange(4), length_N, token_budget=5)] == [[[0], [3], [2], [1]]]
    assert shard(torch.tensor([2]), length_N, num_ranks=3)[1:] == [[], []]


def test_shard_cuts_change_no_gradient():
    """A step cut into ranks and micro-batches by positions gives the gradient of the whole step."""
    batch = batch_of(*prompts(6, 4))
    method = cp.method("grpo")
    rows = method.rows(batch, method.assign(batch), torch.arange(24))
    logp_NT = (
        torch.rand(batch.mask_NT.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1.5
    ).requires_grad_()
    (method.loss(logp_NT, rows).loss_NT * rows.scale_NT).sum().backward()
    whole_NT, logp_NT.grad = logp_NT.grad, None
    for rank in shard(torch.arange(24), batch.length_N, num_ranks=3, token_budget=130):
        for pick_R in rank:
            cut = rows.select(pick_R)
            (method.loss(logp_NT[pick_R], cut).loss_NT * cut.scale_NT).sum().backward()
    assert whole_NT.abs().sum() > 0
    torch.testing.assert_close(logp_NT.grad, whole_NT, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"num_ranks": 0}, "num_ranks must be an integer >= 1, got 0"),
        ({"num_ranks": None}, "num_ranks must be an integer >= 1, got None"),
        ({"token_budget": 0}, "token_budget must be an integer >= 1 or None, got 0"),
        ({"max_rows": 1.5}, "max_rows must be an integer >= 1 or None, got 1.5"),
    ],
)
def test_shard_bad_parameters(params, message):
    with pytest.raises(ValueError, match=f"shard: {message}"):
        shard(torch.arange(2), torch.ones(2), **params)


@pytest.mark.parametrize("name", [*PLANS, *REDUCTIONS])
def test_stages_pickle(name):
    stage = {**PLANS, **REDUCTIONS}[name]
    assert pickle.loads(pickle.dumps(stage())).func is stage
