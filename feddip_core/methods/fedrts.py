"""FedRTS (Wang et al., 2025): a belief per weight, updated by votes; masks are sampled from the beliefs.

One odd round changes a belief a little, and so cannot overturn the mask.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..communication import Form, Payload
from ..masks import Mask, flat, largest, unflat
from ..settings import Setting, real
from ..state import Tensors
from ..streams import stream_seed
from .entries import Entries
from .fedtiny import Adjusting, staying, top_inactive
from .prunefl import PRUNABLE


class Implied(Form):
    """Nothing: the receiver computes this part from the others."""

    def count(self, layout, kept):
        return 0

    def pack(self, layout, v, m):
        return v[:0]


@dataclass(frozen=True)
class WithVotes(Payload):
    """An upload whose votes the server recomputes from the weights, so that they cost nothing."""

    votes: Callable[[Tensor], Tensor] | None = None

    def plus(self, parts):
        return replace(self, parts={**self.parts, **parts})

    def unpack(self, layout, arrays, m):
        tensors = super().unpack(layout, arrays, m)
        return tensors | {"vote": self.votes(tensors["w"])} if self.votes else tensors


class FedRTS(Adjusting):
    """Every round clients and server vote for the largest weights; every R rounds a mask is drawn from the beliefs.

    A belief is a Beta(A, B) distribution of how likely a weight is worth keeping.
    """

    name, label, colour, line = "fedrts", "FedRTS", "#44AA99", "-."
    settings: ClassVar[dict[str, Setting]] = Adjusting.settings | dict(
        vote_share=real(0.5, 0, 1, "γ, weight of the server's vote; 1 − γ is the clients'"),
        vote_strength=real(10.0, 0, math.inf, "λ, what a round's votes add to a belief"),
    )

    def start(self, w, ask):
        m = self.first_mask(w)
        ones = torch.ones(self.layout.prunable_size, dtype=torch.float64, device=w.device)
        return w, m, {} if m is None else {"kept": ones, "gone": ones.clone()}

    def votes_in(self, state) -> bool:
        """Whether this round's votes count: no mask is drawn after T_e."""
        return state.m is not None and state.t + 1 < self.exp.adjust_until

    def adjusts(self, state):
        """Whether a mask is drawn after this round, even if no layer is to swap anything."""
        return self.tau(state.t) is not None and self.votes_in(state)

    def finish(self, upload, terms, m, state, n):
        if not self.votes_in(state):
            return upload
        # With 16 bits per weight the server sees rounded weights, and the votes must be those that it computes.
        w = upload.values["w"]
        upload = upload.plus(vote=self.vote(w.half().to(w) if self.exp.value_bits == 16 else w, state))
        if not self.adjusts(state):
            return upload
        top = {k: top_inactive(v, m[k], self.swaps(state)[k]) for k, v in self.gradient(upload, state, n).items()}
        return upload.plus(top=self.of_layers(top, like=w))

    def vote(self, w: Tensor, state) -> Tensor:
        """1 at the κ_l = active_l − k_l largest active |w| of each layer."""
        swaps, m = self.swaps(state), state.m
        return self.of_layers({k: staying(v, m[k], swaps[k]) for k, v in self.layout.weights(w).items()}, like=w)

    def next(self, average, state):
        w, m, adjusts = average.mean["w"], state.m, self.adjusts(state)
        if not self.votes_in(state):
            return w, m, {}
        own, clients = (self.shares(v) for v in (self.vote(w, state), average.mean["vote"]))
        active, gamma = flat(m), self.exp.vote_share
        # Differs from FedRTS's appendix and code, which swap γ and 1 − γ: this is its Eq. 3.
        x = gamma * own + (1 - gamma) * clients
        if adjusts:  # on inactive weights the server has no opinion
            x = torch.where(active, x, gamma * 0.5 + (1 - gamma) * self.shares(average.mean["top"]))
        strength = self.exp.vote_strength * (active | adjusts)
        memory = {"kept": state.memory["kept"] + strength * x, "gone": state.memory["gone"] + strength * (1 - x)}
        return w, self.drawn(memory, m, state.t) if adjusts else m, memory

    def shares(self, votes: Tensor) -> Tensor:
        """Votes on the prunable weights as shares from 0 to 1."""
        return PRUNABLE.pack(self.layout, votes, None).double().clamp(0, 1)

    def drawn(self, memory: Tensors, m: Mask, t: int) -> Mask:
        """Draw from every belief, and keep as many weights of each layer as before: those with the largest draws."""
        numbers = np.random.default_rng(stream_seed(self.exp.seed, "fedrts", t))
        draws = torch.from_numpy(numbers.beta(*(memory[k].cpu().numpy() for k in ("kept", "gone"))))
        return {k: largest(v.to(m[k].device), int(m[k].sum())) for k, v in unflat(draws, m).items()}

    def upload(self, state, n):
        """The kept weights; in an adjusting round also the positions of the k largest gradients of pruned weights."""
        plain = super().upload(state, n)
        if not self.votes_in(state):
            return plain
        parts = {**plain.parts, "vote": IMPLIED}
        if self.adjusts(state):
            parts["top"] = Entries(sum(self.swaps(state).values()), values=False)
        return WithVotes(parts, plain.kept, lambda w: self.vote(w, state))


IMPLIED = Implied()
