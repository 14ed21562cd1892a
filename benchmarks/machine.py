"""What every benchmark says of its machine and its process."""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch


def device_name() -> str:
    """The accelerator where there is one, else the processor and its threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} cpu, {torch.get_num_threads()} threads"


def now(read: Callable[[], float] = time.perf_counter) -> float:
    """Seconds on a clock, once an accelerator has come to rest."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return read()


def peak() -> int:
    """Most memory of this process so far, in bytes: of the accelerator where there is one, else
    resident.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would start from the peak of the process that started this one
        return next(
            int(line.split()[1]) * 1024
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM")
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
