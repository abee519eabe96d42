"""SSFL (Ohib et al., 2024): SNIP with every client's say. One mask before training, from the data of all clients."""

from typing import ClassVar

import torch
from torch import Tensor

from .. import masks
from ..communication import BITS_PER_WEIGHT, Form
from ..method import Ask
from ..settings import Setting
from ..state import Tensors
from .asking import Asking
from .feddip import SPARSITY_TARGET
from .prunefl import PRUNABLE


class SSFL(Asking):
    """Keep the weights with the largest |g ⊙ w|, averaged over all clients; then run FedAvg on them."""

    name, label, colour, line = "ssfl", "SSFL", "#999933", "--"
    settings: ClassVar[dict[str, Setting]] = dict(sparsity_target=SPARSITY_TARGET)
    feedback = False
    questions: ClassVar[dict[str, dict[str, Form]]] = {"saliency": {"q": PRUNABLE}}

    def start(self, w, ask):
        if self.exp.sparsity_target == 0:
            return w, None, {}
        return w, masks.magnitude_mask(self.layout.weights(self.score(w, ask)), self.exp.sparsity_target), {}

    def sketch(self, w):
        s = self.exp.sparsity_target
        return w, masks.magnitude_mask(self.layout.weights(w), s) if s else None, {}

    def score(self, w: Tensor, ask: Ask) -> Tensor:
        """Σ D_n |g_n ⊙ w|, over all clients."""
        everyone, at_once = list(range(self.exp.clients)), self.exp.clients_per_round  # memory does not grow with N
        total = torch.zeros_like(w, dtype=torch.float64)
        for first in range(0, len(everyone), at_once):
            for answer in ask(everyone[first : first + at_once], "saliency", w=w).values():
                total += answer["q"]
        return total

    def saliency(self, n: int, w: Tensor) -> Tensors:
        """At client n: D_n |g ⊙ w| on one batch, with the absolute value taken before any average."""
        samples = len(self.clients.parts[n])
        g = self.clients.batch_gradient(w, n, 0, "ssfl") if samples else w.new_zeros(w.shape)
        # The client weights its own scores: only the ranking of their sum matters, and the server need not know D_n.
        scores = PRUNABLE.pack(self.layout, samples * (g * w).abs(), None)
        return {"q": PRUNABLE.unpack(self.layout, scores, None)}

    def bits_before(self):
        """Every client receives the dense model and answers one score per prunable weight."""
        asked = self.exp.clients * BITS_PER_WEIGHT * (self.exp.sparsity_target > 0)
        return asked * self.layout.size, asked * self.layout.prunable_size
