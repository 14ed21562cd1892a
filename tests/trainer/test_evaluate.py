"""Numbers of an evaluation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from counterpoise.maths.intervals import over_prompts
from counterpoise.policy import load_model
from counterpoise.tasks import task as make_task
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.evaluate import (
    difference,
    eval_metrics,
    evaluate,
    held_out,
    pass_at_k,
    powers_of_two,
)


def test_pass_at_k_is_the_mean_over_all_subsets():
    """The unbiased formula equals counting every way to draw k of the n samples."""
    rng = np.random.default_rng(0)
    correct_PK = rng.random((5, 6)) < 0.3
    for k in range(1, 7):
        by_hand = np.mean(
            [
                [any(row[list(pick)]) for pick in itertools.combinations(range(6), k)]
                for row in correct_PK
            ]
        )
        assert pass_at_k(correct_PK, k) == pytest.approx(by_hand)
    with pytest.raises(ValueError, match="between 1 and the 6 samples"):
        pass_at_k(correct_PK, 7)


def test_interval_covers_the_mean_as_often_as_it_says():
    """95% intervals of 60 Bernoulli(0.4) draws hold 0.4 in most of 200 repetitions."""
    rng = np.random.default_rng(1)
    hits = 0
    for repetition in range(200):
        _, low, high = over_prompts((rng.random(60) < 0.4).astype(float), seed=repetition)
        hits += low <= 0.4 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_paired_difference_is_narrower_than_two_intervals():
    rng = np.random.default_rng(2)
    easy = rng.random(300)
    a = (rng.random(300) < easy).astype(float)[:, None]
    b = a.copy()
    b[:15] = 1 - b[:15]
    mean, low, high = difference(a, b)
    assert mean == pytest.approx((b - a).mean())
    whole = over_prompts(a.mean(1))
    assert high - low < whole.high - whole.low
    with pytest.raises(ValueError, match="same prompts"):
        difference(a, b[:10])


def test_a_run_s_gain_is_over_the_same_prompts():
    def row(*rewards):
        mean = sum(rewards) / len(rewards)
        accuracy = {"eval/accuracy": mean, "eval/accuracy_low": 0.0, "eval/accuracy_high": 1.0}
        return accuracy | {"reward_PK": [[reward] for reward in rewards]}

    before, after = [0.0, 1.0] * 20, [0.0, 1.0] * 15 + [1.0] * 10
    first, last, gain = held_out([row(*before), row(*before[::-1]), row(*after)])
    assert first is not None and last is not None and gain is not None
    assert (first.mean, last.mean, gain.mean) == (0.5, 0.625, pytest.approx(0.125))
    assert 0 < gain.low < 0.125 < gain.high <= 0.25
    graded = held_out([row(0.0, 2.0, 2.0), row(2.0, 2.0, 3.0)], success=3.0)
    assert graded.gain is not None and graded.gain.mean == pytest.approx(1 / 3)
    assert held_out([]) == (None, None, None)
    assert held_out([row(*before)]).gain is None
    assert held_out([row(*before), row(*after[:-1])]).gain is None  # other prompts


def test_accuracy_is_the_share_of_right_answers_whatever_they_earn():
    """Rewards of 2 and 3: all earn, those of 3 are right; the mean is told beside it."""
    policy, task = load_model("bundled"), make_task("arithmetic", difficulty="easy")

    class Paid:
        is_trusted = True  # graded here: a local class does not travel

        def prompts(self, *args, **kwargs):
            return task.prompts(*args, **kwargs)

        def reward(self, prompt, text):
            return 2.0 + task.reward(prompt, text)

    plain, paid = (
        evaluate(policy, one, parse_config({"task": {"name": "arithmetic", **more}}), prompts=12)
        for one, more in ((task, {}), (Paid(), {"success": 3.0}))
    )
    assert plain.accuracy == paid.accuracy and 0 < plain.accuracy.mean < 1
    assert paid.mean_reward == pytest.approx(2 + plain.mean_reward)
    numbers = eval_metrics(paid)
    assert numbers["eval/accuracy"] == plain.mean_reward
    assert numbers["eval/reward"] == paid.mean_reward


def test_powers_of_two():
    assert [powers_of_two(k) for k in (1, 2, 7, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]
