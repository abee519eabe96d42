"""SNIP (Lee et al., 2019), federated: one mask before training, from each weight's effect on the loss."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from .. import masks
from ..communication import DENSE, Form
from ..masks import Mask
from ..method import Ask, Method
from ..settings import Setting
from ..state import Tensors
from .feddip import SPARSITY_TARGET


class Snip(Method):
    """Choose one mask before training; then run FedAvg on the kept weights."""

    name, label, colour, line = "snip", "SNIP", "#E69F00", "--"
    settings: ClassVar[dict[str, Setting]] = dict(sparsity_target=SPARSITY_TARGET)
    feedback = False
    questions: ClassVar[dict[str, dict[str, Form]]] = {"sensitivity": {"g": DENSE}}
    loss_of: Callable[..., Tensor] = staticmethod(F.cross_entropy)

    @classmethod
    def defaults(cls, model, dataset, rounds) -> dict[str, Any]:
        return {"sparsity_target": 0.8} if model == "alexnet" else {}  # the paper says that it diverges at 0.9

    def start(self, w, ask):
        if self.exp.sparsity_target == 0:
            return w, None, {}
        return w, self.mask(self.score(w, ask)), {}

    def sketch(self, w):
        return w, self.mask(w) if self.exp.sparsity_target else None, {}

    def mask(self, score: Tensor) -> Mask:
        """Keep the weights with the largest |score|."""
        return masks.magnitude_mask(self.layout.weights(score), self.exp.sparsity_target)

    def score(self, w: Tensor, ask: Ask) -> Tensor:
        """∂CE/∂c at c = 1 for weights c ⊙ w, that is g ⊙ w, averaged over one batch per client of the first round."""
        answers = ask(None, "sensitivity", w=w)
        return sum(answer["g"] for answer in answers.values()) / len(answers) * w

    def sensitivity(self, n: int, w: Tensor) -> Tensors:
        """At client n: the gradient at w on one batch."""
        return {"g": self.clients.batch_gradient(w, n, 0, "snip", self.loss_of)}
