"""Micro-batches of a small model on a CPU, one in each thread.

The products of a small model are too small to be shared by several threads: torch's wait for each
other hundreds of times in a micro-batch. Here every thread has torch to itself and takes whole
micro-batches. Gradients are added in the order of the micro-batches: which thread was faster
changes no bit.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

MOST_PARAMETERS = 1 << 23  # every thread has a gradient of its own; larger products can be shared
# glibc's M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX
MALLOC_OPTIONS = {-1: 1 << 28, -3: 1 << 25, -8: 1}
Job = TypeVar("Job")
Result = TypeVar("Result")


def add_gradients(
    parameters: Sequence[Tensor], jobs: Sequence[Job], run: Callable[[Job], tuple[Tensor, Result]]
) -> list[Result]:
    """Add the gradient of every job's loss to the parameters, as a backward of one after the other
    would; what the jobs returned beside their losses.

    Args:
        parameters: the leaves.
        run: the loss of a job, and what else it gives; called in several threads at once.
    """

    def work(job: Job) -> tuple[tuple[Tensor | None, ...], Result]:
        loss, result = run(job)
        return torch.autograd.grad(loss, parameters, allow_unused=True), result

    keep_freed_memory()
    num_threads = torch.get_num_threads()
    if num_threads == 1 or len(jobs) == 1:
        return [_add(parameters, *work(job)) for job in jobs]
    futures = [_pool(os.getpid(), num_threads).submit(work, job) for job in jobs]
    try:
        return [_add(parameters, *future.result()) for future in futures]
    finally:  # after an error too: what surrounds the call must outlast the threads' work
        wait([future for future in futures if not future.cancel()])


@functools.cache
def keep_freed_memory() -> None:
    """Up to 256 MiB that were freed stay with the process, where its C library is glibc: pages that
    go back to the system after every micro-batch have to be cleared again for the next.

    One pool of memory for all threads: those of single threads are given back whole."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        for option, value in MALLOC_OPTIONS.items():
            mallopt(option, value)


def _add(parameters: Sequence[Tensor], grads: Sequence[Tensor | None], result: Result) -> Result:
    for p, grad in zip(parameters, grads):
        if grad is not None:
            p.grad = grad.contiguous().clone() if p.grad is None else p.grad.add_(grad)
    return result


@functools.cache
def _pool(pid: int, num_threads: int) -> ThreadPoolExecutor:
    """Threads of this process (a fork has none), in each of which torch has one thread.

    Torch's number is a thread's own once the thread has used torch; new threads begin with the
    number that was set last, which is put back here."""
    everyone = Barrier(num_threads)

    def take_one_thread(_: int) -> None:
        torch.get_num_threads()  # at its first use in a thread torch takes the common number
        torch.set_num_threads(1)
        everyone.wait()

    pool = ThreadPoolExecutor(num_threads, f"update-{pid}")
    list(pool.map(take_one_thread, range(num_threads)))
    torch.set_num_threads(num_threads)
    return pool
