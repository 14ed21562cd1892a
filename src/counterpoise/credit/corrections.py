"""IBPO's generate mode: the policy corrects its failed answers, and verified corrections join the
group (arXiv 2605.16302).

The rule ``edits`` then pairs each failed rollout with its nearest correct one, as a rule the
correction made from it. A correction is off-policy: it was sampled from a prompt with hints and is
scored once under the plain prompt, so that ratios start at 1. Reads the paper as: the best verified
correction by reward - edit_cost * normalised edit distance is kept, one per failed rollout."""

from __future__ import annotations

from counterpoise.credit.align import edit_distance, nearest_correct
from counterpoise.rollouts import RolloutBatch
from counterpoise.stage import Sampler
from counterpoise.types import TokenBatch

TEMPLATE = (
    "{prompt}\n\nA wrong answer:\n{failed}\n\nA correct answer to learn"
    " from:\n{reference}\n\nCorrected answer:\n"
)


def asks_for_corrections(*, corrections: int) -> bool:
    return corrections > 0


def add_corrections(
    rollouts: RolloutBatch, sampler: Sampler, *, corrections: int, edit_cost: float, template: str
) -> RolloutBatch:
    """The batch with verified corrections appended as further rollouts of their groups."""
    pairs = failed_with_reference(rollouts)
    if not pairs:
        return rollouts
    group, failed = rollouts.batch.group_N.tolist(), [row for row, _ in pairs]
    prompts = [
        template.format(
            prompt=rollouts.prompts[group[row]].text,
            failed=rollouts.texts[row],
            reference=rollouts.texts[sibling],
        )
        for row, sibling in pairs
    ]
    answers = sampler.answer(rollouts, failed, prompts, samples=corrections, purpose="corrections")
    best = _best(rollouts, answers, failed, edit_cost)
    if not best:
        return rollouts._replace(
            num_grader_failures=rollouts.num_grader_failures + answers.num_grader_failures,
            grader_messages=rollouts.grader_messages + answers.grader_messages,
        )
    return rollouts.extend(sampler.score(answers.select(best)))


def failed_with_reference(rollouts: RolloutBatch) -> list[tuple[int, int]]:
    """(failed rollout, nearest correct sibling) for every failed rollout that has one."""
    batch, ids = rollouts.batch, response_ids(rollouts.batch)
    reward, group = batch.reward_N.tolist(), batch.group_N.tolist()
    is_right = batch.is_success_N.tolist()
    correct: dict[int, list[int]] = {}
    for row in range(len(ids)):
        if is_right[row]:
            correct.setdefault(group[row], []).append(row)
    failed = [row for row in range(len(ids)) if not is_right[row] and group[row] in correct]
    return [
        (row, siblings[nearest_correct(ids[row], [(ids[k], reward[k]) for k in siblings])])
        for row in failed
        for siblings in [correct[group[row]]]
    ]


def response_ids(batch: TokenBatch) -> list[list[int]]:
    return [row[keep].tolist() for row, keep in zip(batch.token_ids_NT.cpu(), batch.mask_NT.cpu())]


def _best(
    rollouts: RolloutBatch, answers: RolloutBatch, failed: list[int], edit_cost: float
) -> list[int]:
    """The answer to keep for each failed rollout that has a correct one."""
    wrong, ids, reward = (
        response_ids(rollouts.batch),
        response_ids(answers.batch),
        answers.batch.reward_N.tolist(),
    )
    is_right = answers.batch.is_success_N.tolist()
    best: dict[int, tuple[float, int]] = {}
    for k, source in enumerate(answers.batch.extra["source_N"].tolist()):
        if not is_right[k]:
            continue
        row = failed[source]
        score = reward[k] - edit_cost * edit_distance(wrong[row], ids[k])
        if row not in best or score > best[row][0]:
            best[row] = (score, k)
    return [k for _, k in best.values()]
