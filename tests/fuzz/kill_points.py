"""A fault at every write of a run, then --resume: bit for bit the run that was never interrupted.

A process loads everything once and forks a child per case. The child counts its calls into the
operating system that change files, and at one of them is killed (kill -9), finds its last line torn
as well, or finds the disk full from there on. A third of the resumed runs meet a second fault.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ("open", "mkdir", "fsync", "replace", "unlink", "rmdir", "ftruncate")
NEED_SPACE = ("open", "mkdir", "fsync")
KINDS = ("kill", "torn", "full")
NEVER = 1 << 30
RECIPE = {
    "run_dir": "run",
    "model": "bundled",
    "device": "cpu",
    "task": {"name": "helpers.probe_run:Coin"},
    "method": {"name": "fade"},
    "num_batches": 3,
    "rollouts": {"prompts": 2, "group_size": 4, "max_new_tokens": 8},
    "optimizer": {"lr": 1e-3, "updates_per_batch": 2},
    "eval": {"every": 2, "prompts": 2},
    "ledger": {"every": 2},
    "checkpoint_every": 1,
    "keep_every": 2,
    "trackers": [],
}


def fuzz(seed: int | str, num: int) -> dict[str, str]:
    """What differs after ``num`` of the faults, each with its case. A seed ``"0.50"`` goes on with
    the order of seed 0 at its case 50, so that a long run meets every fault once. In a process of
    its own, which has no threads yet.
    """
    path = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
    settings = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run(
        [sys.executable, "-m", "fuzz.kill_points", str(seed), str(num)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        return {"the fuzzer itself failed": result.stderr[-2000:]}
    return json.loads(result.stdout.splitlines()[-1])


def find(seed: str, num: int, root: Path) -> dict[str, str]:
    total = train_in(root / "whole", "kill", NEVER)
    assert total > 50, total
    order, _, start = seed.partition(".")
    expected, rng = contents(root / "whole" / "run"), random.Random(order)
    cases = [(kind, point) for kind in KINDS for point in range(1, total + 1)]
    rng.shuffle(cases)
    faults: dict[str, str] = {}
    for kind, point in cases[int(start or 0) :][:num]:
        second = random.Random(f"{kind}{point}").choice((NEVER, NEVER, point % 40 + 1))
        folder = root / f"{kind}-{point}"
        problem = after_faults(folder, kind, point, second, expected)
        if problem:
            faults.setdefault(problem, f"{kind} at call {point}, then at call {second} of the next")
    return faults


def after_faults(
    folder: Path, kind: str, point: int, second: int, expected: dict[str, bytes]
) -> str | None:
    """What differs from the whole run once a run with faults was resumed; None if nothing."""
    train_in(folder, kind, point)
    train_in(folder, kind, second)
    if train_in(folder, "kill", NEVER) == 0:
        return f"it cannot be resumed: {(folder / 'error').read_text()}"
    got = contents(folder / "run")
    names = sorted(
        name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name)
    )
    return f"other files: {', '.join(names)}" if names else None


def contents(run: Path) -> dict[str, bytes]:
    """Every file of the run but those with times in them."""
    files = [path for path in run.rglob("*") if path.is_file()]
    timed = ("timing.jsonl", "manifest.json")
    return {str(f.relative_to(run)): f.read_bytes() for f in files if f.name not in timed}


def train_in(folder: Path, kind: str, point: int) -> int:
    """Train or resume in a child with one fault; how many calls it made, 0 if it did not end well.

    A run that is there already and has a checkpoint is resumed, any other is begun anew.
    """
    folder.mkdir(exist_ok=True)
    (folder / "count").unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(folder)
            code = train_here(kind, point)
        except BaseException as error:
            Path("error").write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)
    os.waitpid(child, 0)
    count = folder / "count"
    return int(count.read_text()) if count.exists() else 0


def train_here(kind: str, point: int) -> int:
    from counterpoise.run.read import checkpoints
    from counterpoise.trainer.config import parse_config
    from counterpoise.trainer.loop import train

    resume = bool(checkpoints(Path("run")))
    calls = plant(kind, point)
    train(parse_config(RECIPE), resume=resume, fresh=not resume)
    num = calls[0]
    Path("count").write_text(str(num))
    return 0


def plant(kind: str, point: int) -> list[int]:
    """Replace the calls that change files by ones that count, and meet the fault at one of them."""
    calls = [0]

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            calls[0] += 1
            if calls[0] >= point:
                meet_fault(kind, name, args)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))
    return calls


def meet_fault(kind: str, name: str, args: tuple[Any, ...]) -> None:
    if kind == "full":
        if name in NEED_SPACE:
            raise OSError(errno.ENOSPC, "No space left on device")
        return
    if kind == "torn" and name == "fsync":
        path = Path(f"/proc/self/fd/{args[0]}")
        if path.exists() and os.readlink(path).endswith(".jsonl"):
            os.truncate(os.readlink(path), max(0, os.fstat(args[0]).st_size - 7))
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    import torch

    import counterpoise.trainer.loop  # noqa: F401  loaded once, for all children
    import helpers.probe_run  # noqa: F401

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        print(json.dumps(find(sys.argv[1], int(sys.argv[2]), Path(root))))


if __name__ == "__main__":
    main()
