"""The notebooks of the repository, run headlessly: `python -m feddip_core.reproduce`."""
