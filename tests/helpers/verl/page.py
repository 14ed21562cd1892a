"""The command line of docs/hosts/verl.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "hosts" / "verl.md").read_text()


def overrides() -> dict[str, str]:
    """Hydra's overrides of the page's command, key -> value."""
    command = re.search(r"python3 -m verl.trainer.main_ppo \\\n(.*?)```", PAGE, re.DOTALL)
    assert command is not None
    return dict(part.split("=", 1) for part in shlex.split(command[1].replace("\\\n", " ")))
