"""OPSA and ICT: values by hand, twins, what holds at the borders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

import counterpoise as cp
from counterpoise import credit as rules
from helpers import reference_credit as reference
from helpers.credit_cases import as_lists, assert_rows, batch_of, credited_batches, laws, spread
from helpers.full_batch import make_batch


def test_opsa_by_hand():
    """Credit -1 on all three tokens: -1/2 where the entropy is least, -1 where it is largest."""
    batch = batch_of([[1, 2, 3]], entropy=[[0.2, 1.0, 0.6]])
    assert_rows(rules.rare_uncertain(spread([-1.0], batch), batch), [[-0.5, -1, -0.75]])
    flat = batch_of([[1, 2]], entropy=[[0.3, 0.3]])
    assert_rows(rules.rare_uncertain(spread([-1.0], flat), flat), [[-0.75, -0.75]])


def test_opsa_reads_no_reward_and_works_with_one_rollout():
    batch = make_batch()
    method = cp.method("opsa")
    credit = method.assign(batch)
    other = method.assign(batch.replace(reward_N=torch.rand(16).double()))
    assert torch.equal(credit.credit_NT, other.credit_NT)
    assert float(credit.credit_NT.max()) == 0
    assert -1 <= float(credit.credit_NT.min()) <= -0.5
    method.check_group_size(1, "one")
    rows = method.rows(batch, credit, torch.arange(16))
    expected_NT = batch.mask_NT / (16 * batch.length_N[:, None])
    torch.testing.assert_close(rows.scale_NT, expected_NT.double())


def with_candidates(batch, seed):
    """Two of four candidates for every token, on a coarse grid of probabilities."""
    gen = torch.Generator().manual_seed(seed)
    shape = (*batch.mask_NT.shape, 4)
    prob_NTV = torch.randint(1, 5, shape, generator=gen).double()
    best = (prob_NTV / prob_NTV.sum(-1, keepdim=True)).topk(2)
    return batch.replace(topk_ids_NTK=best.indices, topk_logp_NTK=best.values.log())


def as_dicts(batch):
    ids, probs = batch.topk_ids_NTK.tolist(), batch.topk_logp_NTK.exp().tolist()
    return [
        [dict(zip(ids[i][t], probs[i][t])) for t in range(n)]
        for i, n in enumerate(batch.length_N.tolist())
    ]


@laws
@given(data=credited_batches())
def test_divergence_equals_its_twin(data):
    batch, credit_NT = data
    batch, r = with_candidates(batch, 0), reference.Rollouts(batch)
    candidates = as_dicts(batch)
    expected = [
        [reference.divergence_from_group(r, candidates, i, t) for t in range(n)]
        for i, n in enumerate(batch.length_N.tolist())
    ]
    assert_rows(rules.divergence_from_group(batch), expected)


def test_group_divergence_equals_its_twin():
    """Continuous probabilities, so that no tie hangs on the last bit."""
    batch = make_batch(num_groups=3, size=4, width=9)
    credit_NT = torch.randn(batch.mask_NT.shape, dtype=torch.float64) * batch.mask_NT
    for fraction in (0.1, 0.5, 1.0):
        expected = reference.group_divergence(
            as_lists(credit_NT, batch), reference.Rollouts(batch), as_dicts(batch), fraction
        )
        assert_rows(rules.group_divergence(credit_NT, batch, fraction=fraction), expected)


def test_opposite_certainties_by_hand():
    """p (1, 0), the other (0, 1): 0.21576 against their mean, whoever is asked."""
    batch = batch_of([[1], [2]]).replace(
        topk_ids_NTK=torch.tensor([[[1, 2]], [[2, 1]]]),
        topk_logp_NTK=torch.tensor([1.0, 0.0]).log().expand(2, 1, 2),
    )
    for topk in (None, 1):
        divergence_NT = rules.divergence_from_group(batch, topk=topk)
        assert divergence_NT.flatten().tolist() == pytest.approx([0.21576] * 2, abs=5e-6)


def test_nothing_diverges_at_the_first_token_or_alone():
    batch = batch_of([[1, 2, 3], [1, 3], [4, 4]], group=[0, 0, 7])
    batch = with_candidates(batch, 2)
    first = {
        "topk_ids_NTK": batch.topk_ids_NTK.clone(),
        "topk_logp_NTK": batch.topk_logp_NTK.clone(),
    }
    for column in first.values():
        column[1, 0] = column[0, 0]
    divergence_NT = rules.divergence_from_group(batch.replace(**first))
    assert not divergence_NT[:, 0].any()
    assert float(divergence_NT[0, 1]) > 0
    assert divergence_NT[0, 2] == 0
    assert not divergence_NT[2].any()


def test_ict_divides_by_the_tokens_that_it_keeps():
    batch, method = make_batch(), cp.method("ict", credit={"fraction": 0.3})
    credit = method.assign(batch)
    rows = method.rows(batch, credit, torch.arange(16))
    kept_N = (credit.credit_NT != 0).sum(1)
    live_N = kept_N > 0
    expected_N = torch.ceil(0.3 * batch.length_N[live_N] - 1e-9).long()
    assert torch.equal(kept_N[live_N], expected_N)
    torch.testing.assert_close(rows.scale_NT[:, 0][live_N], (1 / (16 * kept_N[live_N])).double())
