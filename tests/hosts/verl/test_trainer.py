"""verl's trainer classes on a queue in memory: no Ray, no GPU.

What verl's methods do around ours is verl's own code.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "verl.trainer.ppo.v1",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

from verl.trainer.ppo.v1 import PPOTrainerSync

import counterpoise as cp
from counterpoise.hosts.verl import register
from counterpoise.hosts.verl.checks import check_config, mode_of
from counterpoise.hosts.verl.trainer import CreditSync
from helpers.verl.cases import (
    Queue,
    Rollout,
    batch_meta,
    config,
    nested,
    rollouts,
    token_batch,
    trainer,
)

pytestmark = [pytest.mark.hosts, pytest.mark.verl]
register()

TOKEN_METHODS = (
    "ktae",
    "gtpo",
    "top_entropy",
    "ar",
    "stapo",
    "ibpo",
    "ntf_whitened",
    "fade",
    "crf_ntf",
)


def computed(cls, made, rows, queue_of, metrics=None):
    """The advantages that verl's queue holds after ``_compute_advantage``, and the trainer."""
    queue, host = queue_of(rows), trainer(cls, made)
    meta = host._compute_advantage(batch_meta(rows), metrics={} if metrics is None else metrics)
    assert meta.keys == [row.key for row in rows]
    return queue.padded(meta.keys, "advantages"), host


def assert_close(got, expected, rtol=1e-6, atol=1e-7):
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus"])
def test_switched_off_it_is_verl_bit_for_bit(name, queue_of):
    rows, made = rollouts(num_prompts=5, seed=2), config(name)
    theirs, _ = computed(PPOTrainerSync, made, rows, queue_of, their_metrics := {})
    ours, host = computed(CreditSync, made, rows, queue_of, our_metrics := {})
    assert host.credit_setup is None
    assert torch.equal(ours, theirs) and ours.abs().sum() > 0
    assert our_metrics == their_metrics


def test_switched_off_the_order_is_verls(queue_of):
    rows, made = (
        rollouts(num_prompts=5, seed=2, sizes=[4, 4, 3, 4, 2]),
        config("grpo", mini=1, train=5),
    )
    orders, logged = [], []
    for cls in (PPOTrainerSync, CreditSync):
        queue_of(rows)
        metrics = {}
        orders.append(
            trainer(cls, made, num_ranks=2)._balance_batch(batch_meta(rows), metrics).keys
        )
        logged.append(metrics)
    assert len(orders[0]) == 20
    assert [key for key in orders[0] if "pad" not in key] == [
        key for key in orders[1] if "pad" not in key
    ]
    assert logged[0] == logged[1]


@pytest.mark.parametrize("name", TOKEN_METHODS)
def test_token_credit_is_the_cores(name, queue_of):
    rows, metrics = rollouts(seed=1), {}
    got, _ = computed(CreditSync, config(f"counterpoise/{name}"), rows, queue_of, metrics)
    expected = cp.method(name).assign(token_batch(rows), batch_number=1)
    assert_close(got, expected.credit_NT)
    assert expected.credit_NT.abs().sum() > 0
    for key, value in expected.metrics.items():
        assert metrics[f"counterpoise/{key}"] == pytest.approx(value, rel=1e-4, abs=1e-6)


def test_reward_only_methods_work_in_the_trainer_too(queue_of):
    rows = rollouts(seed=1)
    got, _ = computed(CreditSync, config("counterpoise/f_grpo"), rows, queue_of)
    assert_close(got, cp.method("f_grpo").assign(token_batch(rows)).credit_NT)


def test_axes_and_seed_from_the_configuration(queue_of):
    rows = rollouts(seed=1)
    axes = {"credit": [{"name": "top_entropy", "fraction": 0.5}], "advantage": "group_mean"}
    got, _ = computed(CreditSync, config("counterpoise/dapo", axes | {"seed": 7}), rows, queue_of)
    assert_close(got, cp.method("dapo", **axes).assign(token_batch(rows)).credit_NT)
    assert 0.3 < (got != 0).sum() / token_batch(rows).mask_NT.sum() < 0.6


