"""From records to the paper's tables and figures: what it printed, which runs each result needs, what they gave.

A run is found by its run_id, so that a record with other settings can never stand in for it; one that was computed in
another way, such as on a GPU, may. Accuracies are in percent here, as in the paper; sparsities stay fractions of zeros.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pandas as pd
import torch

from . import masks, models
from .communication import BITS_PER_WEIGHT, MEBI
from .experiment import CLASSES, HOW, Experiment
from .plots import NAMES
from .records import load_run

PAPER = json.loads((Path(__file__).parent / "assets" / "paper_results.json").read_text())
PAPER_DATA = {"fashion_mini": "fashion_mnist"}  # whose numbers of the paper stand beside an embedded data set
SEEDS = {"paper": (0, 1, 2), "laptop": (0, 1, 2), "smoke": (0, 1)}
ONE_SMOKE_SEED = ("accuracy", "communication", "paper_vs_code", "versions")  # many runs, in about a minute
GRID = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # on which the paper finds two of its penalties
GRID_SHARE = 10  # a grid is searched in runs of a tenth of the rounds, with the first seed
AUTHORS_MEBIBITS = ["downlink_mebibits_authors", "uplink_mebibits_authors"]
BITS = ["downlink_bits", "uplink_bits"]

TABLE_III = ("fedavg", "feddp", "feddip", "prunefl", "snip", "prunetrain", "feddst")
TABLE_V = ("fedavg", "fedprox", "feddip_prox")
# What turns our run of a method into one by its authors' code. FedAvg is the same there; FedProx is FedAvg, since its
# term is zero; SNIP's row needs no explanation.
AUTHORS = {m: dict(rules="authors") for m in ("feddp", "feddip", "feddip_prox")} | {
    m: dict(variant="authors") for m in ("prunefl", "prunetrain", "feddst")
}
VERSIONS = ("prunefl", "prunetrain", "feddst", "feddip_prox")  # those that are not among the switches
VERSION_OF = {f"{m}, authors": m for m in VERSIONS}
SWITCHES = {
    "the paper's rules": dict(rules="paper"),
    "first mask: authors": dict(initial_mask="authors"),
    "time of masks: authors": dict(reconfigure_at="authors"),
    "penalty: authors": dict(lambda_schedule="authors20"),
    "order of masking: authors": dict(regrowth="authors"),
    "all four: authors": dict(rules="authors"),
    "dense memory": dict(regrowth="dense_memory"),
    "FedDP, the paper's rules": dict(method="feddp", rules="paper"),
    "FedDP, all four: authors": dict(method="feddp", rules="authors"),
    "DPF: FedDP, dense at first": dict(method="dpf"),
}
BASE = {k: f"{'FedDP, ' * ('FedDP' in k)}the paper's rules" for k in SWITCHES}
# The best of each grid, by the statistic of its table; of PruneTrain's, the best that removes anything at all.
# Where none was searched, the method's default stands.
FOUND = {
    "fashion_mnist": {
        "fedprox": dict(prox_mu=1e-4), "feddip_prox": dict(prox_mu=1e-4), "prunetrain": dict(lambda_max=0.01),
    },
}  # fmt: skip
# What each run of a result changes in its preset, under the name that its table gives it.
RESULTS = {
    "accuracy": lambda dataset: {m: dict(method=m, **found(dataset, m)) for m in TABLE_III},
    "communication": lambda dataset: {m: dict(method=m, **found(dataset, m)) for m in TABLE_III},
    "non_iid": lambda dataset: {m: dict(method=m, partition="pathological", **found(dataset, m)) for m in TABLE_V},
    "layer_sparsity": lambda dataset: {m: dict(method=m) for m in ("feddip", "dpf")},
    "extreme_sparsity": lambda dataset: {f"{s:g}": dict(sparsity_target=s) for s in extreme_targets(dataset)},
    "extreme_sparsity_authors": lambda dataset: {
        f"{s:g}": dict(sparsity_target=s, rules="authors") for s in extreme_targets(dataset)[::2]
    },
    "paper_vs_code": lambda dataset: SWITCHES,
    "versions": lambda dataset: {
        label: changes
        for m in VERSIONS
        for label, changes in ((m, as_run(dataset, m)), (f"{m}, authors", as_run(dataset, m) | AUTHORS[m]))
    },
    "fedprox_grid": lambda dataset: {
        f"{mu:g}": dict(method="fedprox", partition="pathological", prox_mu=mu) for mu in GRID
    },
    "prunetrain_grid": lambda dataset: {f"{lam:g}": dict(method="prunetrain", lambda_max=lam) for lam in GRID},
}
# The paper's tables: the runs behind each, its numbers, and the statistic to set beside them.
TABLES = {
    "Table III": ("accuracy", "accuracy_iid", "last five"),
    "Table IV": ("communication", "accuracy_at_communication_budget", "at the budget"),
    "Table V": ("non_iid", "accuracy_non_iid", "highest five"),
}
MISS = 0.5  # points: what is nearer to the paper's value counts as reproduced
STATISTICS = {
    "last round": lambda accuracy: accuracy.iloc[-1],
    "last five": lambda accuracy: accuracy.tail(5).mean(),
    "highest five": lambda accuracy: accuracy.nlargest(5).mean(),
}

Wanted = Mapping[str, list[Experiment]]
# The rounds of no run at all: with these columns tables come out empty instead of failing.
_EMPTY = pd.DataFrame(
    {c: pd.Series(dtype=str) for c in ("label", "run_id", "layer_zeros")} | {"seed": pd.Series(dtype=int)}
).assign(
    **{
        c: pd.Series(dtype=float)
        for c in ("round", "test_accuracy", "diverged", "sparsity", "regrown", "seconds", *BITS, *AUTHORS_MEBIBITS)
    }
)


def wanted(result: str, preset: str, dataset: str) -> dict[str, list[Experiment]]:
    """The runs that a result needs: under each name in its table, one experiment a seed."""
    if result not in RESULTS:
        raise ValueError(f"result: {result!r} is not allowed; it must be one of {', '.join(RESULTS)}")
    search = result.endswith("_grid")
    seeds = SEEDS[preset][:1] if search or (preset == "smoke" and result in ONE_SMOKE_SEED) else SEEDS[preset]
    short = {"rounds": max(Experiment.preset(preset, dataset).rounds // GRID_SHARE, 1)} if search else {}
    return {
        label: [Experiment.preset(preset, dataset, seed=seed, **changes, **short) for seed in seeds]
        for label, changes in RESULTS[result](dataset).items()
    }


def as_run(dataset: str, method: str) -> dict:
    """How a method is run for the table that it stands in."""
    partition = {} if method in TABLE_III else dict(partition="pathological")
    return dict(method=method, **partition, **found(dataset, method))


def found(dataset: str, method: str) -> dict:
    """The penalty that the grid gave to a method."""
    return FOUND.get(dataset, {}).get(method, {})


def searched(result: str, preset: str, dataset: str, folder: str | Path, statistic: str) -> pd.DataFrame:
    """A row for each value of a grid: accuracy in percent, and the fraction of zeros at the end."""
    grid = wanted(result, preset, dataset)
    rounds, _ = find(grid, folder)
    n_w = layers(next(iter(grid.values()))[0])["size"].sum()
    table = pd.DataFrame({statistic: of_runs(rounds)[statistic], "final sparsity": final_zeros(rounds) / n_w})
    return table.groupby("label").first().reindex(list(grid))


def find(wanted: Wanted, folder: str | Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rounds of every finished run, with its `label`; and of all that are wanted, how far each has come."""
    found, states, others = [], [], _by_experiment(Path(folder))
    for label, exps in wanted.items():
        for exp in exps:
            record = Path(folder) / exp.run_id
            record = record if record.exists() else others.get(exp.on_any_machine().run_id, record)
            state, rows = _read(exp, record)
            states.append({"label": label, "seed": exp.seed, "run_id": record.name, "state": state})
            if state == "finished" or state.startswith("diverged"):
                found.append(rows.assign(label=label))
    return pd.concat(found, ignore_index=True) if found else _EMPTY, pd.DataFrame(states)


