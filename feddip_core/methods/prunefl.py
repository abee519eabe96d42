"""PruneFL (Jiang et al., 2022): keep the weights with the largest squared gradient per unit of time they cost."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import masks
from ..communication import DENSE, MASK, Form, Payload
from ..masks import Mask, Weights, flat, largest, unflat
from ..method import Method
from ..models import LAYERS, prunable
from ..settings import Setting, whole
from ..state import State, Tensors
from ..streams import global_stream
from .feddip import SCHEDULE

SECONDS_PER_USE = 1e-3  # per multiply-add, if sending a weight takes 1 second: a slow link
PASSES, MOST_PASSES, BATCHES = 50, 1000, 10  # for the one client that finds the first mask


class Prunable(Form):
    """Only the prunable weights, kept or not; all others arrive as zero."""

    def count(self, layout, kept):
        return layout.prunable_size

    def pack(self, layout, v, m):
        return torch.cat([v[layer] for layer in layout.layers])

    def unpack(self, layout, array, m):
        whole = torch.zeros(layout.size, dtype=array.dtype, device=array.device)
        for layer, part in zip(layout.layers, array.split([z.stop - z.start for z in layout.layers]), strict=True):
            whole[layer] = part
        return whole


class PruneFL(Method):
    """One client finds the first mask; every R rounds the mask follows the squared gradients since the last one."""

    name, label, colour, line = "prunefl", "PruneFL", "#0072B2", "-."
    settings: ClassVar[dict[str, Setting]] = SCHEDULE | dict(reconfigure_every=whole(20, 1, "R, rounds between masks"))
    smoke: ClassVar[dict[str, Any]] = dict(reconfigure_every=4)
    feedback = False
    questions: ClassVar[dict[str, dict[str, Form]]] = {"find_mask": {"w": DENSE, "mask": MASK}}

    def start(self, w, ask):
        if self.exp.sparsity_target == 0:
            return w, None, {}
        found = ask([0], "find_mask", w=w)[0]
        return found["w"], self.layout.mask_of(found["mask"]), {}

    def sketch(self, w):
        s = self.exp.sparsity_initial if self.exp.sparsity_target else 0.0
        return w, masks.magnitude_mask(self.layout.weights(w), s) if self.exp.sparsity_target else None, {}

    def find_mask(self, n: int, w: Tensor) -> Tensors:
        """At client n: the weights it trained alone, and the mask it found."""
        with global_stream(self.clients.device, self.exp.seed, "prunefl"):
            w, m = self.found(n, w.clone())
        return {"w": w, "mask": self.layout.flat_mask(m, like=w)}

    def found(self, n: int, w: Tensor) -> tuple[Tensor, Mask]:
        """The client trains on ten batches and prunes every 50 passes, by at most 30 %, until s_0 is reached."""
        # Differs from PruneFL, which stops once five densities in a row change little: here the density is given.
        batches = list(islice(self.clients.batches(n, 0, "prunefl"), BATCHES))
        m, goal, passes = self.layout.full_mask(None, self.clients.device), self.keep(self.exp.sparsity_initial), 0
        while masks.kept(m) > goal or passes == 0:
            summed = Summed(w)
            for _ in range(PASSES):
                loss = self.clients.train_(w, m, batches, terms=[summed], feedback=False)
            passes += PASSES
            trained = self.accuracy(w, batches) >= 1.5 / self.outputs(batches[0][0])
            if trained or passes >= MOST_PASSES or not loss.isfinite():
                keep = max(goal, masks.kept(m) - max(1, int(0.3 * masks.kept(m))))
                m = self.adjusted(w, summed.total.square(), m, keep, r=0)
                w = self.layout.prune(w, m)
        return w, m

    @torch.no_grad()
    def accuracy(self, w: Tensor, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Accuracy of these weights on these batches, in training mode."""
        clients = self.clients
        tensors = self.layout.views(w) | clients.buffers(clients.first_statistics.clone())
        right = [(functional_call(clients.net.train(), tensors, (x,)).argmax(1) == y).double() for x, y in batches]
        return float(torch.cat(right).mean())

    @torch.no_grad()
    def outputs(self, x: Tensor) -> int:
        """The network's number of classes."""
        return self.clients.net.eval()(x[:1]).shape[1]

    def terms(self, t, start):
        return [Summed(start)]

    def finish(self, upload, terms, m, state, n):
        return upload if m is None else upload.plus(g2=self.of_prunable(terms[0].total.square()))

    def of_prunable(self, v: Tensor) -> Tensor:
        """The vector with zeros outside the prunable weights: that part affects no decision and does not travel."""
        return PRUNABLE.unpack(self.layout, PRUNABLE.pack(self.layout, v, None), None)

    def next(self, average, state):
        w, m, t = average.mean["w"], state.m, state.t
        if m is None:
            return w, None, {}
        g2, tau = state.memory.get("g2", 0) + average.mean["g2"], self.tau(t)
        if tau is None:
            return w, m, {"g2": g2}
        return w, self.adjusted(w, g2, m, self.keep(self.sparsity(tau)), r=t), {}

    def adjusted(self, w: Tensor, g2: Tensor, m: Mask, keep: int, r: int) -> Mask:
        """The mask that keeps `keep` weights after round r."""
        uses = uses_of(self.clients.net, self.clients.data.sample)
        squares = self.layout.weights(g2)
        value = {k: squares[k] / (1 + SECONDS_PER_USE * uses[k]) for k in squares}
        return prunefl_mask(self.layout.weights(w), value, m, keep, drop=0.3 * 2 ** (-r / 10_000))

    def keep(self, s: float) -> int:
        """n_w − round(s · n_w)."""
        return self.layout.prunable_size - round(s * self.layout.prunable_size)

    def upload(self, state: State, n: int) -> Payload:
        """The kept weights, and one squared gradient per prunable weight, which the server sums."""
        plain = super().upload(state, n)
        return plain if state.m is None else plain.plus({"g2": PRUNABLE})


