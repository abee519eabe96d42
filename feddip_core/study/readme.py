"""Renew README's tables from the records in outputs/: python -m feddip_core.study.readme

A table stands between `<!-- name -->` and `<!-- end of name -->`; README has those of `parts` that it wants.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd

from ..engine.records import write
from . import summary

ROOT = Path(__file__).parent.parent.parent
OUTPUTS = ROOT / "outputs"
COMMAND = "make runs PRESET=paper SEEDS='0 1 2' OPTIONS='--results all'"
# Of outputs/benchmarks/benchmark.csv: (part, case) under the name that README gives it.
SPEED = {
    ("a round", "bare loop, eager"): "a bare PyTorch loop, one thread",
    ("a round", "feddip, eager, round 100"): "FedDIP, eager, one thread",
    ("a round", "feddip, native, round 100"): "FedDIP, compiled, in round 100 (sparsity 0.6)",
    ("a round", "feddip, native, round 950"): "FedDIP, compiled, in round 950 (sparsity 0.9)",
    ("two workers against one", "feddip, native, K = 10"): "two workers against one, ten clients per round",
    ("two runs side by side against one after the other", "feddip, native"): "two runs side by side against one alone",
}
FLOWER = {
    "Flower, fedavg, eager": "Flower's simulation, FedAvg, eager clients, two processes",
    "ours, fedavg, eager": "FedAvg, eager, two workers",
    "ours, feddip s = 0.5, native": "FedDIP, compiled, two workers",
}
# Of outputs/benchmarks/scale.csv: the paper's three experiments.
SCALE = {
    "fashion_mnist": "LeNet-5, Fashion-MNIST",
    "cifar10": "AlexNet, CIFAR-10",
    "cifar100": "ResNet-18, CIFAR-100",
}


def speed() -> str:
    """A round here against a bare loop and against Flower's."""
    ours = pd.read_csv(OUTPUTS / "benchmarks" / "benchmark.csv").set_index(["part", "case"])
    flower = pd.read_csv(OUTPUTS / "benchmarks" / "flower.csv").set_index("engine")
    lines = ["| one round | seconds | ratio |", "|---|---|---|"]
    for key, name in SPEED.items():
        ratio = "1" if pd.isna(ours.loc[key, "ratio"]) else f"{ours.loc[key, 'ratio']:.2f}"
        lines.append(f"| {name} | {ours.loc[key, 'seconds']:.2f} | {ratio} × |")
    for key, name in FLOWER.items():
        lines.append(f"| {name} | {flower.loc[key, 'seconds_a_round']:.2f} | {flower.loc[key, 'speedup']:.2f} × |")
    return "\n".join(lines)


def scale() -> str:
    """Sizes, and a full-size round; an experiment whose round has not been measured has no row."""
    made = pd.read_csv(OUTPUTS / "benchmarks" / "scale.csv").set_index("dataset")
    lines = [
        "| experiment | parameters | MFLOP per sample | MB down, first round | MB up | GPU MB, estimated "
        "| CPU seconds | CPU MB, peak | CPU hours, T = 1,000 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for dataset, name in SCALE.items():
        if dataset in made.index:
            row = made.loc[dataset]
            cells = [name, f"{row['parameters']:,}", f"{row['megaflops_a_sample']:.1f}"]
            cells += [f"{row[f'megabytes_{way}']:.1f}" for way in ("down_first_round", "up_a_round")]
            cells += [f"{row['gpu_megabytes_estimated']:,.0f}", f"{row['cpu_seconds_a_round']:,.1f}"]
            cells += [f"{row['cpu_peak_megabytes']:,.0f}", f"{24 * row['cpu_days_of_a_run']:,.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parts() -> dict[str, Callable[[], str]]:
    """What README may show, by name; each is made when it is wanted."""
    runs, table = OUTPUTS / "runs", cache(lambda: summary.compared(OUTPUTS / "runs"))
    return {
        "results": lambda: summary.headline(table()),
        "effort": lambda: f"From nothing, `{COMMAND}` makes them anew: {summary.effort(runs)}.",
        "misses": lambda: summary.misses(table()),
        "orders": lambda: summary.orders(table()),
        "moves": lambda: summary.moved(runs),
        "cifar10": lambda: summary.splits_shown(runs, "cifar10"),
        "cifar100": lambda: summary.splits_shown(runs, "cifar100"),
        "speed": speed,
        "scale": scale,
    }


def renewed(text: str) -> str:
    """The text with its tables as the records have them now."""
    for name, made in parts().items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        if begin in text:
            now = f"{begin}{made()}\n{end}"
            text = re.sub(f"(?s){begin}.*?{end}", lambda _, now=now: now, text)
    return text


def main() -> None:
    readme = ROOT / "README.md"
    write(readme, renewed(readme.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
