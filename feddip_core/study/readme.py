"""Renew README's tables from the records in outputs/: python -m feddip_core.study.readme

A table stands between `<!-- name -->` and `<!-- end of name -->`. README names the `parts` that it shows.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd

from ..engine.records import write
from . import cifar, gains, reproduction, summary
from .findings import findings
from .wanted import wanted

ROOT = Path(__file__).parent.parent.parent
OUTPUTS = ROOT / "outputs"
BARE, FLOWER = "a bare PyTorch loop, one thread", "Flower's simulation, FedAvg, eager clients, two processes"
# Of outputs/benchmarks: the case, README's name for it, and what it is measured against.
ROUNDS = [
    ("bare loop, eager", BARE, BARE),
    ("feddip, eager, round 100", "FedDIP, eager, one thread", BARE),
    ("feddip, native, round 100", "FedDIP, compiled, in round 100 (sparsity 0.6)", BARE),
    ("feddip, native, round 950", "FedDIP, compiled, in round 950 (sparsity 0.9)", BARE),
    ("Flower, fedavg, eager", FLOWER, FLOWER),
    ("ours, fedavg, eager", "FedAvg, eager, two workers", FLOWER),
    ("ours, feddip s = 0.5, native", "FedDIP, compiled, two workers", FLOWER),
]
SHORT = ("FedDIP, compiled, in round 950", "FedDIP, compiled, two workers", "FedAvg, eager, two workers")
# Of outputs/benchmarks/scale.csv: the paper's three experiments.
SCALE = {
    "fashion_mnist": "LeNet-5, Fashion-MNIST",
    "cifar10": "AlexNet, CIFAR-10",
    "cifar100": "ResNet-18, CIFAR-100",
}

# What the paper's tables and Figure 6 take on CIFAR at full size.
COLUMNS, COLUMN = ("cifar10", "cifar100"), ("accuracy", "non_iid", "extreme_sparsity")
CIFAR_IMAGES, BOTH_WAYS = 50_000, 3  # a training step takes three times the operations of a forward pass
GPU_FLOPS = (2e12, 10e12)  # what we guess a GPU does per second in single precision: a small one, and a large one


def speed() -> str:
    """A round here against a bare loop and against Flower's: each ratio divides the seconds of two rows."""
    ours = pd.read_csv(OUTPUTS / "benchmarks" / "benchmark.csv")
    flower = pd.read_csv(OUTPUTS / "benchmarks" / "flower.csv").set_index("engine")["seconds_a_round"]
    seconds = pd.concat([ours[ours["part"] == "a round"].set_index("case")["seconds"], flower])
    shown = {name: f"{seconds[case]:.2f}" for case, name, _ in ROUNDS}
    lines = ["| one round | seconds | against | times as fast |", "|---|---|---|---|"]
    for _, name, base in ROUNDS:
        against = "" if name == base else "the bare loop" if base == BARE else "Flower's simulation"
        lines.append(f"| {name} | {shown[name]} | {against} | {float(shown[base]) / float(shown[name]):.2f} |")
    ratio = ours.set_index(["part", "case"])["ratio"]
    pairs = {
        "two workers against one": "feddip, native, K = 10",
        "two runs side by side against one after the other": "feddip, native",
    }
    said = "; ".join(f"{part}: {ratio[part, case]:.2f} times as fast" for part, case in pairs.items())
    return "\n".join(
        [*lines, "", f"{said[0].upper()}{said[1:]} (medians of the ratios of repetitions, FedDIP, compiled)."]
    )


def fastest() -> str:
    """README's three rows: what the compiled gradient gains, and that the engine itself costs nothing."""
    table = speed().splitlines()
    rows = [line for name in SHORT for line in table if line.startswith(f"| {name}")]
    return "\n".join(table[:2] + rows)


def scale() -> str:
    """Sizes, and one full-size round. An experiment that has not been measured has no row."""
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


def full_columns() -> str:
    """What the paper's CIFAR columns take: a core's hours as measured, a GPU's from operations."""
    made = pd.read_csv(OUTPUTS / "benchmarks" / "scale.csv").set_index("dataset")
    lines = ["| column | runs, one seed | PFLOP per run | hours of a CPU core | hours of a GPU, estimated |",
             "|---|---|---|---|---|"]  # fmt: skip
    for dataset in COLUMNS:
        exps = {exp.run_id: exp for result in COLUMN for exp, *_ in wanted(result, "paper", dataset).values()}
        exp = next(iter(exps.values()))
        trained = exp.rounds * exp.local_epochs * exp.clients_per_round / exp.clients * CIFAR_IMAGES
        flops = BOTH_WAYS * trained * made.loc[dataset, "megaflops_a_sample"] * 1e6
        few, many = (flops / speed / 3600 for speed in reversed(GPU_FLOPS))
        cells = [SCALE[dataset], len(exps), f"{flops / 1e15:.0f}", f"{24 * made.loc[dataset, 'cpu_days_of_a_run']:.0f}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {few:.1f} to {many:.1f} |")
    return "\n".join(lines)


def parts(runs: Path) -> dict[str, Callable[[], str]]:
    """What README may show, by name. Each is made from the records only if README names it."""
    table = cache(lambda: summary.compared(runs))
    return {
        "results": lambda: reproduction.headline(table()),
        "tally": lambda: reproduction.tally(table()),
        "ours": lambda: gains.headline(runs),
        "narrow": lambda: cifar.headline(runs),
        "findings": lambda: findings(runs),
        "speed": fastest,
    }


def renewed(text: str, runs: Path = OUTPUTS / "runs") -> str:
    """The text with its tables and comparisons made anew from the records."""
    for name, made in parts(runs).items():
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
