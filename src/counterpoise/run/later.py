"""Files that are written while the caller goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Later:
    """Calls of a thread, one after the other; an error is raised at the next ``call`` or ``wait``.

    The end of the context waits for the last call; its error is not raised over one of the caller.

    >>> with Later() as later:
    ...     later.call(print, "written")
    written
    """

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "files")
        self.last: Future[Any] | None = None

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call it, once the one before is over."""
        self.wait()
        self.last = self.thread.submit(function, *args)

    def wait(self) -> None:
        """Until everything is done."""
        last, self.last = self.last, None
        if last is not None:
            last.result()

    def __enter__(self) -> Later:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.thread.shutdown()
        if kind is None:
            self.wait()
