"""FedDIP (Long et al., 2023), its ablations FedDP and DPF, and FedDIP with a proximal term."""

import math
from functools import partial
from typing import ClassVar

from .. import masks
from ..client import add_group_penalty_
from ..method import Method
from ..schedules import lambda_at, sparsity_at
from ..settings import Setting, flag, real, whole
from .fedavg import PROX_MU, proximal

SPARSITY_INITIAL = real(None, 0, 1, "s_0, fraction of zeros in the first mask", open_high=True)
SPARSITY_TARGET = real(None, 0, 1, "s_p, fraction of zeros at the end", open_high=True)
SCHEDULE: dict[str, Setting] = dict(
    sparsity_initial=SPARSITY_INITIAL,
    sparsity_target=SPARSITY_TARGET,
    reconfigure_every=whole(5, 1, "R, rounds from one mask to the next"),
)
PENALTY: dict[str, Setting] = dict(
    lambda_max=real(None, 0, math.inf, "λ_max, final weight of the group penalty"),
    lambda_steps=whole(10, 1, "Q, steps in which the penalty grows"),
)


class FedDP(Method):
    """Start from an ERK mask; every R rounds keep the largest weights of the average, fewer each time."""

    name, label, colour, line = "feddp", "FedDP", "#56B4E9", "-."
    settings: ClassVar[dict[str, Setting]] = SCHEDULE | dict(
        sparse_uplink=flag(False, "upload pruned weights only in rounds in which the server reads them")
    )

    @classmethod
    def check(cls, exp) -> None:
        super().check(exp)
        if exp.sparse_uplink and exp.clip_norm:
            reason = "clip_norm needs the pruned weights to measure an update's length"
            raise ValueError(f"sparse_uplink: True is not allowed; {reason}")

    def first_mask(self, w):
        return self.erk_mask(self.exp.sparsity_initial)

    def next_mask(self, w, m, t):
        tau = self.tau(t)
        return m if tau is None else self.choose(w, m, self.sparsity(tau))

    def choose(self, w, m, s):
        """The largest |w| over all layers together; pruned weights may return."""
        return None if s == 0 else masks.magnitude_mask(w, s)

    def feeds_back(self, state):
        # A client's steps never read a pruned weight, and the next round starts it from zero. So in rounds in which
        # the server reads only kept weights, these have the same bits without feedback.
        return self.feedback and (not self.exp.sparse_uplink or state.m is None or self.reads_pruned(state.t))

    def reads_pruned(self, t: int) -> bool:
        """Whether the server reads pruned weights after round t: it does when it chooses a mask."""
        return self.tau(t) is not None


class DPF(FedDP):
    """FedDP from a dense start (Lin et al., 2020, made federated)."""

    name, label, colour, line = "dpf", "DPF", "#009E73", ":"
    settings: ClassVar[dict[str, Setting]] = {k: v for k, v in FedDP.settings.items() if k != "sparsity_initial"}

    def first_mask(self, w):
        return None

    def sparsity(self, t):
        return sparsity_at(t, T=self.exp.rounds, s_0=0.0, s_p=self.exp.sparsity_target)


class FedDIP(FedDP):
    """FedDP with a penalty on each layer's norm that grows in Q steps (Eq. 8 and 9)."""

    name, label, colour, line = "feddip", "FedDIP", "#D55E00", "-"
    settings: ClassVar[dict[str, Setting]] = FedDP.settings | PENALTY

    def lam(self, t):
        exp = self.exp
        return lambda_at(t, T=exp.rounds, lambda_max=exp.lambda_max, Q=exp.lambda_steps)

    def terms(self, t, start):
        lam = self.lam(t)
        return [partial(add_group_penalty_, layers=self.layout.layers, lam=lam)] if lam else []


class FedDIPProx(FedDIP):
    """FedDIP with a proximal term that holds each client near the pruned model it received."""

    name, label, colour, line = "feddip_prox", "FedDIP+Prox", "#CC79A7", "--"
    settings: ClassVar[dict[str, Setting]] = FedDIP.settings | dict(prox_mu=PROX_MU)

    def terms(self, t, start):
        return super().terms(t, start) + proximal(self.exp.prox_mu, start)
