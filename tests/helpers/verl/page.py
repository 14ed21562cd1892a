"""The command lines of docs/hosts/verl.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "hosts" / "verl.md").read_text()


def commands() -> list[dict[str, str]]:
    """Hydra's overrides of each command of the page, key -> value."""
    texts = re.findall(r"python3 -m verl.trainer.main_ppo \\\n(.*?)```", PAGE, re.DOTALL)
    return [
        dict(part.split("=", 1) for part in shlex.split(text.replace("\\\n", " ")))
        for text in texts
    ]


def overrides() -> dict[str, str]:
    """Those of the command for one machine."""
    return commands()[0]
