"""Rollouts to parquet and back. Columns are in ``counterpoise.run.schema``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from counterpoise.run.files import write_table
from counterpoise.run.schema import SCHEMA_VERSION
from counterpoise.types import Credit, Prompt, RolloutBatch, TokenBatch

READ = (  # columns of a batch that a batch can be made again from
    *("group", "prompt_id", "prompt", "answer", "prompt_ids", "text", "stop_reason"),
    *("token_ids", "reward", "sampler_logp", "entropy"),
)


def write_rollouts(path: Path, batch_number: int, collected: RolloutBatch, credit: Credit) -> None:
    """One row a rollout; token columns are lists without padding."""
    batch = collected.batch
    group = batch.group_N.tolist()
    prompts = [collected.prompts[g] for g in group]
    assert batch.entropy_NT is not None
    write_table(
        path,
        {
            "batch": [batch_number] * batch.num_rollouts,
            "rollout": list(range(batch.num_rollouts)),
            "group": group,
            "prompt_id": [prompt.id for prompt in prompts],
            "prompt": [prompt.text for prompt in prompts],
            "answer": [prompt.answer for prompt in prompts],
            "text": collected.texts,
            "reward": batch.reward_N.tolist(),
            "advantage": credit.advantage_N.tolist(),
            "stop_reason": collected.stop_reason,
            "prompt_ids": collected.prompt_ids,
            "token_ids": ragged(batch.token_ids_NT, batch.mask_NT),
            "loss_mask": ragged(batch.mask_NT, batch.mask_NT),
            "credit": ragged(credit.credit_NT, batch.mask_NT),
            "weight": ragged(credit.weight_NT, batch.mask_NT),
            "sampler_logp": ragged(batch.sampler_logp_NT, batch.mask_NT),
            "entropy": ragged(batch.entropy_NT, batch.mask_NT),
        },
    )


def read_rollouts(path: Path, max_length: int | None = None) -> RolloutBatch:
    """The batch of a batch again, as it was when it was sampled and graded (columns that
    were measured are left out).
    """
    import pyarrow.parquet as pq
    from pyarrow import ArrowInvalid

    try:
        table = pq.read_table(path)
    except ArrowInvalid as error:
        raise ValueError(
            f"{path} is not a parquet file ({error}). It is cut off or was replaced: choose another"
            " batch."
        ) from None
    version = (table.schema.metadata or {}).get(b"counterpoise_schema", b"").decode()
    if version != str(SCHEMA_VERSION):
        raise ValueError(
            f"{path}: schema version {version or 'missing'}, expected {SCHEMA_VERSION}. Use the"
            " counterpoise that wrote it."
        )
    for name in READ:
        if name not in table.column_names:
            raise ValueError(
                f"{path}: no column {name!r}. Take the file as counterpoise train wrote it"
                " (save_rollouts_every)."
            )
    column: dict[str, list[Any]] = {name: table.column(name).to_pylist() for name in READ}
    by_group = {
        g: Prompt(i, t, a)
        for g, i, t, a in zip(
            column["group"], column["prompt_id"], column["prompt"], column["answer"]
        )
    }
    batch = TokenBatch.from_lists(
        column["token_ids"],
        group=column["group"],
        reward=column["reward"],
        sampler_logp=column["sampler_logp"],
        entropy=column["entropy"],
        max_length=max_length,
    )
    prompts = [by_group[g] for g in sorted(by_group)]
    return RolloutBatch(
        prompts, column["prompt_ids"], column["text"], column["stop_reason"], batch, 0, []
    )


def ragged(value_NT: Tensor, mask_NT: Tensor) -> Any:
    """Rows as an Arrow list column, padding left out."""
    import pyarrow as pa

    value_NT, mask_NT = value_NT.cpu(), mask_NT.cpu().bool()
    ends_N = mask_NT.sum(1).cumsum(0).to(torch.int32)
    offsets = torch.cat([ends_N.new_zeros(1), ends_N]).numpy()
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(value_NT[mask_NT].numpy()))
