"""Many seeds of many methods at once, and verdicts that hold.

``design`` says what is compared, ``results`` what came out, ``statistics`` what follows from it,
``page`` shows it; these read files alone and need no torch. ``stack`` and what is built on it train
many members side by side, ``race`` runs a design.
"""

from counterpoise.run.environment import quiet_torchao

quiet_torchao()
