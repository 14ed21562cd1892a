"""A rule that computes probabilities itself must do so at the temperature of sampling."""

from __future__ import annotations

from collections.abc import Iterable

from counterpoise.stage import Stage

HEAD = "head_VD"  # who reads it computes probabilities from hidden states


def check_temperature(stages: Iterable[Stage], temperature: float, key: str) -> None:
    """An error if a stage would compute the probabilities of a policy that nobody sampled from.

    Args:
        temperature: of sampling; ``key`` is the setting that has it.
    """
    for stage in (part for outer in stages for part in (*outer.nested, outer)):
        own = stage.settings.get("temperature")
        if HEAD in stage.needs and own is not None and own != temperature:
            raise ValueError(
                f"method: {stage.name} computes probabilities at temperature {own:g}, and {key} is"
                f" {temperature:g}. Give the rule temperature: {temperature:g}."
            )
