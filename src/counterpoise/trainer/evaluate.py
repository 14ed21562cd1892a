"""Held-out evaluation: avg@k, greedy, unbiased pass@k, paired difference of two policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from counterpoise.maths.intervals import Interval, over_prompts, paired_bootstrap
from counterpoise.maths.reduce import derived_seed
from counterpoise.policy import Policy, encode_prompts
from counterpoise.run.files import Columns
from counterpoise.run.write import ragged
from counterpoise.sampling import Rollouts, sample_from
from counterpoise.trainer.collect import grade_rollouts, prompts_from, responses
from counterpoise.trainer.config import Config
from counterpoise.types import Prompt

SHOWN = 64  # prompts whose answers are kept


class Evaluation(NamedTuple):
    """Rewards of k samples per prompt, and what they amount to."""

    reward_PK: np.ndarray
    accuracy: Interval
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
    rollouts = sample_from(
        policy,
        prompt_ids,
        group_size=samples,
        max_new_tokens=settings.max_new_tokens,
        temperature=temperature,
        seed=derived_seed(seed, 0, "eval"),
        max_rows=settings.max_rows or 1024,
    )
    texts = responses(policy, rollouts)
    pairs = [(taken[p], text) for p, text in zip(rollouts.prompt_index_N.tolist(), texts)]
    graded = grade_rollouts(task, pairs, config, "evaluation")
    reward_PK = np.array(graded.reward).reshape(len(taken), samples)
    return Evaluation(
        reward_PK=reward_PK,
        accuracy=over_prompts(reward_PK.mean(1), seed),
        pass_at={k: pass_at_k(reward_PK >= config.success, k) for k in powers_of_two(samples)},
        mean_length=float(rollouts.mask_NT.sum(1).float().mean()),
        mean_entropy=float(rollouts.entropy_NT.sum() / rollouts.mask_NT.sum()),
        texts=[texts[p * samples : (p + 1) * samples] for p in range(len(taken))],
        num_grader_failures=graded.num_faults,
        grader_messages=graded.messages,
        samples=sample_columns(taken, rollouts, texts, graded.reward),
    )


def sample_columns(
    prompts: Sequence[Prompt], rollouts: Rollouts, texts: Sequence[str], reward: Sequence[float]
) -> Columns:
    """Answers to the first ``SHOWN`` prompts for the viewer, with the columns of ``rollouts/``;
    rollouts come prompt by prompt.
    """
    group = rollouts.prompt_index_N[rollouts.prompt_index_N < SHOWN].tolist()
    own, num = [prompts[at] for at in group], len(group)
    mask_NT = rollouts.mask_NT[:num]
    return {
        "group": group,
        "rollout": list(range(num)),
        "prompt_id": [prompt.id for prompt in own],
        "prompt": [prompt.text for prompt in own],
        "answer": [prompt.answer for prompt in own],
        "text": list(texts[:num]),
        "reward": [float(one) for one in reward[:num]],
        "stop_reason": list(rollouts.stop_reason[:num]),
        "token_ids": ragged(rollouts.token_ids_NT[:num], mask_NT),
        "sampler_logp": ragged(rollouts.sampler_logp_NT[:num], mask_NT),
        "entropy": ragged(rollouts.entropy_NT[:num], mask_NT),
    }


def difference(reward_a_PK: np.ndarray, reward_b_PK: np.ndarray, seed: int = 0) -> Interval:
    """Mean of b - a over the same prompts: the paired interval."""
    if len(reward_a_PK) != len(reward_b_PK):
        raise ValueError(
            f"difference: {len(reward_a_PK)} and {len(reward_b_PK)} prompts; a paired comparison"
            " needs the same prompts."
        )
    return paired_bootstrap(reward_a_PK.mean(1), reward_b_PK.mean(1), seed).difference


def eval_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Keys ``eval/...`` of ``metrics.jsonl`` and ``evals.jsonl``."""
    mean, low, high = evaluation.accuracy
    passed = {f"eval/pass@{k}": value for k, value in evaluation.pass_at.items() if k > 1}
    return {
        "eval/accuracy": mean,
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
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
