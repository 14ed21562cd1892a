"""State over updates that sets parameters of other axes.

``Stateful(init, apply)``; the state is JSON and is checkpointed.
"""

from __future__ import annotations

from typing import Any

from counterpoise.controllers.entropy import entropy_target
from counterpoise.controllers.fade import fade

CONTROLLERS: dict[str, Any] = {
    "fade": fade,
    "entropy_target": entropy_target,
}

__all__ = ["CONTROLLERS", "entropy_target", "fade"]
