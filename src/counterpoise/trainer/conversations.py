"""Prompts of an environment -> conversations -> a batch with turns."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence

import torch

from counterpoise.environments import Environment
from counterpoise.maths.reduce import derived_seed
from counterpoise.policy import Policy, decode_texts
from counterpoise.policy.bridge import Bridge
from counterpoise.rollouts import RolloutBatch
from counterpoise.sampling import SAMPLED, Rollouts, sample_from
from counterpoise.sampling.conversation import converse
from counterpoise.sampling.play import FAILED, Limits, Play
from counterpoise.trainer.config import Config
from counterpoise.types import Prompt, TokenBatch

ADVICE = "Mend the environment; grader_max_failed_frac says how many may fail."


def limits(policy: Policy, config: Config) -> Limits:
    """The limits of a recipe, and of the model."""
    rollouts, model = config.rollouts, policy.model.config.get_text_config()
    return Limits(
        max_turns=rollouts.max_turns,
        max_turn_tokens=rollouts.max_turn_tokens or rollouts.max_new_tokens,
        max_new_tokens=rollouts.max_new_tokens,
        max_row_tokens=rollouts.max_row_tokens,
        max_positions=getattr(model, "max_position_embeddings", None),
        step_time_limit_s=config.step_time_limit_s,
    )


def decoder(policy: Policy) -> Callable[[list[int]], str]:
    """What the model wrote in a turn, as text; short turns come again and again."""

    @functools.lru_cache(maxsize=10_000)
    def decode(ids: tuple[int, ...]) -> str:
        return policy.tokenizer.decode(list(ids), skip_special_tokens=True)

    return lambda ids: decode(tuple(ids))


def _uncollected(fn: Callable[..., Rollouts], *args: object, **settings: object) -> Rollouts:
    """A call during which Python does not look for garbage: many small objects live until its end,
    and looking through all of torch for them takes longer than a batch of short conversations.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        return fn(*args, **settings)
    finally:
        if was_on:
            gc.enable()


def begin(
    policy: Policy,
    environment: Environment,
    prompts: Sequence[Prompt],
    row_ids: Sequence[Sequence[int]],
    group: Sequence[int],
    config: Config,
    seed: int,
) -> Play:
    """Conversations of rows that have not said anything yet; row i is about ``prompts[group[i]]``,
    and all rows of a group play one episode.
    """
    seeds = [derived_seed(seed, p, "episode") for p in range(len(prompts))]
    return Play(
        environment,
        [prompts[p] for p in group],
        [seeds[p] for p in group],
        [len(ids) for ids in row_ids],
        limits=limits(policy, config),
        bridge=Bridge(policy, config.chat),
        decode=decoder(policy),
        stop_ids=policy.stop_ids,
    )


def hold(
    policy: Policy,
    environment: Environment,
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[Sequence[int]],
    config: Config,
    *,
    group_size: int,
    seed: int,
    temperature: float,
    needs: frozenset[str] = frozenset(),
    success: float | None = None,
) -> RolloutBatch:
    """``group_size`` conversations about every prompt, graded by the environment as they go.

    All rollouts of a prompt play the same episode. Those whose environment failed are among them
    (``without_lost``).
    """
    settings = config.rollouts
    group = [p for p in range(len(prompts)) for _ in range(group_size)]
    row_ids = [list(prompt_ids[p]) for p in group]
    play = begin(policy, environment, prompts, row_ids, group, config, seed)
    return play_out(
        policy,
        play,
        prompts,
        row_ids,
        group,
        max_length=settings.max_new_tokens,
        success=success,
        temperature=temperature,
        top_p=settings.top_p if temperature else 1.0,
        top_k=settings.top_k if temperature else 0,
        seed=seed,
        max_rows=settings.max_rows or len(row_ids),
        needs=needs,
    )


def play_out(
    policy: Policy,
    play: Play,
    prompts: Sequence[Prompt],
    row_ids: list[list[int]],
    group: Sequence[int],
    *,
    max_length: int,
    success: float | None = None,
    **sampling: object,
) -> RolloutBatch:
    """Conversations from their beginning to their end; row i is about ``prompts[group[i]]``.

    Args:
        max_length: tokens that the model draws in a row at most.
        sampling: settings of ``converse``.
    """
    try:
        rollouts = _uncollected(
            sample_from, policy, row_ids, play, by=converse, max_tokens=play.max_tokens, **sampling
        )
        play.check()
    finally:
        play.episodes.close()
    device = rollouts.token_ids_NT.device
    talks = [play.conversation(row) for row in range(len(group))]
    columns = play.columns(rollouts.token_ids_NT.shape[1], group, talks)
    columns = {name: column.to(device) for name, column in columns.items()}
    mask_NT = columns["mask_NT"]
    sampled = {name: c for name in SAMPLED if (c := getattr(rollouts, name)) is not None}
    batch = TokenBatch(
        token_ids_NT=rollouts.token_ids_NT,
        group_N=torch.tensor(group, device=device),
        reward_N=columns["turn_reward_NU"].sum(1),
        sampler_logp_NT=torch.where(mask_NT, rollouts.sampler_logp_NT, 0),
        entropy_NT=torch.where(mask_NT, rollouts.entropy_NT, 0),
        max_length=max_length,
        success=success,
        mask_NT=columns.pop("mask_NT"),
    ).replace(**columns, **{k: column * mask_NT[:, :, None] for k, column in sampled.items()})
    ids_NT, keep_NT = rollouts.token_ids_NT.cpu(), rollouts.mask_NT.cpu()
    kept = [ids[keep].tolist() for ids, keep in zip(ids_NT, keep_NT)]
    texts = decode_texts(policy.tokenizer, kept)
    return RolloutBatch(
        prompts=list(prompts),
        prompt_ids=row_ids,
        texts=texts,
        stop_reason=list(rollouts.stop_reason),
        batch=batch,
        num_grader_failures=0,
        grader_messages=[],
        conversations=talks,
    )


def lost_rows(whole: RolloutBatch) -> list[int]:
    """Rollouts whose environment failed."""
    talks = whole.conversations or []
    return [row for row, talk in enumerate(talks) if talk.end_reason in FAILED]


def lost_messages(whole: RolloutBatch, max_failed_frac: float, where: str) -> list[str]:
    """A line for every rollout whose environment failed; too many of them are an error, which
    ``where`` opens.
    """
    talks, group, lost = whole.conversations or [], whole.batch.group_N.tolist(), lost_rows(whole)
    messages = [f"prompt {whole.prompts[group[row]].id}: {talks[row].message}" for row in lost]
    if lost and (len(lost) > max_failed_frac * len(talks) or len(lost) == len(talks)):
        raise ValueError(
            f"{where}: the environment failed in {len(lost)} of {len(talks)} rollouts. First,"
            f" {messages[0]}. {ADVICE}"
        )
    return messages


def without_lost(whole: RolloutBatch, max_failed_frac: float, where: str) -> RolloutBatch:
    """The batch with the rollouts whose environment failed set apart, as ``lost``."""
    messages, lost = lost_messages(whole, max_failed_frac, where), lost_rows(whole)
    if not lost:
        return whole
    kept = [row for row in range(whole.batch.num_rollouts) if row not in set(lost)]
    return whole.select(kept)._replace(
        num_grader_failures=len(lost), grader_messages=messages, lost=whole.select(lost)
    )
