"""What a client does: E epochs of SGD on dense weights, with gradients taken at the pruned ones (Eq. 8 and 10).

Parameters are one flat vector, so a step is a handful of vector operations whatever the network.
A `gradient` is any function (u, x, y) -> (loss, ∇loss at u); the network's is `eager_gradient`, or of many clients
at once `stacked_gradient`.
A `term` is any function (g, u) that adds the gradient of one more summand of the objective to g.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from .models import Layout

Forward = Callable[[Tensor, Mapping[str, Tensor], Tensor], Tensor]
Gradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Term = Callable[[Tensor, Tensor], None]


def forward_of(
    net: nn.Module, layout: Layout, precision: str = "float32", channels_last: bool = False, compiled: bool = False
) -> Forward:
    """(u, statistics, x) -> logits of the network with parameters u; the other arguments are what a GPU may gain by.

    Batch norms in training mode update `statistics` in place.
    """

    def forward(u, statistics, x):
        if channels_last and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        elif x.is_cuda:  # crops leave images by pixel, which suits a CPU
            x = x.contiguous()
        with torch.autocast(x.device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext():
            return functional_call(net, {**layout.views(u), **statistics}, (x,)).to(u.dtype)

    # Without the option a compiled dropout would draw other numbers.
    return torch.compile(forward, options={"fallback_random": True}) if compiled else forward


def eager_gradient(forward: Forward, statistics: Mapping[str, Tensor], loss_of=F.cross_entropy) -> Gradient:
    """(u, x, y) -> cross-entropy of the network with parameters u, and its gradient."""

    def gradient(u, x, y):
        u = u.detach().requires_grad_()
        loss = loss_of(forward(u, statistics, x), y)
        (g,) = torch.autograd.grad(loss, u)
        return loss.detach(), g

    return gradient


def stacked_gradient(forward: Forward) -> Gradient:
    """The same of many clients at once: u, x and y have a row for each, and so have the losses and gradients."""
    # For networks without statistics: what a batch norm writes would not leave vmap.
    of_all = vmap(grad_and_value(lambda u, x, y: F.cross_entropy(forward(u, {}, x), y)))

    def gradient(u, x, y):
        g, loss = of_all(u, x, y)
        return loss, g

    return gradient


def row_by_row(terms: Sequence[Sequence[Term]]) -> Term:
    """The terms of many clients as one: each client's own, on its row."""

    def add_(g, u):
        for own, g_n, u_n in zip(terms, g, u, strict=True):
            for term in own:
                term(g_n, u_n)

    return add_


def group_penalty(u: Tensor, layers: Sequence[slice]) -> Tensor:
    """Σ_z ‖u_z‖₂, the norm of each layer, not squared (Eq. 8)."""
    return torch.stack([u[z].norm() for z in layers]).sum()


def add_group_penalty_(g: Tensor, u: Tensor, layers: Sequence[slice], lam: float) -> None:
    """g ← g + λ ∇Σ_z ‖u_z‖₂, that is λ u_z / ‖u_z‖ on layer z, and 0 where the layer is all zeros."""
    tiny = torch.finfo(u.dtype).tiny
    for z in layers:
        g[z].addcdiv_(u[z], u[z].norm().clamp_min(tiny), value=lam)


def add_proximal_(g: Tensor, u: Tensor, anchor: Tensor, mu: float) -> None:
    """g ← g + μ (u − w_g), the gradient of (μ/2) ‖u − w_g‖²: FedProx holds a client near the model it was sent."""
    g.add_(u - anchor, alpha=mu)


def add_channel_penalty_(g: Tensor, u: Tensor, layout: Layout, lam: float, eps: float = 1e-8) -> None:
    """g ← g + λ ∇(Σ ‖output channel‖₂ + Σ ‖input channel‖₂), each norm √(Σw² + ε), over the prunable layers.

    PruneTrain's group lasso: the first layer has no input groups, the last no output groups.
    """
    weights, into = layout.weights(u), layout.weights(g)
    for k, v in weights.items():
        if k != layout.prunable[-1]:
            into[k].addcdiv_(v, channel_norms(v, 0, eps), value=lam)
        if k != layout.prunable[0]:
            into[k].addcdiv_(v, channel_norms(v, 1, eps), value=lam)


def channel_norms(v: Tensor, axis: int, eps: float = 0.0) -> Tensor:
    """√(Σw² + ε) of each output (axis 0) or input (axis 1) channel, shaped to divide the weights by it."""
    others = [i for i in range(v.ndim) if i != axis]
    return v.square().sum(others, keepdim=True).add(eps).sqrt()


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
    """Take a step on every batch, and return their mean cross-entropy without waiting for the device.

    With a row for each client in w, m and the batches, it trains them all, and returns a loss for each.
    """
    velocity = torch.zeros_like(w) if momentum else None
    total, seen = torch.zeros(w.shape[:-1], device=w.device), 0
    for x, y in batches:
        loss = error_feedback_step_(w, m, gradient, x, y, eta, velocity=velocity, momentum=momentum, **step)
        total.add_(loss, alpha=y.shape[-1])
        seen += y.shape[-1]
    return total / seen
