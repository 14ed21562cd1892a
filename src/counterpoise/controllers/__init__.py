"""Stages with memory that set parameters of other axes from batch to batch.

``fn(state, batch, *, params) -> Control``; the state is JSON and is checkpointed.
"""

from __future__ import annotations

from counterpoise.controllers.entropy import entropy_target
from counterpoise.controllers.fade import fade
from counterpoise.controllers.stare import stare
from counterpoise.stage import Stage

CONTROLLERS: dict[str, Stage] = {"fade": fade, "entropy_target": entropy_target, "stare": stare}

__all__ = ["CONTROLLERS", "entropy_target", "fade", "stare"]
