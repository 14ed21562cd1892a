"""Worker processes for graders and environments that may hang, raise or end their process.

A worker does one thing at a time. One that is late is killed from outside, which also ends loops
that swallow signals or sit in C code, and a new one takes its place. Workers live as long as the
caller's process."""

from __future__ import annotations

import math
import multiprocessing as mp
import numbers
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from counterpoise.errors import said
from counterpoise.types import Prompt

if TYPE_CHECKING:
    from counterpoise.tasks import Task

START_LIMIT_S = 120.0


class Reward(float):
    """A reward with what the grader says of the answer, e.g. which test failed and how.

    >>> Reward(0.5, "assert f(1) == 2: got 1, expected 2").feedback
    'assert f(1) == 2: got 1, expected 2'
    """

    feedback: str

    def __new__(cls, value: float, feedback: str = "") -> Reward:
        reward = super().__new__(cls, value)
        reward.feedback = feedback
        return reward


class Verdict(NamedTuple):
    """One graded rollout; ``fault`` is empty, ``failed`` or ``timed out``."""

    reward: float
    fault: str = ""
    message: str = ""
    feedback: str = ""


class Fault(NamedTuple):
    """Why a worker gave no result; ``kind`` is ``failed`` or ``timed out``."""

    kind: str
    message: str


class Graded(NamedTuple):
    """The number of a rollout, and its verdict."""

    item: int
    verdict: Verdict


def verdict(task: Task, prompt: Prompt, text: str) -> Verdict:
    """The task's reward if it is a finite number; anything else is a failure with reward 0."""
    try:
        reward: Any = task.reward(prompt, text)
        value = reward.item() if hasattr(reward, "item") else reward
    except Exception as error:
        # a grader's fault is reported with its rollout; it must not end a run
        return Verdict(0.0, "failed", f"the grader raised {said(error)}")
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        kind = "the text " if isinstance(value, str) else ""
        problem = f"returned {kind}{str(value)[:60]!r}, expected a finite number"
        return Verdict(0.0, "failed", f"the grader {problem}")
    return Verdict(float(value), feedback=reward.feedback if isinstance(reward, Reward) else "")


def serve_grade(task: Task, memory: dict[Any, Any], prompt: Prompt, text: str) -> Verdict:
    """What a worker that grades does."""
    return verdict(task, prompt, text)


# (what was sent, memory of the worker, what is asked) -> result
Serve = Callable[..., Any]


def work(connection: Connection, serve: Serve) -> None:
    """The life of a worker: a message is a pickled task, or (what is asked, time limit)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task, memory = None, {}
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        if isinstance(message, bytes):
            task, answer = _load(message)
        else:
            asked, time_limit_s = message
            _arm(time_limit_s + 10)
            answer = serve(task, memory, *asked)
            _arm(0)
        try:
            connection.send(answer)
        except BrokenPipeError:  # the caller is gone, and with it the question
            return


def _load(pickled: bytes) -> tuple[Any, str]:
    try:
        return pickle.loads(pickled), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _arm(seconds: float) -> None:
    """Let the system end this process should the caller be gone while it hangs; 0 disarms."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)


class Sent(NamedTuple):
    """A task as a worker gets it; ``needs_main`` if it, or what the prompts carry for it, is
    defined in the caller's script.
    """

    pickled: bytes
    needs_main: bool


def sent(task: object, prompts: Iterable[Prompt]) -> Sent:
    pickled = pickle.dumps(task)
    metas = pickle.dumps([prompt.meta for prompt in prompts])
    return Sent(pickled, b"__main__" in pickled or b"__main__" in metas)


@contextmanager
def main_left_out() -> Iterator[None]:
    """Processes started in the block do not import the caller's script.

    They need it only for what is defined there; it may import a whole training stack, once for
    every worker.
    """
    main = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    try:
        for name in kept:
            setattr(main, name, None)
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)