def test_without_the_engines_log_probs_the_trainers_stand_in(queue_of):
    rows = rollouts(seed=1)
    for row in rows:
        del row.fields["rollout_log_probs"]
    got, _ = computed(CreditSync, config("counterpoise/ar"), rows, queue_of)
    trainer_logp = [row.fields["old_log_probs"].tolist() for row in rows]
    for row in rows:
        row.fields["rollout_log_probs"] = row.fields["old_log_probs"]
    assert_close(
        got, cp.method("ar").assign(token_batch(rows, sampler_logp=trainer_logp)).credit_NT
    )


def test_fillers_get_nothing_and_change_nothing(queue_of):
    rows = rollouts(seed=1)
    alone, _ = computed(CreditSync, config("counterpoise/ktae"), rows, queue_of)
    filler = Rollout(
        key="pad0_0_0",
        fields={k: v if k == "uid" else v[:1] * 0 for k, v in rows[0].fields.items()}
        | {"uid": "pad0"},
    )
    got, _ = computed(CreditSync, config("counterpoise/ktae"), [*rows, filler], queue_of)
    assert torch.equal(got[:-1], alone) and (got[-1] == 0).all()


@pytest.mark.parametrize("name", ["ktae", "gtpo", "ibpo"])
def test_tokens_of_tools_are_no_part_of_a_rollout(name, queue_of):
    """A tool says the same in every rollout: the credit is that of the rollouts without it, laid
    out around the hole in the mask.
    """
    rows = rollouts(seed=1)
    expected = cp.method(name).assign(token_batch(rows)).credit_NT
    for row in rows:
        with_reply(row, [9, 9])
    got, _ = computed(CreditSync, config(f"counterpoise/{name}"), rows, queue_of)
    for i, row in enumerate(rows):
        mask = row.fields["response_mask"].bool()
        n = len(mask)
        assert_close(got[i, :n][mask], expected[i, : int(mask.sum())])
        assert (got[i, :n][~mask] == 0).all()


def with_reply(row: Rollout, reply: list[int]) -> None:
    """What a tool said after the first token."""
    said = torch.tensor(reply)
    for field, value in row.fields.items():
        if field not in ("uid", "prompts", "position_ids"):
            middle = (said if field == "responses" else 0 * said).to(value.dtype)
            row.fields[field] = torch.cat([value[:1], middle, value[1:]])


def test_what_a_tool_said_is_context(queue_of):
    """Replies that differ end the run of tokens that good and bad rollouts share."""
    rows = rollouts(seed=1)
    for at, row in enumerate(rows):
        with_reply(row, [9, at])
    batch = token_batch(rows)
    mask_NT = torch.zeros_like(batch.mask_NT)
    for at, row in enumerate(rows):
        mask_NT[at, : len(row.fields["response_mask"])] = row.fields["response_mask"].bool()
    expected = cp.method("gtpo").assign(batch.replace(mask_NT=mask_NT)).credit_NT
    got, _ = computed(CreditSync, config("counterpoise/gtpo"), rows, queue_of)
    assert_close(got[:, : expected.shape[1]], expected)


def test_kl_in_the_reward_reaches_the_credit(queue_of):
    from verl.trainer.ppo.core_algos import FixedKLController

    rows, made = (
        rollouts(seed=1),
        config("counterpoise/gtpo", algorithm__use_kl_in_reward=True, algorithm__kl_penalty="kl"),
    )
    queue, host = queue_of(rows), trainer(CreditSync, made)
    host.kl_ctrl_in_reward = FixedKLController(0.1)
    metrics = {}
    host._compute_advantage(batch_meta(rows), metrics=metrics)
    reward = [
        float((r["rm_scores"] - 0.1 * (r["old_log_probs"] - r["ref_log_prob"])).sum())
        for r in (row.fields for row in rows)
    ]
    expected = cp.method("gtpo").assign(
        token_batch(rows).replace(reward_N=torch.tensor(reward)), batch_number=1
    )
    assert_close(
        queue.padded([row.key for row in rows], "advantages"),
        expected.credit_NT,
        rtol=1e-4,
        atol=1e-5,
    )
    assert "actor/reward_kl_penalty" in metrics


