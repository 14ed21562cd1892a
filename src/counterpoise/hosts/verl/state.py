"""What a method carries from batch to batch (FADE's running means), beside verl's checkpoints."""

# verl lives in an environment of its own
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterpoise.catalogue.method import Method

if TYPE_CHECKING:
    from omegaconf import DictConfig

FILE = "counterpoise.json"


def save_state(
    config: DictConfig, batch_number: int, method: Method, state: dict[str, Any] | None
) -> None:
    """Write the state into verl's folder of this batch; ``config`` is verl's ``trainer``."""
    path = _own_folder(config, batch_number) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"method": method.describe(), "state": state}))


def load_state(config: DictConfig, batch_number: int, method: Method) -> dict[str, Any] | None:
    """The state of the checkpoint that verl resumes from; an error if another method wrote it."""
    is_given = config.resume_mode == "resume_path" and config.resume_from_path
    folder = Path(config.resume_from_path) if is_given else _own_folder(config, batch_number)
    path = folder / FILE
    if not path.exists():
        warnings.warn(
            f"{path} is missing: method {method.name!r} starts with a fresh state at batch"
            f" {batch_number}.",
            stacklevel=3,
        )
        return None
    saved = json.loads(path.read_text())
    if saved["method"] != method.describe():
        raise ValueError(
            f"{path} was written by {saved['method']}, this run is {method.describe()}. Resume"
            " with the same method."
        )
    return saved["state"]


def _own_folder(config: DictConfig, batch_number: int) -> Path:
    return Path(config.default_local_dir, f"global_step_{batch_number}")
