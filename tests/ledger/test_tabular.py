"""The ledger on the softmax table, where every number is known: parts add up, shared tokens cancel
or do not.
"""

from __future__ import annotations

import pytest
import torch

import counterpoise as cp
from counterpoise.ledger.calculus.decompose import decompose
from counterpoise.ledger.calculus.logprobs import LogProbs, copy_params, trainable
from counterpoise.ledger.calculus.optimizers import response
from counterpoise.ledger.calculus.own import own_one_by_one
from counterpoise.ledger.measures.changes import cancellation
from counterpoise.ledger.measures.residual import residuals
from counterpoise.types import TokenBatch
from helpers.reference_ledger import phi
from helpers.tabular import TabularPolicy

LETTERS, LENGTH = 2, 3
# a group of four: all share the first letter, two the second, none the third
STRINGS = [[0, 0, 1], [0, 0, 0], [0, 1, 0], [0, 1, 1]]
REWARDS = [1.0, 0.0, 0.0, 0.5]


def policy() -> TabularPolicy:
    out = TabularPolicy(LETTERS, LENGTH)
    torch.manual_seed(0)
    with torch.no_grad():
        out.logits.normal_()
    return out


def batch_of(model: TabularPolicy) -> TokenBatch:
    ids_NT = torch.tensor(STRINGS)
    logp_NT = model.logp_NT(torch.zeros(4, dtype=torch.long), ids_NT).detach()
    return TokenBatch(
        ids_NT,
        torch.ones(4, 3).bool(),
        torch.zeros(4, dtype=torch.long),
        torch.tensor(REWARDS).double(),
        logp_NT,
        max_length=3,
    )


def logprobs_of(model: TabularPolicy, batch: TokenBatch) -> LogProbs:
    def logp(params, row_R):
        ids_RT = batch.token_ids_NT[row_R]
        logits_RTA = params["logits"][
            model.context_NT(torch.zeros(len(row_R), dtype=torch.long), ids_RT)
        ]
        return logits_RTA.log_softmax(-1).gather(2, ids_RT[:, :, None])[:, :, 0]

    return LogProbs(batch.mask_NT, [LENGTH] * len(STRINGS), logp, logp)


