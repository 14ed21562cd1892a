"""Ctrl-C and SIGTERM: the first one ends the run after its batch, the second one at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

INTERRUPTED = 130  # exit code of a process that Ctrl-C ended
FIRST = "stopping after this batch and its checkpoint; a second Ctrl-C ends the process at once"


@contextmanager
def stop_requests(note: Callable[[str], None]) -> Iterator[list[int]]:
    """Fills the list when SIGINT or SIGTERM comes: the loop then finishes its batch, writes a
    checkpoint and leaves. A second signal ends the process, whatever it is busy with.

    Args:
        note: shows a line to a person.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # signals are somebody else's business
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    # Python runs a handler between two operations of the main thread, which may be far apart. The
    # byte in this pipe is written at once and read by a thread of its own.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def receive(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1:  # the thread may wait for the lock of a busy interpreter
            _end()

    handlers = {n: signal.signal(n, receive) for n in numbers}
    wakeup = signal.set_wakeup_fd(writer)
    watcher = threading.Thread(target=_watch, args=(reader, note), daemon=True)
    watcher.start()
    try:
        yield received
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writer)
        watcher.join()
        os.close(reader)


def _watch(reader: int, note: Callable[[str], None]) -> None:
    """Read one byte per signal until the pipe is closed; the second one ends the process."""
    seen = 0
    while byte := os.read(reader, 1):
        seen += byte[0] in (signal.SIGINT, signal.SIGTERM)
        if seen == 1:
            note(FIRST)
        elif seen > 1:
            _end()


def _end() -> None:
    with suppress(OSError):
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
        os.write(2, f"{show_cursor}\ninterrupted\n".encode())
    os._exit(INTERRUPTED)
