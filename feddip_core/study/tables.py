"""From records to numbers: the runs that are there, their statistics, and tables beside the paper's.

A run is found by its run_id, so a record with other settings never replaces it. A record that was computed in another
way, such as on a GPU, may. Accuracies are in percent, as in the paper; sparsities are fractions of zeros.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pandas as pd
import torch

from .. import masks, models
from ..communication import BITS_PER_WEIGHT
from ..engine import records
from ..experiment import COMMON, EXECUTION_SETTINGS, Experiment
from ..layout import Layout
from ..methods.released.billing import MEBI
from ..presets import CLASSES
from .verdicts import judged
from .wanted import PAPER, PAPER_DATA, TABLE_III, TABLE_V, Wanted, reduced, wanted

RELEASED_MEBIBITS = ["downlink_mebibits_released", "uplink_mebibits_released"]
BITS = ["downlink_bits", "uplink_bits"]
STATISTICS = {
    "last round": lambda accuracy: accuracy.iloc[-1],
    "last five": lambda accuracy: accuracy.tail(5).mean(),
    "highest five": lambda accuracy: accuracy.nlargest(5).mean(),
}
_NUMBERS = ("round", "test_accuracy", "diverged", "sparsity", "regrown", "seconds", *BITS, *RELEASED_MEBIBITS)
# The rounds of no run at all: with these columns tables come out empty instead of failing.
_EMPTY = pd.DataFrame(
    {c: pd.Series(dtype=str) for c in ("label", "run_id", "layer_zeros")}
    | {"seed": pd.Series(dtype=int)}
    | {c: pd.Series(dtype=float) for c in _NUMBERS}
)


# Which runs are there.


def find(wanted: Wanted, folder: str | Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rounds of every finished run, with its `label`; and the state of every run that is wanted."""
    found, states, others = [], [], cache(_by_experiment)  # which looks into every record
    for label, exps in wanted.items():
        for exp in exps:
            record = records.folder_of(exp, folder)
            record = record if record.exists() else others(Path(folder)).get(exp.on_any_machine().run_id, record)
            state, rows = _read(exp, record)
            states.append({"label": label, "seed": exp.seed, "run_id": _run_id(record), "state": state})
            if state == "finished" or state.startswith("diverged"):
                found.append(rows.assign(label=label))
    return pd.concat(found, ignore_index=True) if found else _EMPTY, pd.DataFrame(states)


def _by_experiment(folder: Path) -> dict[str, Path]:
    """The records that were computed in another way than by default, by the run_id that they would have then."""
    found: dict[str, Path] = {}
    for record in records.record_folders(folder):
        with suppress(ValueError, TypeError, OSError):  # damaged, of other code, or of data that are not here
            settings = json.loads((record / "config.json").read_text("utf-8"))
            if any(settings.get(k, COMMON[k].default) != COMMON[k].default for k in EXECUTION_SETTINGS):
                found.setdefault(records.experiment_of(record).on_any_machine().run_id, record)
    return found


def _run_id(record: Path) -> str:
    return record.name.rpartition("-")[2]


def _read(exp: Experiment, record: Path) -> tuple[str, pd.DataFrame]:
    """How far a run has come, and its rounds."""
    # Open only the wanted records: one of another run or other code is no reason to fail.
    if not (record / "provenance.json").exists():
        return "missing", pd.DataFrame()
    try:
        rows = records.load_run(record)
    except ValueError as error:
        return f"cannot be used, {error}", pd.DataFrame()
    if rows["faults"].any():
        return f"cannot be used, {rows['faults'].iloc[0]} answers of clients are missing", pd.DataFrame()
    if rows["diverged"].notna().any():
        return f"diverged in round {rows['diverged'].iloc[0]:.0f}", rows
    return "finished" if len(rows) == exp.rounds else f"unfinished, {len(rows)} of {exp.rounds} rounds", rows


def report(states: pd.DataFrame) -> str:
    """Which runs the tables rest on, and which are missing."""
    missing = states[states["state"] == "missing"].groupby("label", sort=False)["seed"].agg(list)
    begun = states[~states["state"].isin(["finished", "missing"])]
    lines = [f"{(states['state'] == 'finished').sum()} of {len(states)} runs are finished."]
    lines += [f"  {label}, seed {seed} ({run_id}): {state}" for label, seed, run_id, state in begun.to_numpy()]
    lines += [f"  {label}: no record for {named(seeds)}" for label, seeds in missing.items()]
    return "\n".join(lines)


