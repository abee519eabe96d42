"""The methods, as small variations of one round (Algorithm 1).

`FedAvg` is the round with nothing added. A method overrides what it does differently: the first mask, the
mask a client trains under, the terms it adds to the objective, the mask that follows a round.
"""

from functools import partial

from torch import Tensor

from .experiment import Experiment
from .local import Term, add_group_penalty_
from .masks import Mask, apply_mask, erk_sparsities, magnitude_mask, random_mask
from .models import Layout
from .schedules import lambda_at, lambda_at_authors, reconfiguration_time, sparsity_at
from .streams import stream


class FedAvg:
    """Dense weights, averaged: no mask, no penalty."""

    def __init__(self, exp: Experiment, layout: Layout):
        self.exp, self.layout = exp, layout

    def initial_mask(self) -> Mask | None:
        """The mask that the server applies before the first round; None is a dense model."""
        return None

    def client_mask(self, m: Mask | None, t: int, n: int) -> Mask | None:
        """The mask under which client n trains in round t."""
        return m

    def lam(self, t: int) -> float:
        """λ_t, the weight of the group penalty."""
        return 0.0

    def terms(self, t: int) -> list[Term]:
        """What round t adds to the cross-entropy of its clients."""
        return []

    def next_mask(self, w: dict[str, Tensor], m: Mask | None, t: int) -> Mask | None:
        """The mask after round t, whose aggregate has the prunable weights w."""
        return m


class FedDIP(FedAvg):
    """An ERK mask at first, then every R rounds the largest weights of the aggregate; a penalty that grows.

    With λ = 0 it is FedDP, with s_0 = 0 as well it is DPF.
    """

    def initial_mask(self):
        # In the authors' code the first model goes out dense.
        return self._erk_mask("initial mask") if self.exp.initial_mask == "erk" else None

    def client_mask(self, m, t, n):
        # In the authors' code each client of the first round draws a mask of its own.
        own = t == 0 and self.exp.initial_mask == "authors"
        return self._erk_mask("client mask", n) if own else m

    def _erk_mask(self, purpose: str, n: int = 0) -> Mask | None:
        if self.exp.sparsity_initial == 0:
            return None
        shapes = self.layout.prunable_shapes
        sparsities = erk_sparsities(shapes, self.exp.sparsity_initial)
        return random_mask(shapes, sparsities, stream(self.exp.seed, purpose, n=n))

    def lam(self, t):
        exp = self.exp
        if exp.lambda_schedule == "authors20":
            return lambda_at_authors(t, T=exp.rounds, lambda_max=exp.lambda_max)
        return lambda_at(t, T=exp.rounds, lambda_max=exp.lambda_max, Q=exp.lambda_steps)

    def terms(self, t):
        lam = self.lam(t)
        return [partial(add_group_penalty_, layers=self.layout.layers, lam=lam)] if lam else []

    def next_mask(self, w, m, t):
        exp = self.exp
        tau = reconfiguration_time(t, R=exp.reconfigure_every, rule=exp.reconfigure_at)
        if t == 0 and exp.initial_mask == "authors":
            tau = 0  # the clients' own masks go, and one of the server's comes
        if tau is None:
            return m
        s = sparsity_at(tau, T=exp.rounds, s_0=exp.sparsity_initial, s_p=exp.sparsity_target)
        if s == 0:
            return None
        # The authors' code masks the aggregate with the old mask first, so that nothing pruned ever returns.
        pruned_first = exp.regrowth == "authors" and m is not None
        return magnitude_mask(apply_mask(w, m) if pruned_first else w, s)


METHODS = {"fedavg": FedAvg, "feddp": FedDIP, "dpf": FedDIP, "feddip": FedDIP}
