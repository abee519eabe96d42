"""What is sent, defined once: a payload gives the bit counts, Flower's bytes and the sums of a plan.

A weight takes 32 bits, or 16 with `value_bits`. Only the kept weights of a pruned model are sent. The mask gives their
positions, one bit per prunable weight, and goes to clients that lack it. A payload names its parts and their forms.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .layout import Layout
from .masks import Mask

BITS_PER_WEIGHT = 32


class Form:
    """How a vector is sent: how many of its numbers, and how many bits each takes. This form sends all parameters."""

    bits_each = BITS_PER_WEIGHT

    def count(self, layout: Layout, kept: int | None) -> int:
        """How many numbers are sent if the mask keeps `kept` prunable weights; None: all of them."""
        return layout.size

    def pack(self, layout: Layout, v: Tensor, m: Mask | None) -> Tensor:
        """The vector as it is sent."""
        return v

    def unpack(self, layout: Layout, array: Tensor, m: Mask | None) -> Tensor:
        """The vector from what was sent."""
        return array

    def check(self, name: str, layout: Layout, array: Tensor, kept: int | None) -> None:
        """Check that a received array has the type and length of this form."""
        dtype = {1: torch.uint8, 16: torch.int16}.get(self.bits_each, torch.get_default_dtype())
        length = math.ceil(self.count(layout, kept) / (8 if self.bits_each == 1 else 1))
        if array.dtype != dtype or array.shape != (length,):
            form = f"{array.dtype} of shape {tuple(array.shape)}"
            raise ValueError(f"{name} is {form}; it must be {dtype} of shape ({length},)")


class Kept(Form):
    """The weights that the mask keeps, and all parameters that are never pruned."""

    def count(self, layout, kept):
        return layout.size - (0 if kept is None else layout.prunable_size - kept)

    def pack(self, layout, v, m):
        return v if m is None else v[layout.flat_mask(m, like=v).bool()]

    def unpack(self, layout, array, m):
        if m is None:
            return array
        zeros = torch.zeros(layout.size, dtype=array.dtype, device=array.device)
        return zeros.masked_scatter_(layout.flat_mask(m, like=zeros).bool(), array)


class Statistics(Form):
    """The statistics of batch norms."""

    def count(self, layout, kept):
        return layout.statistics.size


class MaskBits(Form):
    """A mask, given as a vector of zeros and ones: one bit per prunable weight, eight to a byte."""

    bits_each = 1

    def count(self, layout, kept):
        return layout.prunable_size

    def pack(self, layout, v, m):
        return as_bytes(torch.cat([v[layer] for layer in layout.layers]) != 0)

    def unpack(self, layout, array, m):
        bits = as_bits(array, layout.prunable_size)
        ones = torch.ones(layout.size, device=array.device)
        for layer, part in zip(layout.layers, bits.split([z.stop - z.start for z in layout.layers]), strict=True):
            ones[layer] = part.to(ones)
        return ones


def as_bytes(bits: Tensor) -> Tensor:
    """Truth values, eight to a byte."""
    return torch.from_numpy(np.packbits(bits.cpu().numpy()))


def as_bits(array: Tensor, count: int) -> Tensor:
    """The truth values that `as_bytes` packed."""
    return torch.from_numpy(np.unpackbits(array.cpu().numpy(), count=count)).bool().to(array.device)


DENSE, KEPT, STATISTICS, MASK = Form(), Kept(), Statistics(), MaskBits()


@dataclass(frozen=True)
class Payload:
    """The parts of one message, each with its form. If a mask travels, the kept values are those of that mask."""

    parts: Mapping[str, Form]
    kept: int | None = None  # prunable weights that the mask keeps; None: all of them

    def plus(self, parts: Mapping[str, Form]) -> "Payload":
        """The same payload with more parts, or with other forms for its parts."""
        return Payload({**self.parts, **parts}, self.kept)

    def bits(self, layout: Layout) -> int:
        """The size of the message, without framing."""
        return sum(form.bits_each * form.count(layout, self.kept) for form in self.parts.values())

    def pack(self, layout: Layout, tensors: Mapping[str, Tensor], m: Mask | None) -> dict[str, Tensor]:
        """The flat arrays to send; empty parts are left out."""
        m = layout.mask_of(tensors["mask"]) if "mask" in self.parts else m
        arrays = {k: form.pack(layout, tensors[k], m).detach().cpu() for k, form in self.parts.items()}
        return {k: v for k, v in arrays.items() if v.numel()}

    def unpack(self, layout: Layout, arrays: Mapping[str, Tensor], m: Mask | None) -> dict[str, Tensor]:
        """The tensors that were packed; a ValueError names any part that is missing, unknown or malformed."""
        whole, kept = dict[str, Tensor](), self.kept
        if "mask" in self.parts and "mask" in arrays:  # first: it says which values were sent
            self.parts["mask"].check("mask", layout, arrays["mask"], kept)
            whole["mask"] = self.parts["mask"].unpack(layout, arrays["mask"], m)
            m = layout.mask_of(whole["mask"])
            kept = sum(int(v.sum()) for v in m.values())
        expected = {k for k, form in self.parts.items() if form.count(layout, kept)}
        if set(arrays) != expected:
            raise ValueError(f"it holds {sorted(arrays)}, not {sorted(expected)}")
        for name, form in self.parts.items():
            if name in arrays and name not in whole:
                form.check(name, layout, arrays[name], kept)
            if name not in whole:
                whole[name] = form.unpack(layout, arrays.get(name, torch.empty(0)), m)
        return {name: whole[name] for name in self.parts}
