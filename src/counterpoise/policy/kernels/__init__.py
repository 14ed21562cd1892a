"""Fused kernels of the update, forward and backward: norm, rotation and gate (Triton)."""
