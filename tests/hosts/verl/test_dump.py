"""verl's rollout dumps: a file written by verl's own trainer becomes a run folder."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

pytest.importorskip(
    "verl.trainer.ppo.v1",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import PPOTrainerSync

from counterpoise.run.importers.convert import import_run
from helpers.verl.cases import batch_meta, config, rollouts, trainer

pytestmark = [pytest.mark.hosts, pytest.mark.verl]


def decode(ids, skip_special_tokens):
    return " ".join(f"w{int(k)}" for k in ids if k)


def test_a_dump_of_verls_trainer(queue_of, tmp_path):
    """``trainer.rollout_data_dir``, with two rows that verl appended to fill up the batch."""
    rows = rollouts(num_prompts=3, size=2, seed=1)
    queue_of(rows)
    host = trainer(PPOTrainerSync, config("grpo"))
    host.tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=9, decode=decode)
    host.global_steps = 12
    host._init_dump_executor()
    batch = upsample_batch_to_divisible_size(batch_meta(rows), 4, 9)
    assert len(batch) == 8
    host._log_rollout_data(batch, {}, str(tmp_path / "dump"))
    host._shutdown_dump_executor()

    assert import_run("verl", tmp_path / "dump", tmp_path / "run") == {12: 6}
    out = pq.read_table(tmp_path / "run" / "rollouts" / "batch_000012.parquet").to_pydict()
    assert out["reward"] == [float(row.fields["rm_scores"].sum()) for row in rows]
    assert out["group"] == [0, 0, 1, 1, 2, 2]
    assert out["text"] == [decode(row.fields["responses"], True) for row in rows]


@pytest.mark.parametrize("cls", [PPOTrainerSync, RayPPOTrainer])
def test_files_of_both_writers(cls, tmp_path):
    """``validation_data_dir`` and the older trainer write numbers of the reward function beside."""
    texts, scores = ["a b", "c"], [0.5, 1.0]
    more = {"acc": [0.0, 1.0], "reward": scores, "short": [1]}
    cls._write_generations(["q", "q"], texts, ["c", None], scores, more, str(tmp_path / "d"), 3)
    assert import_run("verl", tmp_path / "d", tmp_path / "run", rewards=["acc"]) == {3: 2}
    out = pq.read_table(tmp_path / "run" / "rollouts" / "batch_000003.parquet").to_pydict()
    assert out["reward"] == [0.0, 1.0] and out["answer"] == ["c", None] and out["text"] == texts
