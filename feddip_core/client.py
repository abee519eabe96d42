"""What a client does: E epochs of SGD on dense weights, with gradients taken at the pruned ones (Eq. 8 and 10).

Parameters are one flat vector, so a step is a few vector operations for any network.
A `gradient` is any function (u, x, y) -> (loss, ∇loss at u); the network's is `eager_gradient`.
A `term` is any function (g, u) that adds the gradient of one more summand of the objective to g.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from . import data, models
from .experiment import Experiment
from .layout import Layout
from .masks import Mask
from .schedules import learning_rate_at
from .streams import global_stream, stream

Forward = Callable[[Tensor, Mapping[str, Tensor], Tensor], Tensor]
Gradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Term = Callable[[Tensor, Tensor], None]
Loss = Callable[..., Tensor]


def eager_gradient(forward: Forward, statistics: Mapping[str, Tensor], loss_of=F.cross_entropy) -> Gradient:
    """(u, x, y) -> cross-entropy of the network with parameters u, and its gradient."""

    def gradient(u, x, y):
        u = u.detach().requires_grad_()
        loss = loss_of(forward(u, statistics, x), y)
        return loss.detach(), torch.autograd.grad(loss, u)[0]

    return gradient


def group_penalty(u: Tensor, layers: Sequence[slice]) -> Tensor:
    """Σ_z ‖u_z‖₂, the sum of the layers' norms, not squared (Eq. 8)."""
    return torch.stack([u[z].norm() for z in layers]).sum()


def add_group_penalty_(g: Tensor, u: Tensor, layers: Sequence[slice], lam: float) -> None:
    """g ← g + λ ∇Σ_z ‖u_z‖₂, that is λ u_z / ‖u_z‖ on layer z, and 0 where the layer is all zeros."""
    tiny = torch.finfo(u.dtype).tiny
    for z in layers:
        g[z].addcdiv_(u[z], u[z].norm().clamp_min(tiny), value=lam)


def add_proximal_(g: Tensor, u: Tensor, anchor: Tensor, mu: float) -> None:
    """g ← g + μ (u − w_g), the gradient of (μ/2) ‖u − w_g‖²: FedProx holds a client near the model it was sent."""
    g.add_(u - anchor, alpha=mu)


def error_feedback_step_(
    w: Tensor, m: Tensor | None, gradient: Gradient, x: Tensor, y: Tensor, eta: float,
    weight_decay: float = 0.0, terms: Iterable[Term] = (), velocity: Tensor | None = None, momentum: float = 0.0,
    feedback: bool = True,
) -> Tensor:  # fmt: skip
    """w ← w − η (∇f(w ⊙ m) + decay · w): the gradient at the pruned point, the step on the dense one (Eq. 10).

    Without feedback the mask follows the step, and a pruned weight stays where it is (Eq. 7).
    """
    # Differentiate at u = w ⊙ m itself. Through the product the gradient would be m ⊙ ∇f,
    # and a pruned weight would never move again: pruning without feedback.
    u = w if m is None else w * m
    loss, g = gradient(u, x, y)
    for term in terms:
        term(g, u)
    g.add_(w, alpha=weight_decay)
    if velocity is not None:
        g = velocity.mul_(momentum).add_(g)
    w.add_(g, alpha=-eta)
    if not feedback and m is not None:
        w.mul_(m)
    return loss


def train_(
    w: Tensor, m: Tensor | None, gradient: Gradient, batches: Iterable[tuple[Tensor, Tensor]], eta: float,
    momentum: float = 0.0, **step,
) -> Tensor:  # fmt: skip
    """Take a step on every batch, and return the mean cross-entropy without waiting for the device.

    If w, m and the batches have one row per client, this trains all of them and returns one loss per client.
    """
    velocity = torch.zeros_like(w) if momentum else None
    total, seen = torch.zeros(w.shape[:-1], device=w.device), 0
    for x, y in batches:
        loss = error_feedback_step_(w, m, gradient, x, y, eta, velocity=velocity, momentum=momentum, **step)
        total.add_(loss, alpha=y.shape[-1])
        seen += y.shape[-1]
    return total / seen


