"""``counterpoise sweep``"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from counterpoise.cli.show import Json, print_json, say

SPREAD = ("--methods", "--seeds")  # options that take several words: --seeds 0 1 2
POLL_S = 0.5
INTERRUPTED = 130


class Job(NamedTuple):
    """One run of a sweep: its folder, its length, and the options of ``train`` that make it."""

    run_dir: Path
    num_batches: int
    options: tuple[str, ...]

    @property
    def log(self) -> Path:
        """What its process said."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")


def sweep(
    recipe: Annotated[str, typer.Argument(help="A recipe, or the name of one: demo.")],
    methods: Annotated[
        list[str], typer.Option(help="Methods, or '{name: dapo, credit: [delta]}': several words.")
    ],
    seeds: Annotated[list[int], typer.Option(help="Seeds: several words.")] = [0, 1, 2],  # noqa: B006
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key of the recipe in every run (repeatable)."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs; runs/RECIPE-sweep by default.")
    ] = None,
    json_: Json = False,
) -> None:
    """Train several methods over several seeds, then compare them.

    A method keeps the axes that the recipe pins; its label says which. The same command goes on
    where it stopped: finished runs stay, others continue from their last checkpoint. A run that
    fails does not stop the others; the exit code is then 1. Each run's output is in NAME.log.

    Example: `counterpoise sweep demo --methods grpo delta --seeds 0 1 2 --jobs 2`
    """
    from counterpoise.trainer.config import recipe_file

    folder = out or Path("runs") / f"{recipe_file(recipe).stem}-sweep"
    planned = plan_jobs(recipe, methods, seeds, set_ or [], folder)
    waiting = [job for job in planned if not is_finished(job)]
    if len(waiting) < len(planned):
        say(f"{len(planned) - len(waiting)} of {len(planned)} runs are finished", file=sys.stderr)
    codes = run_jobs(waiting, planned, recipe, jobs)
    finished = [job.run_dir for job in planned if is_finished(job)]
    failures = {
        job.run_dir: last_line(job.log)
        for job in waiting
        if codes.get(job.run_dir) not in (0, INTERRUPTED)
    }
    if json_:
        print_json({"finished": finished, "failed": {str(k): v for k, v in failures.items()}})
    else:
        show_result(finished, failures)
    if INTERRUPTED in codes.values():
        say("interrupted; the same command goes on where it stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(1 if failures else 0)


def spread(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """Options with several words as repeated options.

    >>> spread(["demo", "--seeds", "0", "1", "--jobs", "2"], ["--seeds"])
    ['demo', '--seeds', '0', '--seeds', '1', '--jobs', '2']
    """
    out: list[str] = []
    current = ""
    for word in args:
        if word.startswith("--"):
            current = word if word in names else ""
            out += [] if current else [word]
        else:
            out += [current, word] if current else [word]
    return out


def plan_jobs(
    recipe: str, methods: list[str], seeds: list[int], settings: list[str], folder: Path
) -> list[Job]:
    """Every run of the sweep, checked before the first one starts."""
    from counterpoise.catalogue.label import label
    from counterpoise.models import find_model
    from counterpoise.trainer.config import load_config

    out = []
    for method, seed in itertools.product(dict.fromkeys(methods), dict.fromkeys(seeds)):
        own = [f"method={method}" if method.startswith("{") else f"method.name={method}"]
        config = load_config(recipe, [*own, *settings, f"seed={seed}"])
        name = re.sub(r"\W+", "_", label(config.method)).strip("_")
        run_dir = folder / f"{name}-seed{seed}"
        overrides = [*own, *settings, f"seed={seed}", f"run_dir={run_dir}"]
        options = tuple(word for text in overrides for word in ("--set", text))
        job = Job(run_dir, config.num_batches, options)
        find_model(config.model)
        check_method(config.method)
        check_same(job, load_config(recipe, overrides).model_dump(mode="json"))
        out.append(job)
    return out


def check_method(method: dict[str, object]) -> None:
    """A wrong name is said before the first run, not by the last one."""
    from counterpoise.catalogue.registry import method as make_method

    make_method(**method)  # pyright: ignore[reportArgumentType]


def check_same(job: Job, config: dict[str, object]) -> None:
    """A run that is there already was made with these settings."""
    from counterpoise.run.read import open_run
    from counterpoise.trainer.config import parse_config

    if not (job.run_dir / "config.yaml").is_file():
        return
    there = parse_config(open_run(job.run_dir).config).model_dump(mode="json")
    keys = [key for key in config if there.get(key) != config[key]]
    if keys:
        raise ValueError(
            f"sweep: {job.run_dir} was made with another {', '.join(keys)}. Choose another folder"
            " with --out, or delete that run."
        )


def num_batches(job: Job) -> int:
    """Batches that a run has finished."""
    from counterpoise.run.read import read_jsonl

    file = job.run_dir / "metrics.jsonl"
    rows = read_jsonl(file, []) if file.is_file() else []
    return max((row["batch"] + 1 for row in rows if isinstance(row.get("batch"), int)), default=0)


def is_finished(job: Job) -> bool:
    """All batches, and the checkpoint that a run ends with."""
    from counterpoise.run.files import batch_of

    return bool(saved := saved_checkpoints(job)) and batch_of(saved[-1]) >= job.num_batches


def saved_checkpoints(job: Job) -> list[Path]:
    from counterpoise.run.read import checkpoints

    return checkpoints(job.run_dir) if job.run_dir.is_dir() else []


def run_jobs(waiting: list[Job], planned: list[Job], recipe: str, at_once: int) -> dict[Path, int]:
    """Run them all, so many at a time; each run folder's exit code."""
    codes: dict[Path, int] = {}
    running: dict[Job, subprocess.Popen[bytes]] = {}
    queue = list(reversed(waiting))
    with progress(planned) as show, ended_with(running):
        try:
            while queue or running:
                while queue and len(running) < at_once:
                    running[job] = start(job := queue.pop(), recipe, at_once)
                time.sleep(POLL_S)
                codes |= reap(running)
                show(len(planned) - len(queue) - len(running), codes)
        except KeyboardInterrupt:
            say("stopping the runs after their batch; Ctrl-C again ends them", file=sys.stderr)
            for process in running.values():
                process.send_signal(signal.SIGINT)
            for job, process in running.items():
                codes[job.run_dir] = process.wait()
            codes |= {job.run_dir: INTERRUPTED for job in queue}
    return codes


@contextmanager
def ended_with(running: dict[Job, subprocess.Popen[bytes]]) -> Iterator[None]:
    """No run outlives the sweep."""
    try:
        yield
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def start(job: Job, recipe: str, at_once: int) -> subprocess.Popen[bytes]:
    """A run in a process of its own; it continues where there is a checkpoint to continue from."""
    mode = ["--resume"] if saved_checkpoints(job) else ["--fresh"]
    command = [sys.executable, "-m", "counterpoise", "train", recipe, *job.options, *mode, "--json"]
    threads = max(1, (os.cpu_count() or 1) // at_once)
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        # a session of its own: Ctrl-C reaches the sweep alone, which hands it on once
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
        )


def reap(running: dict[Job, subprocess.Popen[bytes]]) -> dict[Path, int]:
    """Exit codes of the runs that have ended; they leave ``running``."""
    ended = {job: code for job, process in running.items() if (code := process.poll()) is not None}
    for job in ended:
        del running[job]
    return {job.run_dir: code for job, code in ended.items()}


@contextmanager
def progress(planned: list[Job]) -> Iterator:
    """One line with a bar over all batches and the time left; elsewhere a line per run that
    ends.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.fields[text]}"), BarColumn(bar_width=30), "left")
    told: set[Path] = set()
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        total = sum(job.num_batches for job in planned)
        task = bar.add_task("sweep", total=total, text="", completed=sum(map(num_batches, planned)))

        def show(num_ended: int, codes: dict[Path, int]) -> None:
            text = f"{num_ended} of {len(planned)} runs"
            bar.update(task, completed=sum(map(num_batches, planned)), text=text)
            for run_dir in codes.keys() - told:
                told.add(run_dir)
                word = "ended" if codes[run_dir] == 0 else f"failed (exit code {codes[run_dir]})"
                if not console.is_terminal:
                    say(f"{text}: {run_dir} {word}", file=sys.stderr)

        yield show


def show_result(finished: list[Path], failures: dict[Path, str]) -> None:
    """The comparison of the runs that are finished, then what failed and why."""
    if finished and importlib.util.find_spec("plotly") is None:
        say("the comparison needs more packages: pip install 'counterpoise[report]'")
    elif finished:
        from counterpoise.cli.compare import compare

        compare(finished)
    for run_dir, line in failures.items():
        say(f"failed: {run_dir}: {line}", file=sys.stderr)


def last_line(log: Path) -> str:
    """The last thing that a run said."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("counterpoise: ") if lines else "it said nothing"
