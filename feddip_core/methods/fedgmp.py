"""FedGMP: gradual magnitude pruning (Zhu and Gupta, 2018), federated. It starts dense and stops pruning early."""

from typing import Any, ClassVar

import torch

from ..masks import Weights, magnitude_mask
from ..method import Method
from ..schedules import sparsity_at
from ..settings import Setting, choice, whole
from .feddip import SCHEDULE, SPARSITY_TARGET


class FedGMP(Method):
    """From round b to round e, prune the smallest kept weights every R rounds; then the sparse network recovers.

    A pruned weight stays at zero, so only kept weights travel. The first multiple of R from e on has the target
    sparsity.
    """

    name, label, colour, line = "fedgmp", "FedGMP", "#332288", "-"
    settings: ClassVar[dict[str, Setting]] = dict(
        sparsity_target=SPARSITY_TARGET,
        reconfigure_every=SCHEDULE["reconfigure_every"],
        prune_begin=whole(0, 0, "b, the round after which pruning begins"),
        prune_end=whole(None, 1, "e, the round at which the target is reached; default 0.6 T"),
        mask_score=choice("magnitude", ("magnitude", "lamp"), "how weights are ranked: by |w| or by LAMP's score"),
    )
    feedback = False

    @classmethod
    def defaults(cls, model, dataset, rounds) -> dict[str, Any]:
        return {"prune_end": max(1, round(0.6 * rounds))}

    @classmethod
    def check(cls, exp) -> None:
        super().check(exp)
        if exp.prune_end > exp.rounds:
            raise ValueError(f"prune_end: {exp.prune_end} is not allowed; it must be at most rounds, {exp.rounds}")
        if exp.prune_begin >= exp.prune_end:
            needs = f"it must be less than prune_end, {exp.prune_end}"
            raise ValueError(f"prune_begin: {exp.prune_begin} is not allowed; {needs}")

    def sparsity(self, t):
        """s_t = s_p (1 − (1 − p)³), where p grows from 0 in round b to 1 in round e."""
        exp = self.exp
        duration = exp.prune_end - exp.prune_begin
        since = min(max(t - exp.prune_begin, 0), duration)
        return sparsity_at(since, T=duration, s_0=0.0, s_p=exp.sparsity_target)

    def next_mask(self, w, m, t):
        tau = self.tau(t)
        s = 0.0 if tau is None else self.sparsity(tau)
        return m if s == 0 else magnitude_mask(self.score(w), s, within=m)

    def score(self, w: Weights) -> Weights:
        """The score that ranks weights, over all layers together."""
        return lamp_scores(w) if self.exp.mask_score == "lamp" else w


def lamp_scores(w: Weights) -> Weights:
    """w_j² / Σ w_i² over the weights of the layer that are no smaller (LAMP; Lee et al., 2021).

    The largest weight of each layer scores 1, so no layer is emptied while another has more than one weight.
    """
    scores = {}
    for k, v in w.items():
        squares, order = v.detach().double().flatten().square().sort(stable=True)
        # The sum of all squares that are no smaller; in a layer of zeros 0 / 0 counts as 0.
        rest = squares.flip(0).cumsum(0).flip(0).clamp_min(torch.finfo(squares.dtype).tiny)
        scores[k] = torch.empty_like(squares).scatter_(0, order, squares / rest).view(v.shape)
    return scores
