"""Every number of the paper beside ours and the released code's, and the tables that README makes of them."""

from pathlib import Path

import pandas as pd

from ..experiment import Experiment
from ..method import METHODS
from ..methods.released.billing import MEBI
from ..methods.released.feddip import lambda_in_twenty
from ..schedules import lambda_at, reconfiguration_time, sparsity_at
from .tables import (
    BITS,
    RELEASED_MEBIBITS,
    STATISTICS,
    at_budget,
    beside_paper,
    budget_mebibits,
    final_zeros,
    find,
    layout,
    of_runs,
    of_seeds,
    of_tables,
    over_seeds,
    same_seeds,
    worth,
)
from .verdicts import range_of
from .wanted import (
    BASE,
    PAPER,
    PAPER_DATA,
    RELEASED,
    RESULTS,
    TABLE_III,
    TABLE_V,
    VERSION_OF,
    Wanted,
    as_released,
    of_paper,
    reduced,
    wanted,
)

# The paper's tables: the runs behind each, its numbers, and the statistic to set beside them.
TABLES = {
    "Table III": ("accuracy", "accuracy_iid", "last five"),
    "Table IV": ("communication", "accuracy_at_communication_budget", "at the budget"),
    "Table V": ("non_iid", "accuracy_non_iid", "highest five"),
}


def label(method: str) -> str:
    """The method's name in a table."""
    return METHODS[method].label


def compared(folder: str | Path, dataset: str = "fashion_mnist", preset: str = "paper") -> pd.DataFrame:
    """One row per number of the paper's tables: its own, ours, and the released code's where that differs.

    IID: mean of the last five rounds. At the budget: the last round within it, as the released code counts.
    Pathological: mean of the highest five, as in the paper. Figure 6: the accuracy that its last target costs FedDIP.
    """
    rows = {}
    for table, (result, printed, statistic) in TABLES.items():
        paper = of_paper(printed, dataset)
        for method, own in wanted(result, preset, dataset).items():
            value = paper.get(method)
            mean, std = value if isinstance(value, list) else (value, None)
            sides = [_of_seeds(runs, folder, statistic) for runs in (own, as_released(own))]
            rows[table, method] = {"paper": mean, "paper_std": std, **_summary(*sides)}
    sides = []
    for result in ("extreme_sparsity", "extreme_sparsity_released"):
        first, *_, last = wanted(result, preset, dataset).values()
        sides.append(_of_seeds(last, folder, "last five") - _of_seeds(first, folder, "last five"))
    drop = PAPER["extreme_sparsity"]["largest_accuracy_drop_points"][PAPER_DATA.get(dataset, dataset)]
    rows["Figure 6", "feddip"] = {"paper": -drop, "paper_std": None, **_summary(*sides)}
    table = pd.DataFrame(rows).T.astype(float)
    table.attrs["reduced"] = reduced(wanted("accuracy", preset, dataset)) or None  # what is made of it says so too
    return table


def _of_seeds(experiments: list[Experiment], folder: str | Path, statistic: str) -> pd.Series:
    """A run's statistic for each of these runs that is finished, by its seed."""
    rounds, _ = find({"one": experiments}, folder)
    if statistic in STATISTICS:
        return of_runs(rounds)[statistic].droplevel("label")
    budget = budget_mebibits(experiments[0]) if experiments else 0.0
    return at_budget(rounds, budget, RELEASED_MEBIBITS)["test_accuracy"].droplevel("label")


def _summary(ours: pd.Series, released: pd.Series) -> dict:
    """mean, std and n over the seeds, and the value of each seed, on both sides."""
    summary = {}
    for side, own in {"": ours.dropna(), "released_": released.dropna()}.items():
        values = {"mean": own.mean(), "std": own.std(), "n": len(own)} | {f"seed {s}": v for s, v in own.items()}
        summary |= {f"{side}{k}": v for k, v in values.items()}
    return summary


def seeds_of(table: pd.DataFrame, side: str = "") -> pd.DataFrame:
    """The value of every seed, for each row of `compared`."""
    return table.filter(regex=f"^{side}seed ").rename(columns=lambda name: name.removeprefix(side))


def for_figure(wanted: Wanted, rounds: pd.DataFrame, folder: str | Path, statistic: str) -> tuple:
    """For the seeds that all runs share: the rounds, ours, the released code's (None without a record), the seeds."""
    others = {m: as_released(own) for m, own in wanted.items() if m in RELEASED}
    versions, _ = find(others, folder)
    seeds = same_seeds(rounds, versions)
    own = of_seeds(rounds, seeds)
    ours = over_seeds(of_runs(own)[statistic], wanted)
    released = over_seeds(of_runs(of_seeds(versions, seeds))[statistic], others)
    return own, ours, released if released["n"].any() else None, seeds


def moves(folder: str | Path, dataset: str = "fashion_mnist", preset: str = "paper") -> pd.DataFrame:
    """What each switch, and each released version, is worth: the gain in accuracy, judged."""
    switched = {name: base for name, base in BASE.items() if name != base}
    tables = []
    for result, base in (("paper_vs_code", switched), ("versions", VERSION_OF)):
        rounds, _ = find(wanted(result, preset, dataset), folder)
        tables.append(worth(of_tables(of_runs(rounds)), base))
    return pd.concat(tables)


