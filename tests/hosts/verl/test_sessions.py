"""Agent loops that return several outputs per session, and rollouts without a model token, through
verl's own ``_compute_advantage``: what verl's grpo does, ours do.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "verl.trainer.ppo.v1",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

from verl.trainer.ppo.v1 import PPOTrainerSync

from counterpoise.hosts.verl import register
from counterpoise.hosts.verl.trainer import CreditSync
from helpers.verl.cases import Rollout, batch_meta, config, rollouts, trainer

pytestmark = [pytest.mark.hosts, pytest.mark.verl]
register()


def advantages(cls, made, rows, queue_of):
    queue, host = queue_of(rows), trainer(cls, made)
    keys = host._compute_advantage(batch_meta(rows), metrics={}).keys
    return queue.padded(keys, "advantages")


def several_outputs(seed=1):
    """Sessions with one to three outputs, in any order, that share their session's reward."""
    rows, more = rollouts(seed=seed), rollouts(seed=seed + 1)
    for k, row in enumerate(list(rows)):
        session = row.key.removesuffix("_0")
        for output in range(k % 3):
            fields = more[(k + output) % len(more)].fields | {"uid": row.fields["uid"]}
            scores = torch.zeros_like(fields["rm_scores"])
            scores[-1] = row.fields["rm_scores"].sum()
            rows.append(
                Rollout(key=f"{session}_{output + 1}", fields=fields | {"rm_scores": scores})
            )
    return rows[::-1]


@pytest.mark.parametrize(
    ("ours", "settings", "normalised"),
    [
        ("dr_grpo", None, False),
        ("grpo", {"advantage": {"name": "group_zscore", "eps": 1e-6}}, True),
    ],
)
def test_a_session_counts_once_as_in_verls_grpo(ours, settings, normalised, queue_of):
    rows = several_outputs()
    theirs = advantages(
        PPOTrainerSync,
        config("grpo", algorithm__norm_adv_by_std_in_grpo=normalised),
        rows,
        queue_of,
    )
    got = advantages(CreditSync, config(f"counterpoise/{ours}", settings), rows, queue_of)
    torch.testing.assert_close(got, theirs, rtol=1e-5, atol=1e-6)
    assert got.abs().sum() > 1


def test_verls_own_trainer_with_several_outputs_is_refused(queue_of):
    """verl hands our estimator rows without their sessions: outputs would count as rollouts."""
    with pytest.raises(
        ValueError, match="prompt p2 has 9 rows.*n=4.*trainer_mode=counterpoise/sync"
    ):
        advantages(
            PPOTrainerSync,
            config("counterpoise/dr_grpo", trainer__v1__trainer_mode="sync"),
            several_outputs(),
            queue_of,
        )


def test_verls_own_trainer_with_one_output_is_not_refused(queue_of):
    rows = rollouts(seed=1, sizes=[4, 3, 4, 2])
    made = config("counterpoise/dr_grpo", trainer__v1__trainer_mode="sync")
    theirs = config("grpo", algorithm__norm_adv_by_std_in_grpo=False)
    torch.testing.assert_close(
        advantages(PPOTrainerSync, made, rows, queue_of),
        advantages(PPOTrainerSync, theirs, rows, queue_of),
    )


@pytest.mark.parametrize("name", ["ktae", "top_entropy"])
def test_token_credit_of_several_outputs_is_refused(name, queue_of):
    with pytest.raises(ValueError, match="gave more than one trajectory"):
        advantages(CreditSync, config(f"counterpoise/{name}"), several_outputs(), queue_of)


METHODS = ["ktae", "gtpo", "fade", "ar", "ntf_whitened", "grpo", "dapo", "rloo"]


def without_tokens(rows, *which):
    for k in which:
        rows[k].fields["response_mask"] = torch.zeros_like(rows[k].fields["response_mask"])
    return rows


@pytest.mark.parametrize("name", METHODS)
def test_rollouts_without_a_model_token_do_not_end_the_run(name, queue_of):
    """One in a prompt, all but one of a prompt, all of a prompt: credit 0, and the others go on."""
    rows = without_tokens(rollouts(seed=1), 0, 5, 6, 7, 8, 9, 10, 11)
    got = advantages(CreditSync, config(f"counterpoise/{name}"), rows, queue_of)
    assert got.isfinite().all() and (got[[0, 5, 6, 7, 8, 9, 10, 11]] == 0).all()
    assert got[1:4].abs().sum() > 0 and got[12:].abs().sum() > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_without_a_model_token_gets_no_credit(name, queue_of):
    rows = without_tokens(rollouts(seed=1), *range(16))
    got = advantages(CreditSync, config(f"counterpoise/{name}"), rows, queue_of)
    assert (got == 0).all()


@pytest.mark.parametrize("name", ["ktae", "ar", "fade"])
def test_numbers_outside_the_mask_are_not_read(name, queue_of):
    """Tool replies: engines give them any log-prob."""
    made, rows = config(f"counterpoise/{name}"), rollouts(seed=1, longest=7)
    for row in rows:
        row.fields["response_mask"][1] = len(row.fields["responses"]) < 3
    plain = advantages(CreditSync, made, rows, queue_of)
    for row in rows:
        for field in ("rollout_log_probs", "old_log_probs", "entropy", "ref_log_prob"):
            row.fields[field][row.fields["response_mask"] == 0] = float("nan")
    assert torch.equal(advantages(CreditSync, made, rows, queue_of), plain)
    assert plain.abs().sum() > 0