def test_a_rejected_rollout_keeps_its_place_in_the_statistics(queue_of):
    """verl's rollout correction empties the mask of a rollout far from the sampler; its siblings'
    credit does not change.
    """
    rows = rollouts(seed=1)
    rows[0].fields["old_log_probs"] = rows[0].fields["rollout_log_probs"] - 5
    plain, _ = computed(CreditSync, config("counterpoise/ktae"), rows, queue_of)
    correction = {
        "rollout_is": None,
        "rollout_rs": "seq_mean_k2",
        "rollout_rs_threshold": 1.0,
        "bypass_mode": False,
    }
    made = config("counterpoise/ktae", algorithm__rollout_correction=correction)
    got, _ = computed(CreditSync, made, rows, queue_of)
    assert torch.equal(got[1:], plain[1:])
    assert (got[0] == 0).all() and (plain[0] != 0).any()


def test_fades_state_goes_on_and_survives_a_checkpoint(queue_of, tmp_path):
    made = config("counterpoise/fade", trainer__default_local_dir=str(tmp_path))
    first, second = rollouts(seed=1), rollouts(seed=2)
    fade = cp.method("fade")
    one = fade.assign(token_batch(first))
    two = fade.assign(token_batch(second), one.state)
    _, host = computed(CreditSync, made, first, queue_of)
    assert host.credit_state["controller"] == pytest.approx(one.state["controller"], rel=1e-5)
    host._save_checkpoint()

    resumed = trainer(CreditSync, made)
    resumed._load_checkpoint()
    assert resumed.global_steps == 1 and resumed.credit_state == host.credit_state
    queue = queue_of(second)
    resumed._compute_advantage(batch_meta(second), metrics={})
    assert_close(queue.padded([row.key for row in second], "advantages"), two.credit_NT)
    fresh, _ = computed(CreditSync, made, second, queue_of)
    assert (fresh - two.credit_NT).abs().max() > 1e-4

    other = trainer(
        CreditSync, config("counterpoise/ktae", trainer__default_local_dir=str(tmp_path))
    )
    with pytest.raises(ValueError, match="Resume with the same method"):
        other._load_checkpoint()
    (tmp_path / "global_step_1" / "counterpoise.json").unlink()
    with pytest.warns(UserWarning, match="starts with a fresh state at batch 1"):
        trainer(CreditSync, made)._load_checkpoint()


def test_several_trajectories_a_session_are_refused(queue_of):
    rows = rollouts(seed=1)
    rows[1].key = "p0_0_1"
    with pytest.raises(ValueError, match="session p0_0 gave more than one trajectory"):
        computed(CreditSync, config("counterpoise/ktae"), rows, queue_of)


