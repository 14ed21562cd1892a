"""Methods: a point on the six axes, the tables of names, the published presets.

The folder is not called ``method`` because ``counterpoise.method`` is the function that makes one.
"""
