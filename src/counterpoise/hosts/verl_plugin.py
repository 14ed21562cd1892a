"""What verl's entry point ``verl.plugins`` loads in every process. verl imports it and calls nothing, so importing it registers."""

from __future__ import annotations

from counterpoise.hosts.verl import register

register()
