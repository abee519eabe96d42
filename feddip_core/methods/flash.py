"""FLASH (Babakniya et al., 2023), its variant SPDST: a few clients find how dense each layer should be.

Then everyone trains one fixed random mask with those densities.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import masks
from ..communication import BITS_PER_WEIGHT, KEPT, MASK, Form, Payload
from ..masks import Mask, Weights, largest
from ..settings import Setting, real, whole
from ..state import Tensors
from ..streams import global_stream, stream
from .asking import Asking
from .feddip import SPARSITY_TARGET
from .fedtiny import staying

MOST_REGROWN = 0.99  # of a layer's zeros in one epoch


class Counts(Form):
    """One number per prunable layer."""

    def count(self, layout, kept):
        return len(layout.layers)


class Flash(Asking):
    """Some clients train and regrow sparse models; the server draws one mask with their mean density of each layer."""

    name, label, colour, line = "flash", "FLASH", "#AA4466", "--"
    settings: ClassVar[dict[str, Setting]] = dict(
        sparsity_target=SPARSITY_TARGET,
        discover_share=real(0.1, 0, 1, "share of the clients that find the layers' densities", open_low=True),
        discover_epochs=whole(10, 1, "epochs for which they train"),
        discover_drop=real(0.25, 0, 1, "initial share of a layer's weights that an epoch replaces"),
    )
    smoke: ClassVar[dict[str, Any]] = dict(discover_epochs=3)
    feedback = False
    questions: ClassVar[dict[str, dict[str, Form]]] = {"discover": {"counts": Counts()}}

    def start(self, w, ask):
        if self.exp.sparsity_target == 0:
            return w, None, {}
        m = {k: v.to(w.device) for k, v in self.uniform_mask().items()}
        tensors = {"w": w, "mask": self.layout.flat_mask(m, like=w)}
        answers = ask(self.discoverers(), "discover", **self.order(masks.kept(m)).pack(self.layout, tensors, None))
        found = torch.stack([answer["counts"] for answer in answers.values()]).double().mean(0)
        return w, self.drawn(self.densities(found.tolist()), "initial mask"), {}

    def sketch(self, w):
        s = self.exp.sparsity_target
        return w, masks.magnitude_mask(self.layout.weights(w), s) if s else None, {}

    def discoverers(self) -> list[int]:
        """The clients that find the densities."""
        number = max(1, round(self.exp.discover_share * self.exp.clients))
        return sorted(torch.randperm(self.exp.clients, generator=stream(self.exp.seed, "flash"))[:number].tolist())

    def uniform_mask(self) -> Mask:
        """A random mask that has the same density in every layer."""
        shapes = self.layout.prunable_shapes
        even = dict.fromkeys(shapes, self.exp.sparsity_target)
        return masks.random_mask(shapes, even, stream(self.exp.seed, "flash mask"))

    def densities(self, found: Sequence[float]) -> dict[str, int]:
        """How many weights each layer keeps, in proportion to what was found; together exactly the target's number."""
        shapes, n_w = self.layout.prunable_shapes, self.layout.prunable_size
        keep = n_w - round(self.exp.sparsity_target * n_w)
        return dict(zip(shapes, apportioned(keep, found, [s.numel() for s in shapes.values()]), strict=True))

    def drawn(self, keep: dict[str, int], purpose: str) -> Mask:
        """A random mask with exactly these numbers of weights."""
        shapes = self.layout.prunable_shapes
        sparsities = {k: 1 - keep[k] / shapes[k].numel() for k in shapes}
        m = masks.random_mask(shapes, sparsities, stream(self.exp.seed, purpose))
        return {k: v.to(self.clients.device) for k, v in m.items()}

    def order(self, kept: int | None = None) -> Payload:
        """What a discovering client is sent: the kept weights and their mask."""
        return Payload({"w": KEPT, "mask": MASK}, kept)

    def discover(self, n: int, **arrays: Tensor) -> Tensors:
        """At client n: epochs of masked SGD, after each of which the smallest weights of every layer make room."""
        exp, clients = self.exp, self.clients
        sent = self.order().unpack(self.layout, {k: v.cpu() for k, v in arrays.items()}, None)
        w, m = sent["w"].to(clients.device), self.layout.mask_of(sent["mask"].to(clients.device))
        statistics = clients.first_statistics.clone()
        with global_stream(clients.device, exp.seed, "flash", 0, n):
            for epoch in range(1, exp.discover_epochs + 1):
                clients.train_(w, m, clients.batches(n, epoch, "flash"), 0, statistics, feedback=False)
                if epoch < exp.discover_epochs:
                    numbers = stream(exp.seed, "flash regrow", epoch, n)
                    draws = {k: torch.rand(v.shape, generator=numbers).to(v.device) for k, v in m.items()}
                    share = exp.discover_drop * (1 - epoch / exp.discover_epochs)
                    m, stays = regrown(self.layout.weights(w), m, share, draws)
                    w = self.layout.prune(w, stays)
        return {"counts": torch.tensor([int(v.sum()) for v in m.values()]).to(w)}

    def bits_before(self):
        """What the discovering clients receive and answer."""
        if self.exp.sparsity_target == 0:
            return 0, 0
        clients, kept = len(self.discoverers()), masks.kept(self.uniform_mask())
        return clients * self.order(kept).bits(self.layout), clients * BITS_PER_WEIGHT * len(self.layout.layers)


def regrown(w: Weights, m: Mask, share: float, draws: Weights) -> tuple[Mask, Mask]:
    """Drop ⌈p · active⌉ of each layer; regrow as many in all, in proportion to the layers' mean active |w|.

    New weights are the inactive ones with the largest draws. Also returns what stays.
    """
    means = [float(v[m[k]].abs().double().mean()) if m[k].any() else 0.0 for k, v in w.items()]
    values = [mean if math.isfinite(mean) else 0.0 for mean in means]  # a client that diverges has no opinion
    drops = [math.ceil(share * int(v.sum())) for v in m.values()]
    stays = {k: staying(v, m[k], drop) for (k, v), drop in zip(w.items(), drops, strict=True)}
    room = [int(MOST_REGROWN * int((~v).sum())) for v in stays.values()]
    grow = apportioned(sum(drops), values, room)
    new = {
        k: v | largest(draws[k].masked_fill(v, -1), count) for (k, v), count in zip(stays.items(), grow, strict=True)
    }
    return new, stays


def apportioned(total: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to the weights, by largest remainder; none above its most.

    What exceeds a most goes to the others. The sum is the total if all together have room for it.
    """
    given = [0] * len(weights)
    while left := min(total, sum(most)) - sum(given):
        free = [i for i, high in enumerate(most) if given[i] < high]
        heavy = [i for i in free if weights[i] > 0]
        free, of = (heavy, weights) if heavy else (free, [1.0] * len(weights))
        quotas = {i: left * of[i] / sum(of[j] for j in free) for i in free}
        shares = {i: int(quota) for i, quota in quotas.items()}
        by_remainder = sorted(free, key=lambda i: (shares[i] - quotas[i], i))
        for i in by_remainder[: left - sum(shares.values())]:
            shares[i] += 1
        given = [min(most[i], g + shares.get(i, 0)) for i, g in enumerate(given)]
    return given
