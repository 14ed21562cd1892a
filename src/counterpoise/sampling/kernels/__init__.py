"""Decode steps and draws as kernels: Triton on a GPU, C on a CPU."""
