"""What the paper printed, and which runs each of our results needs.

A result is a table or figure of the paper, or a question of ours. Each of its runs has a label, the name in the table.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..experiment import Experiment
from . import beyond, choosing, league

PAPER = json.loads((Path(__file__).parent.parent / "assets" / "paper_results.json").read_text(encoding="utf-8"))
PAPER_DATA = {"fashion_mini": "fashion_mnist"}  # the data set whose numbers in the paper stand beside an embedded one
SEEDS = {"paper": (0, 1, 2), "narrow": (0,), "smoke": (0, 1)}
ONE_SEED = ("prunetrain_whole",)  # beside a grid, which is searched with the first seed alone
GRID = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # on which the paper finds two of its penalties
GRID_SHARE = 10  # a grid is searched in runs of a tenth of the rounds, with the first seed

TABLE_III = ("fedavg", "feddp", "feddip", "prunefl", "snip", "prunetrain", "feddst")
TABLE_V = ("fedavg", "fedprox", "feddip_prox")
# The methods that are also run as the released code has them. FedAvg is the same there. FedProx is FedAvg there, since
# its term is zero. SNIP's row needs no explanation.
RELEASED = ("feddp", "feddip", "feddip_prox", "prunefl", "prunetrain", "feddst")
VERSIONS = ("prunefl", "prunetrain", "feddst", "feddip_prox")  # those that are not among the switches
LONGER = "fedavg, pathological in 200 rounds of 25 epochs"  # as many steps as Table II's 1,000 rounds of 5
VERSION_OF = {f"{m}, released": m for m in VERSIONS}
SWITCHES: dict[str, dict[str, Any]] = {
    "the paper's rules": dict(rules="paper"),
    "first mask: released": dict(initial_mask="released"),
    "time of masks: released": dict(reconfigure_at="released"),
    "penalty: released": dict(lambda_schedule="released"),
    "order of masking: released": dict(regrowth="released"),
    "all four: released": dict(rules="released"),
    "dense memory": dict(regrowth="dense_memory"),
    "FedDP, the paper's rules": dict(method="feddp", rules="paper"),
    "FedDP, all four: released": dict(method="feddp", rules="released"),
    "DPF: FedDP, dense at first": dict(method="dpf"),
}
BASE = {k: f"{'FedDP, ' * ('FedDP' in k)}the paper's rules" for k in SWITCHES}
# The best value of each grid, by the statistic of its table; for PruneTrain, the best value that removes anything at
# all. If no grid was searched, the method's default stays.
FOUND: dict[str, dict[str, dict[str, float]]] = {
    "fashion_mnist": {
        "fedprox": dict(prox_mu=1e-4), "feddip_prox": dict(prox_mu=1e-4), "prunetrain": dict(lambda_max=0.01),
    },
}  # fmt: skip
# What each run of a result changes in its preset, under the name that its table gives it.
RESULTS: dict[str, Callable[[str], dict[str, dict[str, Any]]]] = {
    "accuracy": lambda dataset: {m: dict(method=m, **found(dataset, m)) for m in TABLE_III},
    "communication": lambda dataset: {m: dict(method=m, **found(dataset, m)) for m in TABLE_III},
    "non_iid": lambda dataset: {m: dict(method=m, partition="pathological", **found(dataset, m)) for m in TABLE_V},
    "layer_sparsity": lambda dataset: {m: dict(method=m) for m in ("feddip", "dpf")},
    "extreme_sparsity": lambda dataset: {f"{s:g}": dict(sparsity_target=s) for s in extreme_targets(dataset)},
    "extreme_sparsity_released": lambda dataset: {
        f"{s:g}": dict(sparsity_target=s, rules="released") for s in extreme_targets(dataset)[::2]
    },
    "paper_vs_code": lambda dataset: SWITCHES,
    "versions": lambda dataset: {
        label: changes
        for m in VERSIONS
        for label, changes in ((m, as_run(dataset, m)), (f"{m}, released", as_run(dataset, m) | dict(rules="released")))
    },
    "fedprox_grid": lambda dataset: {
        f"{mu:g}": dict(method="fedprox", partition="pathological", prox_mu=mu) for mu in GRID
    },
    "prunetrain_grid": lambda dataset: {f"{lam:g}": dict(method="prunetrain", lambda_max=lam) for lam in GRID},
    "prunetrain_whole": lambda dataset: {
        f"{lam:g}": dict(method="prunetrain", lambda_max=lam) for lam in (0.01, 0.001)
    },
}
# Not among the paper's results; most have seeds of their own.
OURS: dict[str, Callable[..., dict[str, dict[str, Any]]]] = {
    "beyond": beyond.reported, "choices": beyond.choices, "league": league.entries, "league_choices": league.choices,
    "cifar": lambda dataset: of_cifar(dataset),
}  # fmt: skip
OUR_SEEDS = {
    "beyond": beyond.SEEDS, "choices": (choosing.SEED,), "league": league.SEEDS, "league_choices": (choosing.SEED,),
}  # fmt: skip

Wanted = Mapping[str, list[Experiment]]


def wanted(result: str, preset: str, dataset: str, **options: Any) -> dict[str, list[Experiment]]:
    """The runs that a result needs: for each label of its table, one experiment per seed."""
    known = RESULTS | OURS
    if result not in known:
        raise ValueError(f"result: {result!r} is not allowed; it must be one of {', '.join(known)}")
    search, one = result.endswith("_grid"), result in ONE_SEED
    seeds = OUR_SEEDS.get(result, SEEDS[preset][:1] if search or one else SEEDS[preset])
    how = {"rounds": max(Experiment.preset(preset, dataset).rounds // GRID_SHARE, 1)} if search else {}
    how |= choosing.SELDOM if seeds == (choosing.SEED,) else {}
    return {
        label: [Experiment.preset(preset, dataset, seed=seed, **changes, **how) for seed in seeds]
        for label, changes in known[result](dataset, **options).items()
    }


def of_cifar(dataset: str) -> dict[str, dict[str, Any]]:
    """The runs that *Reproduction* shows of CIFAR, the most telling first. ResNet-18 is slow, so it has three."""
    if dataset == "cifar100":
        return {m: dict(method=m) for m in ("fedavg", "feddip", "fedgmp")}
    first = {m: dict(method=m) for m in ("fedavg", "feddip", "fedgmp")}
    first["feddip, released"] = dict(method="feddip", rules="released")
    first |= {f"{m}, pathological": dict(method=m, partition="pathological") for m in TABLE_V}
    first[LONGER] = dict(method="fedavg", partition="pathological", local_epochs=25, rounds=200)
    rest = {m: dict(method=m) for m in ("dpf", "feddp", "prunefl", "snip", "prunetrain", "feddst")}
    far = (("feddip", 0.99), ("fedgmp", 0.99), ("feddip", 0.95))
    return first | rest | {f"{m} at {s:g}": dict(method=m, sparsity_target=s) for m, s in far}


def as_run(dataset: str, method: str) -> dict[str, Any]:
    """The settings with which a method runs for its table."""
    partition = {} if method in TABLE_III else dict(partition="pathological")
    return dict(method=method, **partition, **found(dataset, method))


def found(dataset: str, method: str) -> dict[str, float]:
    """The penalty that the grid search gave a method."""
    return FOUND.get(dataset, {}).get(method, {})


def as_released(experiments: list[Experiment]) -> list[Experiment]:
    """The same runs by the released code. Empty if the method has no released version here."""
    return [exp.replace(rules="released") for exp in experiments if exp.method in RELEASED]


def of_paper(table: str, dataset: str) -> dict:
    """One of the paper's tables for a data set. Entries that the paper leaves open are left out."""
    return {k: v for k, v in PAPER[table][PAPER_DATA.get(dataset, dataset)].items() if v is not None}


