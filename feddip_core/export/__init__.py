"""The command that exports the model of a record: `python -m feddip_core.export`."""
