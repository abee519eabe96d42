"""FedDIP: federated learning of one sparse network by dynamic pruning and incremental regularisation."""

from .experiment import Experiment
from .federation import Run, run

__all__ = ["Experiment", "Run", "run"]
