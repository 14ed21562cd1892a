"""The process that begins programs. It never holds a test: a program gets a copy of its memory.

The judge sends a socket, the nursery begins a program at its other end; one byte ends it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import types
from socket import AF_UNIX, SOCK_STREAM, recv_fds, send_fds, socket, socketpair

from . import nest
from .peer import Peer

# what programs often import: a program finds it ready
READY = (
    *("bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "enum", "functools"),
    *("heapq", "itertools", "json", "math", "operator", "random", "re", "string", "typing"),
    *("statistics", "sys", "time"),
)
MAX_BYTES = 1 << 28


def tend(orders: socket, limits: dict[str, int], *, is_nested: bool) -> None:
    """Begin and end programs until the judge is gone."""
    for name in READY:
        __import__(name)
    random.seed(0)
    while True:
        _, fds, _, _ = recv_fds(orders, 1, 1)
        if not fds:
            return
        channel = fds[0]
        pid = nest.start(lambda fd=channel: live(fd), limits, is_nested=is_nested)
        os.close(channel)
        is_over = not orders.recv(1)
        nest.end(pid, is_nested=is_nested)
        if is_over:
            return
        orders.sendall(b".")


def live(channel: int) -> None:
    """The life of a program: no files but its socket, then what the judge asks."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.dup2(channel, 3)
    os.closerange(4, 4096)
    peer = Peer(socket(AF_UNIX, SOCK_STREAM, fileno=3), is_judge=False, max_bytes=MAX_BYTES)
    module = types.ModuleType("answer")
    sys.modules["answer"], peer.names = module, vars(module)
    del sys.path[0]  # the folder of the judge
    peer.serve()


class Nursery:
    """The judge's end: ``begin`` and ``end`` one program at a time."""

    def __init__(self, limits: dict[str, int], *, is_nested: bool) -> None:
        self.orders, theirs = socketpair()
        if not os.fork():
            self.orders.close()
            with contextlib.suppress(OSError):
                nest.hide()
                tend(theirs, limits, is_nested=is_nested)
            os._exit(0)
        theirs.close()
        self.is_ending = False

    def begin(self) -> socket:
        if self.is_ending:  # the last program ends while others work
            self.orders.recv(1)
        ours, theirs = socketpair()
        send_fds(self.orders, [b"."], [theirs.fileno()])
        theirs.close()
        return ours

    def end(self) -> None:
        self.orders.sendall(b".")
        self.is_ending = True


def limits_from(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in json.loads(text).items()}
