"""``counterpoise doctor``"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from counterpoise.cli.show import Json, print_json, say, waiting
from counterpoise.hosts.check import Check, check_trl, check_verl, is_installed
from counterpoise.run.environment import cache_folder, package_versions, why_not_private

PACKAGES = (
    "counterpoise",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "torchao",
    "trl",
    "verl",
    "vllm",
    "ray",
    "pyarrow",
)
HOSTS = ("trl", "verl")
# extra -> a few modules that only it brings
EXTRAS = {"train": ("transformers", "pydantic", "yaml"), "report": ("plotly", "starlette")}


def doctor(
    host: Annotated[str | None, typer.Argument(help="Look at one host: trl or verl.")] = None,
    json_: Json = False,
) -> None:
    """Check versions, devices and hosts; say what is broken and the fix.

    Trains a tiny model for two updates to prove that credit reaches the host's loss.
    Exit code 1 if something is broken.

    Example: `counterpoise doctor trl`
    """
    from counterpoise.errors import nearest

    if host is not None and host not in HOSTS:
        raise ValueError(f"unknown host {host!r}. {nearest(host, HOSTS)}")
    machine = machine_facts()
    with waiting("checking hosts"):
        hosts = {name: check_host(name) for name in ([host] if host else HOSTS)}
    is_broken = any(not check.is_ok for checks in hosts.values() for check in checks or [])
    is_broken |= host is not None and hosts[host] is None
    if json_:
        listed = {
            name: None if checks is None else [check._asdict() for check in checks]
            for name, checks in hosts.items()
        }
        print_json({"machine": machine, "hosts": listed})
    else:
        say(*report(machine, hosts).splitlines())
    if is_broken:
        sys.exit(1)


def machine_facts() -> dict[str, Any]:
    """Python, packages, CPU and GPU."""
    import torch

    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "bf16": bool(gpus) and torch.cuda.is_bf16_supported(),
        "packages": package_versions(PACKAGES),
        "cache": cache_state(),
        "sandbox": sandbox_state(),
        "missing_extras": missing_extras(),
    }


def missing_extras() -> dict[str, list[str]]:
    """Extras that are not installed, and the commands that wait for them."""
    from counterpoise.cli import COMMANDS

    return {
        extra: [name for name, (_, needs) in COMMANDS.items() if needs == extra]
        for extra, modules in EXTRAS.items()
        if not all(importlib.util.find_spec(module) for module in modules)
    }


def cache_state() -> str:
    """Where built kernels lie, and why they are not used if others could have written them."""
    folder = cache_folder("kernels")
    paths = [path for path in (folder.parent, folder) if path.is_dir()]
    return f"{folder.parent}: {why_not_private(*paths) or 'only you can write to it'}"


def sandbox_state() -> str:
    """Whether programs of ``task: code`` can run, and what to do if not."""
    if not sys.platform.startswith("linux"):
        return "task code needs Linux, or task.sandbox: none"
    from counterpoise.tasks.sandbox import why_not

    return why_not() or "bubblewrap runs programs of task code"


def check_host(name: str) -> list[Check] | None:
    """The host's checks; None if it is not installed."""
    if not is_installed(name):
        return None
    return _quietly(check_trl if name == "trl" else check_verl)


def report(machine: dict[str, Any], hosts: dict[str, list[Check] | None]) -> str:
    """Text for a person."""
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    lines = [
        f"python {machine['python']} on {machine['platform']}: {machine['cores']} cores, {gpus}"
    ]
    lines += [
        f"  {name:<13} {version or 'not installed'}"
        for name, version in machine["packages"].items()
    ]
    lines.append(f"  {'cache':<13} {machine['cache']}")
    lines.append(f"  {'sandbox':<13} {machine['sandbox']}")
    lines += [
        f"{', '.join(commands)} need more packages: pip install 'counterpoise[{extra}]'"
        for extra, commands in machine["missing_extras"].items()
    ]
    for name, checks in hosts.items():
        lines.append(f"host {name}")
        if checks is None:
            lines.append(f"  not installed: pip install 'counterpoise[{name}]'")
        for check in checks or []:
            lines.append(f"  {'ok    ' if check.is_ok else 'BROKEN'}  {check.name}: {check.found}")
            lines += [] if check.is_ok else [f"          fix: {check.fix}"]
    return "\n".join(lines)


def _quietly(look: Callable[[], list[Check]]) -> list[Check]:
    """The checks train; what their trainer prints is not part of the report."""
    from contextlib import redirect_stdout
    from io import StringIO

    with redirect_stdout(StringIO()):
        return look()
