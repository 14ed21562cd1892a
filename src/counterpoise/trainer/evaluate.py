"""Held-out evaluation: avg@k, greedy, unbiased pass@k, paired difference of two policies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from counterpoise.environments import Environment, is_environment
from counterpoise.maths.intervals import Interval, over_prompts, paired_bootstrap
from counterpoise.maths.reduce import derived_seed
from counterpoise.maths.trie import row_mask
from counterpoise.policy import Policy, encode_prompts
from counterpoise.run.files import Columns
from counterpoise.run.rollouts import ragged, turn_columns
from counterpoise.sampling import Rollouts
from counterpoise.stage import SUCCESS
from counterpoise.tasks import Task
from counterpoise.trainer.config import Config
from counterpoise.trainer.conversations import hold, lost_messages, lost_rows
from counterpoise.trainer.judge import sample_and_grade
from counterpoise.trainer.prompts import prompts_from
from counterpoise.types import Prompt

SHOWN = 64  # prompts whose answers are kept


class Evaluation(NamedTuple):
    """Rewards of k samples per prompt, and what they amount to: ``accuracy`` is the share that is
    right (a reward of at least ``task.success``).
    """

    reward_PK: np.ndarray
    is_right_PK: np.ndarray
    accuracy: Interval
    mean_reward: float
    pass_at: dict[int, float]
    mean_length: float
    mean_entropy: float
    texts: list[list[str]]
    num_grader_failures: int
    grader_messages: list[str]
    samples: Columns


def evaluate(
    policy: Policy,
    task: Any,
    config: Config,
    *,
    prompts: int,
    samples: int = 1,
    temperature: float = 1.0,
    split: str = "test",
    seed: int = 0,
) -> Evaluation:
    """Sample held-out prompts and grade them; ``temperature`` 0 is greedy.

    The same ``seed`` takes the same prompts and random streams.
    """
    taken = prompts_from(task, split, seed, 0, prompts)
    settings = config.rollouts
    prompt_ids = encode_prompts(
        policy,
        [p.text for p in taken],
        chat=config.chat,
        max_prompt_tokens=settings.max_prompt_tokens,
    )
    if is_environment(task):
        answers = _play(policy, task, config, taken, prompt_ids, samples, temperature, seed)
    else:
        answers = _answer(policy, task, config, taken, prompt_ids, samples, temperature, seed)
    reward_PK = np.array(answers.reward).reshape(len(taken), samples)
    is_right_PK, rollouts, texts = reward_PK >= config.success, answers.rollouts, answers.texts
    return Evaluation(
        reward_PK=reward_PK,
        is_right_PK=is_right_PK,
        accuracy=over_prompts(is_right_PK.mean(1), seed),
        mean_reward=float(reward_PK.mean()),
        pass_at={k: pass_at_k(is_right_PK, k) for k in powers_of_two(samples)},
        mean_length=float(rollouts.mask_NT.sum(1).float().mean()),
        mean_entropy=float(rollouts.entropy_NT.sum() / rollouts.mask_NT.sum()),
        texts=[texts[p * samples : (p + 1) * samples] for p in range(len(taken))],
        num_grader_failures=len(answers.messages),
        grader_messages=answers.messages,
        samples=sample_columns(taken, answers),
    )


class Answers(NamedTuple):
    """What was sampled and graded, prompt by prompt; the messages are those of graders and
    environments that failed."""

    rollouts: Rollouts
    texts: list[str]
    reward: list[float]
    messages: list[str]
    turns: Columns
    feedback: Sequence[str] = ()


def _answer(
    policy: Policy,
    task: Task,
    config: Config,
    prompts: Sequence[Prompt],
    prompt_ids: list[list[int]],
    samples: int,
    temperature: float,
    seed: int,
) -> Answers:
    """One answer each, graded by the task."""
    rollouts, texts, graded = sample_and_grade(
        policy,
        task,
        config,
        prompt_ids,
        [prompt for prompt in prompts for _ in range(samples)],
        "evaluation",
        group_size=samples,
        temperature=temperature,
        seed=derived_seed(seed, 0, "eval"),
        max_rows=config.rollouts.max_rows or 1024,
    )
    return Answers(rollouts, texts, graded.reward, graded.messages, {}, graded.feedback)


def _play(
    policy: Policy,
    environment: Environment,
    config: Config,
    prompts: Sequence[Prompt],
    prompt_ids: list[list[int]],
    samples: int,
    temperature: float,
    seed: int,
) -> Answers:
    """One conversation each; where the environment failed the reward is 0."""
    whole = hold(
        policy,
        environment,
        prompts,
        prompt_ids,
        config,
        group_size=samples,
        seed=derived_seed(seed, 0, "eval"),
        temperature=temperature,
    )
    messages = lost_messages(whole, config.grader_max_failed_frac, "evaluation")
    batch, failed_N = whole.batch, torch.tensor(lost_rows(whole), dtype=torch.long)
    assert batch.entropy_NT is not None
    reward_N = batch.reward_N.index_fill(0, failed_N.to(batch.reward_N.device), 0)
    rollouts = Rollouts(
        prompt_index_N=batch.group_N,
        token_ids_NT=batch.token_ids_NT,
        mask_NT=batch.mask_NT,
        sampler_logp_NT=batch.sampler_logp_NT,
        entropy_NT=batch.entropy_NT,
        stop_reason=tuple(whole.stop_reason),
    )
    return Answers(rollouts, whole.texts, reward_N.tolist(), messages, turn_columns(whole))


def sample_columns(prompts: Sequence[Prompt], answers: Answers) -> Columns:
    """Answers to the first ``SHOWN`` prompts for the viewer, with the columns of ``rollouts/``;
    rollouts come prompt by prompt.
    """
    rollouts = answers.rollouts
    group = rollouts.prompt_index_N[rollouts.prompt_index_N < SHOWN].tolist()
    own, num = [prompts[at] for at in group], len(group)
    row_NT = row_mask(rollouts.mask_NT[:num])
    return {
        "group": group,
        "rollout": list(range(num)),
        "prompt_id": [prompt.id for prompt in own],
        "prompt": [prompt.text for prompt in own],
        "answer": [prompt.answer for prompt in own],
        "text": list(answers.texts[:num]),
        "reward": [float(one) for one in answers.reward[:num]],
        "stop_reason": list(rollouts.stop_reason[:num]),
        "token_ids": ragged(rollouts.token_ids_NT[:num], row_NT),
        "sampler_logp": ragged(rollouts.sampler_logp_NT[:num], row_NT),
        "entropy": ragged(rollouts.entropy_NT[:num], row_NT),
        **({"feedback": list(answers.feedback[:num])} if answers.feedback else {}),
        **{name: column[:num] for name, column in answers.turns.items()},
    }


def difference(a_PK: np.ndarray, b_PK: np.ndarray, seed: int = 0) -> Interval:
    """Mean of b - a over the same prompts, of rewards or of what is right: the paired interval."""
    if len(a_PK) != len(b_PK):
        raise ValueError(
            f"difference: {len(a_PK)} and {len(b_PK)} prompts; a paired comparison needs the same"
            " prompts."
        )
    return paired_bootstrap(a_PK.mean(1), b_PK.mean(1), seed).difference


class HeldOut(NamedTuple):
    """Held-out accuracies of a run, None where evaluation is off. ``gain`` is last - first over the
    same prompts, None where they are others or there is one evaluation alone.
    """

    first: Interval | None = None
    last: Interval | None = None
    gain: Interval | None = None


def held_out(rows: Sequence[Mapping[str, Any]], success: float = SUCCESS) -> HeldOut:
    """What the rows of ``evals.jsonl`` amount to; rewards of ``success`` and more are right."""
    if not rows:
        return HeldOut()
    keys = "eval/accuracy", "eval/accuracy_low", "eval/accuracy_high"
    first, last = (Interval(*(row[key] for key in keys)) for row in (rows[0], rows[-1]))
    before, after = (np.array(row.get("reward_PK") or []) for row in (rows[0], rows[-1]))
    is_paired = len(rows) > 1 and before.ndim == 2 and len(before) == len(after)
    gain = difference(before >= success, after >= success) if is_paired else None
    return HeldOut(first, last, gain)


def eval_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Keys ``eval/...`` of ``metrics.jsonl`` and ``evals.jsonl``."""
    mean, low, high = evaluation.accuracy
    passed = {f"eval/pass@{k}": value for k, value in evaluation.pass_at.items() if k > 1}
    return {
        "eval/accuracy": mean,
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/reward": evaluation.mean_reward,
        "eval/length": evaluation.mean_length,
        "eval/num_grader_failures": evaluation.num_grader_failures,
        **passed,
    }


def pass_at_k(is_correct_PK: np.ndarray, k: int) -> float:
    """Mean over prompts of 1 - C(n - c, k)/C(n, k), unbiased (arXiv 2107.03374, Eq. 1).

    >>> pass_at_k(np.array([[True, False, False, False]]), 2)
    0.5
    """
    n = is_correct_PK.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass_at_k: k must be between 1 and the {n} samples a prompt, got {k}.")
    return float(
        np.mean([1 - math.comb(n - int(c), k) / math.comb(n, k) for c in is_correct_PK.sum(1)])
    )


def powers_of_two(top: int) -> list[int]:
    """1, 2, 4, ... up to ``top``."""
    return [2**e for e in range(top.bit_length()) if 2**e <= top]
