"""counterpoise inside other trainers.

Each host is imported by its own name, so that none of them has to be installed for the others.
"""

from counterpoise.run.environment import quiet_torchao

quiet_torchao()
