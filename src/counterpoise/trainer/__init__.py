"""The reference trainer: config, the loop, the run folder."""
