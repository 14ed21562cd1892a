"""Whose folder it is: whether it holds a run, which of its files a run wrote, and which process has
it now.

Nothing else is ever deleted, and only in folders of this schema version.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from counterpoise.errors import ConfigError
from counterpoise.run.files import inside, is_temporary, remove_folder
from counterpoise.run.read import BATCH_FILE, CHECKPOINT, checkpoints, read_mapping
from counterpoise.run.schema import SAME_FILES, SCHEMA_VERSION
from counterpoise.text import visible

try:
    import fcntl
except ImportError:  # Windows: nobody is held back there
    fcntl = None

log = logging.getLogger("counterpoise.run")
LOCK = ".lock"
HEAD = "# counterpoise run folder, schema version"
# folder -> names of the files in it that a run, its report or a probe wrote
OWN = {
    "": re.compile(r"(metrics|timing|evals)\.jsonl"),
    "rollouts": BATCH_FILE,
    "tokens": BATCH_FILE,
    "evals": BATCH_FILE,
    "plan": BATCH_FILE,
    "report": re.compile(r"index\.html"),
    "tensorboard": re.compile(r"events\.out\.tfevents\..*"),
}
PROBE_FILE = re.compile(r".+\.parquet|started\.json|summary\.json|figure\.html|truth\.safetensors")


def check_free(run_dir: Path, *, fresh: bool, resume: bool) -> None:
    """Before anything is written: a folder that holds a run is resumed, replaced on request, or an
    error.
    """
    manifest = read_mapping(run_dir / "manifest.json")
    has_run = is_manifest(manifest)
    if resume:
        _check_resumable(run_dir, has_run)
    elif not has_run and not is_begun(run_dir):
        if run_dir.is_dir() and any(not _is_passing(path) for path in run_dir.iterdir()):
            raise ConfigError(
                f"run_dir: {run_dir} exists, is not empty and holds no run. Choose another with"
                " --set run_dir=..."
            )
    elif has_run and not fresh:
        rest = (
            ". Continue it with --resume, replace it with --fresh,"
            if checkpoints(run_dir)
            else " without a checkpoint, so it cannot go on. Replace it with --fresh,"
        )
        raise ConfigError(f"run_dir: {run_dir} holds a run{rest} or --set run_dir=...")
    elif has_run and manifest["schema_version"] not in SAME_FILES:
        raise ConfigError(
            f"--fresh: {run_dir} was written in schema version {manifest['schema_version']}, and"
            f" only files of version {SCHEMA_VERSION} are replaced. Delete the folder yourself, or"
            " --set run_dir=..."
        )


def is_manifest(manifest: Mapping[str, Any]) -> bool:
    """Whether ``create_run`` wrote it; other programs have a manifest.json too."""
    return type(manifest.get("schema_version")) is int and isinstance(
        manifest.get("versions"), dict
    )


def is_begun(run_dir: Path) -> bool:
    """Whether a start was cut off between ``config.yaml`` and ``manifest.json``."""
    file = run_dir / "config.yaml"
    if (run_dir / "manifest.json").exists() or not file.is_file() or file.is_symlink():
        return False
    with file.open("rb") as text:
        return text.read(len(HEAD)) == HEAD.encode() and not own_paths(run_dir)


def own_paths(run_dir: Path) -> list[Path]:
    """Files and checkpoints that a run, its report or a probe wrote, checkpoints first; without
    ``config.yaml`` and ``manifest.json``. A folder that leads out of the run is an error.
    """
    out = [path for path in _listed(run_dir, "checkpoints") if CHECKPOINT.fullmatch(path.name)]
    for folder, pattern in OWN.items():
        out += [path for path in _listed(run_dir, folder) if pattern.fullmatch(path.name)]
    for folder in _folders(run_dir, "probes"):
        out += [path for path in _listed(run_dir, folder) if PROBE_FILE.fullmatch(path.name)]
    return out


def remove_run(run_dir: Path) -> None:
    """Remove what a run wrote, and folders that are empty then; everything else stays."""
    paths = own_paths(run_dir)
    for path in paths:
        remove(path)
    folders = {parent for path in paths for parent in path.relative_to(run_dir).parents}
    for folder in sorted(folders - {Path()}, key=lambda one: len(one.parts), reverse=True):
        with suppress(OSError):
            (run_dir / folder).rmdir()


def remove(path: Path) -> None:
    """Remove a file, a link itself, or a folder as a whole."""
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        path.unlink()


def remove_leftovers(run_dir: Path) -> None:
    """Remove temporary files and folders of a process that was killed."""
    for folder in ("", "checkpoints", *(name for name in OWN if name)):
        for path in _listed(run_dir, folder):
            if is_temporary(path.name):
                remove(path)


@contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """One process has the folder for the block; another is told who. The lock of a process that
    died holds nobody back.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    handle = _locked(run_dir / LOCK)
    who = {"pid": os.getpid(), "host": platform.node(), "command": " ".join(sys.argv)[:200]}
    os.ftruncate(handle, 0)
    os.write(
        handle, json.dumps({**who, "since": datetime.now().isoformat(" ", "seconds")}).encode()
    )
    try:
        yield
    finally:
        with suppress(OSError):
            (run_dir / LOCK).unlink()
        os.close(handle)
        with suppress(OSError):  # nothing was written
            run_dir.rmdir()


def _locked(path: Path) -> int:
    """An open, locked file that is still the one of that name."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                os.close(handle)
                raise ConfigError(_in_use(path)) from None
            log.warning("run_dir: %s cannot be locked (%s): use it from one process.", path, error)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)


def _in_use(path: Path) -> str:
    who = read_mapping(path)
    return visible(
        f"run_dir: {path.parent} is in use by process {who.get('pid', '?')} on"
        f" {who.get('host', '?')} since {who.get('since', '?')} ({who.get('command', '?')}). Wait"
        " for it, stop it, or --set run_dir=..."
    )


def _check_resumable(run_dir: Path, has_run: bool) -> None:
    from counterpoise.run.read import check_current

    if not has_run:
        raise ConfigError(f"--resume: {run_dir} holds no run. Start one without --resume.")
    check_current(run_dir)
    own_paths(run_dir)
    if not checkpoints(run_dir):
        raise ConfigError(
            f"--resume: {run_dir} has no complete checkpoint. Start it again with --fresh, or leave"
            " it and --set run_dir=..."
        )


def _is_passing(path: Path) -> bool:
    return path.name == LOCK or is_temporary(path.name)


def _listed(run_dir: Path, folder: str) -> list[Path]:
    path = inside(run_dir, folder)
    return sorted(path.iterdir()) if path.is_dir() else []


def _folders(run_dir: Path, folder: str) -> list[str]:
    """A folder of the run and all below it, links left out."""
    below = [path for path in _listed(run_dir, folder) if path.is_dir() and not path.is_symlink()]
    return [
        folder,
        *(name for path in below for name in _folders(run_dir, f"{folder}/{path.name}")),
    ]
