"""Rollouts as verl keeps them: a DataProto, a queue in memory in place of TransferQueue, and a
trainer without workers.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "verl",
    reason="verl has its own environment: scripts/make_verl_env.sh .venv/bin/python .venv-verl",
)

from tensordict import NonTensorStack, TensorDict

from counterpoise.types import TokenBatch


class Rollout(SimpleNamespace):
    """One rollout: its key in the queue, 1-D columns under verl's names, and whether verl appended
    it to fill up the batch.
    """

    key: str
    fields: dict[str, Any]

    @property
    def prompt(self) -> str:
        return self.key.rsplit("_", 2)[0]


def rollouts(
    num_prompts=4, size=4, seed=0, longest=7, dtype=torch.float32, sizes=None
) -> list[Rollout]:
    """Prompts p0, p1, ... with ``size`` rollouts each (or ``sizes[p]``), rewards 0 and 1 mixed in
    every prompt, ids from a small vocabulary.
    """
    gen = torch.Generator().manual_seed(seed)

    def normal(n):
        return torch.randn(n, generator=gen, dtype=dtype)

    out = []
    for p in range(num_prompts):
        for session in range(size if sizes is None else sizes[p]):
            n = int(torch.randint(2, longest + 1, (), generator=gen))
            logp = -normal(n).abs() - 0.05
            reward = float(session == 0 or (session > 1 and torch.rand((), generator=gen) < 0.5))
            fields = {
                "uid": f"p{p}",
                "responses": torch.randint(1, 6, (n,), generator=gen),
                "response_mask": torch.ones(n, dtype=torch.long),
                "rm_scores": torch.zeros(n, dtype=dtype).index_fill(0, torch.tensor(n - 1), reward),
                "rollout_log_probs": logp,
                "old_log_probs": (logp + 0.01 * normal(n)).clamp(max=0),
                "ref_log_prob": (logp + 0.3 * normal(n)).clamp(max=0),
                "entropy": 0.3 * normal(n).abs() + 0.1,  # decided, on average
                "prompts": torch.ones(3, dtype=torch.long),
                "position_ids": torch.arange(n + 3),
            }
            out.append(Rollout(key=f"p{p}_{session}_0", fields=fields))
    return out


def tag_of(rollout: Rollout) -> dict[str, Any]:
    n = len(rollout.fields["responses"])
    return {"prompt_len": 3, "response_len": n, "seq_len": n + 3}


def token_batch(rows: list[Rollout], **changed) -> TokenBatch:
    """The same rollouts as counterpoise's own TokenBatch, made from lists."""
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    columns = {
        "sampler_logp": "rollout_log_probs",
        "trainer_logp": "old_log_probs",
        "ref_logp": "ref_log_prob",
        "entropy": "entropy",
    }
    lists = {name: [row.fields[field].tolist() for row in rows] for name, field in columns.items()}
    return TokenBatch.from_lists(
        [row.fields["responses"].tolist() for row in rows],
        group=[prompts.index(row.prompt) for row in rows],
        reward=[float(row.fields["rm_scores"].sum()) for row in rows],
        dtype=rows[0].fields["rm_scores"].dtype,
        **(lists | changed),
    )


def data_proto(rows: list[Rollout]) -> Any:
    """verl's DataProto with padded columns, as it is when an estimator is called."""
    from verl import DataProto

    fields = {
        name: nested(rows, name).to_padded_tensor(0) for name in rows[0].fields if name != "uid"
    }
    fields["token_level_rewards"] = fields["rm_scores"]
    uid = np.array([row.fields["uid"] for row in rows], dtype=object)
    return DataProto(batch=TensorDict(fields, batch_size=len(rows)), non_tensor_batch={"uid": uid})


def nested(rows: list[Rollout], name: str) -> torch.Tensor:
    return torch.nested.as_nested_tensor([row.fields[name] for row in rows], layout=torch.jagged)


