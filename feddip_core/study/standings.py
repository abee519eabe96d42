"""The league's table, from records: what each method reaches, what it sends, what it computes.

python -m feddip_core.study.standings [METHOD] prints it, with a method of your own as its last rows.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from .. import models
from ..communication import BITS_PER_WEIGHT
from ..engine import records
from ..experiment import Experiment, class_of, is_hook
from ..methods.asking import Asking
from ..methods.prunefl import uses_of
from ..presets import CLASSES
from .league import SEEDS, SPARSE_UPLINK, TARGETS
from .tables import BITS, find, layout, of_runs, shown
from .verdicts import judged
from .wanted import wanted

SAMPLES = {"fashion_mnist": 60_000, "fashion_mini": 6_000}
STATISTIC = "last five"
BASE = "feddip"  # every other row is judged against its better row at the same target


def standings(
    folder: str | Path, preset: str = "paper", dataset: str = "fashion_mnist", method: str | None = None
) -> pd.DataFrame:
    """One row per cell: entrant, target, settings, accuracy, cost, rank and verdict. Cells without a run stay empty."""
    runs = wanted("league", preset, dataset)
    if method:
        runs |= wanted("league", preset, dataset, methods=[method])
    rounds, _ = find(runs, folder)
    table = pd.DataFrame({name: row_of(name, exps, rounds) for name, exps in runs.items()}).T
    parts = pd.DataFrame([_parts(name, exps[0]) for name, exps in runs.items()], index=list(runs))
    table = parts.join(table)
    accuracies = of_runs(rounds)[STATISTIC].unstack("seed") if len(rounds) else pd.DataFrame(columns=list(SEEDS))
    table["ranked"] = _ranked(table)
    table["against FedDIP"] = _verdicts(table, accuracies)
    return table.assign(front=_fronts(table))


def _parts(name: str, exp: Experiment) -> dict:
    """Who, at which sparsity, with which settings."""
    entrant = SPARSE_UPLINK if getattr(exp, "sparse_uplink", False) else exp.method
    kind = "local" if is_hook(exp.method) else "tuned" if name.endswith(", tuned") else "published"
    return {"entrant": entrant, "target": getattr(exp, "sparsity_target", 0.0), "settings": kind}


def row_of(name: str, exps: Sequence[Experiment], rounds: pd.DataFrame) -> dict:
    """What the runs of one cell gave, mean over the seeds that are there."""
    own = rounds[rounds["label"] == name]
    accuracy = of_runs(own)[STATISTIC] if len(own) else pd.Series(dtype=float)
    sent = own.groupby("seed")[BITS].sum().mean() / 8e6
    last = own.groupby("seed")["layer_zeros"].last()
    n_w = layout(exps[0]).prunable_size
    return {
        "accuracy": accuracy.mean(), "std": accuracy.std(), "n": len(accuracy),
        "MB down": sent[BITS[0]], "MB up": sent[BITS[1]],
        "TFLOP": pd.Series([flops(exps[0], run) / 1e12 for _, run in own.groupby("seed")], dtype=float).mean(),
        "kept": (n_w - last.map(lambda z: sum(map(int, z.split())))).mean() if len(last) else float("nan"),
    }  # fmt: skip


def flops(exp: Experiment, run: pd.DataFrame) -> float:
    """Of all local steps: 2 Σ uses · weights for the forward pass, as much for each of the two backward products.

    Only kept weights count, except in the product that gives weights their gradients where these are needed for pruned
    weights too. Such a round is known by its upload: it is at least as large as a dense model. Batch gradients that
    only rank weights, and work before the first round, are not counted; nor do the bits of that work say anything.
    """
    uses = torch.tensor(_uses(exp), dtype=torch.float64)
    sizes = torch.tensor([shape.numel() for shape in layout(exp).prunable_shapes.values()], dtype=torch.float64)
    zeros = [torch.tensor([int(z) for z in row.split()], dtype=torch.float64) for row in run["layer_zeros"]]
    dense = exp.clients_per_round * BITS_PER_WEIGHT * layout(exp).size
    ups, asked = run["uplink_bits"].tolist(), issubclass(exp.method_class, Asking)
    ups[0] = 0 if asked else ups[0]
    samples = exp.clients_per_round * exp.local_epochs * SAMPLES[exp.dataset] / exp.clients
    total = 0.0
    # A round's steps use the mask that the round before left. The first mask is not recorded: the second one stands in,
    # unless the first download was a dense model.
    first = zeros[0] * (asked or run["downlink_bits"].iloc[0] < dense)
    for before, up in zip([first, *zeros[:-1]], ups, strict=True):
        kept = float((uses * (sizes - before)).sum())
        total += 2 * kept + (float((uses * sizes).sum()) if up >= dense else kept)
    return 2 * total * samples


def _uses(exp: Experiment) -> list[int]:
    net = models.build(exp.model, CLASSES[exp.dataset], exp.width)
    return list(uses_of(net, torch.zeros(1, 1, 28, 28)).values())


def _ranked(table: pd.DataFrame) -> pd.Series:
    """Whether a row is the better one of its entrant's two at its target; only these are compared."""
    best = table["accuracy"].astype(float).groupby([table["entrant"], table["target"]]).transform("max")
    first = ~table.assign(best=table["accuracy"] == best).query("best")[["entrant", "target"]].duplicated()
    return pd.Series(table.index.isin(first[first].index), table.index)


