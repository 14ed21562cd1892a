"""Switched off, counterpoise changes nothing: training through our trainer equals plain TRL bit for
bit.
"""

from __future__ import annotations

import functools
import tempfile

import pytest

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from helpers import trl_tiny

pytestmark = pytest.mark.hosts
LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
ALL_ONES = {
    "method": "dapo",
    "method_axes": {"credit": ["uniform"]},
    "method_advantage": False,
    "method_loss": False,
}


@functools.cache
def plain_weights(loss_type, level="token"):
    """TRL alone: two generations of four updates."""
    trainer = trl_tiny.plain(
        tempfile.mkdtemp(), args={"loss_type": loss_type, "importance_sampling_level": level}
    )
    start = trl_tiny.weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 8
    assert trl_tiny.largest_gap(start, trl_tiny.weights(trainer)) > 1e-3
    return trl_tiny.weights(trainer)


def trained(tmp_path, **args):
    trainer = trl_tiny.ours(tmp_path, args=args)
    trainer.train()
    return trainer


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_uniform_is_plain_trl(loss_type, tmp_path):
    trainer = trained(tmp_path, method="uniform", loss_type=loss_type)
    trl_tiny.assert_identical(trl_tiny.weights(trainer), plain_weights(loss_type))


@pytest.mark.parametrize("loss_type", ["grpo", "luspo"])
def test_uniform_is_plain_trl_at_sequence_level(loss_type, tmp_path):
    trainer = trained(
        tmp_path, method="uniform", loss_type=loss_type, importance_sampling_level="sequence"
    )
    trl_tiny.assert_identical(trl_tiny.weights(trainer), plain_weights(loss_type, "sequence"))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_weights_of_one_are_plain_trl(loss_type, tmp_path):
    """Here the whole path runs: a TokenBatch, a rule, (B, T) advantages in TRL's loss; every weight
    is 1.
    """
    if loss_type == "luspo" and trl.__version__.startswith("1.9."):
        pytest.skip("refused: luspo of trl 1.9 does not mask padding")
    trainer = trained(tmp_path, loss_type=loss_type, **ALL_ONES)
    assert (
        trainer._buffered_inputs[0]["advantages"].shape
        == trainer._buffered_inputs[0]["completion_ids"].shape
    )
    trl_tiny.assert_identical(trl_tiny.weights(trainer), plain_weights(loss_type))


def test_metrics_of_trl_stay(tmp_path):
    """Everything that plain TRL logs is logged, with the same numbers."""
    plain = trl_tiny.plain(tmp_path / "plain")
    plain.train()
    trainer = trained(tmp_path / "ours", method="uniform")
    timed = ("runtime", "per_second", "step_time", "profiling")
    for expected, got in zip(plain.state.log_history, trainer.state.log_history, strict=True):
        assert got.keys() == expected.keys()
        same = [key for key in expected if not any(word in key for word in timed)]
        assert {key: got[key] for key in same} == {key: expected[key] for key in same}
