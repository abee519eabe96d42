"""Algorithm 1: select, broadcast, train, aggregate, reconfigure, prune, evaluate, record.

A round is a step from one immutable state to the next. Clients are trained one after the other on one
network and summed as they finish, so memory grows neither with N nor with K.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from tqdm.auto import tqdm

from . import communication, data, masks, models, records
from .experiment import Experiment
from .local import eager_gradient, train_
from .masks import Mask
from .methods import METHODS
from .schedules import learning_rate_at
from .streams import global_stream, stream

EVALUATION_BATCH = 500


@dataclass(frozen=True)
class State:
    """What the server knows after t rounds."""

    t: int
    w: Tensor  # ω′, the pruned weights that it sends; with a dense memory, ω
    m: Mask | None  # None is a dense model
    statistics: Tensor  # of the batch norms, averaged like weights
    mask_version: int = 0
    held: tuple[int, ...] = ()  # for each client, the version of the mask that it was sent last


@dataclass(frozen=True)
class Run:
    """A finished run: one row of metrics a round, and the final model."""

    experiment: Experiment
    metrics: pd.DataFrame
    weights: dict[str, Tensor]
    mask: dict[str, Tensor]
    statistics: dict[str, Tensor]
    network: nn.Module  # with these weights and statistics, ready to classify normalised images
    provenance: dict


def aggregate(uploads: Iterable[Mapping[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    """w_G = Σ ρ_n w_n with ρ_n = D_n / Σ D_j, over the clients of the round (Eq. 12)."""
    total, sums, dtypes = sum(sizes), {}, {}
    for upload, size in zip(uploads, sizes, strict=True):
        for k, v in upload.items():
            # Summed in double precision: equal models average to themselves, in any order of the clients.
            sums.setdefault(k, torch.zeros_like(v, dtype=torch.float64)).add_(v, alpha=size / total)
            dtypes[k] = v.dtype
    return {k: v.to(dtypes[k]) for k, v in sums.items()}


@torch.no_grad()
def evaluate(net: nn.Module, tensors: Mapping[str, Tensor], x: Tensor, y: Tensor, normalise) -> tuple[float, float]:
    """Top-1 accuracy and mean cross-entropy of the network with these parameters and statistics."""
    net.eval()
    correct = torch.zeros((), dtype=torch.int64, device=x.device)
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in range(0, len(x), EVALUATION_BATCH):
        batch = slice(part, part + EVALUATION_BATCH)
        logits = functional_call(net, dict(tensors), (normalise(x[batch]),))
        correct += (logits.argmax(1) == y[batch]).sum()
        loss += F.cross_entropy(logits, y[batch], reduction="sum")
    return int(correct) / len(x), float(loss) / len(x)


class Federation:
    """One experiment's clients, server and network."""

    def __init__(self, exp: Experiment, dataset: data.Dataset):
        self.exp, self.device = exp, torch.device(exp.device)
        self.data = dataset.to(self.device)
        self.parts = [i.to(self.device) for i in data.partition(dataset.y_train, exp.partition, exp.clients, exp.seed)]
        with global_stream(torch.device("cpu"), exp.seed, "initial weights"):
            self.net = models.build(exp.model, dataset.num_classes, exp.width, **dataset.image).to(self.device)
        self.layout = models.Layout.of(self.net)
        self.statistics = models.Layout.of_statistics(self.net)
        self.method = METHODS[exp.method](exp, self.layout)

    def start(self) -> State:
        """Default initialisation, pruned with the method's first mask."""
        w = self.layout.flat(dict(self.net.named_parameters()))
        statistics = self.statistics.flat(dict(self.net.named_buffers())).to(self.device)
        m = self.method.initial_mask()
        m = m and {k: v.to(self.device) for k, v in m.items()}
        return State(0, self._remembered(w, m), m, statistics, held=(-1,) * self.exp.clients)

    def round(self, state: State) -> tuple[State, dict]:
        """One pass of Algorithm 1's outer loop, and what was measured on the way."""
        began, exp, t = time.perf_counter(), self.exp, state.t
        chosen = self.select(t)
        mean = aggregate(self._train(state, chosen), [len(self.parts[n]) for n in chosen])
        w = mean["w"]
        m = self.method.next_mask(self.layout.weights(w), state.m, t)
        regrown, dropped = masks.changes(self.full_mask(state.m), self.full_mask(m))
        after = State(
            t + 1, self._remembered(w, m), m, mean["statistics"],
            mask_version=state.mask_version + bool(regrown or dropped),
            held=tuple(state.mask_version if n in chosen else v for n, v in enumerate(state.held)),
        )  # fmt: skip
        accuracy, loss = self.evaluate(after)
        downlink, uplink = self._bits(state, chosen)
        return after, {
            "round": t + 1,
            "test_accuracy": accuracy,
            "test_loss": loss,
            "train_loss": float(mean["loss"]),
            "sparsity": masks.sparsity_of(self.full_mask(m)),
            "delta": masks.pruning_error(self.layout.views(w), m or {}),
            "lambda_": self.method.lam(t),
            "learning_rate": learning_rate_at(t, eta_0=exp.learning_rate, decay=exp.learning_rate_decay),
            "downlink_bits": downlink,
            "uplink_bits": uplink,
            "regrown": regrown,
            "dropped": dropped,
            "seconds": time.perf_counter() - began,
        }

    def select(self, t: int) -> list[int]:
        """K of the N clients, uniformly and without replacement."""
        order = torch.randperm(self.exp.clients, generator=stream(self.exp.seed, "select", t))
        return sorted(order[: self.exp.clients_per_round].tolist())

    def _train(self, state: State, chosen: list[int]) -> Iterator[dict[str, Tensor]]:
        for n in chosen:
            yield self.train_client(state, n)

    def train_client(self, state: State, n: int) -> dict[str, Tensor]:
        """What client n uploads: its dense weights, its batch-norm statistics, its mean training loss."""
        exp, t = self.exp, state.t
        w, statistics = state.w.clone(), state.statistics.clone()
        m = self.method.client_mask(state.m, t, n)
        order = stream(exp.seed, "batches", t, n)
        samples = data.batches(self.data, self.parts[n], exp.batch_size, exp.local_epochs, order)
        self.net.train()
        with global_stream(self.device, exp.seed, "dropout", t, n):
            loss = train_(
                w,
                m and self.layout.flat_mask(m, like=w),
                eager_gradient(self.net, self.layout, self.statistics.views(statistics)),
                samples,
                eta=learning_rate_at(t, eta_0=exp.learning_rate, decay=exp.learning_rate_decay),
                weight_decay=exp.weight_decay,
                momentum=exp.momentum,
                terms=self.method.terms(t),
            )
        return {"w": w, "statistics": statistics, "loss": loss}

    def evaluate(self, state: State) -> tuple[float, float]:
        tensors = self.layout.views(self._pruned(state.w, state.m)) | self.statistics.views(state.statistics)
        return evaluate(self.net, tensors, self.data.x_test, self.data.y_test, self.data.normalise)

    def full_mask(self, m: Mask | None) -> Mask:
        """The mask itself, and of a dense model one that keeps all."""
        if m is not None:
            return m
        return {k: torch.ones(s, dtype=torch.bool, device=self.device) for k, s in self.layout.prunable_shapes.items()}

    def finished(self, state: State, metrics: pd.DataFrame, provenance: dict) -> Run:
        weights = self.layout.views(self._pruned(state.w, state.m).cpu())
        statistics = self.statistics.views(state.statistics.cpu())
        self.net.cpu().eval().load_state_dict({**weights, **statistics}, strict=False)
        m = {k: v.cpu() for k, v in self.full_mask(state.m).items()}
        return Run(self.exp, metrics, weights, m, statistics, self.net, provenance)

    def _pruned(self, w: Tensor, m: Mask | None) -> Tensor:
        return w if m is None else w * self.layout.flat_mask(m, like=w)

    def _remembered(self, w: Tensor, m: Mask | None) -> Tensor:
        """What of the aggregate is there when the next round begins."""
        # A dense memory need not be sent: a client's gradient is taken at m ⊙ w, so what is masked only adds
        # to its upload, and the server could add it as well. It is not counted as downlink.
        return w if self.exp.regrowth == "dense_memory" else self._pruned(w, m)

    def _bits(self, state: State, chosen: list[int]) -> tuple[int, int]:
        """Downlink and uplink of a round in which these clients were sent this state."""
        K, sizes = len(chosen), (self.layout.size, self.statistics.size)
        without_mask = sum(state.held[n] != state.mask_version for n in chosen)
        down = K * communication.payload_bits(state.m, *sizes) + without_mask * communication.mask_bits(state.m)
        return down, K * communication.payload_bits(None, *sizes)


