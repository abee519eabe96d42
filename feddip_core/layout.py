"""A network's parameters as one flat vector: what clients train, what travels, what the server averages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from .masks import Mask
from .models import prunable


@dataclass(frozen=True)
class Layout:
    """Where each parameter stands in the vector, and which of them a mask may remove."""

    shapes: Mapping[str, torch.Size]
    prunable: tuple[str, ...] = ()
    statistics_shapes: Mapping[str, torch.Size] = field(default_factory=dict)

    @classmethod
    def of(cls, net: nn.Module) -> "Layout":
        # The step counters of batch norms have no effect at a fixed momentum and are left out.
        statistics = {k: v.shape for k, v in net.named_buffers() if v.is_floating_point()}
        return cls({k: v.shape for k, v in net.named_parameters()}, tuple(prunable(net)), statistics)

    @cached_property
    def statistics(self) -> "Layout":
        """Of the batch norms: a vector of their own."""
        return Layout(self.statistics_shapes)

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes.values()]

    @cached_property
    def size(self) -> int:
        """n, all parameters."""
        return sum(self.sizes)

    @cached_property
    def prunable_size(self) -> int:
        """n_w, the parameters that a mask may remove."""
        return sum(shape.numel() for shape in self.prunable_shapes.values())

    @cached_property
    def prunable_shapes(self) -> dict[str, torch.Size]:
        return {k: self.shapes[k] for k in self.prunable}

    @cached_property
    def spans(self) -> dict[str, slice]:
        """The stretch of the vector that each parameter takes."""
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        return {k: slice(a, a + n) for k, a, n in zip(self.shapes, starts, self.sizes, strict=True)}

    @cached_property
    def layers(self) -> list[slice]:
        """The stretch of the vector that each prunable layer takes, in the network's order."""
        return [span for k, span in self.spans.items() if k in self.prunable]

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensors as one new vector."""
        return torch.cat([tensors[k].detach().flatten() for k in self.shapes]) if self.shapes else torch.empty(0)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The vector as named tensors that share its memory."""
        parts = zip(self.shapes.items(), flat.split(self.sizes), strict=True) if self.shapes else ()
        return {k: part.view(shape) for (k, shape), part in parts}

    def weights(self, flat: Tensor) -> dict[str, Tensor]:
        """The prunable tensors alone, as views."""
        views = self.views(flat)
        return {k: views[k] for k in self.prunable}

    def flat_mask(self, m: Mask, like: Tensor) -> Tensor:
        """The mask as a vector of zeros and ones that also covers, with ones, what is never pruned."""
        flat = torch.ones_like(like)
        for k, view in self.weights(flat).items():
            view.copy_(m[k])
        return flat

    def mask_of(self, flat: Tensor) -> Mask:
        """The mask that `flat_mask` made a vector of."""
        return {k: v.bool() for k, v in self.weights(flat).items()}

    def full_mask(self, m: Mask | None, device: torch.device | str = "cpu") -> Mask:
        """The mask itself, and for a dense model one that keeps everything."""
        if m is not None:
            return m
        return {k: torch.ones(shape, dtype=torch.bool, device=device) for k, shape in self.prunable_shapes.items()}

    def prune(self, w: Tensor, m: Mask | None) -> Tensor:
        """w′ = m ⊙ w."""
        return w if m is None else w * self.flat_mask(m, like=w)
