"""counterpoise inside verl: ``register`` puts every method into verl's registries, ``registered``
says what is there.
"""

from counterpoise.hosts.verl.register import Registered, check_verl, register, registered

__all__ = ["Registered", "check_verl", "register", "registered"]
