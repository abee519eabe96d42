"""A network's parameters as one flat vector, which clients train, messages carry and the server averages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from .masks import Mask
from .models import prunable


@dataclass(frozen=True)
class Layout:
    """Where each parameter is in the vector, and which parameters a mask may remove."""

    shapes: Mapping[str, torch.Size]
    prunable: tuple[str, ...] = ()
    statistics_shapes: Mapping[str, torch.Size] = field(default_factory=dict)

    @classmethod
    def of(cls, net: nn.Module) -> "Layout":
        # The step counters of batch norms are left out: they have no effect at a fixed momentum.
        statistics = {k: v.shape for k, v in net.named_buffers() if v.is_floating_point()}
        return cls({k: v.shape for k, v in net.named_parameters()}, tuple(prunable(net)), statistics)

    @cached_property
    def statistics(self) -> "Layout":
        """The layout of the batch norms' statistics, a separate vector."""
        return Layout(self.statistics_shapes)

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes.values()]

    @cached_property
    def size(self) -> int:
        """n, the number of parameters."""
        return sum(self.sizes)

    @cached_property
    def prunable_size(self) -> int:
        """n_w, the number of parameters that a mask may remove."""
        return sum(shape.numel() for shape in self.prunable_shapes.values())

    @cached_property
    def prunable_shapes(self) -> dict[str, torch.Size]:
        return {k: self.shapes[k] for k in self.prunable}

    @cached_property
    def spans(self) -> dict[str, slice]:
        """The slice of the vector that holds each parameter."""
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        return {k: slice(a, a + n) for k, a, n in zip(self.shapes, starts, self.sizes, strict=True)}

    @cached_property
    def layers(self) -> list[slice]:
        """The slice of the vector that holds each prunable layer, in the network's order."""
        return [span for k, span in self.spans.items() if k in self.prunable]

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensors as one new vector."""
        return torch.cat([tensors[k].detach().flatten() for k in self.shapes]) if self.shapes else torch.empty(0)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The vector as named tensors that share its memory."""
        parts = zip(self.shapes.items(), flat.split(self.sizes), strict=True) if self.shapes else ()
        return {k: part.view(shape) for (k, shape), part in parts}

    def weights(self, flat: Tensor) -> dict[str, Tensor]:
        """Only the prunable tensors, as views."""
        views = self.views(flat)
        return {k: views[k] for k in self.prunable}

    def flat_mask(self, m: Mask, like: Tensor) -> Tensor:
        """The mask as a vector of zeros and ones; parameters that are never pruned get ones."""
        ones = torch.ones(self.size, dtype=torch.bool, device=like.device)
        parts = [m[k].flatten() if k in self.prunable else ones[span] for k, span in self.spans.items()]
        return torch.cat([part.to(like.device) for part in parts]).to(like.dtype)

    def mask_of(self, flat: Tensor) -> Mask:
        """The mask from a vector made by `flat_mask`."""
        return {k: v.bool() for k, v in self.weights(flat).items()}

    def full_mask(self, m: Mask | None, device: torch.device | str = "cpu") -> Mask:
        """The mask itself, or one that keeps everything if the model is dense."""
        if m is not None:
            return m
        return {k: torch.ones(shape, dtype=torch.bool, device=device) for k, shape in self.prunable_shapes.items()}

    def prune(self, w: Tensor, m: Mask | None) -> Tensor:
        """w′ = m ⊙ w."""
        return w if m is None else w * self.flat_mask(m, like=w)