def whole_cost(wanted: Wanted, rounds: pd.DataFrame) -> pd.DataFrame:
    """Megabytes that a whole run sends, both ways, by the exact count, and their share of FedAvg's."""
    sent = (rounds[BITS].sum(axis=1) / 8e6).groupby([rounds["label"], rounds["seed"]], sort=False).sum()
    table = over_seeds(sent, wanted)[["mean", "n"]].rename(columns={"mean": "MB"})
    return table.assign(share=table["MB"] / table.loc["fedavg", "MB"]).rename_axis(columns=reduced(wanted) or None)


def stops(rounds: pd.DataFrame, budget: float) -> pd.DataFrame:
    """Per run: accuracy and round at the budget (in mebibits), by the released count and by the exact one."""
    counts = {"released count": (budget, RELEASED_MEBIBITS), "exact count": (budget * MEBI, BITS)}
    found = {name: at_budget(rounds, *own) for name, own in counts.items()}
    accuracies = {name: own["test_accuracy"] for name, own in found.items()}
    return pd.DataFrame(accuracies | {f"round, {name}": own["round"] for name, own in found.items()})


def at_budget_beside_paper(wanted: Wanted, stops: pd.DataFrame, paper: dict) -> pd.DataFrame:
    """Table IV: `stops` as mean ± std beside the paper's values, with the mean round of each stop."""
    counts = [name for name in stops if not name.startswith("round, ")]
    table = beside_paper(wanted, stops[counts], paper)
    for i, name in enumerate(counts):
        table.insert(2 * i + 1, f"round, {name}", stops[f"round, {name}"].groupby("label").mean().round())
    return table


def schedules_of(exp: Experiment) -> pd.DataFrame:
    """The paper's schedules and the released code's: how many masks, the last sparsity, and λ at three rounds."""
    T, R = exp.rounds, exp.reconfigure_every
    times = {"paper": [tau for t in range(T) if (tau := reconfiguration_time(t, R))], "released": list(range(0, T, R))}
    lam = {"paper": lambda t: lambda_at(t, T, exp.lambda_max, exp.lambda_steps),
           "released": lambda t: lambda_in_twenty(t, T, exp.lambda_max)}  # fmt: skip
    rows = {}
    for rules, own in times.items():
        last = sparsity_at(own[-1], T, exp.sparsity_initial, exp.sparsity_target)
        rounds = {"first λ": 0, "middle λ": T // 2, "last λ": T - 1}
        rows[rules] = {"masks": len(own), "last s": last} | {k: lam[rules](t) for k, t in rounds.items()}
    return pd.DataFrame(rows).T


def switched(wanted: Wanted, accuracies: pd.DataFrame) -> pd.DataFrame:
    """Per set of rules: accuracy, what the change is worth, judged, and how many weights came back."""
    worths = worth(accuracies["last five"], {label: base for label, base in BASE.items() if label != base})
    table = beside_paper(wanted, accuracies[list(STATISTICS)], {}).iloc[:, :-1]
    table["worth"], table["pairs"] = worths.apply(range_of, axis=1), worths["n"]
    table["verdict"] = worths["verdict"]
    table["came back"] = accuracies["regrown"].groupby("label").mean()
    return table.astype(object).fillna("")


def as_published_and_released(wanted: Wanted, rounds: pd.DataFrame, paper: dict) -> pd.DataFrame:
    """Each baseline in both versions: accuracy, the paper's value, what the version is worth, and its sparsity."""
    values = of_tables(of_runs(rounds))
    table = beside_paper(wanted, values.to_frame("accuracy"), paper)
    worths = worth(values, VERSION_OF)
    table["worth"], table["verdict"] = worths.apply(range_of, axis=1), worths["verdict"]
    size = layout(next(iter(wanted.values()))[0]).prunable_size
    table["final sparsity"] = (final_zeros(rounds) / size).groupby("label").mean().round(3)
    return table.astype(object).fillna("").rename(index=lambda k: "… released code" if k in VERSION_OF else label(k))


def thirty_rounds(folder: str | Path) -> pd.DataFrame:
    """Every method of the paper on Fashion-MNIST, seed 0, 30 rounds instead of 1,000: that it works, and no more."""
    rows = {}
    for split, methods in {"IID": (*TABLE_III, "fedprox", "feddip_prox", "dpf"), "pathological": TABLE_V}.items():
        own = {m: [Experiment.preset("paper", method=m, partition=split.lower(), rounds=30)] for m in methods}
        for method, rounds in find(own, folder)[0].groupby("label", sort=False):
            last, sent = rounds.iloc[-1], rounds[BITS].to_numpy().sum() / 8e6
            cells = {"test accuracy": f"{last['test_accuracy']:.3f}", "sparsity": f"{last['sparsity']:.3f}"}
            rows[split, label(method)] = cells | {"MB sent, both ways": f"{sent:.1f}", "record": last["run_id"]}
    return pd.DataFrame(rows).T.rename_axis(["split", "method"]) if rows else pd.DataFrame()


def effort(folder: str | Path, dataset: str = "fashion_mnist", preset: str = "paper") -> str:
    """How many runs all results need, how many of them the folder has, and how long these took."""
    tables = [wanted(result, preset, dataset) for result in RESULTS]
    every = {exp.run_id: exp for table in tables for own in table.values() for exp in own}
    rounds, _ = find({"all": list(every.values())}, folder)
    done, hours = rounds["run_id"].nunique(), rounds["seconds"].sum() / 3600
    return f"All results need {len(every)} runs. {done} of them are done and took {hours:.1f} hours, one core per run."