def named(seeds: list[int]) -> str:
    """These seeds in words."""
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds))}"


# What they gave.


def of_runs(rounds: pd.DataFrame) -> pd.DataFrame:
    """One row per run: its accuracy in percent, by each of the statistics."""
    runs = rounds.groupby(["label", "seed"], sort=False)["test_accuracy"]
    return pd.DataFrame({name: 100 * runs.agg(statistic) for name, statistic in STATISTICS.items()})


def one_run(accuracies: Sequence[float]) -> pd.DataFrame:
    """Rounds of a made-up run with these test accuracies, for examples that can be computed by hand."""
    return pd.DataFrame({"label": "toy", "seed": 0, "test_accuracy": accuracies})


def of_tables(runs: pd.DataFrame) -> pd.Series:
    """Each run by the statistic of its table: the highest five for methods that are only in Table V, else the last."""
    methods = runs.index.get_level_values("label").map(lambda label: label.partition(",")[0])
    return runs["last five"].where(methods.isin(TABLE_III) | ~methods.isin(TABLE_V), runs["highest five"])


def over_seeds(values: pd.Series, labels: Mapping | list) -> pd.DataFrame:
    """mean, std (of a sample) and n over the seeds of each label; a label without runs has n = 0."""
    table = values.groupby("label").agg(["mean", "std", "count"]).reindex(list(labels))
    return table.assign(n=table.pop("count").fillna(0).astype(int))


def worth(values: pd.Series, base: Mapping[str, str]) -> pd.DataFrame:
    """value(label) − value(base of the label), judged over the seeds that both have."""
    by_seed = values.unstack("seed").reindex(sorted({*base, *base.values()}))
    return pd.DataFrame({label: judged(by_seed.loc[label] - by_seed.loc[other]) for label, other in base.items()}).T


def same_seeds(*tables: pd.DataFrame) -> list[int]:
    """The seeds that every label has. A figure shows only these side by side."""
    own = [set(seeds) for rounds in tables for _, seeds in rounds.groupby("label")["seed"]]
    return sorted(set.intersection(*own)) if own else []


def of_seeds(rounds: pd.DataFrame, seeds: list[int]) -> pd.DataFrame:
    """The rounds of these seeds alone."""
    return rounds[rounds["seed"].isin(seeds)].reset_index(drop=True)


def drawn(wanted: Wanted, seeds: list[int]) -> str:
    """The note above a figure: its seeds, and how its runs are reduced."""
    whose = named(seeds) if seeds else "no seed that all runs share"
    return "; ".join(filter(None, [whose, reduced(wanted)]))


def searched(result: str, preset: str, dataset: str, folder: str | Path, statistic: str) -> pd.DataFrame:
    """One row per value of a grid: accuracy in percent, and the fraction of zeros at the end."""
    grid = wanted(result, preset, dataset)
    rounds, _ = find(grid, folder)
    n_w = layout(next(iter(grid.values()))[0]).prunable_size
    table = pd.DataFrame({statistic: of_runs(rounds)[statistic], "final sparsity": final_zeros(rounds) / n_w})
    return table.groupby("label").first().reindex(list(grid))


def final_zeros(rounds: pd.DataFrame) -> pd.Series:
    """Zeros among the prunable weights after the last round of each run that did not diverge."""
    last = rounds[rounds["diverged"].isna()].groupby(["label", "seed"], sort=False)["layer_zeros"].last()
    return last.map(lambda zeros: sum(map(int, zeros.split()))).astype(int)


def zeros_before(own: pd.DataFrame) -> pd.Series:
    """Zeros among the prunable weights at the start of each round of one run, from its second round on."""
    return own["layer_zeros"].map(lambda zeros: sum(map(int, zeros.split()))).shift().iloc[1:]


