"""Runs experiments: data sources, records, checkpoints, workers, the compiled gradient."""