class Worker:
    """A process that holds a task, and the item it works on; ``who`` it works for is named in
    messages.
    """

    def __init__(self, sent: Sent, serve: Serve = serve_grade, who: str = "grader") -> None:
        self.who = who
        method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
        context: Any = mp.get_context(method)
        # with these imported once, replacing a killed worker takes milliseconds
        context.set_forkserver_preload(["counterpoise.tasks", "math_verify"])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, serve), daemon=True)
        with nullcontext() if sent.needs_main else main_left_out():
            self.process.start()
        theirs.close()
        self.item: int | None = None
        self.deadline = math.inf
        self._load(sent)

    def _load(self, sent: Sent) -> None:
        try:
            self.connection.send(sent.pickled)
            fault = (
                self.connection.recv()
                if self.connection.poll(START_LIMIT_S)
                else f"no answer within {START_LIMIT_S:.0f} s"
            )
        except (EOFError, OSError):
            fault = (
                f"it ended at once; a script with a {self.who} needs `if __name__ == '__main__':`"
                " around what it runs"
            )
        if fault:
            self.kill()
            raise ValueError(f"the {self.who}'s process cannot load the task: {fault}.")
        self.sent = sent

    def is_ready(self, sent: Sent) -> bool:
        """Whether it is alive and holds this task."""
        is_same = self.sent.pickled == sent.pickled and self.sent.needs_main >= sent.needs_main
        return is_same and self.process.is_alive() and not self.connection.closed

    def begin(self, item: int, asked: tuple[Any, ...], time_limit_s: float) -> None:
        self.item, self.deadline = item, time.monotonic() + time_limit_s
        self.connection.send((asked, time_limit_s))

    def end(self, time_limit_s: float) -> tuple[int, Any] | None:
        """The item in hand and its result or ``Fault``; None while there is time left."""
        assert self.item is not None
        if self.connection.poll():
            result = self._answer()
        elif time.monotonic() >= self.deadline:
            self.kill()
            result = Fault("timed out", f"the {self.who} took more than {time_limit_s:g} s")
        else:
            return None
        item, self.item = self.item, None
        return item, result

    def _answer(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.kill()
            code = self.process.exitcode
            return Fault("failed", f"the {self.who} ended its process (exit code {code})")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Pool:
    """Workers that are kept between calls."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.lock = threading.Lock()

    def verdicts(
        self,
        sent: Sent,
        pairs: Mapping[int, tuple[Prompt, str]],
        time_limit_s: float,
        num_workers: int,
    ) -> Generator[Graded, None, None]:
        """The verdicts of all pairs, in the order in which they come."""
        with self.lock:
            try:
                yield from self._verdicts(sent, pairs, time_limit_s, num_workers)
            except BaseException:
                # a worker may be in the middle of a rollout of this call; its answer must not reach
                # the next one
                self.close()
                raise

    def _verdicts(
        self,
        sent: Sent,
        pairs: Mapping[int, tuple[Prompt, str]],
        time_limit_s: float,
        num_workers: int,
    ) -> Iterator[Graded]:
        waiting, num_open = list(pairs)[::-1], len(pairs)
        while num_open:
            for slot in range(num_workers):
                if waiting and (slot >= len(self.workers) or self.workers[slot].item is None):
                    item = waiting.pop()
                    self._ready(slot, sent).begin(item, pairs[item], time_limit_s)
            busy = [worker for worker in self.workers if worker.item is not None]
            wait(
                [worker.connection for worker in busy],
                max(0.0, min(worker.deadline for worker in busy) - time.monotonic()),
            )
            for worker in busy:
                if (graded := worker.end(time_limit_s)) is not None:
                    num_open -= 1
                    item, result = graded
                    is_fault = isinstance(result, Fault)
                    yield Graded(item, Verdict(0.0, *result) if is_fault else result)

    def _ready(self, slot: int, sent: Sent) -> Worker:
        if slot >= len(self.workers):
            self.workers.append(Worker(sent))
        elif not self.workers[slot].is_ready(sent):
            self.workers[slot].kill()
            self.workers[slot] = Worker(sent)
        return self.workers[slot]

    def close(self) -> None:
        while self.workers:
            self.workers.pop().kill()


POOL = Pool()
