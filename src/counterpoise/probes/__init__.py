"""Probes: experiments on a saved moment of a run.

Each writes raw data, a figure and a summary, and leaves the run as it was.
"""

from counterpoise.probes.runner import PROBES, Probe, pool, run_probe
from counterpoise.probes.scene import Scene, open_scene
from counterpoise.probes.updates import Change, try_update

__all__ = ["PROBES", "Change", "Probe", "Scene", "open_scene", "pool", "run_probe", "try_update"]