def _by_experiment(folder: Path) -> dict[str, Path]:
    """The records that were computed in another way than by default, by the run_id that they would have then."""
    records = {}
    for config in sorted(folder.glob("*/config.json")):
        with suppress(ValueError, TypeError):  # damaged, of other code, or of data that are not here
            settings = json.loads(config.read_text())
            if any(settings.get(f.name, f.default) != f.default for f in fields(Experiment) if f.name in HOW):
                records.setdefault(Experiment(**settings).on_any_machine().run_id, config.parent)
    return records


def _read(exp: Experiment, record: Path) -> tuple[str, pd.DataFrame]:
    """How far a run has come, and its rounds."""
    # Only what is wanted is opened: a record of something else, or of other code, is no reason to fail.
    if not (record / "provenance.json").exists():
        return "missing", pd.DataFrame()
    try:
        rows = load_run(record)
    except ValueError as error:
        return f"not to be used, {error}", pd.DataFrame()
    if rows["faults"].any():
        return f"not to be used, {rows['faults'].iloc[0]} answers of clients are missing in it", pd.DataFrame()
    if rows["diverged"].notna().any():
        return f"diverged in round {rows['diverged'].iloc[0]:.0f}", rows
    return "finished" if len(rows) == exp.rounds else f"unfinished, {len(rows)} of {exp.rounds} rounds", rows


