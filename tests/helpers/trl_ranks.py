"""One rank of tiny trainings: ``torchrun --nproc_per_node 2 trl_ranks.py OUT SCENARIO...``, by DDP;
those named ``fsdp2/SCENARIO``, which come last, by FSDP2.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from counterpoise.hosts.trl.batch import gather_columns
from counterpoise.hosts.trl.live import live_columns
from counterpoise.hosts.trl.state import credit_state
from counterpoise.hosts.trl.told import turn_reward
from helpers import trl_tiny, trl_turns

WORLD = 2
# sgd without clipping: a difference in the gradient stays the size it has
ARGS = {
    "optim": "sgd",
    "learning_rate": 0.02,
    "max_grad_norm": 0.0,
    "max_steps": 4,
    "gradient_accumulation_steps": 2,
}
SIBLINGS = {
    "source": ["sibling"],
    "template": {"sibling": "{demonstration} {prompt}"},
    "model": "policy",
}
SCENARIOS = {
    "delta": {"method": "delta", "plan": "query_preserved"},
    "fade": {"method": "fade", "plan": "reward_balanced"},
    "dfpo_min": {"method": "dfpo_min"},
    "crf_ntf": {"method": "crf_ntf"},
    "top_entropy": {"method": "top_entropy", "plan": "length_sorted"},
    "reinforce_pp": {"method": "reinforce_pp", "plan": "round_robin"},
    "ktae": {"method": "ktae", "plan": "query_preserved"},
    "clip_cov": {"method": "clip_cov", "plan": "query_preserved"},
    "uniform": {"method": "uniform", "plan": "query_preserved"},
    "ledger": {"method": "delta", "plan": "reward_balanced", "ledger_every": 2},
    # rollouts without a reward: here and there, and all of the second process
    "ungraded": {"method": "ktae", "plan": "round_robin", "reward_funcs": "ungraded"},
    "half_ungraded": {"method": "reinforce_pp", "plan": "round_robin", "reward_funcs": "half"},
    # successes differ by process, and with them the number of rollouts that have a teacher
    "sdpo": {"method": "sdpo", "method_axes": {"credit": SIBLINGS}, "plan": "query_preserved"},
    "turns": {"method": "gigpo", "plan": "query_preserved", "ledger_every": 2, "has_turns": True},
}


def ungraded(completions, **columns):
    rewards = trl_tiny.graded(completions)
    return [None if len(text.split()) == 3 else r for text, r in zip(completions, rewards)]


def half(completions, **columns):
    """Rewards for the first half of a generation, whatever the world."""
    first = int(os.environ.get("RANK", 0)) * len(completions)
    rewards = [float((first + k) % 3 == 0) for k in range(len(completions))]
    return [r if first + k < 8 else None for k, r in enumerate(rewards)]


REWARDS = {"ungraded": ungraded, "half": half}


def shard_fully(trainer):
    """FSDP2 on the CPU: accelerate shards by ``fully_shard`` whatever the device, but offers it on
    accelerators only.
    """
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    trainer.accelerator.state.distributed_type, trainer.accelerator.state.fsdp_plugin = (
        DistributedType.FSDP,
        plugin,
    )
    trainer.is_fsdp_enabled = True


def run(name, world, *, sharded=False):
    """Credit of every generation by global row, plans, and the weights at the end; 16 rollouts a
    generation whatever the world.
    """
    sizes = {"per_device_train_batch_size": 4 // world, "steps_per_generation": 4}
    folder = Path(tempfile.mkdtemp())
    args = ARGS | sizes | SCENARIOS[name]
    reward = REWARDS.get(args.pop("reward_funcs", ""), trl_tiny.graded)
    told = trl_tiny.told
    if args.pop("has_turns", False):
        told, reward = trl_turns.talked, turn_reward
    trainer = trl_tiny.ours(folder, args=args, reward_funcs=reward, rollout_func=told)
    assert trainer.accelerator.num_processes == world, (trainer.accelerator.num_processes, world)
    if sharded:
        shard_fully(trainer)
    credits, plans = watch_batches(trainer)
    start = trl_tiny.weights(trainer)
    trainer.train()
    return {
        "world": world,
        "credit": credits,
        "plans": plans,
        "engine": str(trainer.accelerator.distributed_type),
        "num_sharded": sum(hasattr(p, "full_tensor") for p in trainer.model.parameters()),
        "start": start,
        "weights": whole(trl_tiny.weights(trainer)),
        "state": credit_state(trainer).method_state,
        "tokens": _table(folder, "tokens"),
        "rollouts": _table(folder, "rollouts"),
    }


def watch_batches(trainer):
    """Credit by global row and the plan of every generation, in lists that fill as it trains."""
    credits, plans, take = [], [], trainer._take_batch

    def watched(output):
        credits.append(_by_row(trainer, output))
        take(output)
        plans.append(
            None
            if trainer.credit_plan is None
            else [row_R.tolist() for row_R in trainer.credit_plan]
        )

    trainer._take_batch = watched
    return credits, plans


def _table(folder, name):
    """The first table of a kind, if there is one."""
    file = folder / "counterpoise" / name / "batch_000000.parquet"
    return pq.read_table(file).to_pydict() if file.is_file() else None


def _by_row(trainer, output):
    """[N, T] credit in the order of the rows' global numbers."""
    columns = gather_columns(trainer, {name: output[name] for name in ("cp_row", "cp_credit")})
    return live_columns(columns)["cp_credit"]


def whole(tensors):
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in tensors.items()
    }


def main(out, names):
    torch.set_num_threads(1)
    results = {
        name: run(name.removeprefix("fsdp2/"), WORLD, sharded=name.startswith("fsdp2/"))
        for name in names
    }
    if int(os.environ["RANK"]) == 0:
        torch.save(results, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
