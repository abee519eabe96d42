"""Beyond the paper: the runs from which our own settings are chosen, and those that are reported.

The choice is made with a seed that is never reported: per target, the best of the runs that try it. Until all of them
have a record, the choice is open, and so are the runs that rest on it.
"""

from pathlib import Path
from typing import Any

from ..engine import records
from ..experiment import Experiment
from .choosing import best, experiment

SEEDS = (1, 2, 3)
TARGETS = (0.9, 0.95, 0.99)
Changes = dict[str, Any]


def steps(size: float = 0.01, decay: float = 0.9995) -> Changes:
    """The first step size, and its decay. Table II's, 0.998, leaves an eighth of it at the end."""
    return dict(learning_rate=size, learning_rate_decay=decay)


SWAPS = dict(method="feddip_swap", mask_score="lamp", prune_end=500, **steps())
GRADUAL = dict(method="fedgmp", mask_score="lamp", prune_end=800, **steps())
NO_SWAPS, MIDDLE, LARGE = dict(method="fedgmp"), steps(0.03, 0.999), steps(0.05, 0.999)

# What is tried: per target a base, and changes of it. Runs of 150 rounds with seed 11, which is never reported, showed
# where to look: at 99 % the step size is worth more than all else together. The last candidate at 99 % was added when
# the others had ended, since the largest steps had won.
TRIED: dict[float, tuple[Changes, dict[str, Changes]]] = {
    0.99: (SWAPS, {
        "steps of 0.02": steps(0.02),
        "steps of 0.02, decay 0.999": steps(0.02, 0.999),
        "steps of 0.03, decay 0.999": MIDDLE,
        "steps of 0.05, decay 0.998": steps(0.05, 0.998),
        "steps of 0.05, decay 0.999": LARGE,
        "steps of 0.05, decay 0.999, no swaps": LARGE | NO_SWAPS,
        "steps of 0.05, decay 0.999, half swapped": LARGE | dict(adjust_alpha=0.5),
        "steps of 0.05, decay 0.999, a mask every 20 rounds": LARGE | dict(reconfigure_every=20),
        "steps of 0.05, decay 0.998, swaps until 950": steps(0.05, 0.998) | dict(adjust_until=950),
        "steps of 0.03, decay 0.999, pruned by 300": MIDDLE | dict(prune_end=300),
        "steps of 0.05, decay 0.999, pruned by 300": LARGE | dict(prune_end=300),
        "steps of 0.05, decay 0.999, pruned by 300, swaps every 10 rounds until 950": LARGE
        | dict(prune_end=300, swap_every=10, adjust_until=950),
        "steps of 0.1, decay 0.999, pruned by 300": steps(0.1, 0.999) | dict(prune_end=300),
    }),
    0.95: (SWAPS, {
        "steps of 0.02, decay 0.999": steps(0.02, 0.999),
        "steps of 0.05, decay 0.998": steps(0.05, 0.998),
        "steps of 0.02, decay 0.999, pruned by 600, no swaps": steps(0.02, 0.999) | NO_SWAPS | dict(prune_end=600),
    }),
    0.9: (GRADUAL, {
        "pruned by 600": dict(prune_end=600),
        "pruned by 700, swaps": dict(method="feddip_swap", prune_end=700),
        "steps of 0.02, decay 0.998": steps(0.02, 0.998),
        "steps of 0.02, decay 0.999": steps(0.02, 0.999),
        "steps of 0.03, decay 0.998": steps(0.03, 0.998),
    }),
}  # fmt: skip


def choices(dataset: str = "fashion_mnist") -> dict[str, Changes]:
    """At most 24 runs: per target the base, and each change of it."""
    return {
        f"{s:.0%}{name and f', {name}'}": dict(sparsity_target=s) | base | change
        for s, (base, changes) in TRIED.items() for name, change in {"": {}, **changes}.items()
    }  # fmt: skip


def candidates(s: float) -> dict[str, Changes]:
    """The runs from which the best at this target is chosen."""
    return {name: changes for name, changes in choices().items() if changes.get("sparsity_target") == s}


def chosen(s: float, dataset: str = "fashion_mnist", folder: str | Path = records.OWN_RECORDS) -> Changes | None:
    """Our best at this target; None while a candidate has no record."""
    tried = list(candidates(s).values())
    found = best(tried, dataset, folder)
    return None if found is None else tried[found]


