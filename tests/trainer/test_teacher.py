"""Teachers in the trainer: what they read and score, whose weights they have, files, resume,
replay, refusals before a model loads.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import counterpoise as cp
from counterpoise.policy import load_model
from counterpoise.probes.replay import replay
from counterpoise.probes.scene import open_scene
from counterpoise.run.checkpoint import TEACHER
from counterpoise.run.read import read_jsonl
from counterpoise.run.rollouts import ragged
from counterpoise.tasks import task as make_task
from counterpoise.trainer import loop
from counterpoise.trainer.collect import RolloutSampler, collect, measure_columns
from counterpoise.trainer.config import ConfigError, parse_config
from counterpoise.trainer.loop import train
from counterpoise.trainer.teacher import follow, load_teacher, measure_teacher, teacher_settings

SMALL = {
    "model": "bundled",
    "task": {"name": "arithmetic", "difficulty": "easy"},
    "num_batches": 2,
    "rollouts": {"prompts": 8, "group_size": 4, "max_new_tokens": 80},
    "optimizer": {"lr": 1e-4, "updates_per_batch": 2},
    "eval": {"every": 0},
    "ledger": {"every": 0},
    "checkpoint_every": 1,
    "keep_every": 1,
    "trackers": [],
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe(tmp_path: Path, name: str = "run", **more) -> dict:
    return {**SMALL, "run_dir": str(tmp_path / name), **more}


def rows_of(run_dir) -> list[dict]:
    return read_jsonl(Path(run_dir) / "metrics.jsonl")


def batch_of(method, config, policy):
    """The first batch of a recipe, before any column of a teacher."""
    task = make_task(**config.task)
    sampler = RolloutSampler(policy, task, config, 0, needs=method.needs)
    return measure_columns(policy, method, config, collect(method, sampler))


def plain_logp(model, prompt_ids, response_ids, temperature):
    """Log-probs of a response by one forward of one row."""
    ids = torch.tensor([[*prompt_ids, *response_ids]])
    logp = (model(ids).logits[0].double() / temperature).log_softmax(-1)
    at = range(len(prompt_ids) - 1, len(prompt_ids) + len(response_ids) - 1)
    return [logp[k, token].item() for k, token in zip(at, response_ids)]


def chat_ids(policy, text):
    turn = [{"role": "user", "content": text}]
    return policy.tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]


TEMPLATES = {"sibling": "{demonstration} {prompt}", "feedback": "{feedback} {prompt}"}


@torch.no_grad()
def test_a_teacher_scores_the_same_ids_after_another_prompt(tmp_path):
    """Against a forward of each row by itself: who reads what, at the temperature of the rollouts;
    rollouts without a teacher have 0.
    """
    method = cp.method("sdpo", credit={"model": "policy", "template": TEMPLATES})
    rollouts = {**SMALL["rollouts"], "temperature": 0.8}
    task = {"name": "helpers.fussy:Fussy"}
    config = parse_config(recipe(tmp_path, rollouts=rollouts, task=task))
    policy = load_model("bundled")
    plain = batch_of(method, config, policy)
    collected, numbers = measure_teacher(
        load_teacher(method, policy), policy, method, config, plain
    )
    batch, group = collected.batch, collected.batch.group_N.tolist()
    right, sources = batch.is_success_N.tolist(), {"sibling": 0, "feedback": 0, None: 0}
    for row, number in enumerate(group):
        text = collected.prompts[number].text
        others = [k for k in range(len(group)) if k != row and group[k] == number and right[k]]
        source = "sibling" if others else None if right[row] else "feedback"
        sources[source] += 1
        length = int(batch.length_N[row])
        assert batch.has_teacher_N[row] == (source is not None)
        got = batch.teacher_logp_NT[row, :length].tolist()
        if source is None:
            assert got == [0.0] * length
            continue
        more = collected.texts[others[0]] if others else f"not {len(collected.texts[row])}"
        ids = chat_ids(policy, f"{more.strip()} {text}")
        response = batch.token_ids_NT[row, :length].tolist()
        assert got == pytest.approx(plain_logp(policy.model, ids, response, 0.8), abs=2e-4)
    assert sources["sibling"] and sources["feedback"]
    for name in ("sibling", "feedback"):
        assert numbers[f"teacher/{name}_frac"] == sources[name] / len(group)
    assert numbers["teacher/too_long_frac"] == 0


@torch.no_grad()
def test_initial_and_average_weights_score_and_leave_the_policy_as_it_was(tmp_path):
    config = parse_config(recipe(tmp_path))
    policy = load_model("bundled")
    plain = batch_of(cp.method("opsd"), config, policy)

    def score(teacher, method):
        return measure_teacher(teacher, policy, method, config, plain)[0].batch.teacher_logp_NT

    methods = {
        name: cp.method("opsd", credit={"model": name, "rate": 0.25})
        for name in ("policy", "initial", "average")
    }
    teachers = {name: load_teacher(method, policy) for name, method in methods.items()}
    first_NT = {name: score(teachers[name], methods[name]) for name in methods}
    assert torch.equal(first_NT["policy"], first_NT["initial"])
    assert torch.equal(first_NT["policy"], first_NT["average"])
    start = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    for weight in policy.model.parameters():
        weight.add_(0.02 * torch.randn_like(weight))
    moved = {name: weight.clone() for name, weight in policy.model.named_parameters()}
    for teacher in teachers.values():
        follow(teacher, policy)
    assert torch.equal(score(teachers["initial"], methods["initial"]), first_NT["initial"])
    assert not torch.equal(score(teachers["policy"], methods["policy"]), first_NT["policy"])
    average_NT = score(teachers["average"], methods["average"])
    for name, weight in policy.model.named_parameters():
        assert torch.equal(weight, moved[name])
        weight.copy_(start[name] + 0.25 * (moved[name] - start[name]))
    torch.testing.assert_close(average_NT, score(teachers["policy"], methods["policy"]))


def test_sdpo_trains_and_its_average_is_in_the_checkpoint(tmp_path):
    """Once per batch, not once per update: average += 0.05 (policy - average)."""
    config = parse_config(recipe(tmp_path, method={"name": "sdpo"}))
    train(config)
    folders = [tmp_path / "run" / "checkpoints" / f"batch_{k:06d}" for k in range(3)]
    policy = [load_file(folder / "model.safetensors") for folder in folders]
    average = [load_file(folder / TEACHER) for folder in folders]
    for name, weight in average[0].items():
        assert torch.equal(weight, policy[0][name])
        for k in (1, 2):
            expected = average[k - 1][name].lerp(policy[k][name], 0.05)
            assert torch.equal(average[k][name], expected)
    assert any(not torch.equal(policy[0][name], policy[2][name]) for name in policy[0])
    rows = rows_of(config.run_dir)
    assert all(0 < row["teacher/sibling_frac"] <= 1 for row in rows)
    assert rows[0]["credit/teacher/taught_frac"] == rows[0]["teacher/sibling_frac"]
    assert rows[0]["loss/coef_mass"] > 0
    timing = read_jsonl(tmp_path / "run" / "timing.jsonl")
    assert all(0 < row["teacher_share"] < 1 for row in timing)


METHODS = {
    "sdpo": {"name": "sdpo"},
    "opsd": {"name": "opsd"},
    "live": {"name": "sdpo", "credit": {"model": "policy", "source": ["sibling"]}},
    "top_d": {"name": "top_d", "credit": {"model": "bundled_varied"}},
    "mixed": {
        "name": "grpo",
        "credit": [{"name": "mix", "rules": ["uniform", "teacher"], "weights": [0.9, 0.1]}],
    },
}


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_is_the_whole_run_and_a_replay_has_its_credit(tmp_path, name):
    """Metrics and weights bit for bit, and credit of a stored batch as it was given then."""
    method = METHODS[name]
    whole = parse_config(recipe(tmp_path, "whole", method=method, num_batches=3))
    train(whole)
    train(parse_config(recipe(tmp_path, "torn", method=method, num_batches=1)))
    torn = parse_config(recipe(tmp_path, "torn", method=method, num_batches=3))
    train(torn, resume=True)
    assert rows_of(whole.run_dir) == rows_of(torn.run_dir)
    last = [Path(one.run_dir) / "checkpoints" / "batch_000003" for one in (whole, torn)]
    for file in ["model.safetensors", *([TEACHER] if name in ("sdpo", "mixed") else [])]:
        assert (last[0] / file).read_bytes() == (last[1] / file).read_bytes()
    assert (last[0] / TEACHER).is_file() == (name in ("sdpo", "mixed"))
    scene = open_scene(Path(torn.run_dir), 2)
    stored = pd.read_parquet(Path(torn.run_dir) / "rollouts" / "batch_000002.parquet")
    got = ragged(scene.credit.credit_NT, scene.collected.batch.mask_NT).to_pylist()
    assert any(any(row) for row in got)
    for row, kept in zip(got, stored["credit"]):
        assert row == kept.tolist()


def test_replay_of_other_methods_on_a_run_without_a_teacher(tmp_path):
    """A teacher starts from the first weights; each method has a teacher of its own."""
    config = parse_config(recipe(tmp_path, method={"name": "grpo"}))
    train(config)
    live = "{name: sdpo, credit: {model: policy}}"
    summary = replay(Path(config.run_dir), 1, ["grpo", "sdpo", live, "opsd", "{name: sdpo}"])
    pairs = summary["numbers"]["rank_correlation"]
    assert pairs["sdpo ~ {name: sdpo}"] == 1.0
    assert pairs[f"sdpo ~ {live}"] < 1.0
    assert pairs["sdpo ~ opsd"] < 1.0
    with pytest.raises(ConfigError, match="nothing to teach"):
        replay(Path(config.run_dir), 1, ["top_d"])


def test_one_rollout_per_prompt_teaches_by_the_solution(tmp_path):
    rollouts = {"prompts": 8, "group_size": 1, "max_new_tokens": 80}
    config = parse_config(recipe(tmp_path, method={"name": "opsd"}, rollouts=rollouts))
    train(config)
    assert rows_of(config.run_dir)[-1]["teacher/solution_frac"] == 1.0
    assert rows_of(config.run_dir)[-1]["loss/coef_mass"] > 0


def test_adapters_are_averaged_and_resume(tmp_path):
    more = {"method": {"name": "sdpo"}, "lora": {"r": 4, "alpha": 8}}
    train(parse_config(recipe(tmp_path, num_batches=2, **more)))
    average = load_file(tmp_path / "run" / "checkpoints" / "batch_000002" / TEACHER)
    assert average
    assert all("lora_" in name for name in average)
    longer = parse_config(recipe(tmp_path, num_batches=3, **more))
    assert train(longer, resume=True).batch_number == 3


def test_an_environment_teaches_by_a_sibling_s_conversation(tmp_path):
    config = parse_config(
        recipe(
            tmp_path,
            model="bundled_turns",
            chat=False,
            task={"name": "guess", "n": 4},
            method={"name": "sdpo", "credit": {"template": TEMPLATES}},
            rollouts={
                "prompts": 4,
                "group_size": 4,
                "max_turns": 3,
                "max_turn_tokens": 4,
                "max_new_tokens": 16,
                "max_row_tokens": 200,
            },
        )
    )
    train(config)
    assert rows_of(config.run_dir)[0]["teacher/sibling_frac"] > 0
    scene = open_scene(Path(config.run_dir), 0)
    batch, credit_NT = scene.collected.batch, scene.credit.credit_NT
    said_NT = torch.arange(batch.mask_NT.shape[1]) < batch.mask_NT.sum(1)[:, None]
    assert (said_NT != batch.mask_NT).any(), "replies are holes"
    assert not credit_NT[~batch.mask_NT].any()
    assert credit_NT[batch.mask_NT].any()


def test_what_does_not_fit_into_the_model_has_no_teacher(tmp_path):
    template = {"sibling": "{demonstration} " + "x " * 600 + "{prompt}"}
    method = {"name": "sdpo", "credit": {"source": ["sibling"], "template": template}}
    config = parse_config(recipe(tmp_path, method=method, num_batches=1))
    train(config)
    (row,) = rows_of(config.run_dir)
    assert row["teacher/too_long_frac"] > 0
    assert row["teacher/sibling_frac"] == 0
    assert row["reward/flat_batches"] == 1
    assert row["loss/coef_mass"] == 0


def test_a_rule_of_one_s_own_may_read_a_teacher_and_two_must_agree():
    @cp.declare(needs=("teacher_logp_NT", "has_teacher_N"))
    def mine(credit_NT, batch, *, source="solution"):
        return batch.column("teacher_logp_NT") * batch.mask_NT

    settings = teacher_settings(cp.method("grpo", credit=[mine]))
    assert settings == {"source": "solution", "template": None, "model": "average", "rate": 0.05}
    parts = ["teacher", {"name": "teacher", "rate": 0.5}]
    both = cp.method("grpo", credit=[{"name": "mix", "rules": parts, "weights": [1, 1]}])
    with pytest.raises(ConfigError, match="a batch has one teacher"):
        teacher_settings(both)
    assert teacher_settings(cp.method("grpo")) is None


BAD = [
    ({"method": {"name": "top_d"}}, "reads the prompt alone, so it has nothing to teach"),
    (
        {"method": {"name": "top_d", "credit": {"model": "bundled_turns"}}},
        "its vocabulary is not that of 'bundled': token",
    ),
    ({"method": {"name": "top_d", "credit": {"model": "./none"}}}, "no such folder"),
    (
        {"method": {"name": "opsd"}, "task": {"name": "helpers.fussy:Bare"}},
        "'train/0' has neither meta",
    ),
    (
        {"method": {"name": "sdpo", "credit": {"source": "feedback"}}},
        "the grader of this task gives no feedback",
    ),
    (
        {
            "method": {"name": "opsd", "credit": [{"name": "teacher"}]},
            "rollouts": {"prompts": 4, "group_size": 1, "max_new_tokens": 80},
        },
        "no rollout would have a teacher",
    ),
    (
        {
            "method": {"name": "sdpo", "credit": {"source": "feedback"}},
            "task": {"name": "guess"},
            "rollouts": {"prompts": 4, "group_size": 4, "max_turns": 3, "max_turn_tokens": 4},
        },
        "gives no feedback",
    ),
]


@pytest.mark.parametrize(("more", "message"), BAD)
def test_what_cannot_work_is_refused_before_a_model_loads(tmp_path, monkeypatch, more, message):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loop, "load_policy", load)
    with pytest.raises(ValueError, match=message):
        train(parse_config(recipe(tmp_path, **more)))


def test_feedback_alone_is_fine_where_the_grader_gives_it(tmp_path):
    method = {"name": "sdpo", "credit": {"source": "feedback"}}
    task = {"name": "helpers.fussy:Fussy"}
    config = parse_config(recipe(tmp_path, method=method, task=task, num_batches=1))
    train(config)
    (row,) = rows_of(config.run_dir)
    assert row["teacher/feedback_frac"] == pytest.approx(1 - row["reward/mean"])