class Queue:
    """The three functions of ``transfer_queue`` that are used, on a dict: key -> field -> value."""

    def __init__(self, rows: list[Rollout]) -> None:
        self.data = {row.key: dict(row.fields) for row in rows}

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        names = [
            name for name in self.data[keys[0]] if select_fields is None or name in select_fields
        ]
        return TensorDict({name: self._column(keys, name) for name in names}, batch_size=len(keys))

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None):
        from transfer_queue import KVBatchMeta

        for name in () if fields is None else fields.keys():
            for key, value in zip(
                keys,
                fields[name].unbind() if isinstance(fields[name], torch.Tensor) else fields[name],
            ):
                self.data.setdefault(key, {})[name] = value
        return KVBatchMeta(
            keys=list(keys), tags=list(tags or [{} for _ in keys]), partition_id=partition_id
        )

    def kv_clear(self, keys, partition_id):
        for key in keys:
            del self.data[key]

    def _column(self, keys, name):
        values = [self.data[key][name] for key in keys]
        if isinstance(values[0], torch.Tensor):
            return torch.nested.as_nested_tensor(values, layout=torch.jagged)
        return NonTensorStack(*values)

    def padded(self, keys, name):
        return self._column(keys, name).to_padded_tensor(0.0)


def config(adv_estimator="grpo", counterpoise=None, mini=1, train=4, n=4, **changed) -> Any:
    """The part of verl's configuration that is read, as Hydra gives it."""
    from omegaconf import OmegaConf

    algorithm = {
        "adv_estimator": adv_estimator,
        "gamma": 1.0,
        "lam": 1.0,
        "use_kl_in_reward": False,
        "norm_adv_by_std_in_grpo": True,
    }
    made = OmegaConf.create(
        {
            "algorithm": algorithm
            | ({} if counterpoise is None else {"counterpoise": counterpoise}),
            "data": {"train_batch_size": train},
            "actor_rollout_ref": {
                "actor": {
                    "ppo_mini_batch_size": mini,
                    "shuffle": False,
                    "use_kl_loss": False,
                    "policy_loss": {"loss_mode": "vanilla"},
                },
                "rollout": {"n": n},
            },
            "trainer": {
                "v1": {
                    "trainer_mode": "counterpoise/sync",
                    "sync": {},
                    "separate_async": {"parameter_sync_step": 4},
                },
                "critic_warmup": 0,
                "default_local_dir": "unset",
                "default_hdfs_dir": None,
                "resume_mode": "auto",
                "resume_from_path": None,
                "del_local_ckpt_after_load": False,
            },
        }
    )
    for path, value in changed.items():
        OmegaConf.update(made, path.replace("__", "."), value)
    OmegaConf.set_struct(made, True)
    return made


def trainer(cls: type, made: Any, num_ranks: int = 1) -> Any:
    """A trainer of verl's class without Ray, workers, a model or data: what __init__ would set up
    and the methods under test read.
    """
    from counterpoise.hosts.verl.checks import check_config

    out = object.__new__(cls)
    out.config, out.global_steps, out.use_critic, out.trainer_mode = made, 1, False, "sync"
    out.tokenizer = SimpleNamespace(eos_token_id=0)
    out.actor_rollout_wg = SimpleNamespace(
        _dispatch_info={"actor": list(range(num_ranks))},
        save_checkpoint=lambda *a, **k: None,
        load_checkpoint=lambda *a, **k: None,
    )
    out.train_dataloader = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    out.checkpoint_callback = SimpleNamespace(on_save=lambda **k: None)
    out.credit_setup, out.plan_setup = check_config(made, "sync")
    out.credit_state = None
    return out


def batch_meta(rows: list[Rollout]) -> Any:
    from transfer_queue import KVBatchMeta

    return KVBatchMeta(
        keys=[row.key for row in rows], tags=[tag_of(row) for row in rows], partition_id="train"
    )


def optimizer_steps(keys: list[str], update_size: int, num_ranks: int) -> list[list[str]]:
    """The keys of each update as verl cuts a batch: one chunk a rank, and verl's own
    iterator over mini-batches on each rank.
    """
    from transfer_queue import KVBatchMeta
    from verl.utils.tensordict_utils import make_iterator

    ranks = KVBatchMeta(keys=keys, tags=[{} for _ in keys]).chunk(num_ranks)
    updates: list[list[str]] = [[] for _ in range(math.ceil(len(keys) / update_size))]
    for rank in ranks:
        rows = TensorDict({"row": torch.arange(len(rank))}, batch_size=len(rank))
        cuts = make_iterator(
            rows, update_size // num_ranks, epochs=1, seed=42, dataloader_kwargs={"shuffle": False}
        )
        for update, cut in zip(updates, cuts, strict=True):
            update += [rank.keys[row] for row in cut["row"].tolist()]
    return updates
