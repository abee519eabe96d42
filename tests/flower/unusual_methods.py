"""Methods and networks of a reader's own, each with something unusual to send."""

import torch
from torch import nn

from feddip_core import Method, real
from feddip_core.communication import DENSE


class Drift(Method):
    """A client keeps how far it went, the server where the average went; each round leans on both."""

    settings = dict(lean=real(0.1, 0, 1, "share of either that is added"))  # noqa: RUF012

    def finish(self, upload, terms, m, state, n):
        w = upload.values["w"]
        drift = w - state.w
        for other in (state.own.get(n, {}).get("drift"), state.memory.get("velocity")):
            w = w if other is None else w + self.exp.lean * other
        return type(upload)(upload.values | {"w": w}, {"drift": drift})

    def next(self, average, state):
        return average.mean["w"], None, {"velocity": average.mean["w"] - state.w}

    def download(self, state, n):
        plain = super().download(state, n)
        return plain.plus({"velocity": DENSE}) if "velocity" in state.memory else plain

    def upload(self, state, n):
        return super().upload(state, n).plus({"own/drift": DENSE})


class Secretive(Drift):
    """It keeps something for itself that its upload does not name."""

    def upload(self, state, n):
        return Method.upload(self, state, n)


class NothingLeft(Method):
    """A mask that keeps no weight at all."""

    feedback = False

    def first_mask(self, w):
        return {k: torch.zeros_like(v, dtype=torch.bool) for k, v in self.layout.weights(w).items()}


class NothingGone(Method):
    """A dense model that gets a mask after its second round, one that keeps every weight."""

    feedback = False

    def next_mask(self, w, m, t):
        return self.layout.full_mask(None) if t >= 1 else None


def without_biases():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8, bias=False), nn.ReLU(), nn.Linear(8, 10, bias=False))