class Clients:
    """An experiment's clients: their data, the network that each one trains, and how it takes a step.

    They train one after the other on one network, so memory grows neither with N nor with K. `forward` is the network
    as a function of its parameters. A `kernel`, if there is one, computes `gradient` and `logits` instead.
    """

    def __init__(self, exp: Experiment, dataset: data.Dataset, net: nn.Module, kernel: Any, forward: Forward):
        self.exp, self.device, self.kernel, self.forward = exp, torch.device(exp.device), kernel, forward
        self.data, self.net = dataset.to(self.device), net.to(self.device)
        self.parts = [i.to(self.device) for i in dataset.parts]
        self.layout = Layout.of(net)
        buffers = dict(net.named_buffers())
        self.first_statistics = self.layout.statistics.flat(buffers).to(self.device)
        # A batch norm with momentum=None weights a batch by how many it has seen: every client counts from zero.
        self.counters = {k: v.clone() for k, v in buffers.items() if not v.is_floating_point()}
        own = models.norm_names(net) if exp.batch_norm == "local" else []
        places = [i for k in own for i in range(self.layout.size)[self.layout.spans[k]]]
        self.norms = torch.tensor(places, dtype=torch.int64, device=self.device)  # of w: each client's own

    @property
    def first_weights(self) -> Tensor:
        """The network's initial parameters, as one vector."""
        return self.layout.flat(dict(self.net.named_parameters()))

    def batches(self, n: int, t: int, purpose: str, epochs: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Client n's samples, in the order of this round and purpose."""
        order = stream(self.exp.seed, purpose, t, n)
        return data.batches(self.data, self.parts[n], self.exp.batch_size, epochs, order)

    def gradient(self, statistics: Tensor | None = None, loss_of: Loss = F.cross_entropy, t: int = 0) -> Gradient:
        """(u, x, y) -> loss and ∇loss at u in round t; batch norms update these statistics in place, unless frozen."""
        if self.kernel and loss_of is F.cross_entropy:
            return self.kernel.gradient
        for module in models.batch_norms(self.net.train()).values():
            module.train(self.exp.batch_norm != "frozen" or t == 0)  # frozen: they use the first round's statistics
        counters = {k: v.clone() for k, v in self.counters.items()}
        statistics = self.first_statistics.clone() if statistics is None else statistics
        return eager_gradient(self.forward, self.buffers(statistics) | counters, loss_of)

    def buffers(self, statistics: Tensor) -> dict[str, Tensor]:
        return self.layout.statistics.views(statistics)

    def train_(
        self, w: Tensor, m: Mask | None, batches: Iterable[tuple[Tensor, Tensor]], t: int = 0,
        statistics: Tensor | None = None, terms: Sequence[Term] = (), feedback: bool = True,
    ) -> Tensor:  # fmt: skip
        """Take a step on each batch at the rates of round t, and return the mean loss."""
        flat = self.layout.flat_mask(m, like=w) if m else None
        # Feedback moves pruned weights, and a term other than these may read their gradients. Else a kernel skips them.
        unread = all(getattr(term, "func", term) in (add_group_penalty_, add_proximal_) for term in terms)
        skips = self.kernel and flat is not None and not feedback and unread
        gradient = self.kernel.gradient_of(flat) if skips else self.gradient(statistics, t=t)
        return train_(w, flat, gradient, batches, **self.rates(t), terms=terms, feedback=feedback)

    def rates(self, t: int) -> dict[str, float]:
        """η_t, weight decay and momentum of round t."""
        eta = learning_rate_at(t, eta_0=self.exp.learning_rate, decay=self.exp.learning_rate_decay)
        return dict(eta=eta, weight_decay=self.exp.weight_decay, momentum=self.exp.momentum)

    def batch_gradient(
        self, w: Tensor, n: int, t: int, purpose: str, loss_of: Loss = F.cross_entropy, statistics: Tensor | None = None
    ) -> Tensor:
        """The gradient at w on one batch of client n."""
        x, y = next(self.batches(n, t, purpose))
        with global_stream(self.device, self.exp.seed, purpose, t, n):
            return self.gradient(statistics, loss_of, t)(w, x, y)[1]

    def logits_of(self, u: Tensor, statistics: Tensor) -> Callable[[Tensor], Tensor]:
        """x -> logits of the network with parameters u, in evaluation mode."""
        if self.kernel:
            return lambda x: self.kernel.logits(u, x)
        tensors = self.layout.views(u) | self.buffers(statistics)
        return lambda x: functional_call(self.net.eval(), tensors, (x,))

    def norms_of(self, w: Tensor, statistics: Tensor) -> dict[str, Tensor]:
        """The part of a model that stays with its client: the batch norms if batch_norm="local", else nothing."""
        return {"norms": torch.cat([w[self.norms], statistics])} if self.exp.batch_norm == "local" else {}

    def with_norms(self, w: Tensor, statistics: Tensor, own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The server's model with the client's own batch norms; statistics are a copy."""
        if "norms" not in own:
            return w, statistics.clone()
        w = w.clone()
        w[self.norms], statistics = own["norms"].split([len(self.norms), len(statistics)])
        return w, statistics.clone()
