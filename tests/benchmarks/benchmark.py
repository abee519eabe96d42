"""How fast a round is, against a bare PyTorch loop that takes the same steps, and how time and memory grow.

Only ratios mean anything: machines differ, and other work disturbs both sides alike, so sides are measured in turns and
the table shows medians. It is written to outputs/benchmarks/ with a description of the machine.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pandas as pd
import torch
import torch.nn.functional as F

from feddip_core import Experiment, run
from feddip_core.data import Dataset
from feddip_core.engine import measure, sources
from feddip_core.engine.assembly import assemble, gradient_name
from feddip_core.engine.provenance import provenance
from feddip_core.engine.records import Record, write
from feddip_core.engine.run import SAVING_SHARE, _Log
from feddip_core.engine.workers import Workers
from feddip_core.lab.explorer import Explorer
from feddip_core.server import Federation
from feddip_core.state import Average, State
from feddip_core.streams import stream

OUT = Path(__file__).parent.parent.parent / "outputs" / "benchmarks"
PAPER = dict(dataset="fashion_mini", clients=50, clients_per_round=5, local_epochs=5, batch_size=64, rounds=1000)


def machine_of(*packages: str) -> dict:
    """What a speed was measured on."""
    made = provenance(Experiment(**PAPER))
    here = {k: made[k] for k in ("cpu", "platform", "python", "commit", "started")}
    versions = made["packages"] | {name: version(name) for name in packages}
    return here | versions | {"load_before": round(os.getloadavg()[0], 1)}


def keep(out: Path, name: str, table: pd.DataFrame, text: str, machine: dict) -> None:
    """The table as <name>.csv in the folder, with the machine in every row, and its text as <name>.md."""
    out.mkdir(parents=True, exist_ok=True)
    write(out / f"{name}.csv", table.assign(**machine).to_csv(index=False, lineterminator="\n", float_format="%.4f"))
    write(out / f"{name}.md", text)
    print(text)


def images(train: int, test: int = 10_000) -> Dataset:
    """The embedded images over and over, as many as asked for: speed does not ask what they show."""
    mini = sources.load("fashion_mini")
    sizes = {"x_train": train, "y_train": train, "x_test": test, "y_test": test}
    tiled = {k: getattr(mini, k)[torch.arange(n) % len(getattr(mini, k))] for k, n in sizes.items()}
    return dataclasses.replace(mini, **tiled)


def bare_loop(net, x, y, order, batch_size, eta, weight_decay):
    """What one would write by hand: a module, an optimiser, a loop. The data are normalised beforehand."""
    sgd = torch.optim.SGD(net.parameters(), lr=eta, weight_decay=weight_decay)
    net.train()
    for epoch in order:
        for batch in epoch.split(batch_size):
            sgd.zero_grad()
            loss = F.cross_entropy(net(x[batch]), y[batch])
            loss.backward()
            sgd.step()
    return loss


def bare_round(net, dataset, parts, exp) -> None:
    """The bare loop for each client, the mean of their networks, and a loop over the test images."""
    x, y = dataset.normalise(dataset.x_train[torch.cat(parts)]), dataset.y_train[torch.cat(parts)]
    start = {k: v.clone() for k, v in net.state_dict().items()}
    mean = {k: torch.zeros_like(v) for k, v in start.items()}
    generator = stream(0, "benchmark")
    for first in range(0, len(x), len(parts[0])):
        net.load_state_dict(start)
        own = slice(first, first + len(parts[0]))
        order = [torch.randperm(len(parts[0]), generator=generator) for _ in range(exp.local_epochs)]
        bare_loop(net, x[own], y[own], order, exp.batch_size, exp.learning_rate, exp.weight_decay)
        for k, v in net.state_dict().items():
            mean[k] += v / len(parts)
    net.load_state_dict(mean)
    with torch.no_grad():
        for part in torch.arange(len(dataset.x_test)).split(500):
            F.cross_entropy(net(dataset.normalise(dataset.x_test[part])), dataset.y_test[part])


def measured(fed: Federation, state: State) -> tuple[State, dict]:
    """A round as `run` makes it: the next state, and the row of metrics, the test images among them."""
    after, done = fed.round(state)
    return after, measure.row(fed, state, after, done, 0.0)


class Clocked(Federation):
    """A federation that knows how long its clients, its server and its evaluation took."""

    def train_client(self, state, n):
        return self._timed("local training", super().train_client, state, n)

    def clock(self, state: State) -> dict[str, float]:
        """CPU seconds of each part of a measured round; what is neither training nor evaluation is the server's."""
        self.took = {"local training": 0.0, "evaluation": 0.0}
        evaluate = functools.partial(self._timed, "evaluation", measure.evaluate)
        began = time.process_time()
        with mock.patch.object(measure, "evaluate", evaluate):
            measured(self, state)
        all_of_it = time.process_time() - began
        return self.took | {"server": all_of_it - sum(self.took.values()), "all": all_of_it}

    def _timed(self, what, work, *arguments):
        began = time.process_time()
        result = work(*arguments)
        self.took[what] += time.process_time() - began
        return result