def run(
    experiment: Experiment, out: str | Path | None = None, *, data_dir: str | Path | None = None, progress: bool = True
) -> Run:
    """Train, and return the metrics of every round and the final sparse model.

    With `out`, the record is kept in `out/<run_id>/` and is complete up to the last finished round at any time.
    """
    dataset = data.load(experiment.dataset, data_dir, experiment.normalisation)
    with _computing(experiment):
        federation = Federation(experiment, dataset)
        record = records.Record(experiment, dataset.sha256, out)
        state, rows = federation.start(), []
        with _bar(experiment, progress) as bar:
            for _ in range(experiment.rounds):
                state, row = federation.round(state)
                rows.append(row)
                record.save(rows)
                bar.update()
                bar.set_postfix(accuracy=f"{row['test_accuracy']:.3f}", sparsity=f"{row['sparsity']:.3f}")
        return federation.finished(state, pd.DataFrame(rows), record.provenance)


def _bar(exp: Experiment, progress: bool) -> tqdm:
    # A terminal or a notebook shows the bar, a file does not (None leaves that to tqdm); TQDM_DISABLE silences all.
    disable = True if not progress or os.environ.get("TQDM_DISABLE") else None
    return tqdm(total=exp.rounds, desc=f"{exp.method} {exp.run_id}", unit="round", disable=disable)


@contextmanager
def _computing(exp: Experiment):
    """The experiment's own number of threads, and on a GPU the kernels that give the same bits twice."""
    threads = torch.get_num_threads()
    torch.set_num_threads(exp.threads)
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_num_threads(threads)
