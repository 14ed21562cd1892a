"""A batch of rollouts with everything that is known of them: prompts, texts, conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.types import Prompt, TokenBatch, stack_batches


class Conversation(NamedTuple):
    """What a model and an environment said to each other in one rollout.

    Args:
        actions: what the model wrote, turn by turn.
        replies: what the environment answered, one per turn; the last may be missing.
        states: the environment's key of the state before each turn, "" where it gave none.
        end_reason: done, turns, length, failed or timed out.
        message: what failed.
        metrics: the environment's own numbers, averaged over the turns that have them.
    """

    actions: tuple[str, ...] = ()
    replies: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    end_reason: str = "done"
    message: str = ""
    metrics: Mapping[str, float] = {}


class Completions(NamedTuple):
    """Fresh ends of responses, graded with what they complete.

    Args:
        source_N: the number of the state that each completes.
        reward_N: the grader's number for the whole response.
    """

    source_N: Tensor
    reward_N: Tensor
    num_grader_failures: int
    grader_messages: list[str]


class RolloutBatch(NamedTuple):
    """A batch with everything that is known of it.

    ``prompt_ids`` and ``texts`` are one per rollout, ``prompts`` one per group: rollout i answers
    ``prompts[group_N[i]]``. With an environment there is one of ``conversations`` per rollout, and
    ``lost`` are the rollouts whose environment failed: they are shown and counted, nothing else.
    ``feedback`` is what the grader says of each answer, None where it says nothing.
    """

    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    texts: list[str]
    stop_reason: list[str]
    batch: TokenBatch
    num_grader_failures: int
    grader_messages: list[str]
    conversations: list[Conversation] | None = None
    lost: RolloutBatch | None = None
    feedback: list[str] | None = None

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        """The chosen rollouts, in that order; all prompts stay."""
        row_R = torch.tensor(rows, dtype=torch.long, device=self.batch.mask_NT.device)
        return self._replace(
            prompt_ids=[self.prompt_ids[row] for row in rows],
            texts=[self.texts[row] for row in rows],
            stop_reason=[self.stop_reason[row] for row in rows],
            batch=self.batch.select(row_R),
            conversations=self.conversations and [self.conversations[row] for row in rows],
            feedback=self.feedback and [self.feedback[row] for row in rows],
        )

    def extend(self, more: RolloutBatch) -> RolloutBatch:
        """With further rollouts of the same prompts."""
        return self._replace(
            prompt_ids=self.prompt_ids + more.prompt_ids,
            texts=self.texts + more.texts,
            stop_reason=self.stop_reason + more.stop_reason,
            batch=stack_batches([self.batch, more.batch]),
            num_grader_failures=self.num_grader_failures + more.num_grader_failures,
            grader_messages=self.grader_messages + more.grader_messages,
            conversations=self.conversations and self.conversations + (more.conversations or []),
            lost=self.lost.extend(more.lost) if self.lost and more.lost else self.lost or more.lost,
            feedback=_feedback(self) + _feedback(more) if self.feedback or more.feedback else None,
        )

    def join(self, more: RolloutBatch) -> RolloutBatch:
        """With rollouts of further prompts, whose groups stay apart."""
        prompts, both = self.prompts + more.prompts, self.extend(_renumber(more, len(self.prompts)))
        lost = both.lost and both.lost._replace(prompts=prompts)
        return both._replace(prompts=prompts, lost=lost)


def _renumber(rollouts: RolloutBatch, first: int) -> RolloutBatch:
    """The same rollouts with groups counted from ``first``, those that were lost too."""
    batch = rollouts.batch.replace(group_N=rollouts.batch.group_N + first)
    return rollouts._replace(batch=batch, lost=rollouts.lost and _renumber(rollouts.lost, first))


def _feedback(rollouts: RolloutBatch) -> list[str]:
    return rollouts.feedback or [""] * len(rollouts.texts)
