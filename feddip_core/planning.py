"""What a run will do and cost, known before anything is trained (Eq. 9 and 11, and the bits of `communication`).

The clients of every round and the sizes of the masks are fixed beforehand, so nothing here is an estimate.
"""

from dataclasses import dataclass
from functools import lru_cache

import pandas as pd
import torch

from . import data
from .experiment import ONE_SPARSITY, Experiment
from .federation import Federation, State
from .masks import Mask, erk_sparsities, kept, sparsity_of
from .methods import FedDIP
from .schedules import reconfiguration_time, sparsity_at


@lru_cache(maxsize=4)
def loaded(name: str, normalisation: str) -> data.Dataset:
    """Reading the data takes longer than anything else a slider does, so they are read once."""
    return data.load(name, None, normalisation)


@dataclass(frozen=True)
class Counted:
    """A layer of a mask of which only the sizes are known: enough to say what it costs."""

    size: int
    left: int
    dtype = torch.bool

    def numel(self) -> int:
        return self.size

    def sum(self) -> int:
        return self.left


def plan(exp: Experiment) -> pd.DataFrame:
    """Sparsity, penalty and bits of every round, without training: the sizes of the masks are known beforehand.

    Not those of PruneTrain, whose threshold decides: for it, this is the most that it can send.
    """
    if exp.variant == "authors":
        raise ValueError("variant: 'authors' is not allowed; a plan is of the methods as published")
    site = Federation(exp, loaded(exp.dataset, exp.normalisation))
    dense_bits = exp.clients_per_round * site.payload_bits(None)
    held = [0 if site.method.all_hold_first_mask else -1] * exp.clients
    m, version, since, rows = _first_mask(exp, site), 0, set(), []
    for t in range(exp.rounds):
        chosen = site.select(t)
        since |= set(chosen)
        memory = {"since": torch.tensor([n in since for n in range(exp.clients)])}
        state = State(t, None, m, None, version, tuple(held), memory)
        bits = {"downlink_bits": site.method.downlink_bits(state, chosen)}
        bits |= {"uplink_bits": site.method.uplink_bits(state, chosen), "dense_bits": dense_bits}
        for n in chosen:
            held[n] = version
        new = _next_mask(exp, site, m, t)
        if new is not m:
            m, version, since = new, version + 1, set()
        rows.append({"round": t + 1, "sparsity": sparsity_of(m) if m else 0.0, "lambda_": site.method.lam(t), **bits})
    return pd.DataFrame(rows)


def _first_mask(exp: Experiment, site: Federation) -> Mask | None:
    s = exp.sparsity_target if exp.method in ONE_SPARSITY else exp.sparsity_initial
    if exp.method in ("prunefl", "snip"):
        return _counted(site, s) if exp.sparsity_target else None
    if s == 0 or (exp.initial_mask == "authors" and exp.method != "feddst"):
        return None
    shapes = site.layout.prunable_shapes
    erk = erk_sparsities(shapes, s)
    return {k: Counted(shape.numel(), int((1 - erk[k]) * shape.numel())) for k, shape in shapes.items()}


def _next_mask(exp: Experiment, site: Federation, m: Mask | None, t: int) -> Mask | None:
    """The sizes of the mask after round t; a mask that stays is the same object."""
    magnitude = isinstance(site.method, FedDIP)
    tau = reconfiguration_time(t, R=exp.reconfigure_every, rule=exp.reconfigure_at)
    if t == 0 and exp.initial_mask == "authors" and magnitude:
        tau = 0
    if tau is None or not (magnitude or exp.method in ("prunefl", "feddst")) or (m is None and not magnitude):
        return m
    if exp.method == "feddst":
        return dict(m)  # as many weights, but others
    s = sparsity_at(tau, T=exp.rounds, s_0=exp.sparsity_initial, s_p=exp.sparsity_target)
    new = _counted(site, s) if s else None
    # Without regrowth a mask of the same size is the same mask.
    stays = exp.regrowth == "authors" and m is not None and new is not None and kept(new) >= kept(m)
    return m if stays and magnitude else new


def _counted(site: Federation, sparsity: float) -> Mask:
    n_w = sum(shape.numel() for shape in site.layout.prunable_shapes.values())
    return {"all layers": Counted(n_w, n_w - round(sparsity * n_w))}
