"""Renew README's tables of results and of speed from the records in outputs/, and say what these took."""

import re
from pathlib import Path

import pandas as pd

from feddip_core import results
from feddip_core.records import write

ROOT = Path(__file__).parent.parent
OUTPUTS = ROOT / "outputs"
COMMAND = "make runs PRESET=paper SEEDS='0 1 2' OPTIONS='--results all'"
# Of outputs/benchmarks/benchmark.csv: (part, case) under the name that README gives it.
SPEED = {
    ("a round", "bare loop, eager"): "a bare PyTorch loop, one thread",
    ("a round", "feddip, eager, round 100"): "FedDIP, eager, one thread",
    ("a round", "feddip, native, round 100"): "FedDIP, compiled, in round 100 (sparsity 0.6)",
    ("a round", "feddip, native, round 950"): "FedDIP, compiled, in round 950 (sparsity 0.9)",
    ("two workers against one", "feddip, native, K = 10"): "two workers against one, ten clients a round",
    ("two runs side by side against one after the other", "feddip, native"): "two runs side by side against one alone",
}
FLOWER = {
    "Flower, fedavg, eager": "Flower's simulation, FedAvg, eager clients, two processes",
    "ours, fedavg, eager": "FedAvg, eager, two workers",
    "ours, feddip s = 0.5, native": "FedDIP, compiled, two workers",
}


def speed() -> str:
    ours = pd.read_csv(OUTPUTS / "benchmarks" / "benchmark.csv").set_index(["part", "case"])
    flower = pd.read_csv(OUTPUTS / "benchmarks" / "flower.csv").set_index("engine")
    lines = ["| a round | seconds | ratio |", "|---|---|---|"]
    for key, name in SPEED.items():
        ratio = "1" if pd.isna(ours.loc[key, "ratio"]) else f"{ours.loc[key, 'ratio']:.2f}"
        lines.append(f"| {name} | {ours.loc[key, 'seconds']:.2f} | {ratio} × |")
    for key, name in FLOWER.items():
        lines.append(f"| {name} | {flower.loc[key, 'seconds_a_round']:.2f} | {flower.loc[key, 'speedup']:.2f} × |")
    return "\n".join(lines)


def renewed(text: str) -> str:
    """README with its tables as the records have them now."""
    table = results.compared(OUTPUTS / "runs")
    parts = {
        "results": results.headline(table),
        "effort": f"From nothing, `{COMMAND}` makes them anew: {results.effort(OUTPUTS / 'runs')}.",
        "misses": results.misses(table),
        "orders": results.orders(table),
        "moves": results.moved(OUTPUTS / "runs"),
        "speed": speed(),
    }
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        text = re.sub(f"(?s){begin}.*?{end}", lambda _, now=f"{begin}{part}\n{end}": now, text)
    return text


if __name__ == "__main__":
    text = renewed((ROOT / "README.md").read_text())
    write(ROOT / "README.md", text)
    print(re.search("From nothing, .*", text)[0])
