"""FedMef (Huang et al., 2024): FedTiny that squeezes the weights it is about to drop, so that others take over."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from ..settings import Setting, flag, real
from .fedtiny import FedTiny, staying


class FedMef(FedTiny):
    """In a round that ends with a swap, clients push each layer's smallest weights towards zero, with larger steps.

    Activation pruning, the paper's other part, is left out: it saves a client's memory and changes no message.
    """

    name, label, colour, line = "fedmef", "FedMef", "#AA4499", "-"
    settings: ClassVar[dict[str, Setting]] = FedTiny.settings | dict(
        adjust_alpha=real(0.4, 0, 1, "α, initial share of a layer's weights to replace"),
        extrusion=real(1e-4, 0, math.inf, "λ, weight of the squared norm of the weights about to be dropped"),
        extrusion_rate=flag(True, "larger steps while these weights are squeezed, if their norm is large"),
    )

    def terms_of(self, state, n, start):
        exp = self.exp
        if not self.adjusts(state) or not (exp.extrusion or exp.extrusion_rate):
            return []
        swaps, m = self.swaps(state), state.m
        low = {k: m[k] & ~staying(v, m[k], swaps[k]) for k, v in self.layout.weights(start).items()}
        steps = exp.local_epochs * math.ceil(len(self.clients.parts[n]) / exp.batch_size)
        rates = self.clients.rates(state.t)
        rate = (exp.learning_rate, rates["eta"], rates["weight_decay"]) if exp.extrusion_rate else None
        return [Extrusion(self.of_layers(low, like=start), exp.extrusion, steps, rate)]


class Extrusion:
    """A term that adds λ‖u_low‖² and, given (η_0, η, decay), turns a step of size η into one of size max(η, β)."""

    def __init__(self, low: Tensor, lam: float, steps: int, rate: tuple[float, float, float] | None):
        self.low, self.lam, self.steps, self.rate, self.step = low, lam, steps, rate, 0

    def __call__(self, g: Tensor, u: Tensor) -> None:
        squeezed = u * self.low
        g.add_(squeezed, alpha=2 * self.lam)
        if self.rate:
            eta_0, eta, decay = self.rate
            factor = max(1.0, extrusion_rate(float(squeezed.norm()), self.step, self.steps, eta_0) / eta)
            if factor > 1:  # the step that follows multiplies by η, and adds the decay of u once
                g.mul_(factor).add_(u, alpha=(factor - 1) * decay)
        self.step += 1


def extrusion_rate(norm: float, step: int, steps: int, eta_0: float) -> float:
    """β = p (2σ(‖u_low‖) − 1) η_0 with p = (2B − 2b) / (2B − b), which falls from 1 during a round of B steps."""
    p = (2 * steps - 2 * step) / (2 * steps - step)
    return p * (2 * float(torch.tensor(norm, dtype=torch.float64).sigmoid()) - 1) * eta_0
