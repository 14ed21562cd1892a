"""Probes: experiments on a saved moment of a run.

Each writes raw data, a figure and a summary, and leaves the run as it was.
Names are imported when they are first used (PEP 562): an audit of plans needs no model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoise.probes.localisation import first_error_tokens, localise
    from counterpoise.probes.runner import PROBES, Probe, pool, run_probe
    from counterpoise.probes.scene import Scene, open_scene
    from counterpoise.probes.token_value import compare_values
    from counterpoise.probes.updates import Change, try_update

# the module that has a name -> the names
_HOMES = {
    "counterpoise.probes.localisation": ("first_error_tokens", "localise"),
    "counterpoise.probes.runner": ("PROBES", "Probe", "pool", "run_probe"),
    "counterpoise.probes.scene": ("Scene", "open_scene"),
    "counterpoise.probes.token_value": ("compare_values",),
    "counterpoise.probes.updates": ("Change", "try_update"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "PROBES",
    "Change",
    "Probe",
    "Scene",
    "compare_values",
    "first_error_tokens",
    "localise",
    "open_scene",
    "pool",
    "run_probe",
    "try_update",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'counterpoise.probes' has no attribute {name!r}")
