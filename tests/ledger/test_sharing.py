"""Sharing, residuals and the learning tax: against loops, by hand, and against the Fisher
matrix.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import counterpoise as cp
from counterpoise.ledger.account import head_state
from counterpoise.ledger.calculus.head_change import HeadState, head_change
from counterpoise.ledger.calculus.logprobs import Texts, at, copy_params, of_model, trainable
from counterpoise.ledger.measures.classes import Facts, token_classes
from counterpoise.ledger.measures.residual import entering, residuals
from counterpoise.ledger.measures.sharing import sharing
from counterpoise.ledger.summary import tax
from counterpoise.maths.columns import is_flip
from counterpoise.types import TokenBatch
from helpers.reference_ledger import clean_gpt2, loss_of, residual_mean, rows_of, sharing_of
from helpers.strategies import ragged_batches

ADVANTAGES = st.sampled_from([-1.5, -0.5, 0.0, 0.5, 2.0])


def lists(batch: TokenBatch) -> list[list[int]]:
    return [row[keep].tolist() for row, keep in zip(batch.token_ids_NT, batch.mask_NT)]


@settings(max_examples=60)
@given(ragged_batches(), st.data())
def test_sharing_equals_loops(batch, data):
    num = batch.num_rollouts
    advantage = data.draw(st.lists(ADVANTAGES, min_size=num, max_size=num))
    advantage_N1 = torch.tensor(advantage)[:, None]
    found = sharing(batch.token_ids_NT, batch.mask_NT, batch.group_N, advantage_N1)
    expected = sharing_of(lists(batch), batch.group_N.tolist(), advantage)
    for n, t in batch.mask_NT.nonzero().tolist():
        got = (
            found.positive_NT[n, t],
            found.negative_NT[n, t],
            found.is_full_NT[n, t],
            found.is_fork_NT[n, t],
        )
        assert tuple(value.item() for value in got) == expected[n, t]
    for column in found[1:]:
        assert not column[~batch.mask_NT].any()


@settings(max_examples=40)
@given(ragged_batches(min_group_size=2), st.data())
def test_residuals_equal_loops(batch, data):
    """Every variant of what enters, averaged over nodes that both signs share; causes are
    differences to the full residual.
    """
    num, width = batch.mask_NT.shape
    advantage = data.draw(st.lists(ADVANTAGES, min_size=num, max_size=num))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))

    def drawn() -> torch.Tensor:
        return torch.rand(num, width, dtype=torch.float64, generator=generator) * batch.mask_NT

    advantage_N = torch.tensor(advantage, dtype=torch.float64)
    rows = rows_of(batch, advantage_N[:, None] * drawn(), advantage_N, drawn())
    clipped_NT = (drawn() > 0.5) & batch.mask_NT
    loss = loss_of(torch.where(clipped_NT, 0, rows.credit_NT * drawn()), 0.5 + drawn(), clipped_NT)
    found = residuals(batch.token_ids_NT, rows, loss)
    nodes = sharing_of(lists(batch), batch.group_N.tolist(), advantage)
    assert bool(found) == any(positive and negative for positive, negative, _, _ in nodes.values())
    if found:
        values = {name: value_NT.tolist() for name, value_NT in entering(rows, loss).items()}
        mean = {
            name: residual_mean(lists(batch), batch.group_N.tolist(), advantage, value)
            for name, value in values.items()
        }
        assert found["full"] == pytest.approx(mean["full"])
        assert found["credit"] == pytest.approx(mean["credit"])
        assert found["advantage"] == pytest.approx(mean["advantage"])
        for cause in ("clip", "length", "coupling"):
            assert found[cause] == pytest.approx(mean["full"] - mean[f"no_{cause}"], abs=1e-12)


def group(
    reward: list[float], first: int = 5, lengths: list[int] | None = None, sampler=None
) -> TokenBatch:
    """One group whose rollouts share their first token and part after it."""
    lengths = lengths or [2] * len(reward)
    ids = [[first, *range(10 * n + 6, 10 * n + 5 + length)] for n, length in enumerate(lengths)]
    sampler = sampler or [[-1.0] * length for length in lengths]
    return TokenBatch.from_lists(
        ids, group=[0] * len(reward), reward=reward, sampler_logp=sampler, dtype=torch.float64
    )


def left_over(
    batch: TokenBatch, trainer_logp_NT: torch.Tensor, name: str, **axes
) -> dict[str, float]:
    method = cp.method(name, **axes)
    rows = method.rows(batch, method.assign(batch), torch.arange(batch.num_rollouts))
    rows = method.prepare(trainer_logp_NT, rows)
    return residuals(batch.token_ids_NT, rows, method.loss(trainer_logp_NT, rows))


REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0]


def test_sign_dependent_clip_is_named_as_the_cause():
    """Shared ratio 1.3 > 1.28: the positive rollouts are cut, the negative ones stay.

    Full residual 1, without the clip 0.
    """
    batch = group(REWARDS)
    logp_NT = batch.sampler_logp_NT.clone()
    logp_NT[:, 0] += torch.tensor(1.3).double().log()
    found = left_over(
        batch, logp_NT, "dr_grpo", loss={"name": "clipped", "clip_low": 0.2, "clip_high": 0.28}
    )
    assert found["fully_shared"] == pytest.approx(1.0)
    assert found["clip"] == pytest.approx(1.0)
    assert found["length"] == pytest.approx(0.0, abs=1e-12)
    assert found["credit"] == pytest.approx(0.0, abs=1e-12)


def test_symmetric_clip_leaves_nothing():
    batch = group(REWARDS)
    logp_NT = batch.sampler_logp_NT.clone()
    logp_NT[:, 0] += torch.tensor(1.3).double().log()
    assert (
        left_over(batch, logp_NT, "dr_grpo", loss={"name": "symmetric_clip"})["fully_shared"] == 0
    )


def test_sequence_coupling_is_named_as_the_cause():
    """GSPO's weight carries the other tokens' ratios into the shared one; DFPO's transformed
    weights do not.
    """
    batch = group(REWARDS)
    logp_NT = batch.sampler_logp_NT.clone()
    logp_NT[:, 1] += torch.tensor([0.3, -0.2, 0.1, 0.4, -0.5]).double()
    wide = {"name": "sequence_ratio", "clip_low": 10.0, "clip_high": 10.0}
    coupled = left_over(batch, logp_NT, "dr_grpo", loss=wide)
    assert coupled["fully_shared"] > 0.05
    assert coupled["coupling"] == pytest.approx(coupled["full"])
    assert coupled["clip"] == pytest.approx(0.0, abs=1e-12)
    for transform in ("min", "orth"):
        fixed = left_over(batch, logp_NT, "dfpo_min", loss={"name": "dfpo", "transform": transform})
        assert fixed["fully_shared"] == pytest.approx(0.0, abs=1e-12)
    unfixed = left_over(batch, logp_NT, "dfpo_min", loss={"name": "dfpo", "transform": "none"})
    assert unfixed["coupling"] == pytest.approx(unfixed["full"])


def test_length_is_named_as_the_cause():
    batch = group(REWARDS, lengths=[2, 5, 3, 2, 4])
    found = left_over(batch, batch.sampler_logp_NT, "dr_grpo", reduction="per_sequence")
    assert found["length"] == pytest.approx(found["full"])
    assert found["full"] > 0.05
    constant = left_over(batch, batch.sampler_logp_NT, "dr_grpo")
    assert constant["full"] == pytest.approx(0.0, abs=1e-12)


def test_partly_shared_nodes_keep_what_the_advantages_leave():
    """Rewards (1, 0, 0): A = (2/3, -1/3, -1/3).

    Rollouts 0 and 1 share two tokens, 2 leaves after one: residual 0 and (1/3) / 1.
    """
    batch = TokenBatch.from_lists(
        [[5, 6], [5, 6], [5, 7]],
        group=[0, 0, 0],
        reward=[1.0, 0.0, 0.0],
        sampler_logp=[[-1.0, -1.0]] * 3,
        dtype=torch.float64,
    )
    found = left_over(batch, batch.sampler_logp_NT, "dr_grpo")
    assert found["full"] == pytest.approx((0 + 1 / 3) / 2)
    assert found["advantage"] == pytest.approx(found["full"])
    assert found["fully_shared"] == pytest.approx(0.0, abs=1e-12)


def test_tax_is_the_fisher_form_to_second_order():
    """KL(after || before) at a context = 1/2 d^T F d + O(d^3), F = sum_v pi_v g_v g_v^T; here d =
    eta times the gradient of one rollout.
    """
    model = clean_gpt2()
    texts = Texts([[1, 2]], torch.tensor([[3, 4, 5]]), torch.ones(1, 3).bool())
    params = trainable(model)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    grads = torch.autograd.grad(
        of_model(model, texts).reverse(leaves, torch.tensor([0])).sum(), list(leaves.values())
    )
    ratios = []
    for eta in (2e-5, 1e-5):
        after = {name: p + eta * g for (name, p), g in zip(params.items(), grads)}
        start, end = head_state(model, texts), at(model, after, lambda m: head_state(m, texts))
        found = head_change(start, end, torch.tensor([3, 4, 5])).kl_M
        assert found is not None
        expected = []
        for t in range(3):
            total = 0.0
            for v in range(11):  # every token that could stand there
                ids_NT = torch.tensor([[*[3, 4, 5][:t], v]])
                other = Texts([[1, 2]], ids_NT, torch.ones(1, t + 1).bool())
                logp = of_model(model, other).reverse(leaves, torch.tensor([0]))[0, t]
                slope = sum(
                    (a * b).sum()
                    for a, b in zip(torch.autograd.grad(logp, list(leaves.values())), grads)
                )
                total += float((logp.exp() * slope**2).detach())
            expected.append(0.5 * eta**2 * total)
        ratios.append((found / torch.tensor(expected, dtype=torch.float64)).tolist())
    for coarse, fine in zip(*ratios):
        assert fine == pytest.approx(1.0, abs=0.01)
        assert abs(fine - 1) == pytest.approx(
            abs(coarse - 1) / 2, rel=0.1
        )  # what is left is one order smaller


def test_tax_by_kind_of_context():
    ids_NT = torch.tensor([[5, 6, 8], [5, 7, 8]])
    mask_NT = torch.ones(2, 3).bool()
    shared = sharing(ids_NT, mask_NT, torch.tensor([0, 0]), torch.tensor([[1.0], [-1.0]]))
    facts = Facts(
        mask_NT,
        torch.tensor([[1.0], [-1.0]]),
        torch.zeros(2, 3),
        torch.zeros(2, 3).long(),
        ["other"],
        shared,
    )
    kl_NT = torch.tensor([[1.0, 2.0, 4.0], [1.0, 6.0, 8.0]])
    assert tax(kl_NT, facts) == {"shared": 1.0, "discriminating": 4.0, "other": 6.0}
    assert tax(None, facts) == {}


def test_every_token_is_in_one_kind_of_context():
    """A good and a bad rollout and one without an advantage: 5 6 8, 5 6 8, 4 7 8."""
    mask_NT, group_N = torch.ones(3, 3).bool(), torch.zeros(3).long()

    def kinds(ids: list[list[int]], advantage: list[float]) -> list[list[str]]:
        shared = sharing(torch.tensor(ids), mask_NT, group_N, torch.tensor(advantage)[:, None])
        sets = shared.contexts
        assert (torch.stack(list(sets.values())).sum(0) == 1).all()
        return [[next(k for k in sets if sets[k][n, t]) for t in range(3)] for n in range(3)]

    part = [[5, 6, 8], [5, 6, 9], [5, 7, 8]]
    assert kinds(part, [1.0, 1.0, -1.0])[0] == ["shared", "discriminating", "other"]
    assert kinds(part, [1.0, -1.0, 0.0])[1][1] == "discriminating"  # the third takes another token
    twice = [[5, 6, 8], [5, 6, 8], [4, 7, 8]]
    assert kinds(twice, [1.0, -1.0, 0.0])[0] == ["discriminating", "both_signs", "both_signs"]
    assert kinds([[5, 6, 8]] * 3, [1.0, 1.0, 1.0])[0] == ["other"] * 3  # nothing is torn there


def test_kl_is_zero_without_a_step():
    model = clean_gpt2()
    texts = Texts([[1, 2]], torch.tensor([[3, 4, 5]]), torch.ones(1, 3).bool())
    same = at(model, copy_params(trainable(model)), lambda m: head_state(m, texts))
    assert isinstance(same, HeadState)
    change = head_change(head_state(model, texts), same, torch.tensor([3, 4, 5]))
    assert change.kl_M is not None
    assert change.kl_M.abs().max() == 0
    assert torch.equal(change.logp_before_M, change.logp_after_M)


def test_signs_go_by_turn():
    """Two rollouts say 5, read 9 and say 6 or 7; the first does better in turn 0 and worse in
    turn 1.
    """
    ids_NT = torch.tensor([[5, 9, 6, 8], [5, 9, 7, 8]])
    mask_NT, group_N = torch.tensor([[True, False, True, True]] * 2), torch.zeros(2).long()
    advantage_NT = torch.tensor([[1.0, 0.0, -2.0, -2.0], [-1.0, 0.0, 0.0, 0.0]])
    shared = sharing(ids_NT, mask_NT, group_N, advantage_NT)
    assert shared.positive_NT.tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
    assert shared.negative_NT.tolist() == [[1, 0, 1, 1], [1, 0, 0, 0]]
    assert not shared.is_fork_NT.any(), "after the reply nobody has a positive turn"
    both_NT = advantage_NT + torch.tensor([[0.0], [0.5]])
    both = sharing(ids_NT, mask_NT, group_N, both_NT)
    assert both.is_fork_NT.int().tolist() == [[0, 0, 1, 0]] * 2
    facts = Facts(mask_NT, advantage_NT, *[torch.zeros(2, 4)] * 2, ["other"], shared)
    classes = token_classes(["sign"], facts)["sign"]
    assert {name: int(is_in_NT.sum()) for name, is_in_NT in classes.items()} == {
        "positive": 1,
        "negative": 3,
        "zero": 2,
    }
    fell_NT = torch.full((2, 4), -1)
    assert is_flip(fell_NT, advantage_NT).int().tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
