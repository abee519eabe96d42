"""Steps joined where that costs nothing: batch norms into the layer before them, ReLU into any step."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .graph import Graph

LAYERS = ("conv2d", "linear")
BEFORE_RELU = (*LAYERS, "batch_norm", "add", "max_pool2d")


@dataclass(frozen=True)
class Fused:
    """A step with its numbers: those of a layer, or the scale and the shift of a batch norm that stays alone."""

    op: str
    of: tuple[int, ...]
    shape: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]  # the shapes of what it reads
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: Tensor | None = None
    bias: Tensor | None = None
    relu: bool = False
    about: str = ""

    @property
    def padded(self) -> bool:
        """Whether it reads beyond the edges of its input."""
        return self.op == "conv2d" and any(self.options["padding"])


def fused(graph: Graph) -> list[Fused]:
    """The steps of a graph, fewer of them, that compute the same up to rounding."""
    readers = Counter(i for step in graph.steps for i in step.of)
    steps: list[Fused] = []
    now = {0: 0}  # of each value of the graph, the value among the fused steps
    for i, step in enumerate(graph.steps, 1):
        of = tuple(now[k] for k in step.of)
        before = steps[of[0] - 1] if of[0] and readers[step.of[0]] == 1 else None
        if step.op == "batch_norm" and before and before.op in LAYERS and not before.relu:
            scale, shift = graph.scale_and_shift(step)
            steps[of[0] - 1] = _folded(before, scale, shift)
            now[i] = of[0]
        elif step.op == "relu" and before and before.op in BEFORE_RELU:
            steps[of[0] - 1] = replace(before, relu=True)
            now[i] = of[0]
        else:
            shapes = tuple(graph.shape_of(k) for k in step.of)
            weight, bias, about = None, None, ""
            if step.op in LAYERS:
                weight, bias = (None if k is None else graph.tensors[k] for k in step.names)
                bias = torch.zeros(len(weight)) if bias is None else bias
                about = f"{step.layer}: {int(weight.count_nonzero()):,} of {weight.numel():,} weights"
            elif step.op == "batch_norm":
                weight, bias = graph.scale_and_shift(step)
            steps.append(Fused(step.op, of, step.shape, shapes, step.options, weight, bias, about=about))
            now[i] = len(steps)
    return steps


def _folded(layer: Fused, scale: Tensor, shift: Tensor) -> Fused:
    """The layer whose output is already scaled and shifted, channel by channel."""
    along = scale.double().view(-1, *[1] * (layer.weight.ndim - 1))
    weight, bias = layer.weight.double() * along, layer.bias.double() * scale.double() + shift.double()
    return replace(layer, weight=weight.float(), bias=bias.float())
