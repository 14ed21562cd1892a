"""verl's own ``main_ppo`` on a CPU, by the command line of docs/hosts/verl.md: Ray, TransferQueue
and two FSDP2 workers are real, the model is tiny and the rollouts come from
``helpers.verl.sampler``. The weights that verl ends with are those of a plain loop over
counterpoise's core.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "verl.trainer.ppo.v1",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

import counterpoise as cp
from counterpoise.hosts.verl import write_rows
from counterpoise.policy import load_model
from helpers.verl.cases import optimizer_steps
from helpers.verl.page import overrides
from helpers.verl.tiny_verl import make_model_and_data, model_with

pytestmark = [pytest.mark.hosts, pytest.mark.verl]

LR, N, MINI = 0.1, 4, 2


def command(folder: Path, **changed: str) -> list[str]:
    """The page's overrides with a small model, two processes and two batches; the rest is what it
    says.
    """
    small = {
        "data.train_files": f"{folder}/data.parquet",
        "data.val_files": f"{folder}/data.parquet",
        "data.train_batch_size": "4",
        "data.max_prompt_length": "16",
        "data.max_response_length": "16",
        "data.dataloader_num_workers": "0",
        "actor_rollout_ref.model.path": f"{folder}/model",
        "actor_rollout_ref.model.use_remove_padding": "False",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "False",
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": "False",
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision": (
            "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
        ),
        "actor_rollout_ref.actor.optim.lr": str(LR),
        "actor_rollout_ref.actor.optim.optimizer": "SGD",
        "actor_rollout_ref.actor.optim.weight_decay": "0",
        "actor_rollout_ref.actor.optim.clip_grad": "1000",
        "actor_rollout_ref.actor.ppo_mini_batch_size": str(MINI),
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "160",
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model,hf_model]",
        "actor_rollout_ref.rollout.n": str(N),
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
        "actor_rollout_ref.rollout.nnodes": "1",
        "actor_rollout_ref.rollout.n_gpus_per_node": "1",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": "helpers.verl.sampler.Sampler",
        "trainer.nnodes": "1",
        "trainer.n_gpus_per_node": "2",
        "trainer.device": "cpu",
        "trainer.total_training_steps": "2",
        "trainer.val_before_train": "False",
        "trainer.test_freq": "-1",
        "trainer.save_freq": "1",
        "trainer.default_local_dir": f"{folder}/checkpoints",
        "trainer.logger": "[file]",
        "reward.num_workers": "1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": "1",
        "ray_kwargs.ray_init.num_cpus": "16",
        "+ray_kwargs.ray_init.num_gpus": "2",
        "+ray_kwargs.ray_init.include_dashboard": "False",
        "+ray_kwargs.ray_init.object_store_memory": "200000000",
        "+ray_kwargs.ray_init._temp_dir": f"{folder}/ray",
        "hydra.run.dir": f"{folder}/hydra",
    }
    return [f"{key}={value}" for key, value in (overrides() | small | changed).items()]


def trained(folder: Path, **changed: str) -> list[dict]:
    """Run verl's trainer to its end; the metrics of each batch."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
        "VERL_USE_EXTERNAL_MODULES": "helpers.verl.on_cpu,helpers.verl.sampler",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": f"{folder}/metrics.jsonl",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
    }
    if not (folder / "model").exists():
        make_model_and_data(folder)
    line = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "verl.trainer.main_ppo",
        *command(folder, **changed),
    ]
    done = subprocess.run(
        line, env=environment, cwd=folder, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(row)["data"] for row in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder():
    """A short path: Ray puts sockets below it."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def score_update(model, rows):
    """(log-probs, entropies) of the response tokens of each rollout, as lists of tensors."""
    out = []
    for row in rows:
        n = len(row["responses"])
        logp_TV = model(row["input_ids"][None]).logits[0, -n - 1 : -1].log_softmax(-1)
        out.append(
            (logp_TV.gather(1, row["responses"][:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1))
        )
    return out


def pad_prompts(parts, width):
    return torch.stack([torch.nn.functional.pad(part, (0, width - len(part))) for part in parts])


def plain_batch(rows, before) -> cp.TokenBatch:
    return cp.TokenBatch.from_lists(
        [row["responses"].tolist() for row in rows],
        group=[sorted({row["uid"] for row in rows}).index(row["uid"]) for row in rows],
        reward=[float(row["rm_scores"].sum()) for row in rows],
        sampler_logp=[row["rollout_log_probs"].tolist() for row in rows],
        entropy=[entropy.tolist() for _, entropy in before],
    )


def turn_batch(rows, before) -> cp.TokenBatch:
    """The same with turns and what each of them earned."""
    batch = plain_batch(rows, before)
    num = max(len(row["extra_fields"]["turn_spans"]) for row in rows)
    turn_NT = torch.full(batch.mask_NT.shape, -1)
    reward_NU, mask_NU = torch.zeros(len(rows), num), torch.zeros(len(rows), num)
    for k, row in enumerate(rows):
        for u, (start, end) in enumerate(row["extra_fields"]["turn_spans"]):
            turn_NT[k, start:end], mask_NU[k, u] = u, 1
            reward_NU[k, u] = row["extra_fields"]["turn_rewards"][u]
    return batch.replace(
        mask_NT=turn_NT >= 0, turn_NT=turn_NT, turn_reward_NU=reward_NU, turn_mask_NU=mask_NU
    )


def replayed(
    folder: Path, method: cp.Method, loss: cp.Method, batch_of=plain_batch
) -> tuple[dict[str, torch.Tensor], list[cp.Credit]]:
    """The same two batches by a plain loop: credit of the core once a batch, its loss, one SGD step
    per planned update.
    """
    model, state, credits = model_with(folder), None, []
    for batch_number in (1, 2):
        rollouts = torch.load(
            folder / "checkpoints" / f"rollouts_{batch_number}.pt", weights_only=False
        )
        order = json.loads((folder / "checkpoints" / f"order_{batch_number}.json").read_text())
        updates = [
            [key for key in keys if key in rollouts] for keys in optimizer_steps(order, MINI * N, 2)
        ]
        keys = [key for key in order if key in rollouts]
        rows = [rollouts[key] for key in keys]
        with torch.no_grad():
            before = score_update(model, rows)
        batch = batch_of(rows, before)
        credit = method.assign(batch, state, batch_number=batch_number)
        state, width = credit.state, batch.mask_NT.shape[1]
        credits.append(credit)
        for planned in updates:
            row_R = torch.tensor([keys.index(key) for key in planned])
            made = loss.rows(batch, credit, row_R)
            made = made._replace(
                sampler_logp_NT=pad_prompts([before[row][0] for row in row_R.tolist()], width)
            )
            logp_NT = pad_prompts(
                [logp for logp, _ in score_update(model, [rows[row] for row in row_R.tolist()])],
                width,
            )
            total = (loss.loss(logp_NT, made).loss_NT * made.scale_NT).sum()
            grads = torch.autograd.grad(total, list(model.parameters()))
            with torch.no_grad():
                for parameter, grad in zip(model.parameters(), grads):
                    parameter -= LR * grad
    return model.state_dict(), credits


def assert_same_weights(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """verl's shards of both ranks, put together, against the loop's; and they have moved by much
    more than the tolerance.
    """
    shards = [
        torch.load(
            folder
            / "checkpoints"
            / "global_step_2"
            / "actor"
            / f"model_world_size_2_rank_{rank}.pt",
            weights_only=False,
        )
        for rank in (0, 1)
    ]
    first = model_with(folder).state_dict()
    for name, value in expected.items():
        got = torch.cat([shard[name]._local_tensor for shard in shards])
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-5)
    assert max((value - first[name]).abs().max() for name, value in expected.items()) > 1e-2


def test_the_pages_command_trains_as_the_core_does(folder):
    metrics = trained(folder)
    expected, credits = replayed(
        folder, cp.method("ktae", plan="query_preserved"), cp.method("ktae")
    )
    assert_same_weights(folder, expected)
    uniform, _ = replayed(folder, cp.method("grpo"), cp.method("ktae"))
    assert max((value - uniform[name]).abs().max() for name, value in expected.items()) > 1e-3
    for logged, credit in zip(metrics, credits, strict=True):
        assert logged["counterpoise/plan/prompts_split_frac"] == 0
        assert logged["counterpoise/credit/ktae/mass_ratio"] == pytest.approx(
            credit.metrics["credit/ktae/mass_ratio"], rel=1e-4
        )


def test_state_entropies_and_rows_left_out(folder):
    """FADE reads entropies and keeps a state; reward_balanced leaves prompts out, and verl's
    fillers go through its workers.
    """
    changed = {
        "algorithm.adv_estimator": "counterpoise/fade",
        "+algorithm.counterpoise.plan": "reward_balanced",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "counterpoise/fade",
    }
    metrics = trained(folder, **changed)
    expected, credits = replayed(folder, cp.method("fade"), cp.method("fade"))
    assert_same_weights(folder, expected)
    assert sum(logged["counterpoise/plan/rows_left_out"] for logged in metrics) > 0
    saved = json.loads((folder / "checkpoints" / "global_step_2" / "counterpoise.json").read_text())
    assert saved["state"]["controller"] == pytest.approx(credits[-1].state["controller"], rel=1e-4)


def test_conversations_train_as_the_core_does(folder):
    """verl's agent loop worker, its queue and two FSDP2 workers: turns of ``guess`` by the
    package's model, with the credit of turns.
    """
    game = {"name": "guess", "n": 16, "turns": 3, "cost": 0.125}
    start = load_model("bundled_turns")
    start.model.save_pretrained(folder / "model")
    start.tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "data.parquet", game, "train", num=8)
    changed = {
        "algorithm.adv_estimator": "counterpoise/turn_rloo",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "counterpoise/turn_rloo",
        "+algorithm.counterpoise.turns.environment": "{name:guess,n:16,turns:3,cost:0.125}",
        "+algorithm.counterpoise.turns.max_turn_tokens": "4",
        "+algorithm.counterpoise.turns.chat": "False",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": (
            "helpers.verl.turn_sampler.TurnSampler"
        ),
    }
    metrics = trained(folder, **changed)
    method = cp.method("turn_rloo", plan="query_preserved")
    expected, _ = replayed(folder, method, cp.method("turn_rloo"), turn_batch)
    assert_same_weights(folder, expected)
    uniform, _ = replayed(folder, cp.method("rloo"), cp.method("turn_rloo"), turn_batch)
    assert max((value - uniform[name]).abs().max() for name, value in expected.items()) > 1e-3
    for logged in metrics:
        assert 1 <= logged["counterpoise/turns/mean"] <= 3
        assert logged["counterpoise/turns/end_done"] == 1.0
