"""The rule ``edits``: the alignment, the nearest correct answer, what a pair of rollouts gets."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from counterpoise import credit as rules
from counterpoise.credit.align import edit_credit, edit_distance, nearest_correct
from helpers import reference_credit as reference
from helpers.credit_cases import assert_rows, batch_of, laws
from helpers.strategies import ragged_batches


@st.composite
def id_pairs(draw):
    ids = st.lists(st.integers(0, 3), min_size=1, max_size=9)
    return draw(ids), draw(ids)


@laws
@given(pair=id_pairs())
def test_edit_credit_marks_a_shortest_alignment(pair):
    failed_ids, corrected_ids = pair
    failed, corrected = edit_credit(failed_ids, corrected_ids, 2.0)
    assert set(failed) <= {0.0, -2.0}
    assert set(corrected) <= {0.0, 2.0}
    # what is left on both sides is the same text, and the gaps between it cost max(gone, come)
    # edits each
    kept_failed = [t for t, c in enumerate(failed) if c == 0]
    kept_corrected = [t for t, c in enumerate(corrected) if c == 0]
    assert [failed_ids[t] for t in kept_failed] == [corrected_ids[t] for t in kept_corrected]
    ends_failed, ends_corrected = (
        [-1, *kept_failed, len(failed_ids)],
        [-1, *kept_corrected, len(corrected_ids)],
    )
    gaps = zip(itertools.pairwise(ends_failed), itertools.pairwise(ends_corrected))
    distance = reference.edit_distance(failed_ids, corrected_ids)
    assert sum(max(b - a, d - c) - 1 for (a, b), (c, d) in gaps) == distance
    assert edit_distance(failed_ids, corrected_ids) == distance / max(
        len(failed_ids), len(corrected_ids)
    )


@laws
@given(
    batch=ragged_batches(max_group_size=5, max_length=4, vocab=3),
    serving=st.sampled_from(["sum", "mean"]),
)
def test_edits_equal_their_twin(batch, serving):
    rollouts = reference.Rollouts(batch)
    out = [[0.0] * len(ids) for ids in rollouts.token_ids]
    served = {}
    for i, ids in enumerate(rollouts.token_ids):
        correct = [j for j in rollouts.siblings(i) if rollouts.reward[j] > 0.5]
        if rollouts.reward[i] > 0.5 or not correct:
            continue

        def nearness(j, ids=ids):
            other = rollouts.token_ids[j]
            return reference.edit_distance(ids, other) / max(len(ids), len(other)), other

        best = min(nearness(j) for j in correct)
        copies = [j for j in correct if nearness(j) == best]
        own, other = edit_credit(ids, rollouts.token_ids[copies[0]], 1.0)
        out[i] = own
        for j in copies:
            served.setdefault(j, []).append([c / len(copies) for c in other])
    for j, parts in served.items():
        out[j] = [sum(column) / (len(parts) if serving == "mean" else 1) for column in zip(*parts)]
    assert_rows(
        rules.edits(torch.ones(batch.mask_NT.shape, dtype=torch.float64), batch, serving=serving),
        out,
    )


def test_edits_by_hand():
    # failed 1 2 3 4 5 6, nearest correct 1 9 3 5 6 8: 2 -> 9, 4 goes, 8 comes; the far sibling is
    # left alone. Gain 0.9 - 0.2.
    batch = batch_of(
        [[1, 2, 3, 4, 5, 6], [1, 9, 3, 5, 6, 8], [7, 7, 7], [1, 2], [1, 2]],
        group=[4, 4, 4, 8, 8],
        reward=[0.2, 0.9, 0.8, 1.0, 1.0],
    )
    incoming_NT, g = torch.ones(5, 6, dtype=torch.float64), 0.7
    found_NT = rules.edits(incoming_NT, batch)
    assert_rows(found_NT, [[0, -g, 0, -g, 0, 0], [0, g, 0, 0, 0, g], [0] * 3, [0] * 2, [0] * 2])
    first_NT = rules.edits(incoming_NT, batch, first_edits=1)
    assert_rows(first_NT, [[0, -g, 0, 0, 0, 0], [0, g, 0, 0, 0, 0], [0] * 3, [0] * 2, [0] * 2])
    report = rules.edits.report(incoming_NT, found_NT, batch)
    assert {key: float(value) for key, value in report.items()} == pytest.approx(
        {
            "pairs": 1,
            "skipped_groups": 1,
            "skipped_group_frac": 0.5,
            "credit_sum": 0.0,
            "credit_sum_per_pair": 0.0,
        },
        abs=1e-12,
    )


def test_edits_of_a_reference_that_serves_two():
    # both failures differ from the only correct answer in their last token: its last token gets 1 +
    # 1, or their mean
    batch = batch_of([[1, 2], [1, 3], [1, 4]], reward=[1.0, 0.0, 0.0])
    assert_rows(rules.edits(torch.zeros(3, 2).double(), batch), [[0, 2], [0, -1], [0, -1]])
    assert_rows(
        rules.edits(torch.zeros(3, 2).double(), batch, serving="mean"), [[0, 1], [0, -1], [0, -1]]
    )
    # identical correct answers share it
    twice = batch_of([[1, 2], [1, 3], [1, 2]], reward=[1.0, 0.0, 1.0])
    assert_rows(rules.edits(torch.zeros(3, 2).double(), twice), [[0, 0.5], [0, -1], [0, 0.5]])


def test_nearest_correct_breaks_ties_by_reward_then_ids():
    assert nearest_correct([1, 2], [([1, 9], 0.8), ([1, 8], 1.0), ([1, 7], 1.0)]) == 2
    assert nearest_correct([1, 2], [([3, 4], 1.0), ([1, 2], 0.7)]) == 1


@pytest.mark.parametrize("num_tokens", [6, 7, 11, 23])
def test_ties_do_not_depend_on_the_order(num_tokens):
    zeros, last_differs = ([0] * num_tokens, 1.0), ([0] * (num_tokens - 1) + [1], 1.0)
    assert edit_distance([0], zeros[0]) == edit_distance([0], last_differs[0])
    assert nearest_correct([0], [zeros, last_differs]) == 0
    assert nearest_correct([0], [last_differs, zeros]) == 1
