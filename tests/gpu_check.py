"""Does a GPU compute what a CPU does, without waiting, and how fast? make gpu-check

All data are random: nothing is downloaded. For each of the paper's networks, at full width:

- three rounds of FedDIP with small clients on both devices: what differs stays within `TOLERANCES`;
- the same three rounds once more on the GPU: the same bits;
- a client's training under torch.cuda.set_sync_debug_mode("error"): no step waits for the host;
- one round of the paper's size: rounds per second, peak memory, and the hours of a whole run.

The exit code is 1 if anything is out of tolerance. Without CUDA, the training runs on the meta device, where a tensor
has no values: a step that mixes devices or waits for a value fails there too.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from helpers import on_meta
from torch import Tensor

from feddip_core import Experiment
from feddip_core.data import Dataset
from feddip_core.engine import measure, sources
from feddip_core.engine.assembly import assemble
from feddip_core.engine.computing import computing
from feddip_core.presets import CLASSES, TABLE_II
from feddip_core.server import Federation
from feddip_core.state import State

# GPU against CPU after three rounds. In double precision: ‖w − w_CPU‖ as a share of how far training moved w, the share
# of mask bits that differ, and how far the test loss is off. Rounding alone gives 1e-11, a wrong term 1e-4 and more. In
# single precision a ReLU near zero may switch, so only the loss is compared.
TOLERANCES = {"weights": 1e-6, "mask": 1e-6, "loss": 1e-6, "loss in single precision": 1e-2}
SMALL = dict(clients=10, clients_per_round=2, rounds=3, local_epochs=1, batch_size=32, reconfigure_every=1)
SAMPLES, TESTED = 600, 200  # of the small clients, and test images
FULL_SAMPLES = {"fashion_mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}


def experiment(dataset: str, **settings) -> Experiment:
    """The paper's settings with PyTorch's gradient, which both devices have."""
    return Experiment.preset("paper", dataset, gradient="eager", evaluate_every=1, **settings)


def images(dataset: str, train: int, test: int) -> Dataset:
    """Random images and labels of a data set's shape, normalised and augmented as it is."""
    draw, classes = torch.Generator().manual_seed(0), CLASSES[dataset]
    shape = (1, 28, 28) if dataset == "fashion_mnist" else (3, 32, 32)
    x = torch.randint(0, 256, (train + test, *shape), dtype=torch.uint8, generator=draw)
    y = torch.arange(train + test) % classes
    statistics = sources.mean_and_std(dataset, "standard")
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in statistics) if statistics else (None, None)
    parts = (x[:train], y[:train], x[train:], y[train:])
    return Dataset(*parts, sha256={}, mean=mean, std=std, crop_padding=sources.CROP_PADDING.get(dataset))


@contextmanager
def dropout_drawn_on_the_cpu() -> Iterator[None]:
    """A GPU draws other numbers than a CPU: only so can AlexNet be compared."""

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * (torch.rand(x.shape) >= p).to(x) / (1 - p) if training else x

    before, F.dropout = F.dropout, dropout
    try:
        yield
    finally:
        F.dropout = before


def trained(exp: Experiment, data: Dataset, precision: torch.dtype = torch.float32) -> tuple[Federation, State, float]:
    """The state after all rounds, and its test loss."""
    with computing(exp):
        torch.set_default_dtype(precision)
        federation = assemble(exp, data)
        state = federation.start()
        for _ in range(exp.rounds):
            state, _ = federation.round(state)
        return federation, state, measure.evaluate(federation, state)[1]


def compared(here: Experiment, there: Experiment, data: Dataset) -> dict[str, float]:
    """How far the second experiment's model is from the first one's, in the terms of `TOLERANCES`."""
    with dropout_drawn_on_the_cpu():
        (federation, a, loss), (_, b, other) = (trained(exp, data, torch.float64) for exp in (here, there))
        single = [trained(exp, data)[2] for exp in (here, there)]
    w, m = b.w.cpu(), {k: v.cpu() for k, v in b.m.items()}
    layout, start = federation.clients.layout, federation.clients.first_weights
    return {
        "weights": float((w - a.w).norm() / (layout.prune(a.w - start, a.m)).norm()),
        "mask": sum(int((m[k] != a.m[k]).sum()) for k in m) / layout.prunable_size,
        "loss": abs(other - loss) / loss,
        "loss in single precision": abs(single[1] - single[0]) / single[0],
    }


def repeats(exp: Experiment, data: Dataset) -> bool:
    """Whether two runs give the same bits."""
    (_, a, _), (_, b, _) = (trained(exp, data) for _ in range(2))
    return torch.equal(a.w, b.w) and all(torch.equal(a.m[k], b.m[k]) for k in a.m)


def train_without_waiting(exp: Experiment, data: Dataset) -> None:
    """Raise a RuntimeError if a client's training, with mask and penalty, waits for the host or mixes devices."""
    with computing(exp):
        federation = assemble(exp, data)
        if exp.device == "cpu":
            state = on_meta(federation, t=exp.rounds - 1)
        else:
            state = federation.start().replace(t=exp.rounds - 1)
            federation.train_client(state, 0)  # the first call loads kernels, for which it may wait
            torch.cuda.set_sync_debug_mode("error")
        try:
            federation.train_client(state, 0)
        finally:
            if exp.device != "cpu":
                torch.cuda.set_sync_debug_mode("default")


def full_size(exp: Experiment, data: Dataset) -> str:
    """What the second round of the paper's size takes; the first one loads kernels."""
    with computing(exp):
        federation = assemble(exp, data)
        state, _ = federation.round(federation.start())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        federation.round(state)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    memory = torch.cuda.max_memory_allocated() / 1e6
    return f"{1 / seconds:.3g} rounds per second, {memory:,.0f} MB at most; {seconds * 1000 / 3600:.1f} h for 1,000"


def checked(dataset: str, device: str, full: bool = True, **settings) -> Iterator[tuple[str, bool]]:
    """Lines that say what was found, and whether each is as it should be."""
    data = images(dataset, SAMPLES, TESTED)
    here, there = (experiment(dataset, **SMALL | settings | {"device": d}) for d in ("cpu", device))
    if device != "cpu":
        for what, far in compared(here, there, data).items():
            yield f"{what}: {far:.2g} apart, at most {TOLERANCES[what]:g}", far <= TOLERANCES[what]
        again = repeats(there, data)
        yield f"the same bits twice: {'yes' if again else 'no'}", again
    try:
        train_without_waiting(there, data)
        yield "no step waits for the host" + (" or mixes devices (meta device)" if device == "cpu" else ""), True
    except RuntimeError as error:
        yield f"a step waits for the host: {str(error).splitlines()[0]}", False
    if device != "cpu" and full:
        yield full_size(experiment(dataset, device=device), images(dataset, FULL_SAMPLES[dataset], 10_000)), True


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datasets", nargs="+", default=list(TABLE_II), choices=list(TABLE_II))
    parser.add_argument("--small", action="store_true", help="leave out the rounds of the paper's size")
    options = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "No CUDA device here: only what the meta device shows"
    print(f"{name}; PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    good = True
    for dataset in options.datasets:
        for line, fine in checked(dataset, device, full=not options.small):
            print(f"{'ok  ' if fine else 'FAIL'} {experiment(dataset).model:9} {line}", flush=True)
            good &= fine
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
