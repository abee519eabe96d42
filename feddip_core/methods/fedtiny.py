"""FedTiny (Huang et al., 2022): sparse from the start; the server swaps weights by the clients' largest gradients."""

from typing import Any, ClassVar

from ..communication import Form
from ..masks import Mask, Weights, largest
from ..method import Method
from ..settings import Setting, choice, real, whole
from ..state import State
from .entries import Entries
from .feddip import SPARSITY_TARGET
from .feddst import regrowth_fraction_at
from .prunefl import PRUNABLE


class Adjusting(Method):
    """A base for methods that swap some weights of every layer every R rounds, until round T_e."""

    settings: ClassVar[dict[str, Setting]] = dict(
        sparsity_target=SPARSITY_TARGET,
        reconfigure_every=whole(10, 1, "R, rounds between adjustments"),
        adjust_alpha=real(0.4, 0, 1, "α, initial share of a layer's weights to replace"),
        adjust_until=whole(None, 1, "T_e, the last adjustment comes before this round; default 0.6 T"),
    )
    smoke: ClassVar[dict[str, Any]] = dict(reconfigure_every=4)
    feedback = False

    @classmethod
    def defaults(cls, model, dataset, rounds) -> dict[str, Any]:
        return {"adjust_until": max(1, round(0.6 * rounds))}

    def first_mask(self, w):
        # Differs from FedTiny, which chooses among candidate masks by their batch-norm statistics.
        return self.erk_mask(self.exp.sparsity_target)

    def fraction(self, t: int) -> float:
        """a_τ = α/2 · (1 + cos(πτ/T_e)), and 0 from T_e on, where the cosine would rise again."""
        tau, until = t + 1, self.exp.adjust_until
        return regrowth_fraction_at(tau, T=until, alpha=self.exp.adjust_alpha) if tau < until else 0.0

    def swaps(self, state: State) -> dict[str, int]:
        """k_l = ⌊a_τ · active_l⌋ in each layer, at most as many as it has inactive weights."""
        a, layers = self.fraction(state.t), (state.m or {}).items()
        return {k: min(int(a * int(v.sum())), int((~v).sum())) for k, v in layers}

    def adjusts(self, state: State) -> bool:
        """Whether this round ends with another mask."""
        return self.tau(state.t) is not None and any(self.swaps(state).values())

    def gradient(self, upload, state, n) -> Weights:
        """The gradient at client n's trained weights, pruned ones too, on one batch."""
        w, statistics = upload.values["w"], upload.values["statistics"].clone()
        return self.layout.weights(self.clients.batch_gradient(w, n, state.t, "adjust", statistics=statistics))

    def of_layers(self, values: Weights, like):
        """Values of the prunable layers as one vector; everything else is 0."""
        whole = like.new_zeros(self.layout.size)
        for k, view in self.layout.weights(whole).items():
            view.copy_(values[k])
        return whole


class FedTiny(Adjusting):
    """Every R rounds each layer swaps its smallest weights for the pruned ones on which the loss pulls hardest."""

    name, label, colour, line = "fedtiny", "FedTiny", "#117733", "--"
    settings: ClassVar[dict[str, Setting]] = Adjusting.settings | dict(
        adjust_alpha=real(0.2, 0, 1, "α, initial share of a layer's weights to replace"),
        adjust_gradients=choice("top", ("top", "dense"), "what clients upload: the largest gradients, or all of them"),
    )

    def finish(self, upload, terms, m, state, n):
        if not self.adjusts(state):
            return upload
        g = self.gradient(upload, state, n)
        if self.exp.adjust_gradients == "top":
            g = {k: v.masked_fill(~top_inactive(v, m[k], self.swaps(state)[k]), 0) for k, v in g.items()}
        return upload.plus(g=self.of_layers(g, like=upload.values["w"]))

    def next(self, average, state):
        w = average.mean["w"]
        if not self.adjusts(state):
            return w, state.m, {}
        weights, g = self.layout.weights(w), self.layout.weights(average.mean["g"])
        return w, swapped_layers(weights, g, state.m, self.swaps(state), self.exp.adjust_gradients == "dense"), {}

    def upload(self, state, n):
        """The kept weights; in an adjusting round also the k largest gradients of pruned weights."""
        plain = super().upload(state, n)
        if not self.adjusts(state):
            return plain
        form: Form = PRUNABLE if self.exp.adjust_gradients == "dense" else Entries(sum(self.swaps(state).values()))
        return plain.plus({"g": form})


def top_inactive(g, m, k: int):
    """True at the k largest |g| where the mask is 0."""
    return largest(g.abs().masked_fill(m, -1), k)


def staying(w, m, k: int):
    """True at the active weights of a layer but for its k smallest |w|."""
    return largest(w.abs().masked_fill(~m, -1), int(m.sum()) - k)


def swapped_layers(w: Weights, g: Weights, m: Mask, swaps: dict[str, int], dropped_too: bool = False) -> Mask:
    """Each layer drops its k_l smallest active |w| and grows its k_l largest |g| among the weights inactive so far.

    With `dropped_too`, a weight that has just been dropped may return at once, and keeps its value.
    """
    new = {}
    for k, v in w.items():
        stays = staying(v, m[k], swaps[k])
        new[k] = stays | top_inactive(g[k], stays if dropped_too else m[k], swaps[k])
    return new
