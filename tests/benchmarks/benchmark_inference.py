"""How fast a sparse model classifies: PyTorch dense and sparse, ONNX Runtime, and the generated C, in one run.

The paper's three networks at full width, masks with ERK's share of zeros in each layer, one thread. What a model has
learned does not change its speed, so weights are random. All sides take turns; a ratio is taken in each turn.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from benchmark import OUT, keep, machine_of

from feddip_core import masks, models
from feddip_core.deploy.c import c_file, compiled
from feddip_core.deploy.graph import Samples, graph_of
from feddip_core.deploy.inference import one_thread, seconds
from feddip_core.deploy.onnx_file import onnx_bytes
from feddip_core.deploy.sparse import sparse
from feddip_core.streams import stream

SPARSITIES, BATCHES = (0.8, 0.9, 0.95, 0.99), (1, 64)
NETWORKS = {"lenet5": (1, 28, 28), "alexnet": (3, 32, 32), "resnet18": (3, 32, 32)}  # and a sample of each
DENSE, FORMS = "PyTorch", ("sparse PyTorch", "ONNX Runtime", "C")
MOST_KEPT = 250_000  # weights of a C file; a larger one takes its compiler minutes
# Of a network, from which share of zeros on which form must be faster than which.
GOALS = {"lenet5": (0.95, "C", "ONNX Runtime"), "alexnet": (0.9, "sparse PyTorch", DENSE)}


def network(name: str, s: float) -> torch.nn.Module:
    """The network with random weights, as many of them zero."""
    net = models.MODELS[name]().eval()
    shapes = {k: net.get_parameter(k).shape for k in models.prunable(net)}
    mask = masks.random_mask(shapes, masks.erk_sparsities(shapes, s), stream(0, "benchmark"))
    with torch.no_grad():
        for k, m in mask.items():
            net.get_parameter(k).mul_(m)
    return net


@torch.no_grad()
def forms_of(net: torch.nn.Module, x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Each form as a function that classifies x; all of them agree."""
    graph = graph_of(net, Samples(tuple(x.shape[1:])))
    session = one_thread(onnx_bytes(graph))
    fast, _ = sparse(net)
    array = x.numpy()
    sides = {
        DENSE: lambda: net(x),
        "sparse PyTorch": lambda: fast(x),
        "ONNX Runtime": lambda: torch.from_numpy(session.run(None, {"samples": array})[0]),
    }
    if sum(int(v.count_nonzero()) for v in graph.weights.values()) <= MOST_KEPT:
        classify, outputs = compiled(c_file(graph)), graph.outputs
        sides["C"] = lambda: classify(x, outputs)
    expected = sides[DENSE]()
    for side, work in sides.items():
        difference = (work() - expected).abs().max() / expected.abs().max()
        assert difference < 1e-3, f"{side} differs by {difference:.1e}"
    return sides


def measure(name: str, repeat: int) -> pd.DataFrame:
    found = []
    for s in SPARSITIES:
        net = network(name, s)
        for batch in BATCHES:
            x = torch.randn(batch, *NETWORKS[name])
            sides = forms_of(net, x)
            turns = pd.DataFrame([{side: seconds(work) for side, work in sides.items()} for _ in range(repeat)])
            ratios = turns.rdiv(turns[DENSE], axis=0).median()
            for side, took in turns.median().items():
                row = dict(network=name, sparsity=s, batch=batch, form=side)
                found.append(row | dict(microseconds=took / batch * 1e6, ratio=ratios[side], n=repeat))
    return pd.DataFrame(found)


def goal(name: str, table: pd.DataFrame) -> str:
    """Whether a network met its goal, and if not, where."""
    least, form, peer = GOALS[name]
    own = table[(table["network"] == name) & (table["sparsity"] >= least)]
    wide = own.pivot(index=["sparsity", "batch"], columns="form", values="ratio")
    missed = [f"{s:.0%} with {batch} at once" for (s, batch), row in wide.iterrows() if not row[form] > row[peer]]
    said = f"missed at {', '.join(missed)}" if missed else "met"
    return f"Goal for {name}, {form} faster than {peer} from {least:.0%} zeros on: {said}."


def as_text(table: pd.DataFrame, machine: dict) -> str:
    lines = [
        "# How fast a sparse model classifies",
        "",
        "Microseconds of CPU time per image, and how many times faster than dense PyTorch; one thread, medians of "
        f"{table['n'].iloc[0]} turns. ONNX Runtime computes with the zeros. The C file is made for the kept weights, "
        "and takes one image after the other; an "
        f"empty cell has more than {MOST_KEPT:,} of them.",
        "",
        f"| network | zeros | images at once | {' | '.join([DENSE, *FORMS])} |",
        f"|{'---|' * (4 + len(FORMS))}",
    ]
    for (name, s, batch), rows in table.groupby(["network", "sparsity", "batch"], sort=False):
        own = rows.set_index("form")
        cells = [f"{own.loc[DENSE, 'microseconds']:,.1f}"]
        cells += [f"{r.microseconds:,.1f} ({r.ratio:.2f} ×)" for f in FORMS for r in own[own.index == f].itertuples()]
        cells += [""] * (1 + len(FORMS) - len(cells))
        lines.append(f"| {name} | {s:.0%} | {batch} | {' | '.join(cells)} |")
    measured = set(table["network"])
    if "lenet5" in measured:
        words = "On LeNet-5 no layer is replaced: the ratio of sparse PyTorch shows the error of the measurement."
        lines += ["", words]
    lines += [line for name in GOALS if name in measured for line in ("", goal(name, table))]
    return "\n".join([*lines, "", ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in machine.items()) + "."]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="turns")
    words = "which of them; their table replaces that of all"
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS, help=words)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = machine_of("onnxruntime")
    table = pd.concat([measure(name, options.repeat) for name in options.networks])
    keep(options.out, "inference", table, as_text(table, machine), machine)


if __name__ == "__main__":
    main()
