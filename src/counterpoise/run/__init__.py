"""The run folder: its files and columns, one writer, one reader, checkpoints, importers of other
trainers' dumps.
"""
