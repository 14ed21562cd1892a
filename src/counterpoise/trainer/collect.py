"""Prompts -> rollouts -> rewards -> a TokenBatch with the columns that the method needs."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from counterpoise.catalogue.method import Method
from counterpoise.maths.reduce import derived_seed
from counterpoise.plans import is_ready
from counterpoise.policy import Policy, encode_prompts, measure
from counterpoise.sampling import SAMPLED, Rollouts, sample
from counterpoise.tasks import grade
from counterpoise.trainer.config import Config, ConfigError
from counterpoise.types import Prompt, RolloutBatch, TokenBatch


def collect(
    policy: Policy, task: Any, method: Method, config: Config, batch_number: int, start: int
) -> RolloutBatch:
    """Sample and grade one batch; where the plan draws from a buffer, round after round
    until both signs are there.
    """
    rounds = [_round(policy, task, method, config, batch_number, start, 0)]
    size = update_size(method, config)
    while size and len(rounds) < config.buffer.max_rounds and not _ready(rounds, size):
        rounds.append(_round(policy, task, method, config, batch_number, start, len(rounds)))
    return join_batches(rounds)


def prompts_from(task: Any, split: str, seed: int, start: int, num: int) -> list[Prompt]:
    """The next prompts of a stream; one that ends is begun again."""
    taken = list(itertools.islice(task.prompts(split, seed, start=start), num))
    if not taken:
        raise ConfigError(f"task: no prompts in split {split!r}.")
    while len(taken) < num and split == "train":
        taken += list(
            itertools.islice(task.prompts(split, seed, start=start + len(taken)), num - len(taken))
        )
    return taken


def check_prompts(policy: Policy, task: Any, config: Config) -> None:
    """Prompts of the first batch and of the evaluation can be read by the model: a chat template,
    the length limit, a test split.
    """
    taken = prompts_from(task, "train", config.seed, 0, config.rollouts.prompts)
    if config.eval.every:
        taken += prompts_from(task, "test", 0, 0, config.eval.prompts)
    encode_prompts(
        policy,
        [p.text for p in taken],
        chat=config.chat,
        max_prompt_tokens=config.rollouts.max_prompt_tokens,
    )


def measure_columns(
    policy: Policy, method: Method, config: Config, collected: RolloutBatch, reference: Any = None
) -> RolloutBatch:
    """The batch with the columns that the method needs and the sampler did not give."""
    batch = collected.batch
    missing = {name for name in method.needs if getattr(batch, name, None) is None}
    if not missing:
        return collected
    with autocast(policy.model):
        columns = measure(
            policy.model,
            collected.prompt_ids,
            batch.token_ids_NT,
            batch.mask_NT,
            missing,
            temperature=config.rollouts.temperature,
            token_budget=config.token_budget,
            ref_model=reference,
        )
    return collected._replace(batch=batch.replace(**columns))


def update_size(method: Method, config: Config) -> int:
    """Rows of the whole batch if the plan draws them from a buffer, else 0."""
    is_buffer = (
        method.planner.name == "reward_balanced" and method.planner.params.get("mode") == "buffer"
    )
    return config.rollouts.prompts * config.rollouts.group_size if is_buffer else 0


def autocast(model: torch.nn.Module) -> Any:
    """bf16 for matmuls on CUDA where the weights are float32; nothing elsewhere."""
    parameter = next(model.parameters())
    on = parameter.is_cuda and parameter.dtype == torch.float32
    return torch.autocast("cuda", torch.bfloat16) if on else nullcontext()


def join_batches(parts: list[RolloutBatch]) -> RolloutBatch:
    """Several batches as one; groups of different parts stay apart."""
    if len(parts) == 1:
        return parts[0]
    offset = itertools.accumulate([0, *(len(part.prompts) for part in parts[:-1])])
    groups = [part.batch.group_N + shift for part, shift in zip(parts, offset)]
    return RolloutBatch(
        prompts=[prompt for part in parts for prompt in part.prompts],
        prompt_ids=[ids for part in parts for ids in part.prompt_ids],
        texts=[text for part in parts for text in part.texts],
        stop_reason=[reason for part in parts for reason in part.stop_reason],
        batch=stack_batches([part.batch for part in parts]).replace(group_N=torch.cat(groups)),
        num_grader_failures=sum(part.num_grader_failures for part in parts),
        grader_messages=[message for part in parts for message in part.grader_messages],
    )


def stack_batches(batches: list[TokenBatch]) -> TokenBatch:
    """The rows of several batches, padded to the widest; sampled columns only, and of the optional
    ones those that all have.
    """
    width = max(batch.mask_NT.shape[1] for batch in batches)

    def joined_column(name: str) -> Tensor:
        columns = [getattr(batch, name) for batch in batches]
        return torch.cat(
            [
                pad(column, (*[0, 0] * (column.dim() - 2), 0, width - column.shape[1]))
                for column in columns
            ]
        )

    return TokenBatch(
        token_ids_NT=joined_column("token_ids_NT"),
        mask_NT=joined_column("mask_NT"),
        sampler_logp_NT=joined_column("sampler_logp_NT"),
        entropy_NT=joined_column("entropy_NT"),
        group_N=torch.cat([batch.group_N for batch in batches]),
        reward_N=torch.cat([batch.reward_N for batch in batches]),
        max_length=batches[0].max_length,
    ).replace(
        **{
            name: joined_column(name)
            for name in SAMPLED
            if all(getattr(batch, name) is not None for batch in batches)
        }
    )


def responses(policy: Policy, rollouts: Rollouts) -> list[str]:
    """The text of every rollout, special tokens left out."""
    ids = [
        row[keep].tolist() for row, keep in zip(rollouts.token_ids_NT.cpu(), rollouts.mask_NT.cpu())
    ]
    return policy.tokenizer.batch_decode(ids, skip_special_tokens=True)


def _round(
    policy: Policy,
    task: Any,
    method: Method,
    config: Config,
    batch_number: int,
    start: int,
    number: int,
) -> RolloutBatch:
    settings = config.rollouts
    prompts = prompts_from(
        task, "train", config.seed, start + number * settings.prompts, settings.prompts
    )
    prompt_ids = encode_prompts(
        policy,
        [p.text for p in prompts],
        chat=config.chat,
        max_prompt_tokens=settings.max_prompt_tokens,
    )
    with autocast(policy.model):
        rollouts = sample(
            policy.model,
            prompt_ids,
            group_size=settings.group_size,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop_ids=policy.stop_ids,
            pad_id=policy.tokenizer.pad_token_id,
            seed=derived_seed(config.seed, batch_number, f"rollouts/{number}"),
            max_rows=settings.max_rows or len(prompt_ids) * settings.group_size,
            needs=method.needs,
        )
    texts = responses(policy, rollouts)
    graded = grade(
        task,
        [(prompts[p], text) for p, text in zip(rollouts.prompt_index_N.tolist(), texts)],
        config.grader_time_limit_s,
    )
    batch = TokenBatch(
        token_ids_NT=rollouts.token_ids_NT.clone(),
        mask_NT=rollouts.mask_NT.clone(),
        group_N=rollouts.prompt_index_N.clone(),
        reward_N=torch.tensor(graded.reward, dtype=torch.float32, device=rollouts.mask_NT.device),
        sampler_logp_NT=rollouts.sampler_logp_NT.clone(),
        entropy_NT=rollouts.entropy_NT.clone(),
        max_length=settings.max_new_tokens,
    ).replace(**{name: getattr(rollouts, name) for name in SAMPLED})
    row_ids = [prompt_ids[p] for p in rollouts.prompt_index_N.tolist()]
    failures = graded.num_failed + graded.num_timed_out
    return RolloutBatch(
        prompts, row_ids, texts, list(rollouts.stop_reason), batch, failures, list(graded.messages)
    )


def _ready(rounds: list[RolloutBatch], size: int) -> bool:
    is_positive_N = torch.cat([part.batch.reward_N for part in rounds]) > 0.5
    return is_ready(int(is_positive_N.sum()), int((~is_positive_N).sum()), size)
