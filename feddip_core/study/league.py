"""The league of federated pruning: one protocol for every method, as data.

Fixed: Fashion-MNIST, LeNet-5, IID, and Table II's N, K, T, E and batch size. A method enters with the settings of its
paper, and with the best of four runs on a seed that is never reported. The better of the two is ranked.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..engine import records
from ..experiment import class_of, settings_of
from .choosing import best, experiment

SEEDS = (1, 2, 3)
TARGETS = (0.9, 0.99)
GUESSING = 11.0  # percent; of ten classes one in ten is right by chance
# Step sizes and decays that every method is tried with: Table II's, and ten times the size or a slower decay. With the
# small steps a sparse random mask hardly leaves guessing, and a sparse network learns slowly.
SIZES, DECAYS = (0.01, 0.1), (0.998, 0.9995)
# One setting of each method's own, the published value first, tried with both sizes; a method that has none is tried
# with all four pairs of size and decay. PruneTrain does not control its sparsity, and FedProx is FedAvg on IID data:
# neither enters.
ENTRANTS: dict[str, dict[str, Sequence[Any]]] = {
    "fedavg": {},
    "dpf": dict(reconfigure_every=(5, 20)),
    "feddp": dict(reconfigure_every=(5, 20)),
    "feddip": dict(lambda_max=(1e-3, 1e-4)),
    "prunefl": dict(reconfigure_every=(20, 50)),
    "snip": {},
    "feddst": dict(adjust_alpha=(0.5, 0.2)),
    "fedgmp": dict(mask_score=("magnitude", "lamp")),
    "feddip_swap": dict(mask_score=("magnitude", "lamp")),
    "fedtiny": dict(adjust_alpha=(0.2, 0.4)),
    "fedrts": dict(adjust_alpha=(0.4, 0.2)),
    "ssfl": {},
    "fedmef": dict(adjust_alpha=(0.4, 0.2)),
    "sparsyfed": {},
    "flash": {},
}
# Step sizes that papers name for these methods. SparsyFed prunes to its target in the first round. With steps below 0.1
# at 90 %, or below 0.4 at 99 %, that leaves a layer empty or nearly so: it never learns, so its second size is 0.4.
PUBLISHED: dict[str, dict[str, Any]] = {
    "sparsyfed": dict(learning_rate=0.5), "ssfl": dict(learning_rate=0.1), "flash": dict(learning_rate=0.1),
}  # fmt: skip
OWN_SIZES = {"sparsyfed": (0.5, 0.4), "ssfl": (0.1, 0.01), "flash": (0.1, 0.01)}  # the published one first
# The same model for fewer bytes, so that it needs no choice of its own.
SPARSE_UPLINK = "feddip, sparse uplink"


def cells(methods: Sequence[str] | None = None) -> Iterator[tuple[str, float | None, dict[str, Any]]]:
    """Every entrant at every target, with the settings of its paper; a dense method has no target.

    Target by target: a batch that stops early leaves one of them whole.
    """
    for s, entrant in itertools.product((None, *TARGETS), methods or [*ENTRANTS, SPARSE_UPLINK]):
        method = entrant.partition(",")[0]
        if (s is not None) == ("sparsity_target" in settings_of(method)):
            own = dict(sparse_uplink=True) if entrant == SPARSE_UPLINK else PUBLISHED.get(method, {})
            yield entrant, s, dict(method=method) | own | ({} if s is None else dict(sparsity_target=s))


def label(entrant: str, target: float | None, tuned: bool = False) -> str:
    """The name of a row."""
    return entrant + ("" if target is None else f" at {target:g}") + ", tuned" * tuned


def grid(entrant: str) -> list[dict[str, Any]]:
    """The four settings that a method is tried with; a method of your own may name the values of one as its `grid`."""
    method = entrant.partition(",")[0]
    own, sizes = ENTRANTS.get(method, getattr(class_of(method), "grid", {})), OWN_SIZES.get(method, SIZES)
    steps = itertools.product(sizes, DECAYS[:1] if own else DECAYS)
    alone = [{k: v} for k, values in own.items() for v in values] or [{}]
    return [dict(learning_rate=eta, learning_rate_decay=decay) | one for eta, decay in steps for one in alone]


def choices(dataset: str = "fashion_mnist", methods: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """The runs from which the settings are chosen: four per entrant and target."""
    return {
        f"{label(entrant, s)}, {_said(tried)}": changes | tried
        for entrant, s, changes in cells(methods or list(ENTRANTS)) for tried in grid(entrant)
    }  # fmt: skip


def _said(settings: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in settings.items())


def entries(
    dataset: str = "fashion_mnist", methods: Sequence[str] | None = None, folder: str | Path = records.OWN_RECORDS
) -> dict[str, dict[str, Any]]:
    """The runs that are reported: each cell with its paper's settings, and with those chosen, if all four are there."""
    runs = {}
    for entrant, s, changes in cells(methods):
        runs[label(entrant, s)] = changes
        tuned = chosen(entrant, changes, dataset, folder)
        if tuned is not None and tuned != _defaults(changes, tuned, dataset):
            runs[label(entrant, s, tuned=True)] = changes | tuned
    return runs


def _defaults(changes: dict[str, Any], names: dict[str, Any], dataset: str) -> dict[str, Any]:
    exp = experiment(dataset, changes)
    return {k: getattr(exp, k) for k in names}


def chosen(
    entrant: str, changes: dict[str, Any], dataset: str, folder: str | Path = records.OWN_RECORDS
) -> dict[str, Any] | None:
    """Of the four, the settings with the highest accuracy over the last five rounds; None while one is missing."""
    own = {k: v for k, v in changes.items() if k != "sparse_uplink"}  # which changes no model
    tried = grid(entrant)
    found = best([own | one for one in tried], dataset, folder)
    return None if found is None else tried[found]
