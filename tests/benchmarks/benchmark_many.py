"""Rounds per second with a thousand clients: FedDIP in Flower's simulation against the in-process engine, in one run.

N = 1,000 and K = 50 on the embedded data, six images per client, so that what an engine adds to the training weighs
most. All sides run the same experiment, and must end every round with the same weights.
"""

import argparse
import hashlib
import logging
import time
from pathlib import Path

import pandas as pd
from benchmark import OUT, keep, machine_of

from feddip_core import Experiment, run
from feddip_core.flower import simulate

PROCESSES = 2
WARM_UP = 2  # rounds: actors start, import torch and load the data
ENGINES = {
    "in process": run,
    "in process, two workers": lambda exp, **options: run(exp, workers=PROCESSES, **options),
    "Flower's simulation, two actors": lambda exp, **options: simulate(exp, processes=PROCESSES, **options),
}


class Clock:
    """When each round ended, and with which weights."""

    def __init__(self):
        self.times, self.weights = [], []

    def __call__(self, federation, state, done):
        self.times.append(time.perf_counter())
        self.weights.append(hashlib.sha256(state.w.numpy().tobytes()).hexdigest())

    def seconds(self) -> pd.Series:
        return pd.Series(self.times).diff().iloc[WARM_UP:]


def measure(rounds: int) -> pd.DataFrame:
    exp = Experiment.preset(
        "smoke", clients=1000, clients_per_round=50, rounds=rounds + WARM_UP, local_epochs=1, batch_size=6
    )
    clocks = {name: Clock() for name in ENGINES}
    for name, engine in ENGINES.items():
        engine(exp, observe=clocks[name], progress=False)
    if len({tuple(clock.weights) for clock in clocks.values()}) != 1:
        raise RuntimeError("the engines do not give the same weights")
    seconds = pd.DataFrame({name: clock.seconds() for name, clock in clocks.items()})
    median = seconds.median()
    return pd.DataFrame({
        "seconds_a_round": median, "fastest": seconds.min(), "slowest": seconds.max(),
        "rounds_a_second": 1 / median, "ratio": median["in process"] / median, "n": len(seconds),
    }).rename_axis("engine").reset_index()  # fmt: skip


def as_text(table: pd.DataFrame, machine: dict) -> str:
    lines = [
        "# Rounds per second with 1,000 clients, 50 of them per round",
        "",
        "FedDIP, LeNet-5, six images per client, one epoch, 1,000 test images; medians of "
        f"n = {table['n'].iloc[0]} rounds after {WARM_UP} to warm up, one engine after the other; the same weights "
        "after every round.",
        "",
        "| engine | seconds per round (fastest to slowest) | rounds per second | ratio to in process |",
        "|---|---|---|---|",
    ]
    for row in table.itertuples():
        spread = f"{row.seconds_a_round:.2f} ({row.fastest:.2f} to {row.slowest:.2f})"
        lines.append(f"| {row.engine} | {spread} | {row.rounds_a_second:.2f} | {row.ratio:.2f} |")
    return "\n".join([*lines, "", ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in machine.items()) + "."]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="that are measured, at least 5")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the table")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error("--rounds: at least 5")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    machine = machine_of("flwr", "ray")
    table = measure(options.rounds)
    keep(options.out, "many", table, as_text(table, machine), machine)


if __name__ == "__main__":
    main()