PRUNABLE = Prunable()


class Summed:
    """A term that leaves the gradient unchanged and records it: the sum, or only the last."""

    def __init__(self, like: Tensor, last_only: bool = False):
        self.total, self.keep = torch.zeros_like(like), 0.0 if last_only else 1.0

    def __call__(self, g: Tensor, u: Tensor) -> None:
        self.total.mul_(self.keep).add_(g)


def prunefl_mask(w: Weights, value: Weights, m: Mask, keep: int, drop: float) -> Mask:
    """Each layer keeps the largest (1 − d) of its active |w|; the largest values fill the rest of `keep`."""
    safe = {}
    for k, v in w.items():
        active = int(m[k].sum())
        safe[k] = largest(v.abs().masked_fill(~m[k], -1), active - int(drop * active))
    # `keep` is exact: if the safe weights are too many, the smallest of them go, whatever their layer.
    safe_flat = flat(safe)
    order = torch.where(safe_flat, torch.inf, flat(value))
    if int(safe_flat.sum()) > keep:
        order = torch.where(safe_flat, flat(w).abs(), -torch.inf)
    return unflat(largest(order, keep), w)


def uses_of(net: nn.Module, x: Tensor) -> dict[str, int]:
    """How often one sample's forward pass uses each prunable weight: the positions of its layer's output."""
    counts = positions(net, x)
    return {k: counts.get(k, 0) for k in prunable(net)}


def positions(net: nn.Module, x: Tensor) -> dict[str, int]:
    """How often one sample, x, uses each parameter of the prunable layers."""
    counts: dict[str, int] = {}
    names = {v: k for k, v in net.named_modules() if isinstance(v, LAYERS)}

    def count(module, inputs, output):
        # Once per position: of a sequence, of an output image, or of a transposed convolution's input image.
        transposed = getattr(module, "transposed", False)
        values = inputs if transposed else output
        while isinstance(values, tuple):  # an LSTM returns its state too
            values = values[0]
        uses = values.numel() // getattr(module, "in_channels" if transposed else "out_channels", values.shape[-1])
        for k, _ in module.named_parameters(prefix=names[module]):  # attention's output layer is never called itself
            counts[k] = counts.get(k, 0) + uses

    hooks = [module.register_forward_hook(count) for module in names]
    with torch.no_grad():
        net.eval()(x)
    for hook in hooks:
        hook.remove()
    return counts
