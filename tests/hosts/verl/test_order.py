"""The order of a batch, cut as verl cuts it: chunks of ranks by KVBatchMeta, mini-batches by verl's
iterator.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip(
    "verl.trainer.ppo.v1",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

from verl.trainer.ppo.v1 import PPOTrainerSync

from counterpoise.hosts.verl import register
from counterpoise.hosts.verl.plan import by_rank, fill_updates
from counterpoise.hosts.verl.trainer import CreditSync
from helpers.verl.cases import batch_meta, config, optimizer_steps, rollouts, trainer

pytestmark = [pytest.mark.hosts, pytest.mark.verl]
register()

PRESERVED = {"plan": "query_preserved"}
BALANCED = {"plan": "reward_balanced"}


def ordered(rows, counterpoise, queue_of, num_ranks=2, mini=2, cls=CreditSync, batch_number=1):
    """(updates as lists of keys, the batch, the queue, metrics) after verl's
    ``_balance_batch`` and ours.
    """
    num_prompts = len({row.prompt for row in rows})
    host = trainer(cls, config(counterpoise=counterpoise, mini=mini, train=num_prompts), num_ranks)
    host.global_steps = batch_number
    queue, metrics = queue_of(rows), {}
    batch = host._balance_batch(batch_meta(rows), metrics)
    return optimizer_steps(batch.keys, 4 * mini, num_ranks), batch, queue, metrics


def prompts_of(update):
    return Counter(key.rsplit("_", 2)[0] for key in update if not key.startswith("pad"))


def is_split(updates):
    seen = [set(prompts_of(update)) for update in updates]
    return sum(map(len, seen)) > len(set().union(*seen))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("mini", [1, 2, 4])
def test_query_preserved_keeps_whole_prompts_in_every_step(mini, num_ranks, queue_of):
    rows = rollouts(num_prompts=8, seed=5)
    updates, batch, _, metrics = ordered(rows, PRESERVED, queue_of, num_ranks, mini)
    assert [prompts_of(update).most_common()[-1][1] for update in updates] == [4] * (8 // mini)
    assert sorted(batch.keys) == sorted(row.key for row in rows)
    assert (
        metrics["counterpoise/plan/prompts_split_frac"] == 0
        and metrics["counterpoise/plan/pairs_kept"] == 1
    )


def test_verls_own_order_splits_prompts(queue_of):
    rows = rollouts(num_prompts=8, seed=5)
    updates, *_ = ordered(rows, None, queue_of, cls=PPOTrainerSync)
    assert is_split(updates)
    assert not is_split(ordered(rows, PRESERVED, queue_of)[0])


def test_tags_travel_with_their_rollouts(queue_of):
    rows = rollouts(num_prompts=8, seed=5)
    _, batch, _, _ = ordered(rows, PRESERVED, queue_of)
    length = {row.key: len(row.fields["responses"]) for row in rows}
    assert [tag["response_len"] for tag in batch.tags] == [length[key] for key in batch.keys]


def test_every_step_is_shared_out_evenly(queue_of):
    """Within an update the ranks get equal numbers of rows and nearly equal tokens; verl's log says
    so.
    """
    rows = rollouts(num_prompts=8, seed=5, longest=40)
    updates, batch, _, metrics = ordered(rows, PRESERVED, queue_of, num_ranks=2)
    length = dict(zip(batch.keys, [tag["seq_len"] for tag in batch.tags]))
    for update in updates:
        halves = [sum(length[key] for key in half) for half in (update[:4], update[4:])]
        assert abs(halves[0] - halves[1]) <= 0.15 * sum(halves)
    ranks = [sum(length[key] for key in half) for half in (batch.keys[:16], batch.keys[16:])]
    assert (metrics["global_seqlen/balanced_min"], metrics["global_seqlen/balanced_max"]) == (
        min(ranks),
        max(ranks),
    )


def test_failed_rollouts_leave_room_for_verls_fillers(queue_of):
    """31 and 27 rollouts do not divide: verl appends fillers, and they take the places that the
    plan leaves free.
    """
    for sizes in ([4, 4, 3, 4, 4, 4, 4, 4], [4, 4, 3, 4, 2, 4, 2, 4]):
        rows = rollouts(num_prompts=8, seed=5, sizes=sizes)
        updates, batch, queue, _ = ordered(rows, PRESERVED, queue_of)
        assert not is_split(updates)
        assert [len(update) for update in updates] == [8] * 4
        fillers = [key for key in batch.keys if key.startswith("pad")]
        assert len(fillers) == 32 - sum(sizes)
        assert all(queue.data[key]["response_mask"].sum() == 0 for key in fillers)


def test_the_plan_depends_on_the_step_and_the_seed(queue_of):
    rows = rollouts(num_prompts=8, seed=5)
    first = ordered(rows, PRESERVED, queue_of)[1].keys
    assert first == ordered(rows, PRESERVED, queue_of)[1].keys
    assert first != ordered(rows, PRESERVED, queue_of, batch_number=2)[1].keys
    assert first != ordered(rows, PRESERVED | {"seed": 1}, queue_of)[1].keys


def graded(rewards):
    """Rollouts of 4 a prompt with the given numbers of successes."""
    rows = rollouts(num_prompts=len(rewards), seed=7)
    for k, row in enumerate(rows):
        row.fields["rm_scores"] = torch.zeros_like(row.fields["rm_scores"])
        row.fields["rm_scores"][-1] = float(k % 4 < rewards[k // 4])
    return rows


def test_reward_balanced_leaves_constant_prompts_out(queue_of):
    """Two prompts are all right and all wrong: they go, fillers come, and every update holds as
    many successes as failures.
    """
    rows = graded([4, 1, 3, 2, 0, 1, 3, 2])
    updates, batch, queue, metrics = ordered(rows, BALANCED, queue_of, mini=4)
    kept = {key for update in updates for key in update if not key.startswith("pad")}
    assert kept == {row.key for row in rows if row.prompt not in ("p0", "p4")}
    assert not is_split(updates)
    reward = {row.key: float(row.fields["rm_scores"].sum()) for row in rows}
    assert [sum(reward.get(key, 0) for key in update) for update in updates] == [6, 6]
    assert len(batch.keys) == 32 and len(set(batch.keys)) == 32
    assert set(queue.data) == set(batch.keys)
    fillers = [key for key in batch.keys if key.startswith("pad")]
    assert [sum(key in fillers for key in update) for update in updates] == [4, 4]
    assert metrics["counterpoise/plan/rows_left_out"] == 8
    assert (
        metrics["counterpoise/plan/positive_frac_min"]
        == metrics["counterpoise/plan/positive_frac_max"]
        == 0.5
    )


def test_after_rows_were_left_out_credit_still_works(queue_of):
    rows = graded([4, 1, 3, 2, 0, 1, 3, 2])
    host = trainer(CreditSync, config("counterpoise/rloo", BALANCED, mini=4, train=8), num_ranks=2)
    queue = queue_of(rows)
    batch = host._balance_batch(batch_meta(rows), {})
    host._compute_advantage(batch, metrics={})
    advantage = {key: queue.data[key]["advantages"] for key in batch.keys}
    # prompt p1: one success of four, so 1 - 0 = 1 for it and 0 - 1/3 for the others
    assert advantage["p1_0_0"].unique().tolist() == [1.0]
    assert advantage["p1_1_0"].unique().tolist() == pytest.approx([-1 / 3])
    assert all((value == 0).all() for key, value in advantage.items() if key.startswith("pad"))


def test_a_plan_works_beside_our_credit(queue_of):
    rows = rollouts(num_prompts=8, seed=5)
    host = trainer(CreditSync, config("counterpoise/ibpo", mini=2, train=8), num_ranks=2)
    queue_of(rows)
    assert not is_split(optimizer_steps(host._balance_batch(batch_meta(rows), {}).keys, 8, 2))


def test_steps_that_cannot_be_filled_are_an_error():
    with pytest.raises(ValueError, match="3 rows do not make 2 updates of 2"):
        fill_updates([["a"], ["b"]], ["x"], 2)
    assert by_rank([["a", "b"]], {"a": 1, "b": 2}, 1, lambda work, num_ranks: [[1, 0]]) == [
        ["b", "a"]
    ]
