"""The causal probe and the intervals against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from counterpoise.ledger.calculus.logprobs import LogProbs
from counterpoise.probes.output import mean_difference, means, number_dict, ratios
from counterpoise.probes.peer_masking import BUCKETS, candidates, causal_rows, full_update, tau
from counterpoise.types import Rows


class Table(nn.Module):
    """Two letters, one context."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2, dtype=torch.float64))


def table_update(token_ids_RT: torch.Tensor, weight_RT: torch.Tensor, lr: float):
    model = Table()

    def logp(params, row_R):
        return params["logits"].log_softmax(0)[token_ids_RT[row_R]]

    logprobs = LogProbs(
        torch.ones_like(token_ids_RT, dtype=torch.bool), [1] * len(token_ids_RT), logp, logp
    )
    return full_update(model, torch.optim.SGD(model.parameters(), lr=lr), logprobs, weight_RT)


def test_tau_by_hand() -> None:
    """Letter 0 at logits (0, 0): grad logp = (1/2, -1/2).

    With weights summing to W over tokens of letter 0, one batch of SGD moves the logit gap by lr W,
    so logp(0) goes to -log(1 + exp(-lr W)). Weights 1, 2, -3, 4 on four rollouts: W = 4 in full;
    leaving out rows 1, 2, 3 leaves W = 1.
    """
    weight_RT = torch.tensor([[1.0], [2.0], [-3.0], [4.0]], dtype=torch.float64)
    update = table_update(torch.zeros(4, 1, dtype=torch.long), weight_RT, lr=0.5)
    expected = -math.log(1 + math.exp(-0.5 * 4)) + math.log(1 + math.exp(-0.5 * 1))
    assert tau(update, (0, 0), [(1, 0), (2, 0), (3, 0)]) == pytest.approx(expected, abs=1e-14)
    assert torch.equal(update.model.logits, torch.zeros(2, dtype=torch.float64))  # put back
    assert update.model.logits.grad is None


def test_tau_of_different_letters_pulls_the_other_way() -> None:
    """A peer of letter 1 with weight w moves the gap by -lr w: it takes from letter 0 what a peer
    of letter 0 would give.
    """
    update = table_update(
        torch.tensor([[0], [1], [1], [1]]), torch.ones(4, 1, dtype=torch.float64), lr=0.1
    )
    # in full W = 1 - 3 = -2; without the peers W = 1
    expected = -math.log(1 + math.exp(0.2)) + math.log(1 + math.exp(-0.1))
    assert tau(update, (0, 0), [(1, 0), (2, 0), (3, 0)]) == pytest.approx(expected, abs=1e-14)


def rows_of(advantage: list[float], width: int) -> Rows:
    num = len(advantage)
    ones = torch.ones(num, width, dtype=torch.float64)
    advantage_N = torch.tensor(advantage, dtype=torch.float64)
    return Rows(
        row_R=torch.arange(num),
        mask_NT=ones.bool(),
        group_N=torch.zeros(num, dtype=torch.long),
        reward_N=(advantage_N > 0).double(),
        advantage_N=advantage_N,
        credit_NT=advantage_N[:, None] * ones,
        sampler_logp_NT=-ones,
        scale_NT=ones,
    )


def test_buckets_part_the_peers() -> None:
    """Every weighted token of the prompt's other rollouts is in exactly one of the eight
    buckets.
    """
    generator = torch.Generator().manual_seed(0)
    rows = rows_of([1.0, -1.0, 1.0, -1.0, 0.0], 4)
    ids_RT = torch.randint(0, 2, (5, 4), generator=generator)
    is_high_RT = torch.rand(5, 4, generator=generator) > 0.8
    weight_RT = rows.credit_NT.clone()
    found = torch.stack(
        [candidates((0, 1), bucket, rows, ids_RT, is_high_RT, weight_RT) for bucket in BUCKETS]
    ).sum(0)
    expected = torch.zeros(5, 4, dtype=torch.long)
    expected[1:4] = 1
    assert torch.equal(found, expected)


def test_causal_rows_have_the_sign_of_their_bucket() -> None:
    """One context: same-letter peers with positive advantage raise the target, negative ones lower
    it; different letters the reverse.
    """
    rows = rows_of([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0], 2)
    ids_RT = torch.tensor([[0, 1]] * 7)
    entropy_RT = torch.ones(7, 2, dtype=torch.float64)  # all in the top fifth
    update = table_update(ids_RT, rows.credit_NT, lr=0.01)
    table = pd.DataFrame(causal_rows(update, rows, ids_RT, entropy_RT, num_targets=3, seed=0))
    # every target has three same-letter peers or more on both sides: four buckets (high entropy),
    # none with low entropy
    assert set(table["entropy"]) == {"high"} and len(table) == 12
    direction = table["sign"].map({"positive": 1, "negative": -1}) * table["token"].map(
        {"same": 1, "different": -1}
    )
    assert (np.sign(table["tau"]) == direction).all()
    assert np.allclose(table["pull"], 3.0)


def test_fewer_than_three_prompts_have_no_interval() -> None:
    """Two prompts have three draws, and a chance agreement of the two would pass for certainty."""
    value, cluster = np.array([1.0, 3.0, 5.0, 8.0]), np.array([0, 0, 1, 2])
    found = means(value, {"one": cluster == 0, "two": cluster < 2, "three": cluster >= 0}, cluster)
    assert found["one"] == {"mean": 2.0, "low": None, "high": None}
    assert found["two"] == {"mean": 3.0, "low": None, "high": None}
    assert found["three"] == {
        "mean": 4.25,
        "low": 2.0,
        "high": 8.0,
    }  # a prompt alone is drawn in 1 of 27


def test_clustered_mean_and_interval() -> None:
    """Clusters with means 0, 0 and 3: a draw of three gives 0, 1, 2 or 3 with 8, 12, 6
    and 1 of 27.
    """
    value, cluster = np.array([0.0, 0.0, 0.0, 3.0, 3.0]), np.array([0, 1, 1, 2, 2])
    weight = np.array([1.0, 0.5, 0.5, 0.5, 0.5])
    ratio_B = ratios([value * weight], [weight], cluster)[:, 0]
    assert ratio_B[0] == 1.0
    assert np.allclose(
        [(ratio_B[1:] == x).mean() for x in range(4)], np.array([8, 12, 6, 1]) / 27, atol=0.03
    )
    assert number_dict(ratio_B) == {"mean": 1.0, "low": 0.0, "high": 3.0}


def test_means_by_set_and_joint_difference() -> None:
    """The second set is the first plus 1 in every cluster: means vary over draws, their difference
    does not.
    """
    value = pd.Series([0.0, 1.0, 5.0, 6.0, 10.0, 11.0])
    cluster, is_second = np.array([0, 0, 1, 1, 2, 2]), np.array([False, True] * 3)
    found = means(value, {"first": ~is_second, "none": np.zeros(6, bool)}, cluster)
    assert (
        set(found) == {"first"} and found["first"]["mean"] == 5.0 and found["first"]["low"] == 0.0
    )
    assert mean_difference(value, is_second, ~is_second, cluster) == {
        "mean": 1.0,
        "low": 1.0,
        "high": 1.0,
    }
