"""Where numbers go besides the run folder: TensorBoard by default, W&B or trackio by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from counterpoise.run.files import inside
from counterpoise.trainer.config import Config, ConfigError


class Tracker(NamedTuple):
    """``log(batch, numbers)`` and ``close()`` of one service."""

    log: Callable[[int, dict[str, Any]], None]
    close: Callable[[], None]


def open_trackers(config: Config, run_dir: Path, batch_number: int) -> list[Tracker]:
    """The trackers of the config."""
    return [OPENERS[name](config, run_dir, batch_number) for name in config.trackers]


def check_trackers(config: Config) -> None:
    """A package that is missing is an error that names it, before anything is written."""
    for name in config.trackers:
        _import(name)


def _tensorboard(config: Config, run_dir: Path, batch_number: int) -> Tracker:
    from torch.utils.tensorboard.writer import SummaryWriter

    writer = SummaryWriter(str(inside(run_dir, "tensorboard")), purge_step=batch_number or None)

    def log(at: int, numbers: dict[str, Any]) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, at)
        writer.flush()

    return Tracker(log, writer.close)


def _wandb(config: Config, run_dir: Path, batch_number: int) -> Tracker:
    return _run_tracker(
        _import("wandb"),
        config,
        run_dir,
        {"resume": "allow", "id": run_dir.name, "dir": str(run_dir)},
    )


def _trackio(config: Config, run_dir: Path, batch_number: int) -> Tracker:
    return _run_tracker(_import("trackio"), config, run_dir, {"resume": "allow"})


def _run_tracker(package: Any, config: Config, run_dir: Path, options: dict[str, Any]) -> Tracker:
    run = package.init(
        project=config.project, name=run_dir.name, config=config.model_dump(mode="json"), **options
    )
    return Tracker(lambda at, numbers: run.log(numbers, step=at), run.finish)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"trackers: {name!r} is not installed. pip install {name}, or take it out of trackers."
        ) from None


OPENERS: dict[str, Callable[[Config, Path, int], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
