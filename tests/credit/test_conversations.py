"""Every rule and every preset on conversations: what an environment says gets nothing and changes
nothing, however long it is; order and ranks change nothing.
"""

from __future__ import annotations

import pytest
import torch

import counterpoise as cp
from counterpoise.credit import RULES
from counterpoise.stage import build
from helpers import conformance_table as table
from helpers.credit_cases import on_two_ranks, run
from helpers.full_batch import make_batch
from helpers.replies import with_replies

SHORT = [1 + row % 3 for row in range(16)]
LONG = [2 + row * 5 % 7 for row in range(16)]
CHAINS = {
    name: [build("credit rule", RULES, {"name": name, **row.params})]
    for name, row in table.RULES.items()
}
METHODS = {name: cp.method(name) for name in cp.methods()}
METHODS |= {f"grpo with {name}": cp.method("grpo", credit=chain) for name, chain in CHAINS.items()}
METHODS |= {
    f"turn_rloo with {name}": cp.method("turn_rloo", credit=["turn_baseline", *chain])
    for name, chain in CHAINS.items()
    if not chain[0].has("assigns_turns") and not chain[0].has("replaces_credit")
}
METHODS |= {
    "turns by sides": cp.method(
        "turn_rloo",
        credit=["turn_baseline", "negative_token_filter"],
        loss="contrastive",
        reduction="side_means",
    )
}
PERMUTATION = torch.randperm(16, generator=torch.Generator().manual_seed(3))
DRAWS = {"clip_cov", "grpo with covariance", "turn_rloo with covariance"}


def drawn(value_NT: torch.Tensor, batch: cp.TokenBatch) -> torch.Tensor:
    """The values of the tokens that the model wrote, rollout by rollout."""
    assert not value_NT[~batch.mask_NT].any(), "an environment token has a number"
    return value_NT[batch.mask_NT].double()


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_longer_reply_changes_no_credit_and_no_scale(name):
    method, plain = METHODS[name], make_batch(turns=True)
    batches = [with_replies(plain, lengths) for lengths in (SHORT, LONG)]
    assert batches[0].mask_NT.shape[1] < batches[1].mask_NT.shape[1]
    outs = [method.assign(batch) for batch in batches]
    if name not in DRAWS:
        assert_same(*(drawn(out.credit_NT, batch) for out, batch in zip(outs, batches)))
        assert_same(*(drawn(out.weight_NT, batch) for out, batch in zip(outs, batches)))
    plans = [method.plan(batch, 2) for batch in batches]
    assert plans[0].manifest == plans[1].manifest
    for row_R in plans[0]:
        rows = [method.rows(batch, out, row_R) for batch, out in zip(batches, outs)]
        cut = [batch.select(row_R) for batch in batches]
        assert_same(*(drawn(one.scale_NT, batch) for one, batch in zip(rows, cut)))
        losses = [
            method.loss(logp_NT, method.prepare(logp_NT, one))
            for one, logp_NT in zip(rows, (batch.column("trainer_logp_NT") for batch in cut))
        ]
        if name not in DRAWS:
            assert_same(*(drawn(loss.coef_NT, batch) for loss, batch in zip(losses, cut)))


@pytest.mark.parametrize("name", sorted(set(METHODS) - DRAWS))
def test_order_changes_nothing(name):
    batch, method = with_replies(make_batch(turns=True), LONG), METHODS[name]
    expected, got = method.assign(batch), method.assign(batch.select(PERMUTATION))
    assert_same(got.credit_NT, expected.credit_NT[PERMUTATION])
    if expected.advantage_NU is not None:
        assert_same(got.advantage_NU, expected.advantage_NU[PERMUTATION])


@pytest.mark.parametrize("name", sorted(set(CHAINS) - {"covariance", "value_baseline"}))
def test_ranks_change_nothing(name):
    """On the advantage of rollouts, and on that of turns."""
    batch, rule = with_replies(make_batch(turns=True), LONG), CHAINS[name][0]
    cut_N = batch.group_N < 2
    for start in ("grpo", "turn_rloo"):
        credit_NT = METHODS[start].assign(batch).credit_NT
        whole_NT = run(rule, credit_NT, batch)
        first_NT, second_NT = on_two_ranks(rule, credit_NT, batch, cut_N)
        assert_same(first_NT, whole_NT[~cut_N])
        assert_same(second_NT, whole_NT[cut_N])


def test_chains_have_the_sign_of_the_turn():
    """A rollout with turns of both signs: NTF keeps all of its good turns."""
    batch = with_replies(make_batch(turns=True), SHORT)
    turns = METHODS["turn_rloo"].assign(batch)
    chain = METHODS["turn_rloo with negative_token_filter"].assign(batch)
    sides_N = (turns.credit_NT > 0).any(1) & (turns.credit_NT < 0).any(1)
    assert sides_N.any()
    is_good_NT = turns.credit_NT > 0
    assert torch.equal(chain.credit_NT[is_good_NT], turns.credit_NT[is_good_NT])
    assert torch.equal(chain.advantage_NU, turns.advantage_NU)
    assert 0 < (chain.credit_NT < 0).sum() < (turns.credit_NT < 0).sum()