def report(states: pd.DataFrame) -> str:
    """Which runs the tables rest on, and which are not there."""
    missing = states[states["state"] == "missing"].groupby("label", sort=False)["seed"].agg(list)
    begun = states[~states["state"].isin(["finished", "missing"])]
    lines = [f"{(states['state'] == 'finished').sum()} of {len(states)} runs are finished."]
    lines += [f"  {label}, seed {seed} ({run_id}): {state}" for label, seed, run_id, state in begun.to_numpy()]
    lines += [f"  {label}: missing for the seeds {', '.join(map(str, seeds))}" for label, seeds in missing.items()]
    return "\n".join(lines)


def scale(wanted: Wanted) -> str:
    """What is run, and whether the paper's numbers can stand beside it."""
    exp = next(iter(wanted.values()))[0]
    differs, note = exp.differences_from_paper(), reduced(wanted)
    verdict = f"not the paper's: {', '.join(differs)}" if differs else "every setting is the paper's"
    verdict = note if "dataset" in differs else "; ".join(filter(None, [verdict, note]))
    return f"{exp.model} on {exp.dataset}, T = {exp.rounds}, N = {exp.clients}, K = {exp.clients_per_round}; {verdict}."


def reduced(wanted: Wanted) -> str:
    """What the runs have less of than the paper's, to stand wherever both are shown; empty if nothing."""
    exp = next(iter(wanted.values()))[0]
    full = exp.differences_from_paper()
    if "dataset" in full:
        return "a toy: nothing in it can be compared with the paper"
    words = {"width": "width", "rounds": "T", "local_epochs": "E"}
    less = [f"{word} = {getattr(exp, k):g} instead of {full[k]:g}" for k, word in words.items() if k in full]
    return f"reduced: {', '.join(less)}" if less else ""


def of_paper(table: str, dataset: str) -> dict:
    """One of the paper's tables for a data set; an entry that it leaves open is left out."""
    return {k: v for k, v in PAPER[table][PAPER_DATA.get(dataset, dataset)].items() if v is not None}


def extreme_targets(dataset: str) -> list[float]:
    return PAPER["extreme_sparsity"]["sparsity_targets"][PAPER_DATA.get(dataset, dataset)]


def of_runs(rounds: pd.DataFrame) -> pd.DataFrame:
    """One row a run: its accuracy in percent, by each of the statistics."""
    runs = rounds.groupby(["label", "seed"], sort=False)["test_accuracy"]
    return pd.DataFrame({name: 100 * runs.agg(statistic) for name, statistic in STATISTICS.items()})


def over_seeds(values: pd.Series, labels: Mapping | list) -> pd.DataFrame:
    """mean, std (of a sample) and n over the seeds of each label; a label without runs has n = 0."""
    table = values.groupby("label").agg(["mean", "std", "count"]).reindex(list(labels))
    return table.assign(n=table.pop("count").fillna(0).astype(int))


def shown(mean: float, std: float = float("nan")) -> str:
    """A number with its spread, if it has one."""
    if pd.isna(mean):
        return "–"
    return f"{mean:.2f}" if pd.isna(std) else f"{mean:.2f} ± {std:.2f}"


def beside_paper(wanted: Wanted, runs: pd.DataFrame, paper: Mapping) -> pd.DataFrame:
    """A row for each label: ours by each column of `runs` as mean ± std, n, and what the paper printed."""
    table = pd.DataFrame(index=list(wanted))
    for column in runs:
        ours = over_seeds(runs[column], wanted)
        table[column] = [shown(mean, std) for mean, std in zip(ours["mean"], ours["std"], strict=True)]
    values = [paper.get(label, float("nan")) for label in wanted]
    name = "paper, full size" if reduced(wanted) else "paper"
    return table.assign(n=ours["n"], **{name: [shown(*v) if isinstance(v, list) else shown(v) for v in values]})


