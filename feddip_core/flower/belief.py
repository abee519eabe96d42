"""Which uploads the server believes: those it can evaluate, and whose step is not much longer than the others' steps.

This stops clients that break or shout. A plausible lie passes: the settings `aggregation` and `clip_norm` bound what it
does to weights. Other parts of an upload, such as PruneFL's squared gradients, can mislead a mask, and no more.
"""

import math
from collections.abc import Mapping

from torch import Tensor

from ..engine.measure import TRIED, evaluate
from ..server import Federation
from ..state import State, Upload

LONGEST = 10.0  # times the usual step; see `too_far`
REASON = 300  # characters kept of the reason for a rejection: a client's own text may be long

Lengths = dict[str, tuple[float, float]]  # per part: the length of its step, and the length of what was sent


class Rejected(Exception):
    """Why an answer cannot be used."""

    def __init__(self, reason: str):
        super().__init__(reason if len(reason) <= REASON else f"{reason[:REASON]}…")


class Diverged(Rejected):
    """An answer of the right form that contains a number, or gives a loss, that is not finite."""


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise Diverged if a part holds a number that is not finite; it names the part."""
    for name, v in tensors.items():
        if not v.isfinite().all():
            raise Diverged(f"{name} holds a number that is not finite")


def check_model(fed: Federation, state: State, upload: Upload) -> None:
    """Raise Diverged if an upload's model cannot be evaluated, and Rejected if a variance is negative."""
    w, statistics = upload.values["w"], upload.values["statistics"]
    for name, v in fed.clients.layout.statistics.views(statistics).items():
        if name.endswith("running_var") and (v < 0).any():
            raise Rejected(f"statistics hold a negative variance, {float(v.min()):g} in {name}")
    if not math.isfinite(evaluate(fed, state.replace(w=w, statistics=statistics), TRIED)[1]):
        raise Diverged("its model gives a loss that is not finite")


def lengths(tensors: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> Lengths:
    """‖v − what was sent‖ and ‖what was sent‖, for each part that was sent and came back changed."""
    both = {k: (v.double(), sent[k].double()) for k, v in tensors.items() if k in sent}
    return {k: (float((v - start).norm()), float(start.norm())) for k, (v, start) in both.items()}


def too_far(steps: Mapping[int, Lengths], longest: float = LONGEST) -> dict[int, str]:
    """Why a client is left out: its step exceeds `longest` × the others' median, and `longest` × the model it was sent.

    Of an even number of steps the smaller median counts, so half of the clients may shout. The model's length counts
    too, so a client that stands still gets nobody else rejected. With the smoke preset, also on dirichlet(0.1), the
    longest step of an honest client was 4.8 models (PruneFL; 1.2 for the others). FedAvg and FedDIP recover from a
    random step of 10 models, but not from one of 30. Hence the default of 10.
    """
    reasons = {}
    for n, parts in steps.items():
        for name, (length, sent) in parts.items():
            others = sorted(other[name][0] for i, other in steps.items() if i != n)
            usual = others[(len(others) - 1) // 2] if others else 0.0
            if length > longest * max(usual, sent):
                reasons[n] = (
                    f"its step in {name} is {length:.3g} long; it may be {longest:g} times the others' median, "
                    f"{usual:.3g}, or what it was sent, {sent:.3g}"
                )
    return reasons
