"""FedDST (Bibikar et al., 2022): sparse from the start; every few rounds the clients try other weights."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..communication import MASK
from ..masks import Mask, Weights, largest
from ..method import Method
from ..settings import Setting, real, whole
from .feddip import SPARSITY_TARGET


class FedDST(Method):
    """Every R rounds a client drops its smallest weights and brings back those with the largest gradient."""

    name, label, colour, line = "feddst", "FedDST", "#661100", "-."
    settings: ClassVar[dict[str, Setting]] = dict(
        sparsity_target=SPARSITY_TARGET,
        reconfigure_every=whole(20, 1, "R, rounds between readjustments"),
        adjust_alpha=real(0.5, 0, 1, "α, initial share of the weights to replace"),
    )
    smoke: ClassVar[dict[str, Any]] = dict(reconfigure_every=4)
    feedback = False
    one_mask = False

    def first_mask(self, w):
        return self.erk_mask(self.exp.sparsity_target)

    def readjusts(self, state) -> bool:
        """Whether clients change their masks in this round."""
        return self.tau(state.t) is not None and state.m is not None

    def finish(self, upload, terms, m, state, n):
        if not self.readjusts(state):
            return upload
        w = upload.values["w"]
        g = self.clients.batch_gradient(w, n, state.t, "regrow", statistics=upload.values["statistics"].clone())
        a = regrowth_fraction_at(state.t, T=self.exp.rounds, alpha=self.exp.adjust_alpha)
        stays, own = drop_and_regrow(self.layout.weights(w), self.layout.weights(g), m, a)
        return upload.plus(w=self.layout.prune(w, stays), mask=self.layout.flat_mask(own, like=w))

    def next(self, average, state):
        w, m = average.mean["w"], state.m
        if not self.readjusts(state):
            return w, m, {}
        # Each weight is averaged over the clients that hold it.
        coverage = average.mean["mask"]
        w = torch.where(coverage > 0, w / coverage.clamp_min(torch.finfo(w.dtype).tiny), 0)
        # A weight that has just returned is 0, like one that nobody holds: the votes tell them apart.
        counts, votes = {k: int(v.sum()) for k, v in m.items()}, self.layout.weights(coverage)
        return w, layer_mask(self.layout.weights(w), counts, votes), {}

    def upload(self, state, n):
        """The kept weights, and in a readjusting round the client's mask too."""
        plain = super().upload(state, n)
        return plain.plus({"mask": MASK}) if self.readjusts(state) else plain


def regrowth_fraction_at(t: int, T: int, alpha: float) -> float:
    """a_t = α/2 · (1 + cos(πt/T)), the share of a layer's weights to replace."""
    return alpha / 2 * (1 + math.cos(math.pi * t / T))


def layer_mask(w: Weights, keep: Mapping[str, int], votes: Weights | None = None) -> Mask:
    """Keep the `keep[l]` largest |w| of each layer l; ties drop those with fewer votes, then the first."""
    return {k: largest(v.abs(), keep[k], None if votes is None else votes[k]) for k, v in w.items()}


def drop_and_regrow(w: Weights, g: Weights, m: Mask, fraction: float) -> tuple[Mask, Mask]:
    """Drop the ⌈a · active⌉ smallest |w| of each layer, and regrow as many where |g| is largest.

    Returns two masks: what stays, and what stays or regrows. A dropped weight may regrow at once, from zero.
    """
    stays, new = {}, {}
    for k, v in w.items():
        active = int(m[k].sum())
        dropped = math.ceil(fraction * active)
        # −1 excludes inactive weights from the largest, and weights that stay from the regrown.
        stays[k] = largest(v.abs().masked_fill(~m[k], -1), active - dropped)
        new[k] = stays[k] | largest(g[k].abs().masked_fill(stays[k], -1), dropped)
    return stays, new