def at(s: float, **changes: Any) -> Changes:
    """Changes with this target."""
    return dict(sparsity_target=s) | changes


def reported(dataset: str = "fashion_mnist", folder: str | Path = records.OWN_RECORDS) -> dict[str, Changes]:
    """The runs that are reported, the most telling first.

    Before the choice 16 per seed, so 48: the league wants 21 of them too, the tables of the paper 8 others. The choice
    adds our best at three targets and on the other split, FedAvg and FedDIP with its step sizes, and each of its
    ingredients alone: at most 16 per seed.
    """
    ours = {s: own for s in TARGETS if (own := chosen(s, dataset, folder))}
    feddip = {"FedDIP": dict(method="feddip"), "FedDIP, released": dict(method="feddip", rules="released")}
    split, bits = dict(partition="pathological"), dict(value_bits=16)
    runs = {f"best, {s:.0%}": ours[s] for s in (0.99, 0.9, 0.95) if s in ours}
    runs |= {"FedAvg": dict(method="fedavg")}
    runs |= {f"FedGMP, {s:.0%}": at(s, method="fedgmp") for s in (0.99, 0.9, 0.95)}
    runs |= {f"FedDIP, {s:.0%}": at(s, method="feddip") for s in (0.99, 0.9)}
    # Both sides of a comparison take steps of the same size, from the first round to the last.
    for s, own in ((s, experiment(dataset, ours[s])) for s in (0.99, 0.9) if s in ours):
        alike, end = steps_of(own), said(own)
        runs |= {f"{name}, {s:.0%}{end}": at(s, **rules, **alike) for name, rules in feddip.items()}
        runs |= {f"FedAvg{end}": dict(method="fedavg", **alike)}
    runs |= {f"FedGMP, 99%, {name} alone": own for name, own in ingredients(ours.get(0.99)).items()}
    runs |= {f"FedDIP, released, {s:.0%}": at(s, **feddip["FedDIP, released"]) for s in (0.99, 0.9)}
    runs |= {f"FedDIP, sparse uplink, {s:.0%}": at(s, method="feddip", sparse_uplink=True) for s in (0.9, 0.99)}
    dense_and_sparse = {"FedGMP, 90%": at(0.9, method="fedgmp"), "FedAvg": dict(method="fedavg")}
    runs |= {f"{name}, pathological": own | split for name, own in dense_and_sparse.items()}
    if 0.9 in ours:
        own = experiment(dataset, ours[0.9])
        runs |= {"best, 90%, pathological": ours[0.9] | split}
        runs |= {f"FedAvg{said(own)}, pathological": dict(method="fedavg", **steps_of(own)) | split}
    dense_and_sparse |= {"FedDIP, 90%": at(0.9, method="feddip")}
    runs |= {f"{name}, 16 bits": own | bits for name, own in dense_and_sparse.items()}
    runs |= {"FedDIP, 95%": at(0.95, method="feddip")}
    return runs


def steps_of(exp: Experiment) -> Changes:
    """A run's step size and its decay."""
    return steps(exp.learning_rate, exp.learning_rate_decay)


def said(exp: Experiment) -> str:
    """The end of the labels of runs with the step size of this one."""
    return f", steps of {exp.learning_rate:g}, decay {exp.learning_rate_decay:g}"


# What may tell our best from FedGMP as it is: an ingredient's name, and its settings.
INGREDIENTS = {
    "LAMP": ("mask_score",),
    "the decay": ("learning_rate_decay",),
    "the step size": ("learning_rate",),
    "the end of pruning": ("prune_end",),
    "the rounds between masks": ("reconfigure_every",),
    "swaps": ("method", "swap_every", "adjust_alpha", "adjust_until"),
}


def ingredients(ours: Changes | None, dataset: str = "fashion_mnist") -> dict[str, Changes]:
    """FedGMP at 99 % with one ingredient of our best; none while the best is not chosen."""
    if ours is None:
        return {}
    plain = at(0.99, method="fedgmp")
    base = experiment(dataset, plain)
    found = {}
    for name, settings in INGREDIENTS.items():
        own = {k: ours[k] for k in settings if k in ours}
        if any(getattr(base, k, None) != v for k, v in own.items()):
            found[name] = plain | own
    return found
