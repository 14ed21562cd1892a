"""A batch in verl's queue: its columns as counterpoise names them, its rollouts, its fillers."""

# verl lives in an environment of its own
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transfer_queue as tq
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

from counterpoise.errors import nearest
from counterpoise.hosts.verl.plan import Rollouts, rollouts
from counterpoise.hosts.verl.turns import Fields, turn_columns

# column of a TokenBatch -> verl's field; the sampler's log-probs are the inference engine's where
# verl keeps them
FIELDS = {
    "token_ids_NT": "responses",
    "mask_NT": "response_mask",
    "sampler_logp_NT": "rollout_log_probs",
    "trainer_logp_NT": "old_log_probs",
    "entropy_NT": "entropy",
    "ref_logp_NT": "ref_log_prob",
}


def turn_fields(batch: KVBatchMeta) -> list[Fields]:
    """What agent loops said about each rollout beside its tokens; nothing of verl's fillers."""
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"]
    )
    extra = _values(data.get("extra_fields", None)) or [None for _ in batch.keys]
    return [{} if is_filler(tag) else _plain(own or {}) for own, tag in zip(extra, batch.tags)]


def _plain(own: dict[str, Any]) -> dict[str, Any]:
    """Arrays as lists: an agent loop may give either."""
    return {name: v.tolist() if hasattr(v, "tolist") else v for name, v in own.items()}


def token_columns(batch: KVBatchMeta, fields: Sequence[Fields]) -> dict[str, Tensor]:
    """The batch's columns on the driver, padded; to be read before verl's rollout correction, which
    may empty masks. ``score_NT`` is verl's reward of each token, before a KL term.
    """
    check_keys(batch.keys)
    data = tq.kv_batch_get(
        keys=batch.keys,
        partition_id=batch.partition_id,
        select_fields=[*FIELDS.values(), "rm_scores"],
    ).to_padded_tensor()
    columns = {name: data.get(field, None) for name, field in FIELDS.items()}
    columns = {name: value for name, value in columns.items() if value is not None}
    columns.setdefault("sampler_logp_NT", columns["trainer_logp_NT"])
    columns["mask_NT"] = columns["mask_NT"].bool()
    score_NT = data["rm_scores"]
    turns = turn_columns(batch.keys, fields, columns["mask_NT"], score_NT.sum(-1))
    return columns | turns | {"score_NT": score_NT}


def named_successes(batch: KVBatchMeta, keys: list[str], name: str | None) -> Tensor | None:
    """Which rollouts the reward function called right: its value ``name`` is above 0; None without
    a name. It is a field of the queue, or stands in ``reward_extra_info``.
    """
    if name is None:
        return None
    fields = tq.kv_batch_get(
        keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields", name]
    )
    own, extra = fields.get(name, None), fields.get("extra_fields", None)
    if own is not None:
        return torch.tensor([float(value) > 0 for value in _values(own)])
    infos = [(one.get("reward_extra_info") or {}) for one in _values(extra)]
    infos = infos or [{} for _ in keys]
    lacking = next((key for key, info in zip(keys, infos) if info.get(name) is None), None)
    if lacking is not None:
        raise ValueError(
            f"algorithm.counterpoise.success={name}: the reward function gave rollout {lacking} no"
            f" value of that name. {nearest(name, infos[keys.index(lacking)])}"
        )
    return torch.tensor([float(info[name]) > 0 for info in infos])


def _values(column: Any) -> list[Any]:
    """A column of plain values, in any of the forms that the queue has for one."""
    return column.tolist() if hasattr(column, "tolist") else list(column or [])


def graded_rollouts(batch: KVBatchMeta, success_key: str | None = None) -> Rollouts:
    """What a plan looks at, without verl's fillers."""
    length = {
        key: tag["response_len"] for key, tag in zip(batch.keys, batch.tags) if not is_filler(tag)
    }
    keys = list(length)
    check_keys(keys)
    data = tq.kv_batch_get(
        keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores"]
    ).to_padded_tensor()
    reward_N, length_N = data["rm_scores"].sum(-1).float(), torch.tensor(list(length.values()))
    return rollouts(keys, reward_N, length_N, named_successes(batch, keys, success_key))


def leave_out(batch: KVBatchMeta, keys: set[str], eos_token_id: int) -> KVBatchMeta:
    """The batch with fillers in place of some rollouts; verl's queue drops these as used ones."""
    if not keys:
        return batch
    tq.kv_clear(keys=sorted(keys), partition_id=batch.partition_id)
    rest = batch.select_keys([key for key in batch.keys if key not in keys])
    return upsample_batch_to_divisible_size(rest, len(batch), eos_token_id)


def is_filler(tag: dict[str, Any]) -> bool:
    """Whether verl appended the row to fill up the batch."""
    return tag.get("is_padding", False)


def last_outputs(keys: list[str]) -> Tensor:
    """For each row, the row of its session's last output; keys are <prompt>_<session>_<output>."""
    row_of = {key: row for row, key in enumerate(keys)}
    last: dict[str, int] = {}
    for key in keys:
        session, _, output = key.rpartition("_")
        last[session] = max(last.get(session, 0), int(output))
    sessions = [key.rpartition("_")[0] for key in keys]
    return torch.tensor([row_of[f"{session}_{last[session]}"] for session in sessions])


def check_keys(keys: list[str]) -> None:
    """A session is one rollout."""
    several = [key for key in keys if not key.endswith("_0")]
    if several:
        raise ValueError(
            f"session {several[0].rsplit('_', 1)[0]} gave more than one trajectory, and plans and"
            " credit that reads tokens need one per rollout. Let the agent loop return one output"
            " per session, or use a method that reads rewards alone (counterpoise/dapo)."
        )
