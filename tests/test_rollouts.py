"""Batches that are joined: groups, prompts and lost rollouts stay what they were."""

from __future__ import annotations

import torch

from counterpoise.rollouts import Conversation, RolloutBatch
from counterpoise.types import Prompt, TokenBatch


def rollouts(name: str, lost: bool = True) -> RolloutBatch:
    """Two prompts of two rollouts; the last one's environment failed, if ``lost``."""
    batch = TokenBatch(
        token_ids_NT=torch.tensor([[5], [6], [7], [8]]),
        mask_NT=torch.ones(4, 1, dtype=torch.bool),
        group_N=torch.tensor([0, 0, 1, 1]),
        reward_N=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        sampler_logp_NT=torch.full((4, 1), -1.0),
    )
    prompts, texts = (
        [Prompt(f"{name}{k}", "Play.") for k in range(2)],
        [f"{name}{k}" for k in "wxyz"],
    )
    whole = RolloutBatch(
        *(prompts, [[1]] * 4, texts, ["stop"] * 4, batch, 0, []),
        conversations=[Conversation(actions=(text,)) for text in texts],
    )
    return whole.select([0, 1, 2])._replace(lost=whole.select([3])) if lost else whole


def answers(one: RolloutBatch) -> list[tuple[str, str]]:
    """The prompt and the text of every rollout."""
    return [(one.prompts[g].id, text) for g, text in zip(one.batch.group_N.tolist(), one.texts)]


def test_lost_rollouts_keep_their_prompts_when_batches_are_joined():
    both = rollouts("a").join(rollouts("b"))
    assert [prompt.id for prompt in both.prompts] == ["a0", "a1", "b0", "b1"]
    assert answers(both)[-1] == ("b1", "by")
    assert both.lost is not None and both.lost.prompts == both.prompts
    assert answers(both.lost) == [("a1", "az"), ("b1", "bz")]


def test_so_they_do_where_one_batch_lost_none():
    for first, second, expected in ((False, True, ("b1", "bz")), (True, False, ("a1", "az"))):
        both = rollouts("a", first).join(rollouts("b", second))
        assert both.lost is not None and both.lost.prompts == both.prompts
        assert answers(both.lost) == [expected]
    assert rollouts("a", False).join(rollouts("b", False)).lost is None


def test_further_rollouts_of_the_same_prompts_lose_under_the_same_numbers():
    both = rollouts("a").extend(rollouts("a"))
    assert both.lost is not None and len(both.lost.prompts) == 2
    assert answers(both.lost) == [("a1", "az"), ("a1", "az")]