def final_zeros(rounds: pd.DataFrame) -> pd.Series:
    """Zeros among the prunable weights after the last round of each run that did not diverge on its way there."""
    last = rounds[rounds["diverged"].isna()].groupby(["label", "seed"], sort=False)["layer_zeros"].last()
    return last.map(lambda zeros: sum(map(int, zeros.split()))).astype(int)


def budget_mebibits(exp: Experiment) -> float:
    """The paper's budget; of a run that is shorter or narrower than the paper's, the same share of FedAvg's cost."""
    dataset = PAPER_DATA.get(exp.dataset, exp.dataset)
    printed = PAPER["accuracy_at_communication_budget"]["budget_as_printed_MB"][dataset]
    return printed * dense_mebibits(exp) / dense_mebibits(Experiment.preset("paper", dataset))


def dense_mebibits(exp: Experiment) -> float:
    """2 · T · K · 32 n / 2²⁰: what FedAvg sends in a whole run, in the authors' unit."""
    n = layout(exp).size
    return 2 * exp.rounds * exp.clients_per_round * BITS_PER_WEIGHT * n / MEBI


def sent(rounds: pd.DataFrame, columns: list[str]) -> pd.Series:
    """All that a run has sent until each round, both ways."""
    return rounds[columns].sum(axis=1).groupby([rounds["label"], rounds["seed"]]).cumsum()


def at_budget(rounds: pd.DataFrame, budget: float, columns: list[str]) -> pd.DataFrame:
    """One row a run: the last round that is still within the budget, and its accuracy in percent."""
    within = rounds[sent(rounds, columns) <= budget].groupby(["label", "seed"], sort=False)[["round", "test_accuracy"]]
    return within.last().assign(test_accuracy=lambda table: 100 * table["test_accuracy"])


def layout(exp: Experiment) -> models.Layout:
    """The network's shapes, without the time and memory that its weights would take."""
    with torch.device("meta"):
        return models.Layout.of(models.build(exp.model, CLASSES[exp.dataset], exp.width))


def layers(exp: Experiment) -> pd.DataFrame:
    """The prunable layers in the network's order: kind, size, and what ERK gives them at s_0 and at s_p."""
    shapes = layout(exp).prunable_shapes
    return pd.DataFrame({
        "kind": {k: "convolution" if len(s) == 4 else "fully connected" for k, s in shapes.items()},
        "size": {k: s.numel() for k, s in shapes.items()},
        "ERK at s_0": masks.erk_sparsities(shapes, exp.sparsity_initial),
        "ERK at s_p": masks.erk_sparsities(shapes, exp.sparsity_target),
    }).rename(index=lambda name: name.removesuffix(".weight"))  # fmt: skip


def layer_sparsities(rounds: pd.DataFrame, size: pd.Series) -> pd.DataFrame:
    """Of each label, the final sparsity of every layer, a mean over its seeds."""
    last = rounds.groupby(["label", "seed"], sort=False)["layer_zeros"].last()
    zeros = pd.DataFrame([list(map(int, row.split())) for row in last], index=last.index, columns=size.index)
    return (zeros / size).groupby("label", sort=False).mean().T


