"""PruneTrain (Lym et al., 2019), federated: a penalty on every channel; channels pushed to zero are removed."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from .. import masks
from ..communication import Form, as_bits, as_bytes
from ..layout import Layout
from ..masks import Mask, Weights
from ..method import Method
from ..settings import Setting, real, whole

# Operations that join two streams of channels, as functions and as tensor methods.
SUMS = (
    operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul,
    torch.add, torch.sub, torch.mul, "add", "add_", "sub", "sub_", "mul", "mul_",
)  # fmt: skip

CHANNELLED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)  # outputs along axis 0, inputs along axis 1


@dataclass(frozen=True)
class Structure:
    """How a network's prunable layers are connected."""

    first: tuple[str, ...]  # layers that read the network's input, whose channels all stay
    last: tuple[str, ...]  # layers that write the network's output
    streams: tuple[tuple[str, ...], ...]  # layers that write into one sum: they lose an output channel together

    @classmethod
    def of(cls, net: nn.Module, prunable: Sequence[str]) -> "Structure":
        """Found by tracing the network."""
        try:
            graph = fx.symbolic_trace(net).graph
        except Exception as error:  # control flow that depends on values, in whatever way it fails
            raise ValueError(
                f"method: 'prunetrain' is not allowed; it must know how the layers of {type(net).__name__} are "
                f"connected, but the network cannot be traced ({str(error).splitlines()[0]})"
            ) from error
        called = {node.target for node in graph.nodes if node.op == "call_module"}
        # A grouped convolution's axis 1 counts the channels of a group, which are not those of its input.
        whole = {k: v for k, v in net.named_modules() if isinstance(v, CHANNELLED) and getattr(v, "groups", 1) == 1}
        layers = whole.keys() & called
        if inside := [k for k in prunable if k.rpartition(".")[0] not in layers]:
            knows = "it needs ungrouped convolutions and linear layers that the network calls directly"
            advice = f"list the layer of {inside[0]!r} in the network's `exempt`"
            raise ValueError(f"method: 'prunetrain' is not allowed; {knows}; {advice}")
        writers: dict[Any, frozenset[str]] = {}  # per value, the layers that wrote its channels
        first, last, sums = [], frozenset[str](), list[frozenset[str]]()
        for node in graph.nodes:
            sources = [writers[source] for source in node.all_input_nodes]
            if node.op == "call_module" and node.target in layers:
                first += [f"{node.target}.weight"] if not sources[0] else []
                writers[node] = frozenset([f"{node.target}.weight"])
                continue
            writers[node] = frozenset().union(*sources)
            if node.target in SUMS and len(sources) > 1:
                sums.append(writers[node])
            last = writers[node] if node.op == "output" else last
        # Ignore layers that are never pruned: if they counted, no channel would ever be removed.
        own = [tuple(k for k in prunable if k in group) for group in _joined(sums)]
        reading, writing = (tuple(k for k in prunable if k in side) for side in (first, last))
        return cls(reading, writing, tuple(group for group in own if len(group) > 1))


def _joined(groups: Sequence[frozenset[str]]) -> list[frozenset[str]]:
    """Merge groups that share a layer."""
    joined: list[frozenset[str]] = []
    for group in groups:
        touching = [other for other in joined if other & group]
        joined = [other for other in joined if not other & group] + [group.union(*touching)]
    return joined


class Channels(Form):
    """A mask of whole channels: one bit per removable output channel and one per removable input channel."""

    bits_each = 1

    def __init__(self, structure: Structure):
        self.structure = structure

    def _axes(self, layout: Layout) -> list[tuple[str, int]]:
        rows = [(k, 0) for k in layout.prunable if k not in self.structure.last]
        return rows + [(k, 1) for k in layout.prunable if k not in self.structure.first]

    def count(self, layout, kept):
        return sum(layout.shapes[k][axis] for k, axis in self._axes(layout))

    def pack(self, layout, v, m):
        keep = layout.mask_of(v)
        return as_bytes(torch.cat([keep[k].transpose(0, axis).flatten(1).any(1) for k, axis in self._axes(layout)]))

    def unpack(self, layout, array, m):
        axes = self._axes(layout)
        bits = as_bits(array, self.count(layout, None)).split([layout.shapes[k][axis] for k, axis in axes])
        flat = torch.ones(layout.size, device=array.device)
        views = layout.weights(flat)
        for (k, axis), keep in zip(axes, bits, strict=True):
            views[k].transpose(0, axis)[~keep] = 0
        return flat


