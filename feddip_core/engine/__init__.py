"""What runs an experiment: data, records, checkpoints, workers, a compiled gradient."""