def a_round(repeat: int) -> list[dict]:
    """One thread, CPU time: FedAvg and FedDIP, eager and native, each against the bare loop of the same repetition."""
    dataset = images(60_000)
    late = {"fedavg": [0], "feddip": [100, 950]}  # rounds with s = 0.59 and s = 0.90, both with λ > 0
    sides = {}
    for gradient in ("eager", "native"):
        for method, rounds in late.items():
            fed = assemble(Experiment(method=method, gradient=gradient, **PAPER), dataset, Clocked)
            for t in rounds:
                sides[f"{method}, {gradient}" + (f", round {t}" if t else "")] = (fed, at_round(fed, t))
    fed = sides["fedavg, eager"][0]
    parts = [fed.clients.parts[n] for n in fed.select(0)]
    times = []
    for _ in range(repeat):
        began = time.process_time()
        bare_round(fed.clients.net, dataset, parts, fed.exp)
        times.append({"bare loop": {"all": time.process_time() - began}})
        for name, (federation, state) in sides.items():
            times[-1][name] = federation.clock(state)
    rows = [row("a round", "bare loop, eager", seconds=statistics.median(t["bare loop"]["all"] for t in times))]
    for name in sides:
        ratio = statistics.median(t["bare loop"]["all"] / t[name]["all"] for t in times)
        goal = 3.0 if name.startswith("feddip, native") else None
        rows.append(row("a round", name, statistics.median(t[name]["all"] for t in times), ratio, goal))
        for part in ("local training", "evaluation", "server"):
            share = statistics.median(t[name][part] / t[name]["all"] for t in times)
            rows.append(row(f"of it, {part}", name, statistics.median(t[name][part] for t in times), share=share))
    return [*rows, *saving(sides["feddip, native, round 950"])]


def at_round(fed: Federation, t: int) -> State:
    """As if t rounds had gone by: the mask has the sparsity of that round, the weights are the first ones."""
    state = fed.start()
    if t and state.m is not None:
        w, m, memory = fed.method.next(Average({"w": state.w}, []), state.replace(t=t - t % 5 + 4))
        state = state.replace(w=fed.method.remembered(w, m), m=m, memory=memory)
    return state.replace(t=t)


def saving(side: tuple[Federation, State]) -> list[dict]:
    """Record and checkpoint when the run is nearly over and both are at their largest."""
    fed, state = side
    _, last = measured(fed, state)
    rows = [last | {"round": i + 1} for i in range(999)]
    with tempfile.TemporaryDirectory() as folder:
        log = _Log(fed, Record(fed.exp, {}, folder, gradient=gradient_name(fed)), state, rows, 0)
        times = []
        for _ in range(9):
            log.save()
            times.append(log.cost)
    seconds = statistics.median(times)
    return [row(f"saving once, paced to {SAVING_SHARE:.0%} of the time", "feddip, native, after 999 rounds", seconds)]


def workers(repeat: int) -> list[dict]:
    """Wall time of a round with two workers against one, eager and native, an odd and an even number of clients."""
    dataset, rows = images(60_000), []
    for gradient, k in (("native", 5), ("native", 10), ("eager", 4)):
        fed = assemble(Experiment(method="feddip", gradient=gradient, **PAPER | {"clients_per_round": k}), dataset)
        state, times = fed.start(), {1: [], 2: []}
        with Workers(fed, 2) as pool:
            for trial in range(repeat + 1):
                for count, train in ((1, fed.train_here), (2, pool.train)):
                    fed.train = train
                    began = time.perf_counter()
                    measured(fed, state)
                    times[count] += [time.perf_counter() - began] if trial else []
        ratio = statistics.median(a / b for a, b in zip(times[1], times[2], strict=True))
        name = f"feddip, {gradient}, K = {k}"
        rows.append(row("two workers against one", name, statistics.median(times[2]), ratio, 1.8 if k > 5 else None))
    return rows


