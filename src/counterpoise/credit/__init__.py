"""Credit rules: ``rule(credit_NT, batch, *, params) -> credit_NT``, one file a family. Axes as in ``types``."""

from __future__ import annotations

from typing import Any

from counterpoise.credit.uniform import uniform

RULES: dict[str, Any] = {
    "uniform": uniform,
}
