"""How the judge and a program speak: plain data over a socket, and numbers for all other objects.

Neither side can send code or classes. The judge keeps what it expects to itself; a program sees
the arguments of its functions and nothing else. Runs inside the sandbox: standard library alone."""

from __future__ import annotations

import builtins
import json
import operator
import time
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from socket import socket
from typing import Any

MAX_ITEMS = 100_000  # of an iterator that the judge reads
CHUNK = 1 << 16
SMALL = 1 << 53

# type -> (tag, plain parts, from parts); looked through in this order, subclasses are sent as these
TYPES: dict[type, tuple[str, Callable[[Any], Any], Callable[..., Any]]] = {
    tuple: ("tuple", list, lambda *items: tuple(items)),
    set: ("set", list, lambda *items: set(items)),
    frozenset: ("frozenset", list, lambda *items: frozenset(items)),
    deque: ("deque", list, lambda *items: deque(items)),
    range: ("range", lambda r: [r.start, r.stop, r.step], range),
    complex: ("complex", lambda z: [z.real, z.imag], complex),
    bytes: ("bytes", lambda b: [b.hex()], bytes.fromhex),
    bytearray: ("bytearray", lambda b: [b.hex()], bytearray.fromhex),
    Fraction: ("Fraction", lambda q: [q.numerator, q.denominator], Fraction),
    Decimal: ("Decimal", lambda d: [str(d)], Decimal),
    datetime: ("datetime", lambda d: [d.isoformat()], datetime.fromisoformat),
    date: ("date", lambda d: [d.isoformat()], date.fromisoformat),
    timedelta: ("timedelta", lambda d: [d.days, d.seconds, d.microseconds], timedelta),
}
# classes that go by name; no functions: a test that calls what it gets must not call eval
CLASSES = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, range)
CLASS_NAMES = {kind.__name__: kind for kind in CLASSES}
MAKERS = {tag: make for tag, _, make in TYPES.values()}


class Gone(Exception):
    """The other side is late, has ended, or does not keep to the protocol."""


class Foreign(Exception):
    """An error of the other side that has no builtin class."""


class Peer:
    """One end of the socket. ``objects`` are those that the other side knows by number."""

    def __init__(self, channel: socket, *, is_judge: bool, max_bytes: int) -> None:
        self.channel, self.is_judge, self.max_bytes = channel, is_judge, max_bytes
        self.deadline: float | None = None
        self.names: dict[str, Any] = {}
        self.objects: list[Any] = []
        self.buffer = bytearray()

    def ask(self, do: str, on: Any = None, *args: Any, **kwargs: Any) -> Any:
        """What the other side answers; meanwhile it may call functions that it was given."""
        asked = [self.encode(arg) for arg in args]
        named = {name: self.encode(value) for name, value in kwargs.items()}
        self.send({"do": do, "on": on, "args": asked, "kwargs": named})
        while "do" in (message := self.receive()):
            self.send(self.answer(message))
        if "error" in message:
            raise error_of(*message["error"])
        for arg, after in zip(args, message.get("after", [])):
            change(arg, self.decode(after))
        return self.decode(message["value"])

    def serve(self) -> None:
        while True:
            self.send(self.answer(self.receive()))

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """What was asked for, or the error. A judge lets its functions be called, nothing else."""
        try:
            args = [self.decode(arg) for arg in message["args"]]
            kwargs = {name: self.decode(value) for name, value in message["kwargs"].items()}
            if self.is_judge and message["do"] != "call":
                raise Gone("asked the judge for more than a call")
            value = OPERATIONS[message["do"]](self, message["on"], *args, **kwargs)
            after = [self.encode(arg) for arg in args]
            extra = {"after": after} if after != message["args"] else {}
            return {"value": self.encode(value), **extra}
        except BaseException as error:  # also SystemExit: a program ends when the judge says so
            if isinstance(error, Gone):
                raise
            return {"error": [type(error).__name__, text_of(error)]}

    def send(self, message: dict[str, Any]) -> None:
        try:
            self.channel.settimeout(self.time_left())
            self.channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Gone("ended") from error

    def receive(self) -> dict[str, Any]:
        while b"\n" not in self.buffer:
            if len(self.buffer) > self.max_bytes:
                raise Gone(f"gave a result of more than {self.max_bytes} bytes")
            self.buffer += self._chunk()
        line, _, rest = self.buffer.partition(b"\n")
        self.buffer = bytearray(rest)
        return checked(line)

    def _chunk(self) -> bytes:
        try:
            self.channel.settimeout(self.time_left())
            chunk = self.channel.recv(CHUNK)
        except TimeoutError as error:
            raise Gone("timed out") from error
        except OSError as error:
            raise Gone("ended") from error
        if not chunk:
            raise Gone("ended")
        return chunk

    def time_left(self) -> float | None:
        if self.deadline is None:
            return None
        if (left := self.deadline - time.monotonic()) <= 0:
            raise Gone("timed out")
        return left

    def encode(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, float, str)):
            return plain(value)
        if isinstance(value, int):
            return int(value) if -SMALL < value < SMALL else {"int": hex(value)}
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        if isinstance(value, dict):
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in value.items()]}
        if isinstance(value, Proxy) and value._peer is self:
            return {"yours": value._on}
        for kind, (tag, parts, _) in TYPES.items():
            if isinstance(value, kind):
                return {tag: [self.encode(item) for item in parts(value)]}
        if any(value is kind for kind in CLASSES):
            return {"class": value.__name__}
        self.objects.append(value)
        return {"mine": len(self.objects) - 1}

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        [(tag, body)] = value.items()
        if tag == "int":
            return int(body, 16)
        if tag == "dict":
            return {self.decode(k): self.decode(v) for k, v in body}
        if tag == "class":
            return CLASS_NAMES[body]
        if tag == "mine":
            return Proxy(self, body)
        if tag == "yours":
            return self.thing(body)
        return MAKERS[tag](*(self.decode(item) for item in body))

    def thing(self, on: int | str) -> Any:
        """An object by number, or a name of the program; a judge has no names."""
        if self.is_judge or not isinstance(on, str):
            return self.objects[operator.index(on)]  # pyright: ignore[reportArgumentType]
        if on not in self.names and not hasattr(builtins, on):
            raise NameError(f"name {on!r} is not defined")
        return self.names[on] if on in self.names else getattr(builtins, on)