def extreme_targets(dataset: str) -> list[float]:
    """The targets of Figure 6."""
    return PAPER["extreme_sparsity"]["sparsity_targets"][PAPER_DATA.get(dataset, dataset)]


def scale(wanted: Wanted) -> str:
    """What is run, and whether it can be compared with the paper's numbers."""
    exp = next(iter(wanted.values()))[0]
    differs, note = exp.differences_from_paper(), reduced(wanted)
    verdict = f"not the paper's: {', '.join(differs)}" if differs else "every setting is the paper's"
    verdict = note if "dataset" in differs else "; ".join(filter(None, [verdict, note]))
    verdict += f"; tested every {exp.evaluate_every} rounds, and in the last five" * (exp.evaluate_every > 1)
    return f"{exp.model} on {exp.dataset}, T = {exp.rounds}, N = {exp.clients}, K = {exp.clients_per_round}; {verdict}."


def reduced(wanted: Wanted) -> str:
    """How the runs are smaller than the paper's, shown wherever both are. Empty if they are not."""
    exp = next(iter(wanted.values()))[0]
    full = exp.differences_from_paper()
    if "dataset" in full:
        return "a toy: do not compare it with the paper"
    words = {"width": "width", "rounds": "T", "local_epochs": "E"}
    less = [f"{word} = {getattr(exp, k):g} instead of {full[k]:g}" for k, word in words.items() if k in full]
    return f"reduced: {', '.join(less)}" if less else ""
