"""counterpoise inside verl: ``register`` puts every method into verl's registries, ``registration``
says what is there.
"""

from counterpoise.hosts.verl.register import Registration, check_verl, register, registration

__all__ = ["Registration", "check_verl", "register", "registration"]
