"""Triton kernels of the ledger."""