@pytest.mark.parametrize(
    ("made", "line"),
    [
        ({"adv_estimator": "counterpoise/delta"}, "reads hidden_NTD"),
        (
            {"adv_estimator": "counterpoise/dapo", "counterpoise": {"credit": ["value_baseline"]}},
            "reads hidden_NTD, and verl's workers send back log-probs and entropies alone",
        ),
        ({"adv_estimator": "counterpoise/dfpo_min"}, "whole update"),
        ({"adv_estimator": "counterpoise/dappo"}, "Did you mean 'dapo'"),
        (
            {"adv_estimator": "counterpoise/grpo", "n": 1},
            "rollout.n=1: group_zscore compares the rollouts of one prompt",
        ),
        (
            {
                "adv_estimator": "counterpoise/top_entropy",
                "algorithm__rollout_correction": {"bypass_mode": True},
            },
            "bypass_mode=True skips the pass",
        ),
        (
            {
                "adv_estimator": "counterpoise/dapo",
                "counterpoise": {"credit": [{"name": "top_entropy"}]},
                "algorithm__rollout_correction": {"bypass_mode": True},
            },
            "reads entropies",
        ),
        (
            {"counterpoise": {"credit": ["uniform"]}},
            "counterpoise.credit needs an estimator of counterpoise, got adv_estimator=grpo",
        ),
        ({"actor_rollout_ref__actor__policy_loss__loss_mode": "counterpoise/tpo"}, "whole update"),
        (
            {
                "counterpoise": {"plan": "query_preserved"},
                "actor_rollout_ref__actor__shuffle": True,
            },
            "actor.shuffle=True",
        ),
        (
            {"counterpoise": {"plan": {"name": "reward_balanced", "mode": "per_query"}}},
            "Use mode 'groups'",
        ),
        ({"counterpoise": {"plan": "query_preserve"}}, "Did you mean 'query_preserved'"),
        (
            {
                "actor_rollout_ref__actor__strategy": "torchtitan",
                "actor_rollout_ref__actor__torchtitan": {"context_parallel_size": 2},
            },
            (
                "actor.torchtitan.context_parallel_size=2: each rank sees a part of every"
                " sequence.*Set it to 1"
            ),
        ),
        (
            {
                "actor_rollout_ref__actor__strategy": "megatron",
                "actor_rollout_ref__actor__megatron": {"dynamic_context_parallel": True},
            },
            "actor.megatron.dynamic_context_parallel=True.*Set it to False",
        ),
    ],
)
def test_what_cannot_work_is_said_before_any_worker_starts(made, line):
    with pytest.raises(ValueError, match=line):
        check_config(config(**made), "sync")


def test_a_credit_rule_that_reads_the_reference_asks_for_it():
    from counterpoise import declare, register_rule
    from counterpoise.catalogue.registry import FAMILIES

    @declare(needs="ref_logp_NT")
    def from_reference(credit_NT, batch):
        return credit_NT * (batch.ref_logp_NT - batch.sampler_logp_NT).exp()

    register_rule("from_reference", from_reference)
    try:
        made = {
            "adv_estimator": "counterpoise/dapo",
            "counterpoise": {"credit": ["from_reference"]},
        }
        with pytest.raises(ValueError, match="actor.use_kl_loss=True"):
            check_config(config(**made), "sync")
        assert (
            check_config(config(**made, actor_rollout_ref__actor__use_kl_loss=True), "sync")[0]
            is not None
        )
    finally:
        del FAMILIES["credit"]["from_reference"]


def test_one_optimizer_step_a_batch_is_warned_about():
    with pytest.warns(UserWarning, match="one update per batch"):
        check_config(config(counterpoise={"plan": "query_preserved"}, mini=4, train=4), "sync")
    with pytest.warns(UserWarning, match="one update per batch"):
        check_config(
            config(counterpoise={"plan": "query_preserved"}, mini=2, train=8), "separate_async"
        )


def test_the_constructor_restores_verls_own_mode(monkeypatch):
    """verl compares trainer_mode with its own names; ours is taken off before verl's constructor
    runs, and the checks have run by then.
    """
    seen = {}
    monkeypatch.setattr(
        "verl.trainer.ppo.v1.trainer_base.PPOTrainer.__init__",
        lambda self, made: seen.update(mode=made.trainer.v1.trainer_mode),
    )
    host = CreditSync(config("counterpoise/ktae", {"plan": "query_preserved"}))
    assert seen == {"mode": "sync"}
    assert host.credit_setup.method.name == "ktae" and host.plan_setup is not None
    with pytest.raises(ValueError, match="reads hidden_NTD"):
        CreditSync(config("counterpoise/delta"))


def test_modes():
    with pytest.raises(ValueError, match="Did you mean 'counterpoise/sync'"):
        mode_of("counterpoise/snyc")


def test_the_queue_in_memory_gives_what_was_put():
    rows = rollouts(seed=1)
    got = Queue(rows).kv_batch_get([row.key for row in rows], "train", ["rm_scores", "uid"])
    assert torch.equal(got["rm_scores"].values(), nested(rows, "rm_scores").values())
    assert list(got["uid"]) == [row.fields["uid"] for row in rows]
