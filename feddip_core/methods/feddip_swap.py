"""FedDIP-Swap: gradual pruning, plus occasional rounds of FedDIP's feedback that tell which pruned weights to try.

In such a round a pruned weight starts at zero and moves where the clients' gradients push it. It stays tiny compared to
a trained weight, so it competes only with other pruned weights, as RigL ranks the gradients of one batch.
"""

from typing import Any, ClassVar

from ..masks import Mask, Weights, flat, largest, unflat
from ..settings import Setting, real, whole
from .feddst import regrowth_fraction_at
from .fedgmp import FedGMP


class FedDIPSwap(FedGMP):
    """FedGMP with swaps: every few rounds the smallest weights make room for the pruned ones that moved furthest.

    Pruned weights move and are uploaded only in these rounds.
    """

    name, label, colour, line = "feddip_swap", "FedDIP-Swap", "#882255", "-"
    settings: ClassVar[dict[str, Setting]] = FedGMP.settings | dict(
        swap_every=whole(20, 1, "rounds between swaps, a multiple of R"),
        adjust_alpha=real(0.3, 0, 1, "α, initial share of the kept weights to replace"),
        adjust_until=whole(None, 1, "T_e, the last swap comes before this round; default 0.8 T"),
    )
    smoke: ClassVar[dict[str, Any]] = dict(swap_every=4)

    @classmethod
    def defaults(cls, model, dataset, rounds) -> dict[str, Any]:
        return super().defaults(model, dataset, rounds) | {"adjust_until": max(1, round(0.8 * rounds))}

    @classmethod
    def check(cls, exp) -> None:
        super().check(exp)
        if exp.swap_every % exp.reconfigure_every:
            needs = f"it must be a multiple of reconfigure_every, {exp.reconfigure_every}"
            raise ValueError(f"swap_every: {exp.swap_every} is not allowed; {needs}")

    def fraction(self, t: int) -> float:
        """a_τ = α/2 · (1 + cos(πτ/T_e)) if weights are swapped after round t, else 0."""
        exp, tau = self.exp, t + 1
        # After T_e the cosine would rise again.
        swaps = tau % exp.swap_every == 0 and tau < exp.adjust_until
        return regrowth_fraction_at(tau, T=exp.adjust_until, alpha=exp.adjust_alpha) if swaps else 0.0

    def keep(self, t: int) -> int:
        """How many weights the schedule keeps after round t."""
        n_w = self.layout.prunable_size
        return n_w - round(self.sparsity(t + 1) * n_w)

    def feeds_back(self, state):
        # A share that is less than one weight is not worth a dense upload.
        return state.m is not None and int(self.fraction(state.t) * self.keep(state.t)) > 0

    def next(self, average, state):
        if not self.feeds_back(state):
            return super().next(average, state)
        w = average.mean["w"]
        alive = self.layout.prune(w, state.m)
        score, moved = self.score(self.layout.weights(alive)), self.layout.weights(w)
        # A returning weight starts from zero: its movement only shows that it is worth a try.
        return alive, swapped(score, moved, state.m, self.keep(state.t), self.fraction(state.t)), {}


def swapped(score: Weights, moved: Weights, m: Mask, keep: int, fraction: float) -> Mask:
    """⌊a · keep⌋ of the `keep` weights are new: the pruned ones that moved furthest.

    The others are the mask's weights with the largest |score|, over all layers together.
    """
    old = flat({k: m[k] for k in score})
    new = min(int(fraction * keep), int((~old).sum()))
    stays = largest(flat(score).abs().masked_fill(~old, -1), keep - new)
    return unflat(stays | largest(flat(moved).abs().masked_fill(old, -1), new), score)
