"""SparsyFed (Guastella et al., 2025): train θ with weights sign(θ)|θ|^β, so that small weights fade and zeros stay.

The server's model and the client's vector hold the weights themselves, as everywhere. Clients step in θ, prune and
upload θ, and the server averages θ. Activation pruning, the paper's other part, is left out.
"""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from .. import masks
from ..communication import BITS_PER_WEIGHT, KEPT, MASK, STATISTICS, Form, Payload, as_bits, as_bytes
from ..layout import Layout
from ..masks import Mask
from ..method import Method
from ..settings import Setting, real
from ..state import State
from .feddip import SPARSITY_TARGET


class SparsyFed(Method):
    """Each client prunes its model to s_p after its steps; the server keeps what any of them kept."""

    name, label, colour, line = "sparsyfed", "SparsyFed", "#6699CC", "-"
    settings: ClassVar[dict[str, Setting]] = dict(
        sparsity_target=SPARSITY_TARGET,
        power=real(1.25, 1, 10, "β, exponent of the weights that are trained; 1: the weights themselves"),
    )
    one_mask = False
    plan_is_a_bound = True  # how many weights the clients' masks have in common is not known before

    @classmethod
    def check(cls, exp) -> None:
        super().check(exp)
        if exp.momentum and exp.power > 1:
            raise ValueError(f"momentum: {exp.momentum} is not allowed; SparsyFed's steps are defined without it")

    def client_mask(self, state, n):
        return None  # nothing masks a step: with β > 1 the gradient of a zero is zero

    def terms(self, t, start):
        rates = self.clients.rates(t)
        own = dict(layout=self.layout, beta=self.exp.power, eta=rates["eta"], decay=rates["weight_decay"])
        return [partial(step_in_theta_, **own)] if self.exp.power > 1 else []

    def finish(self, upload, terms, m, state, n):
        w = upload.values["w"]
        theta = self.each(w, root)
        if self.exp.sparsity_target == 0:
            return upload.plus(w=theta)
        own = masks.magnitude_mask(self.layout.weights(w), self.exp.sparsity_target, self.within(state))
        # By |w|, whose order is that of |θ|.
        return upload.plus(w=self.layout.prune(theta, own), mask=self.layout.flat_mask(own, like=w))

    def next(self, average, state):
        w = self.each(average.mean["w"], power)
        if self.exp.sparsity_target == 0:
            return w, None, {}
        m, n_w = {k: v != 0 for k, v in self.layout.weights(w).items()}, self.layout.prunable_size
        # A mask that takes more bits than it saves is not sent: the model travels as a dense one.
        return w, m if BITS_PER_WEIGHT * masks.kept(m) + n_w <= BITS_PER_WEIGHT * n_w else None, {}

    def within(self, state: State) -> Mask | None:
        """The weights that a client can keep: with β > 1 those that it was sent, since a zero stays."""
        return state.m if self.exp.power > 1 else None

    def each(self, w: Tensor, function) -> Tensor:
        """The vector with its prunable layers transformed."""
        if self.exp.power == 1:
            return w
        w = w.clone()
        for v in self.layout.weights(w).values():
            v.copy_(function(v, self.exp.power))
        return w

    def upload(self, state, n):
        """The weights that the client has kept, and which they are of those that it was sent."""
        n_w, s, within = self.layout.prunable_size, self.exp.sparsity_target, self.within(state)
        if s == 0:
            return Payload({"w": KEPT, "statistics": STATISTICS})
        keep = n_w - round(s * n_w)
        if not within or not masks.kept(within):
            return Payload({"w": KEPT, "statistics": STATISTICS, "mask": MASK}, 0 if within else keep)
        parts = {"w": KEPT, "statistics": STATISTICS, "mask": Within(within)}
        return Payload(parts, min(keep, masks.kept(within)))


class Within(Form):
    """A mask that keeps only weights of another one, which both sides know: one bit for each of these."""

    bits_each = 1

    def __init__(self, m: Mask):
        self.m = m

    def count(self, layout, kept):
        return masks.kept(self.m)

    def pack(self, layout, v, m):
        return as_bytes(v[self._places(layout, v)] != 0)

    def unpack(self, layout, array, m):
        ones = torch.ones(layout.size)
        ones = layout.flat_mask({k: torch.zeros_like(v, device="cpu") for k, v in self.m.items()}, like=ones)
        ones[self._places(layout, ones)] = as_bits(array, self.count(layout, None)).to(ones)
        return ones

    def _places(self, layout: Layout, like: Tensor) -> Tensor:
        """Where the weights of the other mask are in the vector."""
        prunable = layout.flat_mask({k: torch.zeros_like(v) for k, v in self.m.items()}, like=like) == 0
        return prunable & layout.flat_mask(self.m, like=like).bool()


def power(theta: Tensor, beta: float) -> Tensor:
    """w = sign(θ) |θ|^β."""
    return theta.sign() * theta.abs() ** beta


def root(w: Tensor, beta: float) -> Tensor:
    """θ = sign(w) |w|^(1/β)."""
    return power(w, 1 / beta)


def slope(theta: Tensor, beta: float) -> Tensor:
    """∂w/∂θ = β |θ|^(β−1), and 0 at 0, where automatic differentiation of the product would give NaN."""
    return beta * theta.abs() ** (beta - 1)


def step_in_theta_(g: Tensor, u: Tensor, layout: Layout, beta: float, eta: float, decay: float) -> None:
    """Change g so that the step u − η (g + decay · u) ends at the weights of θ − η (∂w/∂θ · g + decay · θ)."""
    for z in layout.layers:
        theta = root(u[z], beta)
        end = power(theta - eta * (slope(theta, beta) * g[z] + decay * theta), beta)
        g[z] = (u[z] - end) / eta - decay * u[z]
