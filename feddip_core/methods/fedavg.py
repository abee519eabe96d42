"""FedAvg (McMahan et al., 2017) and FedProx (Li et al., 2020): dense models, averaged."""

import math
from functools import partial
from typing import ClassVar

from torch import Tensor

from ..client import Term, add_proximal_
from ..method import Method
from ..settings import Setting, real

PROX_MU = real(0.01, 0, math.inf, "μ, weight of the proximal term")


class FedAvg(Method):
    """Every client trains all weights; the server averages them."""

    name, label, colour, line = "fedavg", "FedAvg", "#000000", "--"


class FedProx(FedAvg):
    """FedAvg with a proximal term that holds each client near the model it received."""

    name, label, colour, line = "fedprox", "FedProx", "#888888", ":"
    settings: ClassVar[dict[str, Setting]] = dict(prox_mu=PROX_MU)

    def terms(self, t, start):
        return proximal(self.exp.prox_mu, start)


def proximal(mu: float, start: Tensor) -> list[Term]:
    """(μ/2) ‖u − start‖² as a term of the objective; empty if μ is 0."""
    return [partial(add_proximal_, anchor=start, mu=mu)] if mu else []
