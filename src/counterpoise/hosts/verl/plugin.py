"""What verl's entry point ``verl.plugins`` loads in every process. verl imports it and calls
nothing, so importing it registers.
"""

from __future__ import annotations

import warnings

from counterpoise.hosts.verl import register

try:
    register()
except Exception as error:
    # verl logs what a plug-in raises at debug level; a warning is seen
    warnings.warn(f"counterpoise is not available in verl: {error}", stacklevel=1)
    raise
