"""Many seeds of many methods, and verdicts that hold.

``design`` says what is compared, ``results`` what came out, ``statistics`` what follows from it,
``page`` shows it; these read files alone and need no torch.
"""
