"""Seconds per round: Flower's simulation runtime against our engine, with the same clients and in the same run.

The paper's setting: N = 50, K = 5, E = 5, LeNet-5, 1,200 images per client; two processes of one thread train the
clients, and nobody evaluates. Flower's clients run the bare loop of benchmark.py on data and a network that each actor
keeps. Each repetition measures every side once; a ratio is the median over the repetitions.
"""

import argparse
import logging
import os
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

# Read when Flower and Ray are imported. Ray would start its actors with a niceness of 15, to the advantage of ours.
os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
os.environ.update(OMP_NUM_THREADS="1", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")

import pandas as pd
import torch
from benchmark import OUT, bare_loop, images, keep, machine_of
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from feddip_core import Experiment, models
from feddip_core.engine.assembly import assemble
from feddip_core.engine.measure import evaluate
from feddip_core.engine.partitions import partition
from feddip_core.engine.workers import Workers
from feddip_core.server import Federation

PROCESSES = 2
WARM_UP = 2  # rounds: the first one waits for the actors to start, import torch and load the data
SETTINGS = dict(
    dataset="fashion_mini", clients=50, clients_per_round=5, local_epochs=5, batch_size=64, learning_rate=0.01,
    learning_rate_decay=1.0, weight_decay=5e-4,
)  # fmt: skip
FLOWER = "Flower, fedavg, eager"
OURS = {
    "ours, fedavg, eager": dict(method="fedavg", gradient="eager"),
    "ours, fedavg, native": dict(method="fedavg", gradient="native"),
    "ours, feddip s = 0.5, native": dict(
        method="feddip", gradient="native", sparsity_initial=0.5, sparsity_target=0.5
    ),
}  # fmt: skip

client_app = ClientApp()


@cache
def kept_by_actor():
    """What an actor makes once, and keeps from client to client and from round to round."""
    torch.set_num_threads(1)
    dataset = images(60_000)
    parts = partition(dataset.y_train, "iid", SETTINGS["clients"], seed=0)
    net = models.build("lenet5", dataset.num_classes)
    return net, dataset.normalise(dataset.x_train), dataset.y_train, parts


@client_app.train()
def train(message, context):
    net, x, y, parts = kept_by_actor()
    part = parts[context.node_config["partition-id"]]
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    order = [part[torch.randperm(len(part))] for _ in range(SETTINGS["local_epochs"])]
    loss = bare_loop(net, x, y, order, *(SETTINGS[k] for k in ("batch_size", "learning_rate", "weight_decay")))
    metrics = MetricRecord({"num-examples": len(part), "train-loss": loss.item()})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


class Ours(Federation):
    """Our engine, which knows where it stands; a round does not evaluate."""

    def __init__(self, *parts):
        super().__init__(*parts)
        # The middle of a run, where FedDIP's penalty is at work.
        self.state = self.start().replace(t=self.exp.rounds // 2)

    def seconds(self) -> float:
        """Of one more round."""
        began = time.perf_counter()
        self.state, _ = self.round(self.state)
        return time.perf_counter() - began

    def test_accuracy(self, w: torch.Tensor) -> float:
        return evaluate(self, self.state.replace(w=w))[0]


def count_replies(replies, _) -> MetricRecord:
    # Flower continues without the clients that failed: such a round would be a fast one.
    return MetricRecord({"clients": len(replies)})


def measure(repeat: int) -> tuple[pd.DataFrame, dict[str, float]]:
    """The seconds of each side in every repetition, and the test accuracy that each has reached at the end."""
    dataset = images(60_000)
    ours = {name: assemble(Experiment(**SETTINGS, **settings), dataset, Ours) for name, settings in OURS.items()}
    some, rows, accuracy = next(iter(ours.values())), [], {}
    server_app = ServerApp()

    @server_app.main()
    def main(grid, context):
        began = 0.0

        def between(server_round, arrays):
            """Where Flower would evaluate, before the first round and after each, our engine has its turn."""
            nonlocal began
            if server_round:
                row = {FLOWER: time.perf_counter() - began}
                rows.append(row | {name: side.seconds() for name, side in ours.items()})
            began = time.perf_counter()

        # The first round may begin before Flower has counted all clients, so a fraction of them is not enough.
        N, K = SETTINGS["clients"], SETTINGS["clients_per_round"]
        strategy = FedAvg(
            fraction_train=K / N, fraction_evaluate=0.0, min_train_nodes=K, min_available_nodes=N,
            train_metrics_aggr_fn=count_replies,
        )  # fmt: skip
        start = ArrayRecord(some.clients.net.state_dict())
        result = strategy.start(grid, start, num_rounds=WARM_UP + repeat, evaluate_fn=between)
        replies = [metrics["clients"] for metrics in result.train_metrics_clientapp.values()]
        if replies != [K] * len(rows):
            raise RuntimeError(f"clients of Flower failed: {replies} replied")
        accuracy[FLOWER] = some.test_accuracy(some.clients.layout.flat(result.arrays.to_torch_state_dict()))

    logging.getLogger("flwr").setLevel(logging.ERROR)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        os.environ["FLWR_HOME"] = folder
        for side in ours.values():
            side.train = stack.enter_context(Workers(side, PROCESSES)).train
        backend = {
            "init_args": {"num_cpus": PROCESSES, "_temp_dir": folder},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        }
        run_simulation(server_app, client_app, SETTINGS["clients"], backend_config=backend)
    accuracy |= {name: side.test_accuracy(side.state.w) for name, side in ours.items()}
    return pd.DataFrame(rows[WARM_UP:]), accuracy


def summary(times: pd.DataFrame, accuracy: dict[str, float]) -> pd.DataFrame:
    """One row per side; `speedup` is Flower's seconds over this side's, repetition by repetition."""
    return pd.DataFrame({
        "seconds_a_round": times.median(),
        "fastest": times.min(),
        "slowest": times.max(),
        "speedup": times.rdiv(times[FLOWER], axis=0).median(),
        "n": len(times),
        "test_accuracy": accuracy,
    }).rename_axis("engine").reset_index()  # fmt: skip


def as_text(table: pd.DataFrame, machine: dict) -> str:
    s, n, rounds = SETTINGS, table["n"].iloc[0], table["n"].iloc[0] + WARM_UP
    lines = [
        "# Seconds per round, without evaluation",
        "",
        f"LeNet-5, {s['clients_per_round']} of {s['clients']} clients per round, 1,200 images each, "
        f"{s['local_epochs']} epochs, batches of {s['batch_size']}; {PROCESSES} processes of one thread; medians of "
        f"n = {n} rounds after {WARM_UP} to warm up, the engines in turn.",
        "",
        "| engine, method, gradient | seconds (fastest to slowest) | speed-up | test accuracy |",
        "|---|---|---|---|",
    ]
    for row in table.itertuples():
        spread = f"{row.seconds_a_round:.2f} ({row.fastest:.2f} to {row.slowest:.2f})"
        lines.append(f"| {row.engine} | {spread} | {row.speedup:.2f} | {row.test_accuracy:.3f} |")
    lines += [
        "",
        f"The accuracy, after {rounds} rounds from the same weights, only shows that all of them train; FedDIP has the "
        "penalty of mid-run from the first.",
        "",
        ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in machine.items()) + ".",
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=11, help="repetitions, at least 5")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the table")
    options = parser.parse_args()
    if options.repeat < 5:
        parser.error("--repeat: at least 5")
    machine = machine_of("flwr", "ray")
    table = summary(*measure(options.repeat))
    keep(options.out, "flower", table, as_text(table, machine), machine)


if __name__ == "__main__":
    # By its module's name: what an actor gets from __main__ is a copy for each call, and would keep nothing.
    import benchmark_flower

    benchmark_flower.main()