def correlations(layers: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Pearson's, between a layer's size and its sparsity, for each kind of layer; of one layer there is none."""
    rows = {kind: {"layers": len(own)} | {c: own["size"].corr(own[c]) for c in columns}
            for kind, own in layers.groupby("kind", sort=False) if len(own) > 1}  # fmt: skip
    return pd.DataFrame(rows).T.astype({"layers": int})


def worth(values: pd.Series, base: Mapping[str, str]) -> pd.DataFrame:
    """mean, std and n of value(label) − value(base of the label), over the seeds that both have."""
    by_seed = values.unstack("seed").reindex(sorted({*base, *base.values()}))
    pairs = {label: by_seed.loc[label] - by_seed.loc[other] for label, other in base.items()}
    return over_seeds(pd.DataFrame(pairs).rename_axis(columns="label").unstack(), base)


def by_authors(experiments: list[Experiment]) -> list[Experiment]:
    """The same runs with what their authors' code does instead; none for a method that has no such version here."""
    return [exp.replace(**AUTHORS[exp.method]) for exp in experiments if exp.method in AUTHORS]


def compared(folder: str | Path, dataset: str = "fashion_mnist", preset: str = "paper") -> pd.DataFrame:
    """A row for each number of the paper's tables: its own, ours, and that of its authors' code where that differs.

    i.i.d.: mean of the last five rounds; at the budget: the last round within it, by the authors' count; pathological:
    mean of the highest five, as the paper has it. The row of Figure 6 is what its last target costs FedDIP.
    """
    rows = {}
    for table, (result, printed, statistic) in TABLES.items():
        paper = of_paper(printed, dataset)
        for method, own in wanted(result, preset, dataset).items():
            value = paper.get(method)
            mean, std = value if isinstance(value, list) else (value, None)
            sides = [_of_seeds(runs, folder, statistic) for runs in (own, by_authors(own))]
            rows[table, method] = {"paper": mean, "paper_std": std, **_summary(*sides)}
    sides = []
    for result in ("extreme_sparsity", "extreme_sparsity_authors"):
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
    return at_budget(rounds, budget, AUTHORS_MEBIBITS)["test_accuracy"].droplevel("label")


def _summary(ours: pd.Series, theirs: pd.Series) -> dict:
    """mean, std and n over the seeds, and the value of each seed, on both sides."""
    summary = {}
    for side, own in {"": ours.dropna(), "theirs_": theirs.dropna()}.items():
        values = {"mean": own.mean(), "std": own.std(), "n": len(own)} | {f"seed {s}": v for s, v in own.items()}
        summary |= {f"{side}{k}": v for k, v in values.items()}
    return summary


def headline(table: pd.DataFrame) -> str:
    """README's table: the paper, ours under its rules and by its authors' code, and the differences, as Markdown."""
    lines = ["| method | split | paper | ours, the paper's rules | difference | n | ours, its authors' code | "
             "difference | n |", "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for (name, method), row in table.loc[["Table III", "Table V"]].iterrows():
        split = "pathological" if name == "Table V" else "i.i.d."
        cells = [NAMES[method], split, shown(row["paper"], row["paper_std"])]
        for side in ("", "theirs_") if method in AUTHORS else ("",):
            mean, std, n = row[[f"{side}mean", f"{side}std", f"{side}n"]]
            cells += [shown(mean, std), signed(mean - row["paper"]), f"{n:.0f}"]
        lines.append(f"| {' | '.join(cells + [''] * (9 - len(cells)))} |")
    return "\n".join(lines)


def signed(mean: float, std: float = float("nan")) -> str:
    """A difference, with its spread if it has one."""
    return "–" if pd.isna(mean) else ("+" if mean >= 0 else "") + shown(mean, std)


def missed(table: pd.DataFrame) -> pd.DataFrame:
    """The rows in which ours is further from the paper's than MISS."""
    return table[(table["mean"] - table["paper"]).abs() > MISS]


def explained(row: pd.Series) -> str:
    """Whether a miss is one of the version: the authors' own meets the paper's number, comes nearer, or does not."""
    if row.name[1] not in AUTHORS:
        return "unknown"
    ours, theirs = row["mean"] - row["paper"], row["theirs_mean"] - row["paper"]
    if pd.isna(theirs):
        return "not run yet"
    if abs(theirs) > MISS and ours * theirs < 0:
        return "beyond it"
    return "yes" if abs(theirs) <= MISS else "in part" if abs(theirs) < abs(ours) else "no"


def misses(table: pd.DataFrame) -> str:
    """README's list of what did not reproduce, and whether the authors' code does, as Markdown."""
    lines = ["| | paper | ours, the paper's rules | difference | ours, its authors' code | difference | explained |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for (name, method), row in missed(table).iterrows():
        cells = [f"{name}: {NAMES[method]}", shown(row["paper"])]
        for side in ("", "theirs_"):
            here = not side or method in AUTHORS
            cells += [shown(row[f"{side}mean"]), signed(row[f"{side}mean"] - row["paper"])] if here else ["", ""]
        lines.append(f"| {' | '.join(cells)} | {explained(row)} |")
    return "\n".join(lines)


def seeds_of(table: pd.DataFrame, side: str = "") -> pd.DataFrame:
    """Of each row of `compared` the value of every seed."""
    return table.filter(regex=f"^{side}seed ").rename(columns=lambda name: name.removeprefix(side))


def reversed_order(paper: pd.Series, ours: pd.DataFrame) -> dict[tuple[str, str], float]:
    """The pairs that ours has the other way round than the paper, (above in ours, above in the paper), and by how much:
    a mean over the seeds that both have.
    """
    gaps = {(a, b): (ours.loc[a] - ours.loc[b]).mean() for a in paper.index for b in paper.index if paper[a] < paper[b]}
    return {pair: gap for pair, gap in gaps.items() if gap > 0}


def orders(table: pd.DataFrame) -> str:
    """README's list of pairs in another order than the paper's, under its rules and by its authors' code."""
    lines = []
    for name in TABLES:
        own = table.loc[name]
        ours, theirs = seeds_of(own), seeds_of(own, "theirs_")
        switched = pd.DataFrame({m: (theirs if m in AUTHORS else ours).loc[m] for m in own.index}).T
        for rules, values in (("the paper's rules", ours), ("its authors' code", switched)):
            above = {}
            for (a, b), gap in reversed_order(own["paper"], values).items():
                above.setdefault(a, []).append(f"{NAMES[b]} (by {gap:.2f})")
            pairs = "; ".join(f"{NAMES[a]} above {', '.join(b)}" for a, b in above.items())
            rest = ", as far as there are runs" if values.isna().all(axis=1).any() else ""
            lines.append(f"- {name}, {rules}: {pairs or 'none'}{rest}.")
    return "\n".join(lines)


def of_tables(runs: pd.DataFrame) -> pd.Series:
    """Of each run the statistic of its method's table: the highest five of what is in Table V alone, else the last."""
    methods = runs.index.get_level_values("label").str.partition(",").get_level_values(0)
    return runs["last five"].where(methods.isin(TABLE_III) | ~methods.isin(TABLE_V), runs["highest five"])


def moves(folder: str | Path, dataset: str = "fashion_mnist", preset: str = "paper") -> pd.DataFrame:
    """What each switch, and each version of the authors' own, is worth: mean, std and n of the gain in accuracy."""
    switched = {label: base for label, base in BASE.items() if label != base}
    tables = []
    for result, base in (("paper_vs_code", switched), ("versions", VERSION_OF)):
        rounds, _ = find(wanted(result, preset, dataset), folder)
        tables.append(worth(of_tables(of_runs(rounds)), base))
    return pd.concat(tables)


def moved(folder: str | Path) -> str:
    """README's table of what each single change is worth, as Markdown."""
    lines = ["| changed | worth, points | n |", "|---|---|---|"]
    for label, row in moves(folder).iterrows():
        method, _, _ = label.partition(", authors")
        name = f"{NAMES[method]}: its authors' code" if method in NAMES else label
        name = name if name.startswith(tuple(NAMES.values())) else f"FedDIP, {name}"
        lines.append(f"| {name} | {signed(row['mean'], row['std'])} | {row['n']:.0f} |")
    return "\n".join(lines)


def both_splits(folder: str | Path, dataset: str, preset: str = "laptop") -> pd.DataFrame:
    """Tables III's and V's methods on both partitions: mean, std and n of each table's statistic, and final zeros."""
    rows = {}
    for method in dict.fromkeys(TABLE_III + TABLE_V):
        for split, statistic in (("iid", "last five"), ("pathological", "highest five")):
            own = [Experiment.preset(preset, dataset, method, partition=split, seed=s) for s in SEEDS[preset]]
            rounds, _ = find({method: own}, folder)
            zeros = final_zeros(rounds).mean() / layers(own[0])["size"].sum()
            runs = of_runs(rounds)
            rows[method, split] = over_seeds(runs[statistic], [method]).loc[method].to_dict() | {
                "last": runs["last five"].mean(),
                "sparsity": zeros,
            }
    return pd.DataFrame(rows).T.astype(float)


def splits_shown(folder: str | Path, dataset: str, preset: str = "laptop") -> str:
    """README's table of runs of reduced size, which says so, as Markdown; the paper's values are those of full size."""
    lines = [
        f"*{scale(wanted('accuracy', preset, dataset))}*\n",
        "| method | i.i.d. | n | pathological | last five | n | sparsity | paper, full size: i.i.d. | pathological |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    full = [of_paper(table, dataset) for table in ("accuracy_iid", "accuracy_non_iid")]
    table = both_splits(folder, dataset, preset)
    for method in table.index.unique(0):
        even, one_sided = table.loc[(method, "iid")], table.loc[(method, "pathological")]
        sparsity = one_sided["sparsity"] if pd.isna(even["sparsity"]) else even["sparsity"]
        cells = [NAMES[method], shown(even["mean"], even["std"]), f"{even['n']:.0f}"]
        cells += [shown(one_sided["mean"], one_sided["std"]), shown(one_sided["last"]), f"{one_sided['n']:.0f}"]
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
