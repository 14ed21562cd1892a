"""counterpoise inside verl: ``register`` puts every method into verl's registries, ``registration``
says what is there. ``write_rows`` makes verl's data from an environment.
"""

from counterpoise.hosts.verl.data import rows, write_rows
from counterpoise.hosts.verl.registry import Registration, register, registration

__all__ = ["Registration", "register", "registration", "rows", "write_rows"]
