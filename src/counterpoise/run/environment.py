"""What a run was made with: package versions, commit, command. No torch."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# logger -> words of a warning that is no news: transformers loads torchao where it is
# installed, for kernels that we do not use
NO_NEWS = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass"}
# packages whose versions a manifest keeps, where they are installed
PACKAGES = (
    "counterpoise",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "peft",
    "trl",
    "accelerate",
    "math-verify",
    "reasoning-gym",
)


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """The installed version of each package, None where it is not installed.

    >>> package_versions(["no-such-package"])
    {'no-such-package': None}
    """
    return {name: _version(name) for name in names}


def process_facts() -> dict[str, object]:
    """Command, commit, versions, Python and platform of this process, for a manifest."""
    versions = package_versions(PACKAGES)
    return {
        "command": [*_program(), *sys.argv[1:]],
        "commit": source_commit(),
        "versions": {name: version for name, version in versions.items() if version},
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _program() -> list[str]:
    """The words before the arguments; ``python -m counterpoise`` is known by its file alone."""
    script = Path(sys.argv[0])
    is_module = script.name == "__main__.py"
    return ["python", "-m", script.parent.name] if is_module else [script.name]


def source_commit() -> str | None:
    """The commit of this code, where it is a checkout; None if it was installed, even into a folder
    of somebody's repository.
    """
    if shutil.which("git") is None:
        return None
    file = Path(__file__)

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["git", "-C", str(file.parent), *args], capture_output=True, text=True, check=False
        )

    is_tracked = git("ls-files", "--error-unmatch", file.name).returncode == 0
    return git("rev-parse", "HEAD").stdout.strip() if is_tracked else None


def cache_folder(name: str) -> Path:
    """A folder for what is built or converted once: below ``COUNTERPOISE_CACHE``, by default
    ``~/.cache/counterpoise``.
    """
    root = os.environ.get("COUNTERPOISE_CACHE") or "~/.cache/counterpoise"
    return Path(root).expanduser() / name


def why_not_private(*paths: Path) -> str | None:
    """Why others could have put something else there: another owner, or a mode that lets anybody
    write. None where nobody could, and on systems without owners.
    """
    if not hasattr(os, "getuid"):
        return None
    for path in paths:
        facts = path.stat()
        if facts.st_uid not in (os.getuid(), 0):
            return f"{path} belongs to another user (id {facts.st_uid})"
        if facts.st_mode & 0o002:
            return f"anybody may write to {path} (chmod o-w {path})"
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def quiet_torchao() -> None:
    """Before transformers is imported: torchao does not say which of its kernels cannot be loaded.
    Its other warnings are shown.
    """
    for name, words in NO_NEWS.items():
        logging.getLogger(name).addFilter(lambda record, words=words: words not in str(record.msg))
