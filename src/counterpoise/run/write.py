"""The one writer of run folders: the trainer, the TRL host and the importers write through it.

Files and columns are in ``run.schema``. Takes plain data; loads torch only for rollouts that are
tensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from counterpoise.errors import ConfigError
from counterpoise.run.environment import process_facts
from counterpoise.run.files import (
    Columns,
    append_json,
    batch_file,
    batch_of,
    json_line,
    sync_folder,
    write_json,
    write_table,
    write_text,
)
from counterpoise.run.read import check_current, read_jsonl
from counterpoise.run.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from counterpoise.types import Credit, RolloutBatch


def check_free(run_dir: Path, *, fresh: bool, resume: bool) -> None:
    """Before anything is written: a folder that holds a run is resumed, replaced on request, or an
    error.
    """
    has_run = (run_dir / "manifest.json").is_file()
    has_files = run_dir.is_dir() and any(run_dir.iterdir())
    if resume and not has_run:
        raise ConfigError(f"--resume: {run_dir} holds no run. Start one without --resume.")
    if resume:
        check_current(run_dir)
    if resume or not has_files:
        return
    if not has_run:
        raise ConfigError(
            f"run_dir: {run_dir} exists, is not empty and holds no run. Choose another with --set"
            " run_dir=..."
        )
    if not fresh:
        raise ConfigError(
            f"run_dir: {run_dir} holds a run. Continue it with --resume, replace it with --fresh,"
            " or --set run_dir=..."
        )


def create_run(run_dir: Path, config: Mapping[str, Any] | None, facts: Mapping[str, Any]) -> None:
    """Start a run folder, an earlier run in it removed; ``manifest.json`` comes last: with it the
    folder is a run.

    Args:
        config: the recipe, for ``config.yaml``; None where there is none (an import).
        facts: of the run (method, seed, device ...), for ``manifest.json`` beside versions, commit
            and command of this process.
    """
    if (run_dir / "manifest.json").is_file():
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    if config is not None:
        head = f"# counterpoise run folder, schema version {SCHEMA_VERSION}\n"
        write_text(run_dir / "config.yaml", head + yaml.safe_dump(dict(config), sort_keys=False))
    write_json(
        run_dir / "manifest.json", {"schema_version": SCHEMA_VERSION, **process_facts(), **facts}
    )


def write_rollouts(
    run_dir: Path, batch_number: int, rollouts: RolloutBatch, credit: Credit
) -> None:
    """``rollouts/batch_N.parquet``, as ``read.read_rollouts`` takes it back."""
    write_rollout_columns(run_dir, batch_number, rollout_columns(batch_number, rollouts, credit))


def write_rollout_columns(run_dir: Path, batch_number: int, columns: Columns) -> None:
    """``rollouts/batch_N.parquet``: one row per rollout."""
    write_table(batch_file(run_dir, "rollouts", batch_number, ".parquet"), columns)


def write_tokens(run_dir: Path, batch_number: int, columns: Columns) -> None:
    """``tokens/batch_N.parquet``: one row per token."""
    write_table(batch_file(run_dir, "tokens", batch_number, ".parquet"), columns)


def write_plan(run_dir: Path, batch_number: int, manifest: Mapping[str, Any]) -> None:
    """``plan/batch_N.json``: ``Plan.manifest``."""
    path = batch_file(run_dir, "plan", batch_number, ".json")
    write_json(path, {"schema_version": SCHEMA_VERSION, **manifest})


def append_row(run_dir: Path, name: str, batch_number: int, row: Mapping[str, Any]) -> None:
    """A row of ``metrics``, ``timing`` or ``evals``."""
    append_json(run_dir / f"{name}.jsonl", {"batch": batch_number, **row})


def rewind(run_dir: Path, batch_number: int) -> None:
    """Forget what was written at or after a batch, so that a resumed run writes it again; the
    evaluation before it stays.
    """
    for name, end in (
        ("metrics", batch_number),
        ("timing", batch_number),
        ("evals", 1 + batch_number),
    ):
        path = run_dir / f"{name}.jsonl"
        rows = [row for row in read_jsonl(path) if row["batch"] < end]
        write_text(path, "".join(map(json_line, rows)))
    for folder in ("rollouts", "tokens", "plan"):
        for file in (run_dir / folder).glob("batch_*"):
            if batch_of(file) >= batch_number:
                file.unlink()
    sync_folder(run_dir)


def rollout_columns(batch_number: int, rollouts: RolloutBatch, credit: Credit) -> Columns:
    """One row per rollout; token columns are lists without padding."""
    batch = rollouts.batch
    group = batch.group_N.tolist()
    prompts = [rollouts.prompts[g] for g in group]
    tokens = {
        "token_ids": batch.token_ids_NT,
        "loss_mask": batch.mask_NT,
        "credit": credit.credit_NT,
        "weight": credit.weight_NT,
        "sampler_logp": batch.sampler_logp_NT,
        "entropy": batch.entropy_NT,
    }
    return {
        "batch": [batch_number] * batch.num_rollouts,
        "rollout": list(range(batch.num_rollouts)),
        "group": group,
        "prompt_id": [prompt.id for prompt in prompts],
        "prompt": [prompt.text for prompt in prompts],
        "answer": [prompt.answer for prompt in prompts],
        "text": rollouts.texts,
        "reward": batch.reward_N.tolist(),
        "advantage": credit.advantage_N.tolist(),
        "stop_reason": rollouts.stop_reason,
        "prompt_ids": rollouts.prompt_ids,
        **{
            name: ragged(value_NT, batch.mask_NT)
            for name, value_NT in tokens.items()
            if value_NT is not None
        },
    }


def ragged(value_NT: Tensor, mask_NT: Tensor) -> pa.Array:
    """Rows as an Arrow list column, padding left out; Arrow has no bfloat16: float32."""
    import pyarrow as pa
    import torch

    value_NT, mask_NT = value_NT.cpu(), mask_NT.cpu().bool()
    if value_NT.is_floating_point() and value_NT.itemsize < 4:
        value_NT = value_NT.float()
    ends_N = mask_NT.sum(1).cumsum(0).to(torch.int32)
    offsets = torch.cat([ends_N.new_zeros(1), ends_N]).numpy()
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(value_NT[mask_NT].numpy()))
