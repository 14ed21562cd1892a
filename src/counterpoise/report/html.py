"""What every page is made of: its assets, and a policy that lets it run its own scripts alone."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources


def policy(*, scripts: Sequence[str], styles: Sequence[str]) -> str:
    """A Content-Security-Policy: only these very scripts and styles run, and nothing is loaded."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(digest, scripts))}",
            f"style-src {' '.join(map(digest, styles))}",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def digest(text: str) -> str:
    """The source expression of an inline script or style: the hash of its text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def asset(name: str, subject: str = "report") -> str:
    """The text of an asset of the report or of the viewer."""
    return (resources.files(f"counterpoise.{subject}") / "assets" / name).read_text(
        encoding="utf-8"
    )
