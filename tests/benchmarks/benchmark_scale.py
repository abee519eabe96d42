"""What the paper's three experiments take: sizes by counting, one real round by running it, a whole run from that.

Each network's first round at the paper's settings runs in a process of its own, on the real data. Its CPU time counts,
summed over its threads: other work on the machine hardly changes it. The table is written to outputs/benchmarks/ with
a description of the machine.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F

from feddip_core import Experiment, masks, models
from feddip_core.engine import measure
from feddip_core.engine.assembly import assemble
from feddip_core.engine.computing import computing, forward_of
from feddip_core.engine.networks import flops
from feddip_core.engine.provenance import provenance
from feddip_core.engine.records import write
from feddip_core.layout import Layout
from feddip_core.presets import CLASSES, TABLE_II
from feddip_core.server import Federation, Round
from feddip_core.state import State

OUT = Path(__file__).parent.parent.parent / "outputs" / "benchmarks"
IMAGE = {"fashion_mnist": dict(channels=1, size=28)}
COLOUR = dict(channels=3, size=32)
MOST_MEGABYTES = 4096  # that a round may take on a CPU
VECTORS = 7  # of all parameters that a client's step holds: sent, start, w, w ⊙ m, gradient, mask, and a spare one


def counted(dataset: str) -> dict:
    """Parameters, operations and memory, without a single number being computed."""
    exp, image = Experiment.preset("paper", dataset), IMAGE.get(dataset, COLOUR)
    with torch.device("meta"):
        net = models.build(exp.model, CLASSES[dataset], **image)
    layout = Layout.of(net)
    activations = activation_bytes(net, layout, exp.batch_size, image)
    evaluation = 2 * measure.EVALUATION_BATCH * largest_activation(net, image)
    samples = 70_000 if dataset == "fashion_mnist" else 60_000
    fixed = samples * image["channels"] * image["size"] ** 2 + layout.size * (4 * VECTORS + 8)  # 8: the sum of uploads
    return {
        "dataset": dataset, "model": exp.model, "parameters": layout.size,
        "prunable": layout.prunable_size,
        "megaflops_a_sample": flops(net, image) / 1e6,
        "gpu_megabytes_estimated": (fixed + max(activations, evaluation)) / 1e6,
    }  # fmt: skip


def activation_bytes(net, layout: Layout, batch: int, image: dict) -> int:
    """What a forward pass keeps for the backward one, apart from the parameters."""
    u = torch.empty(layout.size, device="meta", requires_grad=True)
    kept = {}

    def keep(tensor):
        kept[id(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        held.append(tensor)  # or its memory, and with it the name, would be given to another
        return tensor

    held = []
    x = torch.empty(batch, image["channels"], image["size"], image["size"], device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        flat = torch.empty(layout.statistics.size, device="meta")
        logits = forward_of(net.train(), layout)(u, layout.statistics.views(flat), x)
        F.cross_entropy(logits, torch.empty(batch, dtype=torch.int64, device="meta"))
    kept.pop(id(u.untyped_storage()), None)
    return sum(kept.values())


def largest_activation(net, image: dict) -> int:
    """Of one sample, in bytes."""
    sizes = []
    hooks = [m.register_forward_hook(lambda *a: sizes.append(a[2].numel())) for m in net.modules()]
    net.eval()(torch.empty(1, image["channels"], image["size"], image["size"], device="meta"))
    for hook in hooks:
        hook.remove()
    return 4 * max(sizes)


def measured(dataset: str, threads: int) -> dict:
    """The first round of FedDIP, in a process of its own."""
    code = f"from benchmark_scale import first_round; first_round({dataset!r}, {threads})"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def first_round(dataset: str, threads: int) -> None:
    exp = Experiment.preset("paper", dataset, threads=threads, evaluate_every=1)
    with computing(exp):
        fed = assemble(exp)
        state = fed.start()
        began = time.perf_counter(), time.process_time()
        after, done = fed.round(state)
        row = measure.row(fed, state, after, done, 0.0)
        wall, seconds = time.perf_counter() - began[0], time.process_time() - began[1]
        check(fed, after, done, row)
    peak = next(line for line in Path("/proc/self/status").read_text("utf-8").splitlines() if line.startswith("VmHWM"))
    print(json.dumps({
        "megabytes_down_first_round": row["downlink_bits"] / 8e6, "megabytes_up_a_round": row["uplink_bits"] / 8e6,
        "cpu_seconds_a_round": seconds, "wall_seconds_a_round": wall,
        "cpu_days_of_a_run": seconds * exp.rounds / 86_400, "cpu_peak_megabytes": int(peak.split()[1]) / 1024,
        "train_loss": row["train_loss"], "test_loss": row["test_loss"], "sparsity": row["sparsity"],
    }))  # fmt: skip


def check(fed: Federation, after: State, done: Round, row: dict) -> None:
    """A finite loss; ERK's count of zeros in every layer, and the target's in the mask that the end would choose."""
    assert math.isfinite(row["train_loss"]) and math.isfinite(row["test_loss"]) and torch.isfinite(after.w).all(), row
    exp, layout = fed.exp, fed.clients.layout
    shapes = layout.prunable_shapes
    erk = masks.erk_sparsities(shapes, exp.sparsity_initial)
    assert {k: int(keep.sum()) for k, keep in after.m.items()} == {
        k: int((1 - erk[k]) * shape.numel()) for k, shape in shapes.items()
    }
    assert not after.w[layout.flat_mask(after.m, like=after.w) == 0].any()
    last = masks.magnitude_mask(layout.weights(done.w), exp.sparsity_target)
    assert layout.prunable_size - masks.kept(last) == round(exp.sparsity_target * layout.prunable_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", nargs="+", default=list(TABLE_II), choices=list(TABLE_II))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the measured round")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the table; the rows of other data sets stay")
    options = parser.parse_args()
    path = options.out / "scale.csv"
    rows = pd.read_csv(path).to_dict("records") if path.exists() else []
    for dataset in options.datasets:
        made = provenance(Experiment.preset("paper", dataset, threads=options.threads))
        machine = {"threads": options.threads, "machine": made["cpu"], "commit": made["commit"], "at": made["started"]}
        row = counted(dataset) | measured(dataset, options.threads) | machine
        rows = [old for old in rows if old["dataset"] != dataset] + [row]
        options.out.mkdir(parents=True, exist_ok=True)
        write(path, pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
        print(pd.Series(row).to_string(), flush=True)
        assert row["cpu_peak_megabytes"] < MOST_MEGABYTES, f"{dataset}: a round takes too much memory"


if __name__ == "__main__":
    main()
