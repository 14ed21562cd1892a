"""What a grader says of an answer stays with its rollout."""

from __future__ import annotations

import torch

import counterpoise as cp
from counterpoise.rollouts import RolloutBatch
from counterpoise.run.rollouts import read_rollouts
from counterpoise.run.write import write_rollouts
from counterpoise.types import Prompt, TokenBatch


def rollouts(feedback):
    batch = TokenBatch.from_lists(
        [[5, 6], [5, 7]],
        group=[0, 0],
        reward=[1.0, 0.0],
        sampler_logp=[[-0.1, -0.2], [-0.1, -2.0]],
        entropy=[[0.1, 0.2], [0.1, 0.2]],
    )
    prompts, texts = [Prompt("a", "Write f.")], ["right", "wrong"]
    ids = [[1, 2]] * 2
    return RolloutBatch(prompts, ids, texts, ["stop"] * 2, batch, 0, [], feedback=feedback)


def test_feedback_is_selected_and_joined_with_its_rollouts():
    one = rollouts(["", "f(1) is 2"])
    assert one.select([1, 0]).feedback == ["f(1) is 2", ""]
    assert one.join(rollouts(None)).feedback == ["", "f(1) is 2", "", ""]
    assert rollouts(None).join(one).feedback == ["", "", "", "f(1) is 2"]
    assert rollouts(None).join(rollouts(None)).feedback is None
    assert rollouts(None).select([0]).feedback is None


def test_feedback_comes_back_from_the_run_folder(tmp_path):
    for number, feedback in enumerate((["", "f(1) is 2"], None)):
        one = rollouts(feedback)
        write_rollouts(tmp_path, number, one, cp.method("grpo").assign(one.batch))
        back = read_rollouts(tmp_path / "rollouts" / f"batch_{number:06}.parquet")
        assert back.feedback == feedback
        assert torch.equal(back.batch.reward_N, one.batch.reward_N)
