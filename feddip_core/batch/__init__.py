"""Many runs with one command, each an execution of notebooks/31_experiment.ipynb by Papermill.

    python -m feddip_core.batch --preset paper --dataset fashion_mnist --methods all --seeds 0 1 2 --jobs 2

Finished runs are skipped and interrupted runs resume; a failed run does not affect the others. Several commands, even
on several machines, may share a folder: only one of them works on a run.
"""
