"""A process for one program: namespaces of its own, limits, a filter of system calls.

Processes: the filter refuses fork, clone and exec, so a program has one process and one thread.
Whatever is left of it goes with its process: it is the first of its process namespace, and its
files lie in a file system of its own. Runs inside the sandbox: standard library alone."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Callable
from typing import Any

LIBC = ctypes.PyDLL(None, use_errno=True)  # PyDLL: the lock of the interpreter stays with us
NEW_MOUNTS, NEW_PROCESSES = 0x00020000, 0x20000000
MOUNT_FLAGS = 2 | 4 | 8  # no set-uid, no devices, no programs
NO_DUMPS, SECCOMP, NO_NEW_PRIVILEGES, AMBIENT = 4, 22, 38, 47
CAPABILITIES_V3 = 0x20080522
REFUSED = 0x00050000 | 1  # EPERM
ALLOWED, KILLED = 0x7FFF0000, 0x80000000

# name -> its number on x86_64 and on aarch64, None where it has none
CALLS: dict[str, tuple[int | None, int | None]] = {
    # processes and threads
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    # network; socketpair stays
    "socket": (41, 198),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # memory that the limit of memory does not count
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_secret": (447, 447),
    # wide doors into the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def why_not() -> str:
    """Why programs cannot be nested on this machine; empty where they can."""
    machine = platform.machine()
    return "" if machine in MACHINES else f"no filter of system calls for {machine} processors"


def start(live: Callable[[], Any], limits: dict[str, int], *, is_nested: bool) -> int:
    """Begin a process that lives and ends; its number."""
    pid = _clone() if is_nested else os.fork()
    if pid:
        return pid
    try:
        if is_nested:
            mount_tmp(limits["disk_bytes"])
        else:
            os.setsid()
        set_limits(limits)
        if is_nested:
            drop_privileges()
            filter_calls()
        live()
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(1)


def end(pid: int, *, is_nested: bool) -> None:
    """Kill a program and all that it began."""
    try:
        os.kill(pid, signal.SIGKILL) if is_nested else os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def hide() -> None:
    """Nobody may look into the memory of this process."""
    if hasattr(LIBC, "prctl"):
        LIBC.prctl(NO_DUMPS, 0, 0, 0, 0)


def mount_tmp(size: int) -> None:
    options = f"size={size},nr_inodes=1024,mode=0700".encode()
    check(LIBC.mount(b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(MOUNT_FLAGS), options), "mount")
    os.chdir("/tmp")


def set_limits(limits: dict[str, int]) -> None:
    wanted = {
        "AS": limits["memory_bytes"],
        "CPU": limits["cpu_s"],
        "FSIZE": limits["disk_bytes"],
        "NOFILE": 64,
        "CORE": 0,
        "MEMLOCK": 0,
    }
    for name, value in wanted.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def drop_privileges() -> None:
    check(LIBC.prctl(AMBIENT, 4, 0, 0, 0), "prctl")
    header = struct.pack("Ii", CAPABILITIES_V3, 0)
    check(LIBC.capset(header, bytes(24)), "capset")
    check(LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")


def filter_calls() -> None:
    """From here on the calls of ``CALLS`` fail with EPERM; foreign machine code is killed."""
    code = filter_code(platform.machine())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    check(LIBC.prctl(SECCOMP, 2, program, 0, 0), "seccomp")


def filter_code(machine: str) -> bytes:
    """The filter as the kernel reads it: (operation, jump if true, jump if false, value)."""
    column, architecture = MACHINES[machine]
    numbers = [pair[column] for pair in CALLS.values() if pair[column] is not None]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    rows = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, KILLED), (load, 0, 0, 0)]
    rows.append((at_least, len(numbers) + 1, 0, 0x40000000))  # the x32 numbers of x86_64
    rows += [(equal, len(numbers) - k, 0, number) for k, number in enumerate(numbers)]
    rows += [(give, 0, 0, ALLOWED), (give, 0, 0, REFUSED)]
    return b"".join(struct.pack("HBBI", *row) for row in rows)


def check(result: int, call: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _clone() -> int:
    """A fork whose child is the first process of a namespace, with mounts of its own."""
    number = CALLS["clone"][MACHINES[platform.machine()][0]]
    flags = NEW_PROCESSES | NEW_MOUNTS | signal.SIGCHLD
    pid = LIBC.syscall(ctypes.c_long(number or 0), ctypes.c_ulong(flags), None, None, None, None)
    if pid < 0:
        check(pid, "clone")
    return pid
