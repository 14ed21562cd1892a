"""Environment tokens are context only: no credit, no weight, no count, and what they say tells
contexts apart.
"""

from __future__ import annotations

import pytest
import torch

import counterpoise as cp
from counterpoise import credit as rules
from counterpoise.catalogue.method import FAMILIES
from counterpoise.credit.overlap import conflict_tokens
from counterpoise.maths.trie import prefix_nodes
from counterpoise.stage import build
from helpers import conformance_table as table
from helpers.full_batch import make_batch
from helpers.replies import with_reply, without_reply

AT, LENGTH = 1, 3


def both() -> tuple[cp.TokenBatch, cp.TokenBatch]:
    """Rollouts, and the same with one reply for every group."""
    batch = make_batch(turns=True)
    reply = [[2, int(group), 1] for group in batch.group_N]
    return batch, with_reply(batch, AT, reply)


def same(with_NT: torch.Tensor, without_NT: torch.Tensor) -> None:
    torch.testing.assert_close(
        without_reply(with_NT, AT, LENGTH), without_NT, rtol=1e-12, atol=1e-12
    )


METHODS = {name: cp.method(name) for name in cp.methods()}
METHODS |= {
    f"grpo with {name}": cp.method(
        "grpo", credit=[build("credit rule", FAMILIES["credit"], {"name": name, **row.params})]
    )
    for name, row in table.RULES.items()
}
METHODS |= {
    f"grpo under {name}": cp.method("grpo", plan={"name": name, **row.params})
    for name, row in table.PLANS.items()
}


@pytest.mark.parametrize("name", METHODS)
def test_an_equal_reply_in_every_rollout_changes_nothing(name):
    """Credit, its numbers, the plan, the reduction and the loss of every model token."""
    method, (plain, holed) = METHODS[name], both()
    expected, got = method.assign(plain), method.assign(holed)
    same(got.credit_NT, expected.credit_NT)
    same(got.weight_NT, expected.weight_NT)
    assert not got.credit_NT[~holed.mask_NT].any()
    assert not got.weight_NT[~holed.mask_NT].any()
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-9, abs=1e-12, nan_ok=True)
    plan = method.plan(plain, 2)
    assert method.plan(holed, 2).manifest == plan.manifest
    assert cp.audit(plan, holed) == cp.audit(plan, plain)
    for row_R in plan:
        rows = [method.rows(*pair, row_R) for pair in ((holed, got), (plain, expected))]
        logps = [batch.column("trainer_logp_NT")[row_R] for batch in (holed, plain)]
        prepared = [method.prepare(*pair) for pair in zip(logps, rows)]
        losses = [method.loss(*pair) for pair in zip(logps, prepared)]
        same(rows[0].scale_NT, rows[1].scale_NT)
        for column, plain_column in zip(*losses):
            same(column.double(), plain_column.double())
        assert not rows[0].scale_NT[~rows[0].mask_NT].any()
        assert not losses[0].coef_NT[~rows[0].mask_NT].any()


def rollouts(reply: list[list[int]]) -> cp.TokenBatch:
    """A good and a bad rollout that say the same, with a reply after the second token."""
    batch = cp.TokenBatch.from_lists(
        [[1, 2, 3, 4]] * 2, group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-1.0] * 4] * 2
    )
    return with_reply(batch, 2, reply)


SPREAD = torch.tensor([[1.0], [-1.0]])


def test_a_prefix_ends_where_replies_differ():
    equal, other = rollouts([[8, 9], [8, 9]]), rollouts([[8, 9], [8, 7]])
    sizes = [
        prefix_nodes(batch.token_ids_NT, batch.mask_NT, batch.group_N).size_NT.tolist()
        for batch in (equal, other)
    ]
    assert sizes == [[[2, 2, 0, 0, 2, 2]] * 2, [[2, 2, 0, 0, 1, 1]] * 2]
    nodes = prefix_nodes(other.token_ids_NT, other.mask_NT, other.group_N)
    assert nodes.node_NT.tolist() == [[0, 1, -1, -1, 2, 3], [0, 1, -1, -1, 4, 5]]
    assert nodes.size_M.tolist() == [2, 2, 1, 1, 1, 1]
    credit_NT = torch.where(other.mask_NT, SPREAD, 0)
    got = rules.shared_prefix(credit_NT, other).abs().tolist()
    assert got == [[0.5, 0.5, 0, 0, 1, 1]] * 2


def test_a_run_of_conflict_tokens_ends_where_replies_differ():
    equal, other = rollouts([[8, 9], [8, 9]]), rollouts([[8, 9], [8, 7]])
    credit_NT = torch.where(equal.mask_NT, SPREAD, 0)

    def found(batch: cp.TokenBatch, runs: str) -> list[int]:
        return conflict_tokens(credit_NT, batch, runs=runs)[0].int().tolist()

    for runs in ("start", "end", "both"):
        assert found(equal, runs) == [1, 1, 0, 0, 1, 1]
    assert found(other, "start") == [1, 1, 0, 0, 0, 0]
    assert found(other, "end") == [0, 0, 0, 0, 1, 1]


def test_a_reply_after_the_last_model_token_is_padding():
    batch = rollouts([[8, 9], [8, 9]])
    cut = batch.replace(mask_NT=batch.mask_NT & (torch.arange(6) < 2))
    sizes = prefix_nodes(cut.token_ids_NT, cut.mask_NT, cut.group_N).size_NT.tolist()
    assert sizes == [[2, 2, 0, 0, 0, 0]] * 2


def test_only_model_tokens_count_at_a_node():
    """The one rollout wrote what the other one read: the place is the same, the count is one."""
    batch = rollouts([[8, 9], [8, 9]])
    mask_NT = batch.mask_NT.clone()
    mask_NT[0, 2] = True
    nodes = prefix_nodes(batch.token_ids_NT, mask_NT, batch.group_N)
    assert nodes.size_NT.tolist() == [[2, 2, 1, 0, 2, 2], [2, 2, 0, 0, 2, 2]]
