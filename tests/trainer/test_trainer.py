"""The loop with the bundled model: deterministic, resumable after kill -9, indifferent to
micro-batches, and it learns from real credit.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import counterpoise as cp
from counterpoise.policy import load_model, measure
from counterpoise.run import checkpoint
from counterpoise.run.checkpoint import TEACHER
from counterpoise.run.environment import source_commit
from counterpoise.run.files import write_table
from counterpoise.run.read import read_jsonl
from counterpoise.run.rollouts import read_rollouts, rollout_columns
from counterpoise.tasks import task
from counterpoise.trainer.collect import RolloutSampler, collect, measure_columns
from counterpoise.trainer.config import ConfigError, load_config, parse_config
from counterpoise.trainer.loop import train
from counterpoise.trainer.update import adamw, apply_update, learning_rate

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden_run.json"
SMALL = {
    "model": "bundled",
    "num_batches": 3,
    "rollouts": {"prompts": 4, "group_size": 4, "max_new_tokens": 80},
    "optimizer": {"lr": 1e-4, "updates_per_batch": 2},
    "eval": {"every": 0},
    "ledger": {"every": 0},
    "checkpoint_every": 1,
    "trackers": [],
}


def small(tmp_path: Path, **more) -> dict:
    return {**SMALL, "run_dir": str(tmp_path / "run"), **more}


def metrics(run_dir) -> list[dict]:
    return read_jsonl(Path(run_dir) / "metrics.jsonl")


def weights(run_dir) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(checkpoint.checkpoints(Path(run_dir))[-1] / "model.safetensors")


def test_two_runs_of_one_seed_are_bit_identical_and_another_seed_is_not(tmp_path):
    runs = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = parse_config(small(tmp_path, run_dir=str(tmp_path / name), seed=seed))
        runs[name] = train(config).run_dir
    assert metrics(runs["a"]) == metrics(runs["b"])
    assert metrics(runs["a"]) != metrics(runs["c"])
    a, b = weights(runs["a"]), weights(runs["b"])
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_golden_run(tmp_path):
    """Ten batches against stored numbers, 1e-5 across machines.

    ``REGOLD=1 pytest`` writes them anew: say why in the commit.

    One thread, since the number of threads decides how a BLAS rounds, and a ratio on the edge of
    its clip then falls to either side."""
    config = parse_config(
        small(
            tmp_path,
            num_batches=10,
            rollouts={"prompts": 8, "group_size": 4, "max_new_tokens": 80},
            checkpoint_every=0,
        )
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(config)
    finally:
        torch.set_num_threads(num_threads)
    keys = (
        "reward/mean",
        "entropy/mean",
        "rollouts/num_tokens",
        "loss/total",
        "loss/grad_norm",
        "loss/coef_mass",
        "plan/pairs_kept",
    )
    got = [{key: row[key] for key in keys} for row in metrics(config.run_dir)]
    assert sum(row["loss/coef_mass"] > 0 for row in got) == 10, (
        "a golden run without advantages shows nothing"
    )
    if os.environ.get("REGOLD"):
        GOLDEN.write_text(json.dumps(got, indent=1) + "\n")
    stored = json.loads(GOLDEN.read_text())
    for batch_number, (row, kept) in enumerate(zip(got, stored, strict=True)):
        assert row == pytest.approx(kept, rel=1e-4, abs=1e-4), f"batch {batch_number}"


# loads everything once, then forks a run per line; says its process id and how it ended
FORK = """
import json, os, sys, traceback
import torch
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train
torch.set_num_threads(1)
for line in sys.stdin:
    recipe, mode = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(parse_config(recipe), resume=mode == "resume", fresh=mode == "fresh")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Forks:
    """Runs in processes of their own, forked off one that has loaded everything."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", FORK]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start(self, recipe: dict, mode: str) -> int:
        self.server.stdin.write(json.dumps([recipe, mode]).encode() + b"\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    def has_ended(self) -> bool:
        return bool(select.select([self.server.stdout], [], [], 0.02)[0])

    def exit_code(self) -> int:
        return int(self.server.stdout.readline())


@pytest.fixture(scope="module")
def forks():
    forks = Forks()
    yield forks
    forks.server.communicate()


@pytest.mark.parametrize("method", ["fade", "sdpo"])
def test_kill_dash_nine_at_random_moments_and_resume_bit_identically(tmp_path, forks, method):
    """FADE carries a controller's state, SDPO a moving average of the weights; evaluation and files
    are on, so that every writer can be hit.
    """
    more = {
        "num_batches": 5,
        "method": {"name": method},
        "eval": {"every": 2, "prompts": 4},
        "checkpoint_every": 2,
    }
    whole = small(tmp_path, run_dir=str(tmp_path / "whole"), **more)
    # in a process of its own too: how many threads this one has, earlier tests decide
    forks.start(whole, "new")
    assert forks.exit_code() == 0
    torn = small(tmp_path, run_dir=str(tmp_path / "torn"), **more)
    watched = Path(torn["run_dir"]) / "metrics.jsonl"
    rng, mode, kills = random.Random(0), "new", 0
    while True:
        process = forks.start(torn, mode)
        goal = len(read_jsonl(watched)) + rng.choice((1, 2))
        while not forks.has_ended():
            if kills < 2 and len(read_jsonl(watched)) >= goal:
                time.sleep(rng.random() * 0.3)
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(process, signal.SIGKILL)
                kills += 1
                break
        code = forks.exit_code()
        if code == 0:
            break
        assert code == -signal.SIGKILL
        mode = "resume" if checkpoint.checkpoints(Path(torn["run_dir"])) else "fresh"
    assert kills == 2
    assert metrics(whole["run_dir"]) == metrics(torn["run_dir"])
    assert read_jsonl(Path(whole["run_dir"]) / "evals.jsonl") == read_jsonl(
        Path(torn["run_dir"]) / "evals.jsonl"
    )
    a, b = weights(whole["run_dir"]), weights(torn["run_dir"])
    assert all(torch.equal(a[key], b[key]) for key in a)
    averages = [checkpoint.checkpoints(Path(r["run_dir"]))[-1] / TEACHER for r in (whole, torn)]
    assert [path.is_file() for path in averages] == [method == "sdpo"] * 2
    if method == "sdpo":
        assert averages[0].read_bytes() == averages[1].read_bytes()


def test_sigterm_writes_a_checkpoint_and_leaves(tmp_path, forks):
    recipe = small(tmp_path, num_batches=200, checkpoint_every=0)
    process = forks.start(recipe, "new")
    watched = Path(recipe["run_dir"]) / "metrics.jsonl"
    while not forks.has_ended() and not read_jsonl(watched):
        pass
    os.kill(process, signal.SIGTERM)
    assert forks.exit_code() == 0
    (kept,) = checkpoint.checkpoints(Path(recipe["run_dir"]))
    done = json.loads((kept / "state.json").read_text())["batch_number"]
    assert done == len(metrics(recipe["run_dir"])) < 200


def test_a_checkpoint_is_a_plain_hugging_face_folder_and_evaluates(tmp_path, capfd):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = train(parse_config(small(tmp_path, num_batches=1)))
    assert "shards" not in capfd.readouterr().err, "a run has one progress bar, its own"
    path = checkpoint.checkpoints(result.run_dir)[-1]
    model = AutoModelForCausalLM.from_pretrained(path)
    assert AutoTokenizer.from_pretrained(path).chat_template
    stored = weights(result.run_dir)
    assert all(
        torch.equal(parameter, stored[name])
        for name, parameter in model.named_parameters()
        if name in stored
    )
    assert not list(path.rglob("*.pt")) and not list(path.rglob("*.bin")), (
        "nothing that needs unpickling"
    )


@pytest.fixture(scope="module")
def scene():
    """A policy with one batch that has both signs."""
    config = parse_config(
        {**SMALL, "rollouts": {"prompts": 6, "group_size": 4, "max_new_tokens": 80}}
    )
    policy = load_model("bundled", dtype=torch.float32, device="cpu")
    collected = collect(
        cp.method("dapo"),
        RolloutSampler(policy, task(name="arithmetic"), config, 0, needs=cp.method("dapo").needs),
    )
    assert 0 < collected.batch.reward_N.mean() < 1
    return config, policy, collected


def test_sampler_logp_equals_a_teacher_forced_forward(scene):
    config, policy, collected = scene
    batch = collected.batch
    columns = measure(
        policy.model,
        collected.prompt_ids,
        batch.token_ids_NT,
        batch.mask_NT,
        {"trainer_logp_NT", "entropy_NT"},
    )
    torch.testing.assert_close(columns["trainer_logp_NT"], batch.sampler_logp_NT, atol=1e-4, rtol=0)
    torch.testing.assert_close(columns["entropy_NT"], batch.entropy_NT, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["dapo", "gspo", "dfpo_orth", "delta", "crf_ntf"])
def test_the_update_does_not_depend_on_the_micro_batch_budget(scene, name):
    """One AdamW batch from the same weights with two budgets: equal parameters up to rounding."""
    config, _, collected = scene
    method, after = cp.method(name), []
    for budget in (200, 100_000):
        cut = config.model_copy(
            update={"optimizer": config.optimizer.model_copy(update={"token_budget": budget})}
        )
        policy = load_model("bundled", dtype=torch.float64, device="cpu")
        ready = measure_columns(policy, method, cut, collected._replace(batch=collected.batch))
        optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.1)
        rows = method.rows(
            ready.batch, method.assign(ready.batch), torch.arange(ready.batch.num_rollouts)
        )
        update = apply_update(policy.model, optimizer, method, rows, ready, cut)
        assert update.grad_norm > 0
        after.append(torch.cat([p.detach().flatten() for p in policy.model.parameters()]))
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=1e-9)


def test_rollouts_come_back_from_parquet(scene, tmp_path):
    config, _, collected = scene
    credit = cp.method("grpo").assign(collected.batch)
    write_table(tmp_path / "r.parquet", rollout_columns(0, collected, credit))
    back = read_rollouts(tmp_path / "r.parquet", max_length=80)
    assert back.texts == collected.texts
    assert back.prompt_ids == collected.prompt_ids
    for name in ("token_ids_NT", "mask_NT", "group_N", "reward_N", "sampler_logp_NT", "entropy_NT"):
        got, expected = getattr(back.batch, name), getattr(collected.batch, name)
        on = collected.batch.mask_NT if got.dim() == 2 else slice(None)
        assert torch.equal(got[on], expected[on]), name


def test_tokens_of_an_environment_come_back_as_context(scene, tmp_path):
    """A reply inside a rollout is in the file, masked; what is no token of a row is not."""
    _, _, collected = scene
    mask_NT = collected.batch.mask_NT.clone()
    mask_NT[:, 1] = mask_NT[0, 0] = False
    with_replies = collected._replace(batch=collected.batch.replace(mask_NT=mask_NT))
    credit = cp.method("dapo").assign(with_replies.batch)
    write_table(tmp_path / "r.parquet", rollout_columns(0, with_replies, credit))
    back = read_rollouts(tmp_path / "r.parquet").batch
    width = back.mask_NT.shape[1]
    assert torch.equal(back.mask_NT, mask_NT[:, :width])
    assert back.token_ids_NT[0, :2].tolist() == collected.batch.token_ids_NT[0, :2].tolist()
    assert (back.sampler_logp_NT[:, 1] == 0).all()


def test_rollouts_without_a_column_say_which(scene, tmp_path):
    import pyarrow.parquet as pq

    _, _, collected = scene
    credit = cp.method("grpo").assign(collected.batch)
    write_table(tmp_path / "r.parquet", rollout_columns(0, collected, credit))
    pq.write_table(
        pq.read_table(tmp_path / "r.parquet").drop_columns("sampler_logp"), tmp_path / "r.parquet"
    )
    with pytest.raises(
        ValueError,
        match="r.parquet: no column 'sampler_logp'. Take the file as counterpoise train wrote it",
    ):
        read_rollouts(tmp_path / "r.parquet")
    (tmp_path / "r.parquet").write_bytes((tmp_path / "r.parquet").read_bytes()[:200])
    with pytest.raises(ValueError, match="r.parquet is not a parquet file .* choose another batch"):
        read_rollouts(tmp_path / "r.parquet")


def test_optimizer_state_survives_bit_for_bit(scene, tmp_path):
    config, _, collected = scene
    policy = load_model("bundled", dtype=torch.float32, device="cpu")
    optimizer, method = adamw(policy.model, config.optimizer), cp.method("dapo")
    rows = method.rows(collected.batch, method.assign(collected.batch), torch.arange(8))
    apply_update(policy.model, optimizer, method, rows, collected, config)
    state = checkpoint.LoopState(batch_number=1, method={"controller": {"p": 0.1}, "rules": []})
    path = checkpoint.save(tmp_path, policy, optimizer, state, keep=1, keep_every=0)
    other = load_model("bundled", dtype=torch.float32, device="cpu")
    restored = adamw(other.model, config.optimizer)
    assert checkpoint.restore(path, other.model, restored) == state
    for model, opt in ((policy.model, optimizer), (other.model, restored)):
        apply_update(model, opt, method, rows, collected, config)
    for a, b in zip(policy.model.parameters(), other.model.parameters()):
        assert torch.equal(a, b)


def test_disk_full_keeps_the_last_good_checkpoint(scene, tmp_path, monkeypatch):
    config, policy, _ = scene
    optimizer = adamw(policy.model, config.optimizer)
    checkpoint.save(
        tmp_path, policy, optimizer, checkpoint.LoopState(batch_number=1), keep=1, keep_every=0
    )

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="last good checkpoint is kept"):
        checkpoint.save(
            tmp_path, policy, optimizer, checkpoint.LoopState(batch_number=2), keep=1, keep_every=0
        )
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["batch_000001"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["batch_000001"]


def test_learning_rate_schedules_by_hand():
    make = lambda **more: parse_config({"optimizer": {"lr": 1.0, **more}}).optimizer  # noqa: E731
    assert [learning_rate(make(warmup=2), k, 10) for k in (0, 1, 2, 9)] == [0.5, 1.0, 1.0, 1.0]
    assert learning_rate(make(schedule="linear"), 5, 10) == pytest.approx(0.5)
    assert learning_rate(make(schedule="cosine"), 5, 10) == pytest.approx(0.5)


RECIPES = ("demo", "delta", "dfpo", "ibpo", "fade", "ntf", "query_preserved", "reward_balanced")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_runs_three_steps(name, tmp_path):
    overrides = [
        "num_batches=3",
        f"run_dir={tmp_path / name}",
        "rollouts.prompts=8",
        "rollouts.group_size=4",
        "eval.every=3",
        "eval.prompts=16",
    ]
    result = train(load_config(ROOT / "recipes" / f"{name}.yaml", overrides))
    rows = metrics(result.run_dir)
    assert result.is_finished and len(rows) == 3
    assert all(row["loss/coef_mass"] > 0 and row["loss/grad_norm"] > 0 for row in rows)
    assert (result.run_dir / "config.yaml").exists() and (
        result.run_dir / "plan" / "batch_000002.json"
    ).exists()
    assert (
        result.last is not None
        and 0 <= result.last.low <= result.last.mean <= result.last.high <= 1
    )


def test_corrections_join_their_groups(tmp_path):
    """IBPO's generate mode: rows are added, every added one is right, and is credited against the
    failure it corrects.
    """
    config = parse_config(
        small(
            tmp_path,
            method={"name": "ibpo", "credit": {"corrections": 4, "template": "{prompt}"}},
            rollouts={"prompts": 8, "group_size": 4, "max_new_tokens": 80},
        )
    )
    policy, arithmetic = (
        load_model("bundled", dtype=torch.float32, device="cpu"),
        task(name="arithmetic"),
    )
    before = collect(cp.method("ibpo"), RolloutSampler(policy, arithmetic, config, 0))
    after = collect(cp.method(**config.method), RolloutSampler(policy, arithmetic, config, 0))
    n = before.batch.num_rollouts
    added = after.batch.select(torch.arange(n, after.batch.num_rollouts))
    assert added.num_rollouts > 0
    assert torch.all(added.reward_N == 1)
    mixed = {
        int(g)
        for g in before.batch.group_N.unique()
        if 0 < before.batch.reward_N[before.batch.group_N == g].mean() < 1
    }
    assert set(added.group_N.tolist()) <= mixed
    scored = measure(
        policy.model, after.prompt_ids[n:], added.token_ids_NT, added.mask_NT, {"trainer_logp_NT"}
    )
    torch.testing.assert_close(scored["trainer_logp_NT"], added.sampler_logp_NT, atol=1e-5, rtol=0)
    out = cp.method("ibpo").assign(after.batch)
    assert (out.credit_NT[n:] > 0).any() and not (out.credit_NT[n:] < 0).any()
    assert train(config).is_finished


def test_the_buffer_fills_until_both_signs_are_there(tmp_path):
    """reward_balanced, buffer: hard problems give few positives, so several rounds are sampled and
    the plan takes the batch's size.
    """
    plan = {"name": "reward_balanced", "mode": "buffer", "update_size": 8}
    config = parse_config(
        small(
            tmp_path,
            num_batches=1,
            method={"name": "grpo", "advantage": "signs", "plan": {**plan, "max_rounds": 3}},
        )
    )
    train(config)
    (row,) = metrics(config.run_dir)
    assert row["rollouts/num"] % 16 == 0
    assert row["plan/rows_left_out"] == row["rollouts/num"] - 16


def test_dynamic_sampling_trains_on_mixed_prompts_alone(tmp_path):
    plan = {"name": "dynamic_sampling", "max_rounds": 8}
    config = parse_config(small(tmp_path, num_batches=2, method={"name": "dapo", "plan": plan}))
    train(config)
    size, group = config.rollouts.prompts, config.rollouts.group_size
    for row in metrics(config.run_dir):
        assert row["sampling/prompts"] == size * row["sampling/rounds"]
        assert row["sampling/kept_frac"] == size / row["sampling/prompts"]
        assert row["plan/rows_left_out"] == row["rollouts/num"] - size * group
    assert max(row["sampling/rounds"] for row in metrics(config.run_dir)) > 1


@pytest.mark.parametrize("mode", ["tis", "mis"])
def test_a_sampler_that_agrees_with_the_trainer_needs_no_weights(tmp_path, mode):
    credit = [{"name": "mismatch_weight", "mode": mode}]
    config = parse_config(small(tmp_path, num_batches=1, method={"name": "dapo", "credit": credit}))
    train(config)
    (row,) = metrics(config.run_dir)
    assert row["credit/mismatch_weight/weight_mean"] == pytest.approx(1, abs=1e-4)
    assert row["credit/mismatch_weight/outside_frac"] == 0
    assert abs(row["credit/mismatch_weight/sequence_kl"]) < 1e-4


def test_lora_trains_adapters_alone_and_resumes(tmp_path):
    config = parse_config(small(tmp_path, num_batches=2, lora={"r": 4, "alpha": 8}))
    train(config)
    path = checkpoint.checkpoints(Path(config.run_dir))[-1]
    assert (path / "adapter_model.safetensors").is_file() and not (
        path / "model.safetensors"
    ).exists()
    longer = parse_config(small(tmp_path, num_batches=3, lora={"r": 4, "alpha": 8}))
    assert train(longer, resume=True).batch_number == 3


def test_kl_to_a_reference_reaches_the_loss(tmp_path):
    loss = [{"name": "clipped"}, {"name": "kl", "coef": 0.5}]
    config = parse_config(small(tmp_path, num_batches=2, method={"name": "grpo", "loss": loss}))
    train(config)
    plain = parse_config(small(tmp_path, run_dir=str(tmp_path / "plain"), num_batches=2))
    train(plain)
    assert metrics(config.run_dir)[0]["reward/mean"] == metrics(plain.run_dir)[0]["reward/mean"]
    assert (
        metrics(config.run_dir)[1]["loss/grad_norm"] != metrics(plain.run_dir)[1]["loss/grad_norm"]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rollouts": {"prompts": 4, "group_size": 1}},
            "rollouts.group_size is 1. .*batch_whitened",
        ),
        ({"task": "arithmetik"}, "Did you mean 'arithmetic'"),
        ({"method": "dappo"}, "Did you mean 'dapo'"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"task": {"name": "jsonl", "path": "/no/file.jsonl"}}, "no such file: /no/file.jsonl"),
        (
            {"rollouts": {"prompts": 4, "group_size": 4, "max_prompt_tokens": 5}},
            "max_prompt_tokens",
        ),
        ({"trackers": ["wandb"]}, "'wandb' is not installed"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_written(tmp_path, change, message):
    config = parse_config(small(tmp_path, **change))
    with pytest.raises((ConfigError, ValueError), match=message) as caught:
        train(config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_exists_is_not_overwritten(tmp_path):
    config = parse_config(small(tmp_path, num_batches=1))
    train(config)
    before = metrics(config.run_dir)
    with pytest.raises(
        ConfigError, match="holds a run. Continue it with --resume, replace it with --fresh"
    ):
        train(config)
    assert metrics(config.run_dir) == before
    assert train(config, fresh=True).is_finished
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="holds no run"):
        train(parse_config(small(tmp_path, run_dir=str(tmp_path / "mine"))), fresh=True)
    with pytest.raises(ConfigError, match="--resume: .* holds no run"):
        train(parse_config(small(tmp_path, run_dir=str(tmp_path / "none"))), resume=True)


def test_a_machine_without_git_has_no_commit(monkeypatch):
    assert source_commit() is None or len(source_commit()) == 40
    monkeypatch.setenv("PATH", "")
    assert source_commit() is None
