"""How the time of a client falls with sparsity, with error feedback and without it, against a dense model in one run.

The paper's LeNet-5 and local epochs, 1,200 images, masks with ERK's share of zeros in each layer. With feedback the
gradient of every weight is wanted, without it that of the kept ones. All sides take turns.
"""

import argparse
import time
from pathlib import Path

import pandas as pd
import torch
from benchmark import OUT, PAPER, images, keep, machine_of

from feddip_core import Experiment
from feddip_core.engine.assembly import assemble

SPARSITIES = (0.0, 0.5, 0.9, 0.95, 0.99)
GOALS = {0.9: 2.0, 0.99: 4.0}  # without feedback


def measure(repeat: int) -> pd.DataFrame:
    fed = assemble(Experiment(method="feddst", gradient="native", **PAPER), images(60_000))
    clients, epochs = fed.clients, PAPER["local_epochs"]
    found = []
    for trial in range(repeat + 1):
        for s in SPARSITIES:
            m = fed.method.erk_mask(s)
            for feedback in (True, False):
                w = clients.layout.prune(clients.first_weights, m).clone()
                began = time.process_time()
                clients.train_(w, m, clients.batches(0, trial, "batches", epochs), feedback=feedback)
                found.append(dict(trial=trial, sparsity=s, feedback=feedback, seconds=time.process_time() - began))
    seconds = pd.DataFrame(found).query("trial > 0").pivot(index="trial", columns=["sparsity", "feedback"])["seconds"]
    ratio = seconds.rdiv(seconds[0.0, True], axis=0)
    table = pd.DataFrame({"seconds": seconds.median(), "ratio": ratio.median(), "n": repeat}).reset_index()
    return table.assign(
        goal=[None if feedback else GOALS.get(s) for s, feedback in table[["sparsity", "feedback"]].values]
    )


def as_text(table: pd.DataFrame, machine: dict) -> str:
    lines = [
        "# How much faster a client is than with a dense model",
        "",
        f"LeNet-5, native gradient, 1,200 images, five epochs, ERK masks; CPU time, medians, n = {table['n'].iloc[0]}.",
        "",
        "| zeros | with feedback | without feedback |",
        "|---|---|---|",
    ]
    for s, rows in table.groupby("sparsity"):
        cells = [f"{row.ratio:.2f} × ({row.seconds:.3f} s)" for row in rows.sort_values("feedback").itertuples()][::-1]
        lines.append(f"| {s:.0%} | {' | '.join(cells)} |")
    missed = table[table["ratio"] < table["goal"]]
    goals = " and ".join(f"{goal:g} × at {s:.0%}" for s, goal in GOALS.items())
    lines += ["", f"Goal without feedback: {goals}: {'missed' if len(missed) else 'met'}."]
    return "\n".join([*lines, "", ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in machine.items()) + "."]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = machine_of()
    table = measure(options.repeat)
    keep(options.out, "sparsity", table, as_text(table, machine), machine)


if __name__ == "__main__":
    main()
