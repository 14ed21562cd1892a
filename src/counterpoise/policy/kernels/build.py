"""C sources built once with the system's C compiler and kept in the cache folder.

Calls go through ctypes, which lets go of the interpreter. There is no OpenMP in them: its threads
would be a second set beside torch's.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from counterpoise.run.environment import cache_folder, why_not_private

COMPILERS = ("cc", "gcc", "clang")
HEADERS = Path(__file__).parent
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
TYPES = {"p": ctypes.c_void_p, "f": ctypes.c_float, "n": ctypes.c_int64}


def load_library(
    source: Path, arguments: Mapping[str, str], log: logging.Logger, who: str, instead: str
) -> ctypes.CDLL | None:
    """The library of a C source, built first if need be; None, with one line in the log, where it
    cannot be had.

    Args:
        arguments: of each function, a letter per argument: p a pointer, f a float, n an int64.
        who: what the line in the log begins with.
        instead: what happens without the library.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        log.info("%s: no C compiler (%s) was found; %s.", who, ", ".join(COMPILERS), instead)
        return None
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    errors = []
    for flags in ((*FLAGS, native), FLAGS):
        try:
            path = _built(source, compiler, flags, log, who)
            return _declared(ctypes.CDLL(str(path)), arguments)
        except (
            OSError,
            RuntimeError,
            subprocess.SubprocessError,
        ) as error:  # RuntimeError: a user without a home folder
            errors.append(getattr(error, "stderr", None) or str(error))
    reason = errors[-1].strip()[:300]
    log.info("%s: the C kernels could not be built (%s); %s.", who, reason, instead)
    return None


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor lies; the C sources know no strides."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def structure(name: str, **fields: str) -> type[ctypes.Structure]:
    """A struct of a C source, field by field: names of each kind, in order."""
    kinds = {
        "pointer": ctypes.c_void_p,
        "whole": ctypes.c_int64,
        "real": ctypes.c_float,
        "flag": ctypes.c_int,
    }
    typed = [(field, kinds[kind]) for kind, names in fields.items() for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": typed})


def _built(
    source: Path, compiler: str, flags: tuple[str, ...], log: logging.Logger, who: str
) -> Path:
    """The shared library in the cache; a build has a folder of its own until it is whole, since
    others may build at the same time. A cache that others can write to is left aside.
    """
    cache, name = cache_folder("kernels"), f"kernels-{_key(source, compiler, flags)}.so"
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / name
    reason = why_not_private(cache.parent, cache, *([path] if path.is_file() else []))
    if reason:
        log.warning("%s: %s: the kernels in it are not loaded but built anew.", who, reason)
        return _compile(source, compiler, flags, _private_folder() / name)
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            os.replace(_compile(source, compiler, flags, Path(folder, name)), path)
    return path


def _compile(source: Path, compiler: str, flags: tuple[str, ...], path: Path) -> Path:
    _call(compiler, *flags, f"-I{HEADERS}", "-shared", str(source), "-o", str(path), "-lm")
    return path


@functools.cache
def _private_folder() -> Path:
    """A folder of this process alone, removed at its end."""
    folder = tempfile.TemporaryDirectory(prefix="counterpoise-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _key(source: Path, compiler: str, flags: tuple[str, ...]) -> str:
    """Of all that decides the machine code: native flags depend on the processor, and a home folder
    may be shared by several.
    """
    sources = [source, *sorted(HEADERS.glob("*.h"))]
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    processor = sorted(
        {line for line in lines if line.startswith(("flags", "Features", "CPU part", "model name"))}
    )
    facts = [
        *(file.read_text(encoding="utf-8") for file in sources),
        _call(compiler, "--version"),
        *flags,
        platform.platform(),
        platform.processor(),
        *processor,
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _call(*command: str) -> str:
    # no time limit: whether a run computes in C must not depend on how busy the machine is
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _declared(loaded: ctypes.CDLL, arguments: Mapping[str, str]) -> ctypes.CDLL:
    for name, letters in arguments.items():
        getattr(loaded, name).argtypes = [TYPES[letter] for letter in letters]
        getattr(loaded, name).restype = None
    return loaded
