"""FedDIP: federated learning of one sparse network by dynamic pruning and incremental regularisation.

The modules of this folder are the algorithm. Sub-packages hold methods, engine, study, lab, Flower and deploy.
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
__all__ = [  # the public interface
    "METHODS", "Experiment", "Method", "Run", "__version__", "check_parameters", "choice", "flag", "load_model",
    "load_runs", "real", "run", "whole",
]  # fmt: skip


def _curves(experiment: Experiment):
    """The observer that draws a run's curves in a notebook. Matplotlib is imported only here, and is optional."""
    if "ipykernel" not in sys.modules:
        return None
    try:
        from .lab import live
    except ImportError:
        return None
    return live.watch(experiment)


watched_by(_curves)
exported_by(deploy.export)