def side_by_side(repeat: int) -> list[dict]:
    """Two runs at once against one after the other, in processes of their own."""
    code = "from benchmark import alone; alone()"

    def seconds(count):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        started = [
            subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
            for _ in range(count)
        ]  # fmt: skip
        return max(float(process.communicate()[0]) for process in started)

    pairs = [(seconds(1), seconds(2)) for _ in range(max(3, repeat // 2))]
    ratio = statistics.median(2 * one / two for one, two in pairs)
    both = statistics.median(two for _, two in pairs)
    return [row("two runs side by side against one after the other", "feddip, native", both, ratio, 1.95)]


def alone() -> None:
    torch.set_num_threads(1)
    fed = assemble(Experiment(method="feddip", **PAPER), images(60_000))
    state, _ = measured(fed, fed.start())
    began = time.perf_counter()
    for _ in range(4):
        state, _ = measured(fed, state)
    print((time.perf_counter() - began) / 4)


def start_up(repeat: int) -> list[dict]:
    """Seconds until the first round, in a fresh process: Python and PyTorch, this package, a federation."""
    steps = {
        "python and torch": "import torch",
        "and feddip_core": "import feddip_core",
        "and LeNet-5 with 50 clients": "from benchmark import *; assemble(Experiment(**PAPER), images(60_000))",
    }
    rows = []
    for name, code in steps.items():
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        times = []
        for _ in range(max(3, repeat // 2)):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], env=environment, check=True)
            times.append(time.perf_counter() - began)
        rows.append(row("start-up", name, statistics.median(times)))
    return rows


def sliders(repeat: int) -> list[dict]:
    """From the move of a slider of the explorer to the new picture of its schedules and cost, in the kernel.

    The goal is a tenth of a second: the ratio says how often the time goes into it.
    """
    rows = []
    for T, R in ((12, 2), (40, 5), (200, 5), (200, 1)):  # (40, 5) is the preset of the paper's schedules
        explorer, times = Explorer(Experiment.preset("smoke", rounds=T, reconfigure_every=R)), []
        for i in range(4 * repeat):
            began = time.perf_counter()
            explorer.controls["sparsity_target"].value = 0.8 + 0.01 * (i % 10)
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times)
        rows.append(row("a slider of the explorer, against 0.1 s", f"T = {T}, R = {R}", seconds, 0.1 / seconds, 1.0))
    return rows


GROWTH = {
    "clients N": [dict(clients=n) for n in (10, 100, 1000)],
    "clients a round K": [dict(clients_per_round=k) for k in (2, 4, 8)],
    "local epochs E": [dict(local_epochs=e) for e in (1, 2, 4)],
    "model size (width, eager)": [dict(width=w, gradient="eager") for w in (0.5, 1, 2, 4)],
}


def growth() -> list[dict]:
    """Seconds per round and peak memory, each case in a process of its own; every client has 60 images."""
    rows = []
    for name, cases in GROWTH.items():
        found = []
        for case in cases:
            code = f"from benchmark import grown; grown({case!r})"
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
            done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
            found.append(json.loads(done.stdout))
        for case, here in zip(cases, found, strict=True):
            value = next(iter(case.values()))
            ratio = here["seconds"] / found[0]["seconds"]
            rows.append(row(f"growth with {name}", str(value), here["seconds"], ratio, memory=here["megabytes"]))
    return rows


def grown(case: dict) -> None:
    torch.set_num_threads(1)
    settings = dict(dataset="fashion_mini", clients=10, clients_per_round=4, local_epochs=4, batch_size=16) | case
    dataset = images(60 * settings["clients"], test=100)
    fed = assemble(Experiment(method="feddip", **settings), dataset)
    state, _ = measured(fed, fed.start())
    times = []
    for _ in range(7):
        began = time.process_time()
        state, _ = measured(fed, state)
        times.append(time.process_time() - began)
    # Not getrusage's, which a process inherits from the one that started it.
    peak = next(line for line in Path("/proc/self/status").read_text("utf-8").splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": statistics.median(times), "megabytes": int(peak.split()[1]) / 1024}))


def row(part, case, seconds, ratio=None, goal=None, share=None, memory=None) -> dict:
    return dict(part=part, case=case, seconds=seconds, ratio=ratio, goal=goal, share=share, peak_megabytes=memory)


def table(rows: list[dict], machine: str) -> str:
    """The rows as Markdown."""

    def cells(r):
        share = "" if r["share"] is None else f"{r['share']:.1%}"
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.2f} ×"
        goal = "" if r["goal"] is None else f"≥ {r['goal']} ×" + (" missed" if r["ratio"] < r["goal"] else "")
        memory = "" if r["peak_megabytes"] is None else f"{r['peak_megabytes']:.0f}"
        return [r["part"], r["case"], f"{r['seconds']:.3f}", ratio, goal, share, memory]

    head = ["what", "case", "seconds", "ratio", "goal", "share", "peak MB"]
    lines = [head, ["---"] * len(head), *map(cells, rows)]
    return f"{machine}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the tables")
    options = parser.parse_args()
    repeat, out = options.repeat, options.out
    torch.set_num_threads(1)
    run(Experiment.preset("smoke", rounds=1), progress=False)  # whatever is compiled only once
    made = provenance(Experiment(**PAPER))
    machine = f"{made['cpu']}; torch {made['packages']['torch']}; one thread per process; medians, n = {repeat}; "
    machine += f"commit {made['commit']}, {made['started']}"
    rows = [*a_round(repeat), *workers(repeat), *side_by_side(repeat), *start_up(repeat), *sliders(repeat), *growth()]
    out.mkdir(parents=True, exist_ok=True)
    write(out / "benchmark.csv", pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
    write(out / "benchmark.md", table(rows, machine))
    print(table(rows, machine))


if __name__ == "__main__":
    main()