def take_update(name: str, lr: float, **axes):
    """One SGD batch by a preset; what the ledger says of it."""
    model = policy()
    batch = batch_of(model)
    method = cp.method(name, **axes)
    rows = method.rows(batch, method.assign(batch), torch.arange(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    before = copy_params(trainable(model))
    loss = method.loss(model.logp_NT(torch.zeros(4, dtype=torch.long), batch.token_ids_NT), rows)
    (loss.loss_NT * rows.scale_NT).sum().backward()
    optimizer.step()
    weight_NT = loss.coef_NT * rows.scale_NT
    sign_N1 = rows.advantage_N.sign()[:, None]
    classes = {
        "sign": {
            "positive": (sign_N1 > 0) & batch.mask_NT,
            "negative": (sign_N1 <= 0) & batch.mask_NT,
        }
    }
    logprobs = logprobs_of(model, batch)
    found = decompose(
        logprobs,
        before,
        trainable(model),
        weight_NT,
        classes,
        response(optimizer, dict(model.named_parameters())),
    )
    return model, batch, rows, loss, before, weight_NT, logprobs, found


def exact_change(model: TabularPolicy, batch: TokenBatch, before, direction) -> torch.Tensor:
    """(e_a - pi(context)) . direction[context], token by token: the exact first-order change of
    log-softmax.
    """
    context_NT = model.context_NT(torch.zeros(4, dtype=torch.long), batch.token_ids_NT)
    out = torch.zeros(4, 3, dtype=torch.float64)
    for n in range(4):
        for t in range(3):
            c, a = int(context_NT[n, t]), int(batch.token_ids_NT[n, t])
            pi = before["logits"][c].softmax(-1).tolist()
            out[n, t] = sum(((v == a) - pi[v]) * direction[c, v].item() for v in range(LETTERS))
    return out


def test_parts_add_up_to_the_exact_change():
    model, batch, rows, loss, before, weight_NT, logprobs, found = take_update("dr_grpo", 0.1)
    direction = model.logits.detach() - before["logits"]
    expected_NT = exact_change(model, batch, before, direction)
    torch.testing.assert_close(found.predicted_NT, expected_NT, rtol=1e-13, atol=1e-16)
    torch.testing.assert_close(
        found.parts["sign"]["positive"] + found.parts["sign"]["negative"],
        expected_NT,
        rtol=1e-12,
        atol=1e-16,
    )
    assert expected_NT.abs().max() > 1e-3


def test_own_and_coupling_by_hand():
    """In a table only tokens of one context couple: own is eta c_j phi_jj, coupling sums phi over
    the other rollouts at that context.
    """
    eta = 0.1
    model, batch, rows, loss, before, weight_NT, logprobs, found = take_update("dr_grpo", eta)
    context_NT = model.context_NT(torch.zeros(4, dtype=torch.long), batch.token_ids_NT)
    tokens = [(n, t) for n in range(4) for t in range(3)]
    own = weight_NT * own_one_by_one(logprobs, before, {"logits": eta}, tokens).view(4, 3)
    for n in range(4):
        for t in range(3):
            pi, a = (
                before["logits"][context_NT[n, t]].softmax(-1).tolist(),
                int(batch.token_ids_NT[n, t]),
            )
            assert float(own[n, t]) == pytest.approx(
                eta * float(weight_NT[n, t]) * phi(pi, pi, a, a), abs=1e-16
            )
            others = [m for m in range(4) if m != n and context_NT[m, t] == context_NT[n, t]]
            coupling = sum(
                eta * float(weight_NT[m, t]) * phi(pi, pi, a, int(batch.token_ids_NT[m, t]))
                for m in others
            )
            assert float(found.predicted_NT[n, t]) == pytest.approx(
                float(own[n, t]) + coupling, abs=1e-15
            )


def test_actual_change_approaches_the_prediction_quadratically():
    """Halving the batch quarters what first order leaves out."""
    gaps = []
    for rate in (0.4, 0.2):
        model, batch, _, _, before, _, logprobs, found = take_update("dr_grpo", rate)
        rows = torch.arange(4)
        delta_NT = logprobs.forward(trainable(model), rows) - logprobs.forward(before, rows)
        gaps.append(float((delta_NT - found.predicted_NT).norm()))
    assert gaps[0] / gaps[1] == pytest.approx(4.0, rel=0.05)


def test_shared_tokens_cancel_under_group_mean_with_constant_length():
    """All four rollouts share the first letter: the advantages sum to 0, so good and bad pull it
    exactly equally.
    """
    *_, batch, rows, loss, before, weight_NT, logprobs, found = take_update("dr_grpo", 0.1)
    positive, negative = (
        found.parts["sign"]["positive"][:, 0],
        found.parts["sign"]["negative"][:, 0],
    )
    assert positive.min() > 1e-4
    torch.testing.assert_close(positive, -negative, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        cancellation(list(found.parts["sign"].values())[:2])[:, 0],
        torch.ones(4).double(),
        rtol=0,
        atol=1e-12,
    )
    assert found.predicted_NT[:, 0].abs().max() < 1e-15
    left = residuals(batch.token_ids_NT, rows, loss)
    assert left["fully_shared"] < 1e-15
    assert left["clip"] == left["length"] == left["coupling"] == 0


def test_shared_tokens_do_not_cancel_under_positives_only():
    *_, batch, rows, loss, before, weight_NT, logprobs, found = take_update(
        "dr_grpo", 0.1, advantage="positives_only"
    )
    assert found.parts["sign"]["negative"].abs().max() == 0
    assert found.predicted_NT[:, 0].min() > 1e-4
    assert cancellation(list(found.parts["sign"].values())[:2])[:, 0].max() == 0


def test_per_sequence_length_breaks_the_cancellation():
    """The same group, but rollouts of different length under 1/n_i: a shared first letter keeps
    |sum A_i/n_i| / sum |A_i|/n_i.

    A = (0.625, -0.375, -0.375, 0.125), n = (3, 1, 3, 3): (0.625 - 1.125 - 0.375 + 0.125) / (0.625 +
    1.125 + 0.375 + 0.125) = 0.75 / 2.25."""
    model = policy()
    batch = batch_of(model)
    mask_NT = batch.mask_NT.clone()
    mask_NT[1, 1:] = False
    batch = batch.replace(mask_NT=mask_NT)
    method = cp.method("dr_grpo", reduction="per_sequence")
    rows = method.rows(batch, method.assign(batch), torch.arange(4))
    loss = method.loss(batch.sampler_logp_NT, rows)
    left = residuals(batch.token_ids_NT, rows, loss)
    assert left["fully_shared"] == pytest.approx(1 / 3)
    assert left["length"] > 0
    assert left["clip"] == left["coupling"] == 0