def beside_paper(wanted: Wanted, runs: pd.DataFrame, paper: Mapping) -> pd.DataFrame:
    """One row per label: ours by each column of `runs` as mean ± std, n, the paper's value, how runs are reduced."""
    table = pd.DataFrame(index=list(wanted)).rename_axis(columns=reduced(wanted) or None)
    for column in runs:
        ours = over_seeds(runs[column], wanted)
        table[column] = [shown(mean, std) for mean, std in zip(ours["mean"], ours["std"], strict=True)]
    values = [paper.get(label, float("nan")) for label in wanted]
    name = "paper, full size" if reduced(wanted) else "paper"
    return table.assign(n=ours["n"], **{name: [shown(*v) if isinstance(v, list) else shown(v) for v in values]})


def shown(mean: float, std: float = float("nan")) -> str:
    """A number with its spread, if it has one."""
    if pd.isna(mean):
        return "–"
    return f"{mean:.2f}" if pd.isna(std) else f"{mean:.2f} ± {std:.2f}"


# What they sent.


def budget_mebibits(exp: Experiment) -> float:
    """The paper's budget; for a run that is shorter or narrower than the paper's, the same share of FedAvg's cost."""
    dataset = PAPER_DATA.get(exp.dataset, exp.dataset)
    printed = PAPER["accuracy_at_communication_budget"]["budget_as_printed_MB"][dataset]
    return printed * dense_mebibits(exp) / dense_mebibits(Experiment.preset("paper", dataset))


def dense_mebibits(exp: Experiment) -> float:
    """2 · T · K · 32 n / 2²⁰: what FedAvg sends in a whole run, in the released code's unit."""
    return 2 * exp.rounds * exp.clients_per_round * BITS_PER_WEIGHT * layout(exp).size / MEBI


def sent(rounds: pd.DataFrame, columns: list[str]) -> pd.Series:
    """Everything that a run has sent up to each round, both ways."""
    return rounds[columns].sum(axis=1).groupby([rounds["label"], rounds["seed"]]).cumsum()


def at_budget(rounds: pd.DataFrame, budget: float, columns: list[str]) -> pd.DataFrame:
    """One row per run: the last evaluated round that is still within the budget, and its accuracy in percent."""
    within = rounds[(sent(rounds, columns) <= budget) & rounds["test_accuracy"].notna()]
    within = within.groupby(["label", "seed"], sort=False)[["round", "test_accuracy"]]
    return within.last().assign(test_accuracy=lambda table: 100 * table["test_accuracy"])


def entropy(s: float) -> float:
    """H(s) = −s log₂ s − (1 − s) log₂ (1 − s): the fewest bits that a mask bit can take, at sparsity s."""
    return -sum(p * math.log2(p) for p in (s, 1 - s) if p)


# Their layers.


def layout(exp: Experiment) -> Layout:
    """The network's shapes, without allocating its weights."""
    with torch.device("meta"):
        return Layout.of(models.build(exp.model, CLASSES[exp.dataset], exp.width))


def layers(exp: Experiment) -> pd.DataFrame:
    """The prunable layers in the network's order: kind, size, and what ERK gives them at s_0 and at s_p."""
    shapes = layout(exp).prunable_shapes
    s_0, s_p = (getattr(exp, k, 0.0) for k in ("sparsity_initial", "sparsity_target"))
    return pd.DataFrame({
        "kind": {k: "convolution" if len(s) == 4 else "fully connected" for k, s in shapes.items()},
        "size": {k: s.numel() for k, s in shapes.items()},
        "ERK at s_0": masks.erk_sparsities(shapes, s_0),
        "ERK at s_p": masks.erk_sparsities(shapes, s_p),
    }).rename(index=lambda name: name.removesuffix(".weight"))  # fmt: skip


def layer_sparsities(rounds: pd.DataFrame, size: pd.Series) -> pd.DataFrame:
    """The final sparsity of every layer per label, mean over its seeds."""
    last = rounds.groupby(["label", "seed"], sort=False)["layer_zeros"].last()
    zeros = pd.DataFrame([list(map(int, row.split())) for row in last], index=last.index, columns=size.index)
    return (zeros / size).groupby("label", sort=False).mean().T


def correlations(layers: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Pearson's correlation of a layer's size and its sparsity, per kind of layer. One layer has none."""
    rows = {kind: {"layers": len(own)} | {c: own["size"].corr(own[c]) for c in columns}
            for kind, own in layers.groupby("kind", sort=False) if len(own) > 1}  # fmt: skip
    return pd.DataFrame(rows).T.astype({"layers": int})
