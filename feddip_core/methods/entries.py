"""A few of the prunable weights: where they are, and perhaps a value at each.

A list takes ⌈log₂ n_w⌉ bits per position, a map one bit per prunable weight. The shorter of the two is sent.
"""

import torch
from torch import Tensor

from ..communication import BITS_PER_WEIGHT, Form, as_bits, as_bytes
from ..layout import Layout
from ..masks import largest
from .prunefl import PRUNABLE


class Entries(Form):
    """The `number` largest entries of a vector; without values only their positions, which arrive as ones."""

    bits_each = 1

    def __init__(self, number: int, values: bool = True):
        self.number, self.value_bits = number, BITS_PER_WEIGHT * values

    def count(self, layout, kept):
        return self.number * self.value_bits + min(layout.prunable_size, self.number * _width(layout))

    def pack(self, layout, v, m):
        weights = PRUNABLE.pack(layout, v, m).cpu()
        chosen = largest(weights.abs(), self.number)
        values = as_bits(weights[chosen].float().view(torch.uint8), self.number * self.value_bits)
        places = chosen if self._as_map(layout) else (chosen.nonzero() & _powers(layout)).flatten() != 0
        return as_bytes(torch.cat([values, places]))

    def unpack(self, layout, array, m):
        if not self.number:  # an empty part does not travel
            return torch.zeros(layout.size)
        bits = as_bits(array, self.count(layout, None))
        values, places = bits.split([self.number * self.value_bits, len(bits) - self.number * self.value_bits])
        weights = torch.zeros(layout.prunable_size)
        weights[self._found(layout, places)] = as_bytes(values).view(torch.float32) if self.value_bits else 1.0
        return PRUNABLE.unpack(layout, weights, m)

    def _as_map(self, layout: Layout) -> bool:
        return self.number * _width(layout) >= layout.prunable_size

    def _found(self, layout: Layout, places: Tensor) -> Tensor:
        """The positions that were sent, after checking that they can be."""
        if self._as_map(layout):
            found = places.nonzero().flatten()
        else:
            found = (places.view(self.number, -1) * _powers(layout)).sum(1).unique()
        if len(found) != self.number or int(found[-1]) >= layout.prunable_size:
            needs = f"it must have {self.number} different ones below {layout.prunable_size}"
            raise ValueError(f"it has {len(found)} positions up to {int(found.max()) if len(found) else 0}; {needs}")
        return found


def _width(layout: Layout) -> int:
    """⌈log₂ n_w⌉."""
    return (layout.prunable_size - 1).bit_length()


def _powers(layout: Layout) -> Tensor:
    return 2 ** torch.arange(_width(layout))
