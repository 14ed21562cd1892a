"""A stack on disk, so that a killed arena goes on where it stopped: weights, moments, and what each
member carries. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from counterpoise.arena.collect import Bench
from counterpoise.arena.member import Member
from counterpoise.arena.results import Run
from counterpoise.run.files import remove_folder, write_folder, write_json
from counterpoise.run.read import read_mapping

COLUMNS: tuple[str, ...] = ("theta", "first", "second", "count")


class Kept(NamedTuple):
    """A stack after some batches: its buffers, and per member what it carries."""

    batch_number: int
    columns: dict[str, Tensor]
    members: list[dict[str, object]]


def folder_of(out: Path, runs: Sequence[Run]) -> Path:
    """Where the state of these runs is."""
    text = ";".join(f"{run.arm}/{run.lr!r}/{run.seed}" for run in runs)
    return out / "state" / hashlib.sha256(text.encode()).hexdigest()[:16]


def keep(folder: Path, bench: Bench, members: Sequence[Member], batch_number: int) -> None:
    """Write the state, whole or not at all."""
    columns: dict[str, Tensor] = dict(zip(COLUMNS, (bench.stack.theta_SP, *bench.moments)))
    write_kept(folder, Kept(batch_number, columns, [carried(member) for member in members]))


def carried(member: Member) -> dict[str, object]:
    return {
        "state": member.state,
        "num_prompts": member.num_prompts,
        "num_updates": member.num_updates,
        "rewards": member.rewards,
        "stopped": member.stopped,
    }


def write_kept(folder: Path, kept: Kept) -> None:
    """A folder per batch; the older ones go when the new one is whole."""

    def fill(path: Path) -> None:
        whole = {name: column.contiguous().cpu() for name, column in kept.columns.items()}
        save_file(whole, path / "stack.safetensors")
        write_json(
            path / "members.json", {"batch_number": kept.batch_number, "members": kept.members}
        )

    write_folder(folder / str(kept.batch_number), fill)
    for batch in batches_of(folder)[:-1]:
        remove_folder(folder / str(batch))


def batches_of(folder: Path) -> list[int]:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal())


def read_kept(folder: Path) -> Kept | None:
    """The last state of a stack; None where there is none."""
    batches = batches_of(folder)
    if not batches:
        return None
    path = folder / str(batches[-1])
    value = read_mapping(path / "members.json")
    return Kept(value["batch_number"], load_file(path / "stack.safetensors"), value["members"])


@torch.no_grad()
def restore(kept: Kept, bench: Bench, members: Sequence[Member]) -> int:
    """Put the state back; the batch to go on with."""
    for name, column in zip(COLUMNS, (bench.stack.theta_SP, *bench.moments)):
        column.copy_(kept.columns[name])
    for member, own in zip(members, kept.members):
        for key, value in own.items():
            setattr(member, key, value)
    return kept.batch_number


def cut_kept(folder: Path, halves: Sequence[tuple[Path, slice]]) -> None:
    """The state of each half of a stack that was cut in two."""
    kept = read_kept(folder)
    if kept is None:
        return
    for path, rows in halves:
        columns = {name: column[rows].clone() for name, column in kept.columns.items()}
        write_kept(path, Kept(kept.batch_number, columns, kept.members[rows]))
    drop(folder)


def drop(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
