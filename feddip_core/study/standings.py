"""The league's table, from records: what each method reaches, what it sends, what it computes.

python -m feddip_core.study.standings [METHOD] prints it, with a method of your own as its last rows.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import torch

from .. import models
from ..communication import BITS_PER_WEIGHT, Payload
from ..engine import records
from ..experiment import Experiment, class_of, is_hook
from ..methods.asking import Asking
from ..methods.prunefl import uses_of
from ..presets import CLASSES
from . import league
from .league import GUESSING, SEEDS, SPARSE_UPLINK, TARGETS
from .tables import BITS, find, layout, of_runs, shown
from .verdicts import judged
from .wanted import wanted

SAMPLES = {"fashion_mnist": 60_000, "fashion_mini": 6_000}
STATISTIC = "last five"
BASE = "feddip"  # every other row is judged against its better row at the same target


def standings(
    folder: str | Path, preset: str = "paper", dataset: str = "fashion_mnist", method: str | None = None
) -> pd.DataFrame:
    """One row per cell: entrant, target, settings, accuracy, cost, rank and verdict. Cells without a run stay empty.

    A run that diverged has no accuracy, and what it sent until then is no saving: its cell stays empty too.
    """
    runs = wanted("league", preset, dataset, folder=folder)
    if method:
        runs |= wanted("league", preset, dataset, methods=[method], folder=folder)
    rounds, _ = find(runs, folder)
    rounds = rounds[rounds["diverged"].isna()]
    table = pd.DataFrame({name: row_of(name, exps, rounds) for name, exps in runs.items()}).T
    parts = pd.DataFrame([_parts(name, exps[0], runs, folder) for name, exps in runs.items()], index=list(runs))
    table = parts.join(table)
    accuracies = of_runs(rounds)[STATISTIC].unstack("seed") if len(rounds) else pd.DataFrame(columns=list(SEEDS))
    table["ranked"] = _ranked(table, accuracies)
    table["against FedDIP"] = _verdicts(table, accuracies)
    return table.assign(front=_fronts(table))


def _parts(name: str, exp: Experiment, runs: Mapping, folder: str | Path) -> dict:
    """Who, at which sparsity, with which settings."""
    entrant = SPARSE_UPLINK if getattr(exp, "sparse_uplink", False) else exp.method
    target = getattr(exp, "sparsity_target", None)
    kind = "tuned" if name.endswith(", tuned") else "published"
    if kind == "published" and f"{name}, tuned" not in runs:  # not tuned yet, or the grid's best is what was published
        changes = next(own for _, s, own in league.cells([entrant]) if s == target)
        kind += ", tuned alike" * (league.chosen(entrant, changes, exp.dataset, folder) is not None)
    chosen = ", ".join(f"{getattr(exp, k)}" for k in dict.fromkeys(k for one in league.grid(entrant) for k in one))
    if is_hook(exp.method):
        kind = kind.replace("published", "local") if kind.startswith("published") else f"local, {kind}"
    return {"entrant": entrant, "target": target or 0.0, "settings": kind, "values": chosen}


def row_of(name: str, exps: Sequence[Experiment], rounds: pd.DataFrame) -> dict:
    """What the runs of one cell gave, mean over the seeds that are there."""
    own = rounds[rounds["label"] == name]
    accuracy = of_runs(own)[STATISTIC] if len(own) else pd.Series(dtype=float)
    sent = own.groupby("seed")[BITS].sum().mean() / 8e6
    last = own.groupby("seed")["layer_zeros"].last()
    n_w, (down, up) = layout(exps[0]).prunable_size, (bits / 8e6 for bits in uncharged(exps[0]))
    return {
        "accuracy": accuracy.mean(), "std": accuracy.std(), "n": len(accuracy),
        "MB down": sent[BITS[0]] + down, "MB up": sent[BITS[1]] + up,
        "TFLOP": pd.Series([flops(exps[0], run) / 1e12 for _, run in own.groupby("seed")], dtype=float).mean(),
        "kept": (n_w - last.map(lambda z: sum(map(int, z.split())))).mean() if len(last) else float("nan"),
    }  # fmt: skip


def uncharged(exp: Experiment) -> tuple[int, int]:
    """The bits down and up of a question before the first round that the metrics leave out: SNIP's and PruneFL's.

    SNIP asks the clients of the first round, PruneFL a single one; each is sent the dense model.
    """
    cls, own = exp.method_class, layout(exp)
    if issubclass(cls, Asking) or not cls.questions:
        return 0, 0
    clients = 1 if exp.method == "prunefl" else exp.clients_per_round
    answers = [Payload(parts).bits(own) for parts in cls.questions.values()]
    return clients * BITS_PER_WEIGHT * own.size * len(answers), clients * sum(answers)


def flops(exp: Experiment, run: pd.DataFrame) -> float:
    """Of all local steps: 2 Σ uses · weights for the forward pass, as much for each of the two backward products.

    Only kept weights count, except in the product that gives weights their gradients where these are needed for pruned
    weights too. Such a round is known by its upload: it is at least as large as a dense model. If a sparse upload
    brings weights back, each client ranked them by a dense gradient on one more batch. Work before the first round is
    not counted; nor do the bits of that work say anything.
    """
    uses = torch.tensor(_uses(exp), dtype=torch.float64)
    sizes = torch.tensor([shape.numel() for shape in layout(exp).prunable_shapes.values()], dtype=torch.float64)
    zeros = [torch.tensor([int(z) for z in row.split()], dtype=torch.float64) for row in run["layer_zeros"]]
    dense = exp.clients_per_round * BITS_PER_WEIGHT * layout(exp).size
    ups, asked = run["uplink_bits"].tolist(), issubclass(exp.method_class, Asking)
    ups[0] = 0 if asked else ups[0]
    steps = exp.local_epochs * SAMPLES[exp.dataset] / exp.clients
    samples, one_batch, total = exp.clients_per_round * steps, exp.batch_size / steps, 0.0
    # A round's steps use the mask that the round before left. The first mask is not recorded: the second one stands in,
    # unless the first download was a dense model.
    first = zeros[0] * (asked or run["downlink_bits"].iloc[0] < dense)
    all_of_it = float((uses * sizes).sum())
    for before, up, regrown in zip([first, *zeros[:-1]], ups, run["regrown"], strict=True):
        kept = float((uses * (sizes - before)).sum())
        total += 2 * kept + (all_of_it if up >= dense else kept)
        total += one_batch * (2 * kept + all_of_it) * (regrown > 0 and up < dense)
    return 2 * total * samples


def _uses(exp: Experiment) -> list[int]:
    net = models.build(exp.model, CLASSES[exp.dataset], exp.width)
    return list(uses_of(net, torch.zeros(1, 1, 28, 28)).values())


def _ranked(table: pd.DataFrame, accuracies: pd.DataFrame) -> pd.Series:
    """Whether a row is the better one of its entrant's two at its target, over the seeds that both have."""
    ranked = pd.Series(False, table.index)
    for _, own in table.groupby(["entrant", "target"], sort=False):
        there = [name for name in own.index if name in accuracies.index]
        shared = accuracies.loc[there].dropna(axis=1)
        values = shared.mean(axis=1) if shared.shape[1] else accuracies.loc[there].count(axis=1)
        ranked[[values.idxmax()] if there else []] = True
    return ranked


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
    """Whether no other ranked row of the same target, or a dense one, reaches as much with fewer bytes.

    A row that guesses is on no front, however little it sends.
    """
    front, cost = pd.Series(False, table.index), table["MB down"] + table["MB up"]
    for target in TARGETS:
        own = table[table["ranked"] & table["target"].isin([0.0, target]) & (table["accuracy"] > GUESSING)]
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
        names = own["entrant"].map(named) + " (" + own["settings"] + ")"
        columns = {"ranked": own["ranked"].map({True: "●", False: ""})} | columns | {"values": own["values"]}
        parts.append(f"{target:.0%} zeros\n{pd.DataFrame(columns).set_axis(names).rename_axis(None).to_string()}")
    return "\n\n".join(parts)


def named(entrant: str) -> str:
    method, comma, rest = entrant.partition(",")
    return class_of(method).label + comma + rest


if __name__ == "__main__":
    command = argparse.ArgumentParser("python -m feddip_core.study.standings", description=__doc__.splitlines()[0])
    command.add_argument("method", nargs="?", help="your own method, as package.module:Class")
    command.add_argument("--runs", default=records.OWN_RECORDS, type=Path, help="folder of the records")
    options = command.parse_args()
    print(as_text(standings(options.runs, method=options.method)))
