"""FedDIP: federated learning of one sparse network by dynamic pruning and incremental regularisation.

The modules of this folder are the algorithm. Methods, engine, study, lab, Flower and deploy are sub-packages.
"""

import sys
from importlib.metadata import version

from . import deploy
from .engine.final import load_model
from .engine.records import load_runs
from .engine.run import Run, exported_by, run, watched_by
from .experiment import Experiment
from .lab.parameters import check_parameters
from .method import METHODS, Method
from .settings import choice, flag, real, whole

__version__ = version("feddip-core")
__all__ = [  # what is public
    "METHODS", "Experiment", "Method", "Run", "__version__", "check_parameters", "choice", "flag", "load_model",
    "load_runs", "real", "run", "whole",
]  # fmt: skip


def _curves(experiment: Experiment):
    """In a notebook, what draws a run's curves. Matplotlib is imported there alone, and need not be installed."""
    if "ipykernel" not in sys.modules:
        return None
    try:
        from .lab import live
    except ImportError:
        return None
    return live.watch(experiment)


watched_by(_curves)
exported_by(deploy.export)
