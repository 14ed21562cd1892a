"""Held-out numbers of all members: sampled, greedy, pass@k, entropy, length.

Axes: S members, P prompts, K samples per prompt, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from counterpoise.arena.collect import Bench
from counterpoise.arena.crew import Job, Questions, Stretch, judge
from counterpoise.arena.member import Member
from counterpoise.arena.texts import Asked, pad_questions
from counterpoise.maths.reduce import derived_seed
from counterpoise.sampling.draw import uniforms
from counterpoise.sampling.slots import Columns, Settings
from counterpoise.trainer.evaluate import pass_at_k, powers_of_two
from counterpoise.types import Prompt

ROWS = {"cpu": 4096, "cuda": 65536}  # rows in flight at once


class Scores(NamedTuple):
    """Rewards of one kind of answers, and how they looked."""

    reward_SPK: np.ndarray
    entropy_S: np.ndarray
    length_S: np.ndarray


def evaluate_stack(
    bench: Bench, members: Sequence[Member], num_prompts: int, samples: int
) -> list[dict[str, float]]:
    """Every member on the same held-out prompts with the same random streams, as the trainer's
    evaluation.
    """
    stretch = Stretch("test", 0, 0, num_prompts)
    (questions,) = bench.crew.questions([stretch])
    config = members[0].config
    temperature = config.eval.temperature or 1.0
    sampled = score(bench, members, questions, samples, temperature)
    greedy = score(bench, members, questions, 1, 0.0)
    is_right_SPK, is_best_SPK = (one.reward_SPK >= config.success for one in (sampled, greedy))
    return [
        {
            "sampled": float(is_right_SPK[s].mean()),
            "greedy": float(is_best_SPK[s].mean()),
            **{f"pass@{k}": pass_at_k(is_right_SPK[s], k) for k in powers_of_two(samples) if k > 1},
            "entropy": float(sampled.entropy_S[s]),
            "length": float(sampled.length_S[s]),
        }
        for s in range(len(members))
    ]


def score(
    bench: Bench, members: Sequence[Member], questions: Questions, samples: int, temperature: float
) -> Scores:
    """Sample (or take the likeliest tokens, at temperature 0) and grade, some prompts at a time."""
    settings = settings_of(bench, members[0], temperature)
    device, num = bench.stack.theta_SP.device, len(questions.prompts)
    size = wave_size(num, ROWS.get(device.type, ROWS["cpu"]) // (len(members) * samples))
    one, waves = pad_questions([questions.prompt_ids], device), []
    for start in range(0, num, size):
        ids_1PW, length_1P = (column[:, start : start + size] for column in one)
        asked = Asked(ids_1PW.expand(len(members), -1, -1), length_1P.expand(len(members), -1))
        row_N = torch.arange(start * samples, (start + size) * samples, device=device)
        columns = bench.sampler.fill(asked, samples, streams(settings, row_N, members), settings)
        prompts = questions.prompts[start : start + size]
        waves.append(wave_scores(bench, columns, prompts, len(members)))
    reward_SPK = np.concatenate([wave.reward_SPK for wave in waves], 1)
    num_tokens_S = np.sum([wave.length_S for wave in waves], 0)
    entropy_S = np.sum([wave.entropy_S for wave in waves], 0) / num_tokens_S
    return Scores(reward_SPK, entropy_S, num_tokens_S / (num * samples))


def settings_of(bench: Bench, member: Member, temperature: float) -> Settings:
    is_greedy, longest = temperature == 0, member.config.rollouts.max_new_tokens
    stop_ids = tuple(sorted(set(bench.crew.host.policy.stop_ids)))
    return Settings(longest, 1.0 if is_greedy else temperature, 1.0, 0, stop_ids, is_greedy)


def wave_size(num_prompts: int, limit: int) -> int:
    """Prompts of one wave: a divisor, so that all waves have one size.

    >>> wave_size(800, 300), wave_size(7, 3)
    (200, 1)
    """
    fit = range(1, max(1, min(num_prompts, limit)) + 1)
    return max(size for size in fit if num_prompts % size == 0)


def streams(settings: Settings, row_N: Tensor, members: Sequence[Member]) -> Tensor:
    """Random streams of the rows, the same for all members; none where nothing is drawn."""
    if settings.is_greedy:
        return torch.zeros(len(row_N) * len(members), 0, device=row_N.device)
    seed = torch.tensor(derived_seed(0, 0, "eval"), device=row_N.device)
    uniform_NT = uniforms(seed.expand_as(row_N), row_N, settings.max_new_tokens)
    return uniform_NT.repeat(len(members), 1)


def wave_scores(bench: Bench, columns: Columns, prompts: list[Prompt], num_members: int) -> Scores:
    """Rewards of one wave, and sums over its tokens in place of means."""
    length_SN = columns.length_N[:-1].unflatten(0, (num_members, -1))
    width = int(length_SN.max())
    shape = (*length_SN.shape, width)
    is_token_SNT = torch.arange(width, device=length_SN.device) < length_SN[..., None]
    entropy_S = (columns.entropy_NT[:-1, :width].view(shape) * is_token_SNT).sum((1, 2))
    ids_SNT = columns.token_ids_NT[:-1, :width].to(torch.int32).cpu().numpy().reshape(shape)
    lengths, samples = length_SN.cpu().numpy(), length_SN.shape[1] // len(prompts)
    group_N = np.repeat(np.arange(len(prompts)), samples)
    jobs = [Job(prompts, group_N, ids, own, "evaluation") for ids, own in zip(ids_SNT, lengths)]
    rewards = [grades.reward for grades in bench.crew.call(judge, jobs)]
    reward_SPK = np.array(rewards).reshape(num_members, len(prompts), samples)
    return Scores(reward_SPK, entropy_S.double().cpu().numpy(), lengths.sum(1))