def _verdicts(table: pd.DataFrame, accuracies: pd.DataFrame) -> pd.Series:
    """Each ranked row against FedDIP's at the same target, seed by seed; a dense method has no counterpart."""
    verdicts = pd.Series("", table.index)
    for target in TARGETS:
        own = table[table["ranked"] & (table["target"] == target)]
        base = own.index[own["entrant"] == BASE]
        for name in own.index[own["entrant"] != BASE] if len(base) else []:
            verdicts[name] = judged(accuracies.loc[name] - accuracies.loc[base[0]])["verdict"]
    return verdicts


def _fronts(table: pd.DataFrame) -> pd.Series:
    """Whether no other ranked row of the same target, or a dense one, reaches as much with fewer bytes."""
    front, cost = pd.Series(False, table.index), table["MB down"] + table["MB up"]
    for target in TARGETS:
        own = table[table["ranked"] & table["target"].isin([0.0, target])]
        for name in own.index:
            others = own.index[own.index != name]
            better = (own.loc[others, "accuracy"] >= own.loc[name, "accuracy"]) & (cost[others] <= cost[name])
            front[name] |= not better.any()
    return front


def as_text(table: pd.DataFrame) -> str:
    """The table for readers: one part per target, the best first."""
    parts = []
    for target in TARGETS:
        own = table[table["target"].isin([0.0, target])].sort_values("accuracy", ascending=False, na_position="last")
        columns = {
            "accuracy (%)": [shown(a, s) for a, s in zip(own["accuracy"], own["std"], strict=True)],
            "n": own["n"].astype(int), "MB down": own["MB down"].map(shown), "MB up": own["MB up"].map(shown),
            "TFLOP": own["TFLOP"].map(shown), "kept": own["kept"].map(lambda k: "–" if pd.isna(k) else f"{k:,.0f}"),
            "against FedDIP": own["against FedDIP"], "front": own["front"].map({True: "●", False: ""}),
        }  # fmt: skip
        named = own["entrant"].map(_named) + " (" + own["settings"] + ")"
        parts.append(f"{target:.0%} zeros\n{pd.DataFrame(columns).set_axis(named).rename_axis(None).to_string()}")
    return "\n\n".join(parts)


def _named(entrant: str) -> str:
    method, comma, rest = entrant.partition(",")
    return class_of(method).label + comma + rest


if __name__ == "__main__":
    command = argparse.ArgumentParser("python -m feddip_core.study.standings", description=__doc__.splitlines()[0])
    command.add_argument("method", nargs="?", help="your own method, as package.module:Class")
    command.add_argument("--runs", default=records.OWN_RECORDS, type=Path, help="folder of the records")
    options = command.parse_args()
    print(as_text(standings(options.runs, method=options.method)))
