"""Layers of all members of a stack at once, forward and backward (Triton)."""