def run(peer: Peer, _: None, source: str) -> None:
    exec(compile(source, "<answer>", "exec"), peer.names)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "run": run,
    "name": lambda peer, on: peer.thing(on),
    "call": lambda peer, on, *args, **kwargs: peer.thing(on)(*args, **kwargs),
    "get": lambda peer, on, name: getattr(peer.thing(on), name),
    "set": lambda peer, on, name, value: setattr(peer.thing(on), name, value),
    "item": lambda peer, on, key: peer.thing(on)[key],
    "put": lambda peer, on, key, value: operator.setitem(peer.thing(on), key, value),
    "list": lambda peer, on: list(islice(peer.thing(on), MAX_ITEMS)),
    "len": lambda peer, on: len(peer.thing(on)),
    "bool": lambda peer, on: bool(peer.thing(on)),
    "str": lambda peer, on: str(peer.thing(on)),
    "repr": lambda peer, on: repr(peer.thing(on)),
    "equal": lambda peer, on, other: bool(peer.thing(on) == other),
}


class Proxy:
    """An object of the other side.

    It equals no plain data, and has no arithmetic or order: an object of the answer's would learn
    what the test expects, and say that it is that.
    """

    __slots__ = ("_on", "_peer")
    _on: int | str
    _peer: Peer

    def __init__(self, peer: Peer, on: int | str) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_on", on)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self._on, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self._on, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._on, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("item", self._on, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.ask("put", self._on, key, value)

    def __iter__(self) -> Any:
        return iter(need(list, self._peer.ask("list", self._on)))

    def __len__(self) -> int:
        return need(int, self._peer.ask("len", self._on))

    def __bool__(self) -> bool:
        return need(bool, self._peer.ask("bool", self._on))

    def __str__(self) -> str:
        return need(str, self._peer.ask("str", self._on))

    def __repr__(self) -> str:
        return need(str, self._peer.ask("repr", self._on))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Proxy):
            return False
        return need(bool, self._peer.ask("equal", self._on, other))

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def need(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


def plain(value: float | str | None) -> float | str | None:
    """Without a class of the program's."""
    if isinstance(value, float):
        return float(value)
    return str.__str__(value) if isinstance(value, str) else value


def checked(line: bytes | bytearray) -> dict[str, Any]:
    """A message; a program may write anything into its socket."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Gone("wrote into the judge's socket") from error
    if not isinstance(message, dict) or not {"do", "value", "error"} & set(message):
        raise Gone("wrote into the judge's socket")
    return message


def change(before: Any, after: Any) -> None:
    """What a call did to a list, dict or set of its arguments."""
    if type(before) is not type(after):
        return
    if isinstance(before, list):
        before[:] = after
    elif isinstance(before, (dict, set)):
        before.clear()
        before.update(after)


def error_of(name: str, message: str) -> Exception:
    """An error of the other side as one of ours: the builtin class, where a text is enough."""
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration:
        try:
            return kind(str(message))
        except TypeError:
            pass
    return Foreign(f"{name}: {message}")


def text_of(error: BaseException) -> str:
    """The message of an error whose class may be the program's."""
    try:
        return str(error)[:1000]
    except BaseException:
        return ""
