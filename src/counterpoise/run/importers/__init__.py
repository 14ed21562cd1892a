"""Dumps of other trainers as run folders: ``convert`` is the way in, one file per format."""
