"""IBPO's generate mode: the policy corrects its failed answers, and verified corrections join the
group (arXiv 2605.16302).

The rule ``edits`` then pairs each failed rollout with its nearest correct one, which is as a rule
the correction made from it. A correction is off-policy: it was sampled from the prompt with hints
and is scored under the plain prompt, once, here. Reads the paper as: the best verified correction
by reward - edit_cost * normalised edit distance is kept, one a failed rollout."""

from __future__ import annotations

from typing import Any

import torch

from counterpoise.credit import edit_distance, nearest_correct
from counterpoise.maths.reduce import derived_seed
from counterpoise.policy import Policy, encode_prompts, measure
from counterpoise.sampling import sample
from counterpoise.tasks import grade
from counterpoise.trainer.collect import autocast, responses, stack_batches
from counterpoise.trainer.config import Config
from counterpoise.types import RolloutBatch, TokenBatch

CORRECT = 0.5  # rewards above are correct


def add_corrections(
    policy: Policy, task: Any, config: Config, batch_number: int, collected: RolloutBatch
) -> RolloutBatch:
    """The batch with verified corrections appended as further rollouts of their groups; unchanged
    where the recipe has no ``corrections``.
    """
    if config.corrections is None:
        return collected
    pairs = failed_with_reference(collected)
    if not pairs:
        return collected
    rollouts, texts = _sampled(policy, config, batch_number, collected, pairs)
    owner = [pairs[i][0] for i in rollouts.prompt_index_N.tolist()]
    group = collected.batch.group_N.tolist()
    graded = grade(
        task,
        [(collected.prompts[group[row]], text) for row, text in zip(owner, texts)],
        config.grader_time_limit_s,
    )
    kept = _best(collected, rollouts, owner, graded.reward, config.corrections.edit_cost)
    failures = collected.num_grader_failures + graded.num_failed + graded.num_timed_out
    if not kept:
        return collected._replace(num_grader_failures=failures)
    pick = torch.tensor(kept, device=rollouts.mask_NT.device)
    rows = [owner[k] for k in kept]
    batch = _scored(
        policy, config, collected, rollouts, pick, rows, [graded.reward[k] for k in kept]
    )
    return collected._replace(
        batch=stack_batches([collected.batch, batch]),
        prompt_ids=collected.prompt_ids + [collected.prompt_ids[row] for row in rows],
        texts=collected.texts + [texts[k] for k in kept],
        stop_reason=collected.stop_reason + [rollouts.stop_reason[k] for k in kept],
        num_grader_failures=failures,
    )


def failed_with_reference(collected: RolloutBatch) -> list[tuple[int, int]]:
    """(failed rollout, nearest correct sibling) for every failed rollout that has one."""
    batch = collected.batch
    ids, reward, group = (
        response_ids(batch.token_ids_NT, batch.mask_NT),
        batch.reward_N.tolist(),
        batch.group_N.tolist(),
    )
    correct: dict[int, list[int]] = {}
    for row in range(len(ids)):
        if reward[row] > CORRECT:
            correct.setdefault(group[row], []).append(row)
    failed = [row for row in range(len(ids)) if reward[row] <= CORRECT and group[row] in correct]
    return [
        (row, siblings[nearest_correct(ids[row], [(ids[k], reward[k]) for k in siblings])])
        for row in failed
        for siblings in [correct[group[row]]]
    ]


def response_ids(token_ids_NT: torch.Tensor, mask_NT: torch.Tensor) -> list[list[int]]:
    return [row[keep].tolist() for row, keep in zip(token_ids_NT.cpu(), mask_NT.cpu())]


def _sampled(
    policy: Policy,
    config: Config,
    batch_number: int,
    collected: RolloutBatch,
    pairs: list[tuple[int, int]],
) -> tuple[Any, list[str]]:
    assert config.corrections is not None
    settings, group = config.rollouts, collected.batch.group_N.tolist()
    asked = [
        config.corrections.template.format(
            prompt=collected.prompts[group[row]].text,
            failed=collected.texts[row],
            reference=collected.texts[sibling],
        )
        for row, sibling in pairs
    ]
    limit = settings.max_prompt_tokens + 2 * settings.max_new_tokens + 256
    prompt_ids = encode_prompts(policy, asked, chat=config.chat, max_prompt_tokens=limit)
    with autocast(policy.model):
        rollouts = sample(
            policy.model,
            prompt_ids,
            group_size=config.corrections.samples,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            stop_ids=policy.stop_ids,
            pad_id=policy.tokenizer.pad_token_id,
            seed=derived_seed(config.seed, batch_number, "corrections"),
            max_rows=settings.max_rows or 1024,
        )
    return rollouts, responses(policy, rollouts)


def _best(
    collected: RolloutBatch, rollouts: Any, owner: list[int], reward: list[float], edit_cost: float
) -> list[int]:
    failed = response_ids(collected.batch.token_ids_NT, collected.batch.mask_NT)
    corrections = response_ids(rollouts.token_ids_NT, rollouts.mask_NT)
    best: dict[int, tuple[float, int]] = {}
    for k, row in enumerate(owner):
        if reward[k] <= CORRECT:
            continue
        score = reward[k] - edit_cost * edit_distance(failed[row], corrections[k])
        if row not in best or score > best[row][0]:
            best[row] = (score, k)
    return [k for _, k in best.values()]


def _scored(
    policy: Policy,
    config: Config,
    collected: RolloutBatch,
    rollouts: Any,
    pick: torch.Tensor,
    rows: list[int],
    reward: list[float],
) -> TokenBatch:
    """Corrections under the plain prompt: their sampler log-probs are those of the policy there, so
    that ratios start at 1.
    """
    token_ids_NT, mask_NT = rollouts.token_ids_NT[pick].clone(), rollouts.mask_NT[pick].clone()
    with autocast(policy.model):
        columns = measure(
            policy.model,
            [collected.prompt_ids[row] for row in rows],
            token_ids_NT,
            mask_NT,
            {"trainer_logp_NT", "entropy_NT"},
            temperature=config.rollouts.temperature,
            token_budget=config.token_budget,
        )
    return TokenBatch(
        token_ids_NT=token_ids_NT,
        mask_NT=mask_NT,
        group_N=collected.batch.group_N[torch.tensor(rows, device=mask_NT.device)],
        reward_N=torch.tensor(reward, dtype=torch.float32, device=mask_NT.device),
        sampler_logp_NT=columns["trainer_logp_NT"],
        entropy_NT=columns["entropy_NT"],
        max_length=collected.batch.max_length,
    )