class PruneTrain(Method):
    """Remove each channel whose largest weight falls below a threshold; the sparsity is not controlled."""

    name, label, colour, line = "prunetrain", "PruneTrain", "#A89B00", ":"
    settings: ClassVar[dict[str, Setting]] = dict(
        # The paper searches a grid of 1e-1 … 1e-5.
        lambda_max=real(1e-4, 0, math.inf, "the penalty's constant weight"),
        reconfigure_every=whole(1, 1, "R, rounds between checks of the channels"),
        prunetrain_threshold=real(1e-4, 0, math.inf, "largest |w| below which a channel is removed"),
    )
    smoke: ClassVar[dict[str, Any]] = dict(reconfigure_every=1)
    feedback = False
    plan_is_a_bound = True

    def __init__(self, exp, clients):
        super().__init__(exp, clients)
        self.structure = Structure.of(clients.net, self.layout.prunable)
        for group in self.structure.streams:
            if len({self.layout.shapes[k][0] for k in group}) > 1:
                needs = f"the layers {', '.join(group)} meet in one sum, but have different numbers of channels"
                raise ValueError(f"method: 'prunetrain' is not allowed; {needs}")
        self.mask_form = Channels(self.structure)

    def lam(self, t):
        return self.exp.lambda_max

    def terms(self, t, start):
        lam = self.lam(t)
        return [partial(add_channel_penalty_, layout=self.layout, structure=self.structure, lam=lam)] if lam else []

    def next_mask(self, w, m, t):
        if self.tau(t) is None:
            return m
        keep = {k: torch.ones_like(v, dtype=torch.bool) for k, v in w.items()} if m is None else m
        new = channel_mask(w, keep, self.exp.prunetrain_threshold, self.structure)
        return None if masks.sparsity_of(new) == 0 else new


def add_channel_penalty_(
    g: Tensor, u: Tensor, layout: Layout, structure: Structure, lam: float, eps: float = 1e-8
) -> None:
    """g ← g + λ ∇(Σ ‖output channel‖₂ + Σ ‖input channel‖₂), each norm √(Σw² + ε), over the prunable layers.

    Layers that read the network's input have no input groups; layers that write its output have no output groups.
    """
    weights, into = layout.weights(u), layout.weights(g)
    for k, v in weights.items():
        if k not in structure.last:
            into[k].addcdiv_(v, channel_norms(v, 0, eps), value=lam)
        if k not in structure.first:
            into[k].addcdiv_(v, channel_norms(v, 1, eps), value=lam)


def channel_norms(v: Tensor, axis: int, eps: float = 0.0) -> Tensor:
    """√(Σw² + ε) of each output (axis 0) or input (axis 1) channel, shaped to divide the weights by it."""
    others = [i for i in range(v.ndim) if i != axis]
    return v.square().sum(others, keepdim=True).add(eps).sqrt()


def channel_mask(w: Weights, m: Mask, threshold: float, structure: Structure) -> Mask:
    """Remove channels whose largest |w| is below the threshold, except the network's inputs and outputs.

    Layers that write into one sum lose an output channel together or not at all.
    """
    rows = {k: v.flatten(1).abs().amax(1) >= threshold for k, v in w.items()}
    for stream in structure.streams:
        rows |= dict.fromkeys(stream, torch.stack([rows[k] for k in stream]).any(0))
    new = {}
    for k, keep in m.items():
        new[k] = keep.clone()
        if k not in structure.last:
            new[k][~rows[k]] = False
        if k not in structure.first:
            new[k][:, w[k].transpose(0, 1).flatten(1).abs().amax(1) < threshold] = False
    return new
