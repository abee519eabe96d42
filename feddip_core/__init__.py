"""FedDIP: federated learning of one sparse network by dynamic pruning and incremental regularisation."""

from .experiment import Experiment
from .federation import Run, run
from .records import load_runs

__all__ = ["Experiment", "Run", "load_runs", "run"]
