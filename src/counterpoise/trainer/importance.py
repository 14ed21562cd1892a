"""The influence of tokens on the answer: where the task says that it begins, and the column that
comes of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoise.catalogue.method import Method
from counterpoise.maths.reduce import derived_seed
from counterpoise.policy import Policy, measure_importance
from counterpoise.policy.offsets import positions_at, written
from counterpoise.rollouts import RolloutBatch
from counterpoise.tasks import Task, answer_start
from counterpoise.trainer.config import Config, ConfigError
from counterpoise.trainer.update import budget_that_fits
from counterpoise.types import Prompt

COLUMN = "importance_NT"


def check_answers(method: Method, task: Task, name: str) -> None:
    """A method that reads ``importance_NT`` has a task that says where an answer begins."""
    if COLUMN in method.needs and getattr(task, "answer_start", None) is None:
        raise ConfigError(
            f"method: {method.name} reads {COLUMN}, the influence of tokens on the answer, and the"
            f" task {name!r} does not say where an answer begins. Give it a method"
            " answer_start(prompt, text) (docs/guides/own_task.md), or take another method."
        )


def answer_tokens(
    policy: Policy, task: Task, asked: Sequence[Prompt], token_ids_NT: Tensor, mask_NT: Tensor
) -> Tensor:
    """The position of each rollout's first answer token, [N]; -1 where it has no answer. Rollout i
    answers ``asked[i]``.
    """
    own = written(policy.tokenizer, token_ids_NT, mask_NT)
    offsets = [answer_start(task, prompt, text) for prompt, text in zip(asked, own.texts)]
    answers = positions_at(policy.tokenizer, own, offsets)
    return torch.tensor(answers, device=token_ids_NT.device)


def score_tokens(
    policy: Policy,
    method: Method,
    task: Task,
    config: Config,
    collected: RolloutBatch,
    batch_number: int,
) -> tuple[RolloutBatch, dict[str, float]]:
    """The batch with ``importance_NT`` where the method reads it, and numbers to log: the share of
    rollouts with an answer, and the mean of its tokens and of the scores.
    """
    if COLUMN not in method.needs:
        return collected, {}
    check_answers(method, task, config.task["name"])
    batch = collected.batch
    asked = [collected.prompts[p] for p in batch.group_N.tolist()]
    answer_N = answer_tokens(policy, task, asked, batch.token_ids_NT, batch.mask_NT)
    score_NT = measure_importance(
        policy.model,
        collected.prompt_ids,
        batch.token_ids_NT,
        batch.mask_NT,
        answer_N,
        seed=derived_seed(config.seed, batch_number, "importance"),
        temperature=config.rollouts.temperature,
        token_budget=budget_that_fits(policy.model, config),
    )
    is_scored_NT = batch.mask_NT & (score_NT >= 0)
    has_N = is_scored_NT.any(1)
    num, num_scored = max(int(has_N.sum()), 1), max(int(is_scored_NT.sum()), 1)
    num_answer = int((batch.mask_NT & ~is_scored_NT)[has_N].sum())
    numbers = {
        "importance/answer_frac": float(has_N.double().mean()),
        "importance/answer_tokens": num_answer / num,
        "importance/score": float(score_NT[is_scored_NT].double().sum()) / num_scored,
    }
    return collected._replace(batch=batch.replace(importance_NT=score_NT)), numbers
