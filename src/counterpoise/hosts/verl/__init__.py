"""counterpoise inside verl: ``register`` puts every method into verl's registries, ``registration``
says what is there.
"""

from counterpoise.hosts.verl.registry import Registration, register, registration

__all__ = ["Registration", "register", "registration"]
