"""`value_bits=16`, for every method: prunable weights travel as float16 in both directions. All else keeps 32 bits.

So do questions before the first round, and their answers. Rounding is part of the algorithm: clients round what they
upload, the server what it keeps for the next round.
"""

import torch
from torch import Tensor

from ..communication import Form, Payload
from ..method import Method

LARGEST = torch.finfo(torch.float16).max


class Half(Form):
    """Another form with its prunable weights as float16. Other numbers come first, as two 16-bit words each."""

    bits_each = 16

    def __init__(self, form: Form):
        self.form = form

    def count(self, layout, kept):
        return self.form.count(layout, kept) + layout.size - layout.prunable_size

    def pack(self, layout, v, m):
        numbers, weights = self.form.pack(layout, v, m), self._weights(layout, m, v.device)
        return torch.cat([numbers[~weights].float().view(torch.int16), numbers[weights].half().view(torch.int16)])

    def unpack(self, layout, array, m):
        weights = self._weights(layout, m, array.device)
        numbers = torch.empty(len(weights), device=array.device)
        others = 2 * (layout.size - layout.prunable_size)
        numbers[~weights] = array[:others].view(torch.float32).to(numbers)
        numbers[weights] = array[others:].view(torch.float16).to(numbers)
        return self.form.unpack(layout, numbers, m)

    def _weights(self, layout, m, device) -> Tensor:
        """Which of the numbers that the form sends are prunable weights."""
        prunable = torch.zeros(layout.size, device=device)
        for layer in layout.layers:
            prunable[layer] = 1
        return self.form.pack(layout, prunable, m).bool()


def halved(payload: Payload) -> Payload:
    """The payload with its weights as float16."""
    return payload.plus({"w": Half(payload.parts["w"])})


class SixteenBits(Method):
    """A mixin for any method."""

    def remembered(self, w, m):
        return self.rounded(super().remembered(w, m), "the server's average")

    def finish(self, upload, terms, m, state, n):
        upload = super().finish(upload, terms, m, state, n)
        return upload.plus(w=self.rounded(upload.values["w"], f"client {n} in round {state.t + 1}"))

    def download(self, state, n):
        return halved(super().download(state, n))

    def upload(self, state, n):
        return halved(super().upload(state, n))

    def rounded(self, w: Tensor, whose: str) -> Tensor:
        """The nearest float16 of every prunable weight."""
        w = w.clone()
        for v in self.layout.weights(w).values():
            largest = float(v[v.isfinite()].abs().amax()) if v.isfinite().any() else 0.0
            if largest > LARGEST:
                has = f"{whose} has a weight of {largest:g}, but the largest float16 is {LARGEST:g}"
                raise ValueError(f"value_bits: 16 is not allowed here; {has}")
            v.copy_(v.half())
        return w
