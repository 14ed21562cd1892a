"""Programs of a model, run against tests where they can do no harm.

A sandbox is one bubblewrap process per grader, with namespaces of its own: no network, a read-only
system, nothing of the home folder, a private /tmp. Inside, a judge runs the tests and every program
gets a fresh process (``inside``). Bubblewrap and what is inside end with the process that began it.

With ``kind="none"`` the same judge runs outside bubblewrap: programs are limited in time and memory
and can read, write and send whatever you can."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from counterpoise.errors import ConfigError
from counterpoise.tasks.sandbox.inside import nest

KINDS = ("bubblewrap", "none")
INSIDE = Path(__file__).parent / "inside"
SPARE_S = 2.0  # beyond a program's time: for the judge to answer
START_S = 30.0
ADVICE = "Install it (apt-get install bubblewrap), or say task.sandbox: none to run without."
FORBIDDEN = (
    "Allow user namespaces (in Docker --security-opt seccomp=unconfined --security-opt"
    " apparmor=unconfined; on Ubuntu sysctl kernel.apparmor_restrict_unprivileged_userns=0), or say"
    " task.sandbox: none to run without."
)


class Limits(NamedTuple):
    """Of one program with all its tests; a result is what a function gives back, as text."""

    time_limit_s: float = 2.0
    memory_mb: int = 512
    disk_mb: int = 16
    result_kb: int = 1024


class Program(NamedTuple):
    """An answer and its tests. ``setup`` runs after the answer; its imports are also the tests'.
    ``shadows`` are builtin names that the answer is to define anew, as ``sum``.
    """

    answer: str
    tests: tuple[str, ...]
    setup: str = ""
    shadows: tuple[str, ...] = ()


CHECK = Program("def one():\n    return 1", ("assert one() == 1",))


class Sandbox:
    """Runs one program after another.

    >>> with Sandbox(kind="none") as sandbox:
    ...     sandbox.run(Program("def double(x): return x * 2", ("assert double(2) == 5",)))
    ['assert double(2) == 5: got 4, expected 5']
    """

    def __init__(self, limits: Limits | None = None, kind: str = KINDS[0]) -> None:
        self.limits, self.kind = limits or Limits(), kind
        self.process: subprocess.Popen[bytes] | None = None
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, program: Program) -> list[str | None]:
        """One entry per test: None, or what went wrong in one line."""
        process = self._start()
        job = {**program._asdict(), "time_limit_s": self.limits.time_limit_s}
        reply = exchange(process, job, time.monotonic() + self.limits.time_limit_s + SPARE_S)
        if reply is None:
            self.close()
            return ["the tests ended the judge or took too long"] * len(program.tests)
        return reply

    def close(self) -> None:
        if self.process is not None:
            end(self.process)
            self.process = None
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None

    def _start(self) -> subprocess.Popen[bytes]:
        if self.process is not None and self.process.poll() is None:
            return self.process
        self.close()
        if self.kind == "none":
            self.folder = tempfile.TemporaryDirectory(prefix="counterpoise-")
        folder = self.folder.name if self.folder else ""
        self.process = begin(judge_command(self.limits, self.kind, folder))
        return self.process


def why_not(kind: str = KINDS[0]) -> str:
    """Why programs cannot run in a sandbox on this machine, and what to do; empty if they can."""
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return f"the sandbox does not run: bubblewrap is not installed. {ADVICE}"
    if kind == "bubblewrap" and (reason := nest.why_not()):
        return f"the sandbox does not run: {reason}. Say task.sandbox: none to run without."
    try:
        with Sandbox(kind=kind) as sandbox:
            sandbox.run(CHECK)
    except ConfigError as error:
        return str(error)
    return ""


def begin(command: list[str]) -> subprocess.Popen[bytes]:
    """The judge, once it has judged a first program."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=INSIDE.parent,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
        start_new_session=True,
    )
    job = {**CHECK._asdict(), "time_limit_s": START_S}
    if exchange(process, job, time.monotonic() + START_S) != [None]:
        end(process)
        assert process.stderr is not None
        said = process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        reason = said[0] if said else "it gave no answer"
        raise ConfigError(f"the sandbox does not run: {reason}. {FORBIDDEN}")
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def exchange(
    process: subprocess.Popen[bytes], job: dict[str, object], deadline: float
) -> list[str | None] | None:
    """The judge's answer; None if it is late or gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
    except OSError:
        return None
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            return None
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if not chunk:
            return None
        line += chunk
    return json.loads(line)


def judge_command(limits: Limits, kind: str, folder: str) -> list[str]:
    python = os.path.realpath(sys.executable)
    judge = [python, "-s", "-S", "-B", "-m", "inside.judge"]
    if kind == "none":
        return [*judge, "plain", limits_text(limits), folder]
    return [*bubblewrap(python), *judge, "nested", limits_text(limits)]


def limits_text(limits: Limits) -> str:
    return json.dumps(
        {
            "memory_bytes": limits.memory_mb << 20,
            "disk_bytes": limits.disk_mb << 20,
            "cpu_s": int(limits.time_limit_s) + 1,
            "result_bytes": limits.result_kb << 10,
        }
    )


def bubblewrap(python: str) -> list[str]:
    """The command before the judge's: what it may see and do.

    It keeps one privilege inside its own namespace, to give every program namespaces of its own;
    programs have none.
    """
    return [
        "bwrap",
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--new-session", "--die-with-parent", "--clearenv"),
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"),
        *("--setenv", "PYTHONHASHSEED", "0"),
        *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
        *("--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"),
        *system_binds(python),
        *("--ro-bind", str(INSIDE), "/inside", "--dev", "/dev", "--dir", "/tmp"),
        *("--chdir", "/", "--remount-ro", "/dev", "--remount-ro", "/"),
    ]


def system_binds(python: str) -> Iterator[str]:
    """The system's libraries and the Python that runs this, read-only."""
    yield from ("--ro-bind", "/usr", "/usr")
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            yield from ("--symlink", os.readlink(name), name)
        elif os.path.isdir(name):
            yield from ("--ro-bind", name, name)
    for name in ("/etc/ld.so.cache", "/etc/alternatives", "/nix/store"):
        yield from ("--ro-bind-try", name, name)
    for prefix in sorted({sys.base_prefix, os.path.dirname(os.path.dirname(python))}):
        if not f"{prefix}/".startswith("/usr/"):
            yield from ("--ro-bind", prefix, prefix)
