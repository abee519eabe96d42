"""What a client's training and an evaluation take, per network, gradient and share of zeros, against the core's peak.

The networks of the three data sets, AlexNet and ResNet-18 an eighth as wide; 1,000 images, five epochs, the paper's
batch size; masks with ERK's share of zeros in each layer. With feedback the gradient of every weight is wanted,
without it that of the kept ones. PyTorch multiplies zeros too, so it is measured dense only. The peak is that of a
product of two matrices. All sides take turns.
"""

import argparse
import dataclasses
import math
import statistics
import time
from pathlib import Path

import pandas as pd
import torch
from benchmark import OUT, images, keep, machine_of

from feddip_core import Experiment
from feddip_core.data import Dataset
from feddip_core.engine import measure
from feddip_core.engine.assembly import assemble
from feddip_core.engine.networks import flops
from feddip_core.server import Federation

WIDTHS = {"fashion_mnist": 1.0, "cifar10": 0.125, "cifar100": 0.125}
SPARSITIES = (0.0, 0.5, 0.9, 0.95, 0.99)
GOALS = {("lenet5", 0.9): 2.0, ("lenet5", 0.99): 4.0}  # without feedback, against dense
TRAINED, EPOCHS, TESTED = 1_000, 5, 10_000


def colour(classes: int) -> Dataset:
    """Random images of CIFAR's shape, with crops and flips: speed does not ask what they show."""
    g = torch.Generator().manual_seed(0)
    made = {}
    for part, n in (("train", 50 * TRAINED), ("test", TESTED)):
        made[f"x_{part}"] = torch.randint(0, 256, (n, 3, 32, 32), generator=g, dtype=torch.uint8)
        made[f"y_{part}"] = torch.arange(n) % classes
    return dataclasses.replace(images(1, 1), **made, crop_padding="reflect")


def federations() -> dict[tuple[str, str], Federation]:
    """Each network with each gradient that it has."""
    made = {}
    data = {"fashion_mnist": images(50 * TRAINED, TESTED), "cifar10": colour(10), "cifar100": colour(100)}
    for dataset, width in WIDTHS.items():
        exp = Experiment.preset("paper", dataset, method="feddst", clients=50, width=width, partition="iid")
        for gradient in ("native", "eager") if exp.model != "resnet18" else ("eager",):
            made[exp.model, gradient] = assemble(exp.replace(gradient=gradient), data[dataset])
    return made


def peak(n: int = 1024) -> float:
    """Operations per second of a product of two n × n matrices on one core."""
    a, seconds = torch.randn(n, n), []
    for _ in range(5):
        began = time.process_time()
        a @ a
        seconds.append(time.process_time() - began)
    return 2 * n**3 / statistics.median(seconds)


def training(fed: Federation, trial: int, s: float, feedback: bool) -> float:
    clients, m = fed.clients, fed.method.erk_mask(s)
    w = clients.layout.prune(clients.first_weights, m).clone()
    began = time.process_time()
    clients.train_(w, m, clients.batches(0, trial, "batches", EPOCHS), feedback=feedback)
    return time.process_time() - began


def evaluation(fed: Federation) -> float:
    state = fed.start().replace(w=fed.clients.first_weights, m=None)
    began = time.process_time()
    measure.evaluate(fed, state)
    return time.process_time() - began


def measured(repeat: int) -> pd.DataFrame:
    made, found, most = federations(), [], peak()
    for trial in range(repeat + 1):
        for (model, gradient), fed in made.items():
            here = dict(model=model, gradient=gradient, trial=trial)
            for s in SPARSITIES if gradient == "native" else SPARSITIES[:1]:
                for feedback in (True, False) if s else (True,):
                    row = dict(
                        work="training", sparsity=s, feedback=feedback, seconds=training(fed, trial, s, feedback)
                    )
                    found.append(here | row)
            found.append(here | dict(work="evaluation", sparsity=0.0, feedback=True, seconds=evaluation(fed)))
    by = ["model", "gradient", "work", "sparsity", "feedback"]
    table = pd.DataFrame(found).query("trial > 0").groupby(by, sort=False)["seconds"].median().reset_index()
    return pd.concat([compared(rows, made, most) for _, rows in table.groupby("model", sort=False)]).assign(n=repeat)


def compared(rows: pd.DataFrame, made: dict[tuple[str, str], Federation], most: float) -> pd.DataFrame:
    """One network's rows, with the share of the peak, the ratio to its dense model, and the goal."""
    fed = made[rows["model"].iloc[0], "eager"]
    one = flops(fed.clients.net, fed.clients.data.image)
    operations = rows["work"].map({"training": 3 * EPOCHS * TRAINED * one, "evaluation": TESTED * one})
    dense = rows[(rows["work"] == "training") & (rows["sparsity"] == 0)].set_index("gradient")["seconds"]
    return rows.assign(
        share_of_peak=operations / rows["seconds"] / most,
        peak_gflops=most / 1e9,
        ratio=(rows["gradient"].map(dense) / rows["seconds"]).where(rows["work"] == "training"),
        goal=[GOALS.get((r.model, r.sparsity), math.nan) if not r.feedback else math.nan for r in rows.itertuples()],
    )


def as_text(table: pd.DataFrame, machine: dict) -> str:
    lines = [
        "# What a network takes",
        "",
        f"Training: one client, {TRAINED:,} images, {EPOCHS} epochs. Evaluation: {TESTED:,} images. CPU seconds on "
        f"one core, medians, n = {table['n'].iloc[0]}. AlexNet and ResNet-18 are an eighth as wide as the paper's.",
        f"In brackets: the share of the peak, {table['peak_gflops'].iloc[0]:.0f} GFLOPS in a product of two matrices. "
        "It counts every operation of a dense network, those with zeros and with the images' margins too. What skips "
        "them can pass 100 %.",
        "",
        "| network | zeros | PyTorch | compiled | compiled, no feedback |",
        "|---|---|---|---|---|",
    ]
    sides = [("eager", True), ("native", True), ("native", False)]
    for (model, work, s), rows in table.groupby(["model", "work", "sparsity"], sort=False):
        by_side = rows.set_index(["gradient", "feedback"])
        cells = [_said(by_side.loc[side]) if side in by_side.index else "" for side in sides]
        lines.append(f"| {model} | {work if work == 'evaluation' else f'{s:.0%}'} | {' | '.join(cells)} |")
    missed = table[table["ratio"] < table["goal"]]
    goals = " and ".join(f"{goal:g} × at {s:.0%}" for (_, s), goal in GOALS.items())
    lines += ["", f"Goal of LeNet-5 without feedback, against dense: {goals}: {'missed' if len(missed) else 'met'}."]
    return "\n".join([*lines, "", ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in machine.items()) + "."]) + "\n"


def _said(row: pd.Series) -> str:
    return f"{row['seconds']:.3f} ({row['share_of_peak']:.0%})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3, help="repetitions")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = machine_of()
    table = measured(options.repeat)
    keep(options.out, "networks", table, as_text(table, machine), machine)


if __name__ == "__main__":
    main()
