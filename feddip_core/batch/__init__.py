"""Many runs with one command, each an execution of notebooks/31_experiment.ipynb by Papermill.

    python -m feddip_core.batch --preset paper --dataset fashion_mnist --methods all --seeds 0 1 2 --jobs 2

Finished runs are skipped and interrupted ones resumed; a failed one does not harm the others. Several such commands may
share a folder, also from several machines: a run is only ever taken by one of them.
"""
