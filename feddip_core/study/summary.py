"""Every number of the paper beside ours and the released code's, and the tables that README makes of them."""

from pathlib import Path

import pandas as pd

from ..experiment import Experiment
from ..method import METHODS
from .tables import (
    RELEASED_MEBIBITS,
    STATISTICS,
    at_budget,
    budget_mebibits,
    final_zeros,
    find,
    layout,
    of_runs,
    of_tables,
    over_seeds,
    shown,
    signed,
    worth,
)
from .wanted import (
    BASE,
    PAPER,
    PAPER_DATA,
    RELEASED,
    RESULTS,
    SEEDS,
    TABLE_III,
    TABLE_V,
    VERSION_OF,
    as_released,
    of_paper,
    scale,
    wanted,
)

# The paper's tables: the runs behind each, its numbers, and the statistic to set beside them.
TABLES = {
    "Table III": ("accuracy", "accuracy_iid", "last five"),
    "Table IV": ("communication", "accuracy_at_communication_budget", "at the budget"),
    "Table V": ("non_iid", "accuracy_non_iid", "highest five"),
}
MISS = 0.5  # points: what is nearer to the paper's value counts as reproduced


def label(method: str) -> str:
    """The method's name in a table."""
    return METHODS[method].label


def compared(folder: str | Path, dataset: str = "fashion_mnist", preset: str = "paper") -> pd.DataFrame:
    """A row for each number of the paper's tables: its own, ours, and the released code's where that differs.

    IID: mean of the last five rounds. At the budget: the last round within it, as the released code counts.
    Pathological: mean of the highest five, as in the paper. The row of Figure 6 is what its last target costs FedDIP.
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
    return pd.DataFrame(rows).T.astype(float)


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
    """Of each row of `compared` the value of every seed."""
    return table.filter(regex=f"^{side}seed ").rename(columns=lambda name: name.removeprefix(side))


def headline(table: pd.DataFrame) -> str:
    """README's table: the paper, ours under its rules and by the released code, and the differences, as Markdown."""
    lines = ["| method | split | paper | ours, the paper's rules | difference | n | ours, the released code | "
             "difference | n |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for (name, method), row in table.loc[["Table III", "Table V"]].iterrows():
        split = "pathological" if name == "Table V" else "IID"
        cells = [label(method), split, shown(row["paper"], row["paper_std"])]
        for side in ("", "released_") if method in RELEASED else ("",):
            mean, std, n = row[[f"{side}mean", f"{side}std", f"{side}n"]]
            cells += [shown(mean, std), signed(mean - row["paper"]), f"{n:.0f}"]
        lines.append(f"| {' | '.join(cells + [''] * (9 - len(cells)))} |")
    return "\n".join(lines)


def missed(table: pd.DataFrame) -> pd.DataFrame:
    """The rows in which ours is further from the paper's than MISS."""
    return table[(table["mean"] - table["paper"]).abs() > MISS]


def explained(row: pd.Series) -> str:
    """Whether the version explains a miss: the released code meets the paper's number, comes nearer, or does not."""
    if row.name[1] not in RELEASED:
        return "unknown"
    ours, released = row["mean"] - row["paper"], row["released_mean"] - row["paper"]
    if pd.isna(released):
        return "not run yet"
    if abs(released) > MISS and ours * released < 0:
        return "beyond it"
    return "yes" if abs(released) <= MISS else "in part" if abs(released) < abs(ours) else "no"


def misses(table: pd.DataFrame) -> str:
    """What did not reproduce, and whether the released code does, as Markdown."""
    lines = ["| | paper | ours, the paper's rules | difference | ours, the released code | difference | explained |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for (name, method), row in missed(table).iterrows():
        cells = [f"{name}: {label(method)}", shown(row["paper"])]
        for side in ("", "released_"):
            here = not side or method in RELEASED
            cells += [shown(row[f"{side}mean"]), signed(row[f"{side}mean"] - row["paper"])] if here else ["", ""]
        lines.append(f"| {' | '.join(cells)} | {explained(row)} |")
    return "\n".join(lines)


def reversed_order(paper: pd.Series, ours: pd.DataFrame) -> dict[tuple[str, str], float]:
    """The pairs that ours has the other way round than the paper, (above in ours, above in the paper), and by how much:
    a mean over the seeds that both have.
    """
    gaps = {(a, b): (ours.loc[a] - ours.loc[b]).mean() for a in paper.index for b in paper.index if paper[a] < paper[b]}
    return {pair: gap for pair, gap in gaps.items() if gap > 0}


def orders(table: pd.DataFrame) -> str:
    """The pairs in another order than the paper's, under its rules and by the released code, as Markdown."""
    lines = []
    for name in TABLES:
        own = table.loc[name]
        ours, released = seeds_of(own), seeds_of(own, "released_")
        switched = pd.DataFrame({m: (released if m in RELEASED else ours).loc[m] for m in own.index}).T
        for rules, values in (("the paper's rules", ours), ("the released code", switched)):
            above: dict[str, list[str]] = {}
            for (a, b), gap in reversed_order(own["paper"], values).items():
                above.setdefault(a, []).append(f"{label(b)} (by {gap:.2f})")
            pairs = "; ".join(f"{label(a)} above {', '.join(b)}" for a, b in above.items())
            rest = ", as far as there are runs" if values.isna().all(axis=1).any() else ""
            lines.append(f"- {name}, {rules}: {pairs or 'none'}{rest}.")
    return "\n".join(lines)


def moves(folder: str | Path, dataset: str = "fashion_mnist", preset: str = "paper") -> pd.DataFrame:
    """What each switch, and each released version, is worth: mean, std and n of the gain in accuracy."""
    switched = {name: base for name, base in BASE.items() if name != base}
    tables = []
    for result, base in (("paper_vs_code", switched), ("versions", VERSION_OF)):
        rounds, _ = find(wanted(result, preset, dataset), folder)
        tables.append(worth(of_tables(of_runs(rounds)), base))
    return pd.concat(tables)


def moved(folder: str | Path) -> str:
    """What each single change is worth, as Markdown."""
    lines = ["| changed | worth, points | n |", "|---|---|---|"]
    names = tuple(METHODS[m].label for m in (*TABLE_III, *TABLE_V, "dpf"))
    for change, row in moves(folder).iterrows():
        name = f"{label(VERSION_OF[change])}: the released code" if change in VERSION_OF else change
        name = name if name.startswith(names) else f"FedDIP, {name}"
        lines.append(f"| {name} | {signed(row['mean'], row['std'])} | {row['n']:.0f} |")
    return "\n".join(lines)


def both_splits(folder: str | Path, dataset: str, preset: str = "laptop") -> pd.DataFrame:
    """Tables III's and V's methods on both partitions: mean, std and n of each table's statistic, and final zeros."""
    rows = {}
    for method in dict.fromkeys(TABLE_III + TABLE_V):
        for split, statistic in (("iid", "last five"), ("pathological", "highest five")):
            own = [Experiment.preset(preset, dataset, method, partition=split, seed=s) for s in SEEDS[preset]]
            rounds, _ = find({method: own}, folder)
            zeros = final_zeros(rounds).mean() / layout(own[0]).prunable_size
            runs = of_runs(rounds)
            rows[method, split] = over_seeds(runs[statistic], [method]).loc[method].to_dict() | {
                "last": runs["last five"].mean(),
                "sparsity": zeros,
            }
    return pd.DataFrame(rows).T.astype(float)


def splits_shown(folder: str | Path, dataset: str, preset: str = "laptop") -> str:
    """The runs of reduced size, as Markdown that says so. The paper's values are those of full size."""
    lines = [
        f"*{scale(wanted('accuracy', preset, dataset))}*\n",
        "| method | IID | n | pathological | last five | n | sparsity | paper, full size: IID | pathological |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    full = [of_paper(table, dataset) for table in ("accuracy_iid", "accuracy_non_iid")]
    table = both_splits(folder, dataset, preset)
    for method in table.index.unique(0):
        iid, non_iid = table.loc[(method, "iid")], table.loc[(method, "pathological")]
        sparsity = non_iid["sparsity"] if pd.isna(iid["sparsity"]) else iid["sparsity"]
        cells = [label(method), shown(iid["mean"], iid["std"]), f"{iid['n']:.0f}"]
        cells += [shown(non_iid["mean"], non_iid["std"]), shown(non_iid["last"]), f"{non_iid['n']:.0f}"]
        cells += [shown(sparsity), *(shown(*paper.get(method, [float("nan")])) for paper in full)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def effort(folder: str | Path, dataset: str = "fashion_mnist", preset: str = "paper") -> str:
    """How many runs all results need, how many of them the folder has, and what these took."""
    tables = [wanted(result, preset, dataset) for result in RESULTS]
    every = {exp.run_id: exp for table in tables for own in table.values() for exp in own}
    rounds, _ = find({"all": list(every.values())}, folder)
    done, hours = rounds["run_id"].nunique(), rounds["seconds"].sum() / 3600
    return f"{len(every)} runs, of which {done} are there and took {hours:.1f} hours by the clock, one core each"
