"""The run folder: the contract between training and everything that reads it.

Updates are batches, counted from 0.

``config.yaml`` · ``manifest.json`` · ``metrics.jsonl`` (deterministic numbers) · ``timing.jsonl``
(seconds, tokens/s) ·
``rollouts/batch_*.parquet`` · ``tokens/batch_*.parquet`` · ``plan/batch_*.json`` ·
``checkpoints/batch_*/`` · ``tensorboard/``"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml

from counterpoise.errors import ConfigError
from counterpoise.run.environment import process_facts
from counterpoise.run.files import batch_of, read_jsonl, sync_folder, write_json, write_text
from counterpoise.run.schema import SCHEMA_VERSION
from counterpoise.trainer.config import Config


def check_free(run_dir: Path, *, fresh: bool, resume: bool) -> None:
    """Before anything is written: a folder that holds a run is resumed, replaced on request, or an
    error.
    """
    has_run, has_files = (
        (run_dir / "manifest.json").is_file(),
        run_dir.is_dir() and any(run_dir.iterdir()),
    )
    if resume and not has_run:
        raise ConfigError(f"--resume: {run_dir} holds no run. Start one without --resume.")
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


def create(run_dir: Path, config: Config, facts: dict[str, Any]) -> None:
    """Start a run folder, an earlier run in it removed.

    ``manifest.json`` comes last: with it the folder is a run.
    """
    if (run_dir / "manifest.json").is_file():
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    write_text(
        run_dir / "config.yaml",
        yaml.safe_dump(json.loads(config.model_dump_json()), sort_keys=False),
    )
    write_json(run_dir / "manifest.json", {"schema_version": SCHEMA_VERSION, **facts})


def facts(config: Config, device: torch.device, method: dict[str, Any]) -> dict[str, Any]:
    """The method on its six axes; commit, versions, device, seed and command of this process."""
    return {
        "method": method,
        **process_facts(),
        "seed": config.seed,
        "device": str(device) if device.type != "cuda" else torch.cuda.get_device_name(device),
        "num_threads": torch.get_num_threads(),
    }


def rewind(run_dir: Path, batch_number: int) -> None:
    """Forget what was written at or after ``batch``, so that a resumed run writes it again."""
    for name in ("metrics.jsonl", "timing.jsonl"):
        kept = [row for row in read_jsonl(run_dir / name) if row["batch"] < batch_number]
        write_text(run_dir / name, "".join(json.dumps(row) + "\n" for row in kept))
    evals = [row for row in read_jsonl(run_dir / "evals.jsonl") if row["batch"] <= batch_number]
    write_text(run_dir / "evals.jsonl", "".join(json.dumps(row) + "\n" for row in evals))
    for folder in ("rollouts", "tokens", "plan"):
        for file in (run_dir / folder).glob("batch_*"):
            if batch_of(file) >= batch_number:
                file.unlink()
    sync_folder(run_dir)
