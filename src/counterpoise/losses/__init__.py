"""Losses: one value a token, never reduced."""

from __future__ import annotations

from counterpoise.build import Stage
from counterpoise.losses.ratio import clipped, reinforce

LOSSES: dict[str, Stage] = {
    "reinforce": reinforce,
    "clipped": clipped,
}
