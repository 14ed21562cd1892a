"""Dumps of other trainers as run folders."""
