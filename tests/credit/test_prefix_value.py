"""VinePPO and SPO: credit by hand and by twin, where segments begin, what is sampled for them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import counterpoise as cp
from counterpoise import credit as rules
from counterpoise.credit.steps import improbable_starts, step_starts
from counterpoise.credit.values import measure_values
from counterpoise.rollouts import Completions, RolloutBatch
from counterpoise.types import Prompt
from helpers import reference_credit as reference
from helpers.credit_cases import as_lists, assert_rows, batch_of, credited_batches, laws
from helpers.full_batch import make_batch

ALL = {"split": "sentences", "samples": 2, "max_steps": None, "every": 2, "max_prob": 0.9}


def valued(batch, segment, value):
    """The batch with ragged rows of segments and one value per segment."""
    segment_NT = torch.full(batch.mask_NT.shape, -1)
    value_NT = torch.zeros(batch.mask_NT.shape, dtype=torch.float64)
    for i, row in enumerate(segment):
        segment_NT[i, : len(row)] = torch.tensor(row)
        for t, s in enumerate(row):
            value_NT[i, t] = value[i][s] if s >= 0 else 0.0
    return batch.replace(segment_NT=segment_NT, value_NT=value_NT)


def test_the_steps_of_the_paper_by_hand():
    batch = valued(batch_of([[1, 2, 3, 4]], reward=[1.0]), [[0, 1, 1, 2]], [[0.5, 0.75, 0.25]])
    credit_NT = rules.prefix_value(torch.zeros(1, 4).double(), batch)
    assert_rows(credit_NT, [[0.25, -0.5, -0.5, 0.75]])


def test_equal_neighbours_stay_apart():
    """Two segments of one value: the first added nothing, the second all that is left."""
    batch = valued(batch_of([[1, 2]], reward=[1.0]), [[0, 1]], [[0.5, 0.5]])
    assert_rows(rules.prefix_value(torch.zeros(1, 2).double(), batch), [[0.0, 0.5]])
    one = valued(batch_of([[1, 2]], reward=[1.0]), [[0, 0]], [[0.5]])
    assert_rows(rules.prefix_value(torch.zeros(1, 2).double(), one), [[0.5, 0.5]])


@st.composite
def valued_batches(draw):
    """Ragged batches, cut anywhere; some tokens before the first cut have no segment."""
    batch, credit_NT = draw(credited_batches())
    segments, values = [], []
    for length in batch.length_N.tolist():
        without, steps = draw(st.integers(0, length)), draw(st.lists(st.booleans(), min_size=32))
        row, number = [-1] * without, 0
        for t in range(length - without):
            number += int(t > 0 and steps[t % 32])
            row.append(number)
        segments.append(row)
        values.append([draw(st.integers(0, 9)) / 9 for _ in range(number + 1)])
    return valued(batch, segments, values), credit_NT, segments, values


@laws
@given(data=valued_batches())
def test_prefix_value_equals_its_twin_and_telescopes(data):
    batch, credit_NT, segments, values = data
    by_token = [[row[s] for s in ids] for row, ids in zip(values, segments)]
    r = reference.Rollouts(batch)
    got_NT = rules.prefix_value(credit_NT, batch)
    assert_rows(got_NT, reference.prefix_value(r, segments, by_token))
    for i, row in enumerate(segments):
        firsts = [t for t, s in enumerate(row) if s >= 0 and s not in row[:t]]
        total = sum(float(got_NT[i, t]) for t in firsts)
        expected = r.reward[i] - values[i][0] if firsts else 0.0
        assert total == pytest.approx(expected, abs=1e-12)


@laws
@given(data=valued_batches())
def test_whitening_leaves_tokens_without_a_segment_out(data):
    batch, credit_NT, segments, _ = data
    r, rows = reference.Rollouts(batch), as_lists(credit_NT, batch)
    inside = [[s >= 0 for s in row] for row in segments]
    assert_rows(rules.whiten(credit_NT, batch), reference.whiten(rows, r, 1e-8, inside))
    both = [
        [is_in and math.exp(logp) < 0.5 for is_in, logp in zip(*pair)]
        for pair in zip(inside, r.sampler_logp)
    ]
    assert_rows(
        rules.only_improbable(credit_NT, batch, max_prob=0.5, whiten=True),
        reference.whiten(rows, r, 1e-8, both),
    )


def test_segments_and_values_that_do_not_fit_are_refused():
    batch = batch_of([[1, 2, 3]])
    for row in ([0, 2, 2], [1, 1, 1], [0, 1, 0]):
        with pytest.raises(ValueError, match="segment_NT of rollouts .0. does not count"):
            batch.replace(segment_NT=torch.tensor([row]))
    fine = torch.tensor([[0, -1, 0]])
    for value in ([0.1, 0.0, 0.2], [math.nan, 0.0, math.nan]):
        with pytest.raises(ValueError, match="value_NT of rollouts .0. is not one finite number"):
            batch.replace(segment_NT=fine, value_NT=torch.tensor([value]))
    assert batch.replace(segment_NT=fine, value_NT=torch.tensor([[0.1, math.nan, 0.1]]))


@pytest.mark.parametrize(
    ("text", "split", "steps"),
    [
        ("Add 7.5. So 8.", "sentences", ["Add 7.5.", " So 8."]),
        ("A!? B... C", "sentences", ["A!?", " B...", " C"]),
        ("A.\n\nB. C\n", "sentences", ["A.\n\n", "B.", " C\n"]),
        ("A.\n\nB. C\n", "lines", ["A.\n\n", "B. C\n"]),
        ("1. A\n2. B", "sentences", ["1. A\n", "2. B"]),
        ("16. ", "sentences", ["16. "]),
        ("", "sentences", [""]),
    ],
)
def test_steps_of_a_text(text, split, steps):
    starts = [0, *step_starts(text, split)]
    assert [text[a:b] for a, b in zip(starts, [*starts[1:], None])] == steps


def test_a_cut_before_every_fifth_improbable_token():
    logp_T = torch.tensor([-0.01, *[-1.0] * 5, -0.01, *[-0.2] * 5]).double()
    assert improbable_starts(logp_T, every=5, max_prob=0.9) == [5, 11]
    assert improbable_starts(logp_T, every=5, max_prob=0.5) == [5]
    assert improbable_starts(logp_T, every=6, max_prob=0.5) == []


class Recorder:
    """A sampler whose completions earn 0.1 per token that they keep, plus 0.01 for the second."""

    def __init__(self, tokens=()):
        self.tokens, self.calls = tokens, []

    def complete(self, rollouts, places, *, samples, purpose):
        self.calls.append((list(places), samples, purpose))
        source = [k for k in range(len(places)) for _ in range(samples)]
        reward = [0.1 * places[k][1] + 0.01 * s for k in range(len(places)) for s in range(samples)]
        return Completions(
            torch.tensor(source), torch.tensor(reward, dtype=torch.float64), 3, ["a fault"]
        )

    def tokens_at(self, rollouts, offsets):
        assert [len(row) for row in offsets] == [1, 1, 0]
        return [list(row) for row in self.tokens]


def three_rollouts():
    """The first two of one prompt agree on two tokens; the third answers another one alike."""
    batch = batch_of([[1, 2, 3, 4], [1, 2, 5], [1, 2]], group=[0, 0, 1], reward=[1.0, 0.0, 1.0])
    texts, prompts = ["A. B", "A. C", "A"], [Prompt("0", "?"), Prompt("1", "?")]
    return RolloutBatch(prompts, [[9], [9], [8]], texts, ["stop"] * 3, batch, 1, ["before"])


def test_states_that_rollouts_share_are_sampled_once():
    sampler = Recorder([[2], [2], []])
    out = measure_values(three_rollouts(), sampler, **ALL)
    assert sampler.calls == [([(0, 0), (0, 2), (2, 0)], 2, "values")]
    assert out.batch.segment_NT.tolist() == [[0, 0, 1, 1], [0, 0, 1, -1], [0, 0, -1, -1]]
    assert_rows(
        out.batch.value_NT, [[0.005, 0.005, 0.205, 0.205], [0.005, 0.005, 0.205], [0.005] * 2]
    )
    assert (out.num_grader_failures, out.grader_messages) == (4, ["before", "a fault"])


def test_states_behind_the_cap_have_the_reward_for_their_value():
    sampler = Recorder([[1, 2, 3], [2], []])
    out = measure_values(three_rollouts(), sampler, **{**ALL, "max_steps": 2})
    assert sampler.calls[0][0] == [(0, 0), (0, 1), (1, 2), (2, 0)]
    assert out.batch.segment_NT[0].tolist() == [0, 1, 2, 2]
    assert_rows(out.batch.value_NT[:1], [[0.005, 0.105, 1.0, 1.0]])
    credit_NT = rules.prefix_value(torch.zeros(3, 4).double(), out.batch)
    assert_rows(credit_NT[:1], [[0.1, 0.895, 0.0, 0.0]])


def test_a_response_without_a_cut_has_no_segment_and_is_not_sampled():
    rollouts = three_rollouts()
    rare_NT = torch.tensor(
        [[-1.0, -0.01, -1.0, -1.0], [-0.01, -1.0, -0.01, 0.0], [-1.0, -1.0, 0, 0]]
    )
    rollouts = rollouts._replace(batch=rollouts.batch.replace(sampler_logp_NT=rare_NT.double()))
    sampler = Recorder()
    out = measure_values(rollouts, sampler, **{**ALL, "split": "improbable"})
    assert sampler.calls == [([(0, 0), (0, 2), (2, 0), (2, 1)], 2, "values")]
    assert out.batch.segment_NT.tolist() == [[0, 0, 1, 1], [-1] * 4, [0, 1, -1, -1]]
    none = measure_values(rollouts, Recorder(), **{**ALL, "split": "improbable", "every": 9})
    assert int(none.batch.segment_NT.max()) == -1


def test_the_presets_whiten_and_count_as_their_papers_do():
    batch = make_batch(width=9)
    vine = cp.method("vine_ppo").assign(batch).credit_NT
    inside_NT = batch.mask_NT & (batch.segment_NT >= 0)
    assert float(vine[inside_NT].mean()) == pytest.approx(0, abs=1e-12)
    assert float(vine[inside_NT].square().mean()) == pytest.approx(1, abs=1e-6)
    assert not vine[~inside_NT].any()
    method = cp.method("spo_chain")
    spo = method.assign(batch)
    kept_NT = inside_NT & (batch.sampler_logp_NT.exp() < 0.9)
    assert torch.equal(spo.credit_NT != 0, kept_NT)
    assert float(spo.credit_NT[kept_NT].mean()) == pytest.approx(0, abs=1e-12)
    scale_NT = method.rows(batch, spo, torch.arange(16)).scale_NT
    torch.testing.assert_close(
        scale_NT[batch.mask_NT], torch.full_like(scale_NT[batch.mask_NT], 1 / int(kept_NT.sum()))
    )


def test_constant_groups_get_credit():
    """What a group baseline cannot see: all were right, and one step nearly lost it."""
    batch = valued(batch_of([[1, 2], [1, 2]], reward=[1.0, 1.0]), [[0, 1]] * 2, [[0.9, 0.1]] * 2)
    credit_NT = rules.prefix_value(torch.zeros(2, 2).double(), batch)
    assert_rows(credit_NT, [[-0.8, 0.9]] * 2)
