"""Algorithm 1: select, broadcast, train, aggregate, reconfigure, prune, evaluate, record.

A round is a step from one immutable state to the next. Clients are trained one after the other on one
network and summed as they finish, so memory grows neither with N nor with K.
"""

import numbers
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from tqdm.auto import tqdm

from . import checkpoints, communication, data, masks, models, native, records
from .experiment import REVISION, Experiment, is_hook
from .local import Gradient, Term, eager_gradient, forward_of, row_by_row, stacked_gradient, train_
from .masks import Mask
from .methods import METHODS
from .schedules import learning_rate_at
from .streams import global_stream, stream

EVALUATION_BATCH = 500
SAVING_SHARE = 0.02  # of a run's time, about, for its record and its checkpoint


@dataclass(frozen=True)
class State:
    """What the server knows after t rounds."""

    t: int
    w: Tensor  # ω′, the pruned weights that it sends; with a dense memory, ω
    m: Mask | None  # None is a dense model
    statistics: Tensor  # of the batch norms, averaged like weights
    mask_version: int = 0
    held: tuple[int, ...] = ()  # for each client, the version of the mask that it was sent last
    memory: Mapping[str, Tensor] = field(default_factory=dict)  # what a method keeps from round to round
    norms: Tensor = field(default_factory=lambda: torch.empty(0))  # a row for each client, if its norms are its own

    def tensors(self) -> dict[str, Tensor]:
        """All of the state but its two counters, as named tensors."""
        parts = {"mask": self.m or {}, "memory": self.memory}
        named = {f"{part}/{k}": v for part, tensors in parts.items() for k, v in tensors.items()}
        whole = {"w": self.w, "statistics": self.statistics, "held": torch.tensor(self.held), "norms": self.norms}
        return whole | named

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], t: int, mask_version: int, prunable: Sequence[str]) -> "State":
        """The state that `tensors` took apart, its mask in the order of the network's layers."""

        def part(name):
            return {k.removeprefix(f"{name}/"): v for k, v in tensors.items() if k.startswith(f"{name}/")}

        held, norms = tuple(tensors["held"].tolist()), tensors.get("norms", torch.empty(0))
        m = part("mask")  # a file has sorted the names
        m = {k: m[k] for k in prunable} if m else None
        return cls(t, tensors["w"], m, tensors["statistics"], mask_version, held, part("memory"), norms)


# How the clients of a round are trained: their uploads, in their order.
Train = Callable[[State, list[int]], Iterable[dict[str, Tensor]]]


@dataclass(frozen=True)
class Run:
    """A finished run: one row of metrics a round, and the final model.

    If the loss ceased to be finite, `diverged` is the round in which it did, the last of the metrics.
    """

    experiment: Experiment
    metrics: pd.DataFrame
    weights: dict[str, Tensor]
    mask: dict[str, Tensor]
    statistics: dict[str, Tensor]
    network: nn.Module  # with these weights and statistics, ready to classify normalised images
    provenance: dict

    @property
    def diverged(self) -> int | None:
        return self.provenance["diverged"]


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
def evaluate(logits_of: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, normalise) -> tuple[float, float]:
    """Top-1 accuracy and mean cross-entropy of these logits."""
    correct = torch.zeros((), dtype=torch.int64, device=x.device)
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in range(0, len(x), EVALUATION_BATCH):
        batch = slice(part, part + EVALUATION_BATCH)
        logits = logits_of(normalise(x[batch]))
        correct += (logits.argmax(1) == y[batch]).sum()
        loss += F.cross_entropy(logits, y[batch], reduction="sum")
    return int(correct) / len(x), float(loss) / len(x)


class Federation:
    """One experiment's clients, server and network."""

    def __init__(self, exp: Experiment, dataset: data.Dataset):
        self.exp, self.device = exp, torch.device(exp.device)
        self.data = dataset.to(self.device)
        parts = data.partition(dataset.y_train, exp.partition, exp.clients, exp.seed, dataset.owner)
        self.parts = [i.to(self.device) for i in parts]
        self.net = _network(exp, dataset).to(self.device)
        self.layout = models.Layout.of(self.net)
        self.statistics = models.Layout.of_statistics(self.net)
        # A batch norm with momentum=None weighs a batch by how many it has seen: every client counts from the start.
        self.counters = {k: v.clone() for k, v in self.net.named_buffers() if not v.is_floating_point()}
        self.num_classes = models.classes(self.net, self.data.sample)
        if is_hook(exp.model):
            dataset.check_labels(self.num_classes)
            if exp.batch_norm != "average" and not self.statistics.size:
                raise ValueError(f"batch_norm: {exp.batch_norm!r} is not allowed; {exp.model} has no batch norms")
            self._check_batches_of_one()
        self.uses = models.uses(self.net, self.data.sample)
        self.kernel = _kernel(exp, self.net, dataset, self.device)
        self.forward = forward_of(self.net, self.layout, exp.precision, exp.channels_last, exp.torch_compile)
        self.own_norms = exp.batch_norm == "local"
        places = [i for k in models.norm_names(self.net) for i in self.layout.span(k)] if self.own_norms else []
        self.norms = torch.tensor(places, dtype=torch.int64, device=self.device)
        self.method = METHODS[exp.method](exp, self)
        self.aggregate: Tensor | None = None  # w̄ of the last round, before it was pruned, for an observer
        self.faults: list[dict] = []  # clients whose answer a round went without; never any in one process
        self.pace = SAVING_SHARE  # of a run's time, about, for its record and its checkpoint

    def _check_batches_of_one(self) -> None:
        """A batch norm over samples alone has no variance in a batch of one: better now than in the round it comes."""
        B = self.exp.batch_size
        n = next((n for n, part in enumerate(self.parts) if len(part) and len(part) % B == 1 % B), None)
        if n is None:
            return
        buffers = {k: v.clone() for k, v in self.net.named_buffers()}
        try:
            with torch.no_grad(), global_stream(self.device, self.exp.seed, "batch of one"):
                functional_call(self.net.train(), buffers, (self.data.sample,))
        except ValueError as error:
            raise ValueError(
                f"batch_size: {B} is not allowed; of client {n}'s {len(self.parts[n])} samples it leaves a batch of "
                f"one, which {self.exp.model} cannot take ({error})"
            ) from error

    @property
    def gradient_name(self) -> str:
        return "native" if self.kernel else "eager"

    def start(self) -> State:
        """Default initialisation, pruned with the method's first mask."""
        w = self.layout.flat(dict(self.net.named_parameters()))
        statistics = self.statistics.flat(dict(self.net.named_buffers())).to(self.device)
        w, m, memory = self.method.start(w)
        held = (0 if self.method.all_hold_first_mask else -1,) * self.exp.clients
        norms = torch.cat([w[self.norms], statistics]).repeat(self.exp.clients if self.own_norms else 0, 1)
        return State(0, self._remembered(w, m), m, statistics, held=held, memory=memory, norms=norms)

    def round(self, state: State, train: Train | None = None) -> tuple[State, dict]:
        """One pass of Algorithm 1's outer loop, and what was measured on the way."""
        began, exp, t = time.perf_counter(), self.exp, state.t
        chosen, sizes, uploads = self.collect(state, self.select(t), train or self.train_clients)
        kept_back, norms, zeros = {}, state.norms.clone(), []
        mean = aggregate(self._received(uploads, chosen, kept_back, norms, zeros), sizes)
        w, m, memory = self.method.reconfigure(mean, state, chosen, kept_back)
        self.aggregate = w
        regrown, dropped = masks.changes(self.full_mask(state.m), self.full_mask(m))
        after = State(
            t + 1, self._remembered(w, m), m, mean["statistics"],
            mask_version=state.mask_version + bool(regrown or dropped),
            held=tuple(state.mask_version if n in chosen else v for n, v in enumerate(state.held)), memory=memory,
            norms=norms,
        )  # fmt: skip
        accuracy, loss = self.evaluate(after)
        n, billed = self.layout.size, self.method.billed_sparsity(state)
        extra = [bits / communication.MEBI for bits in self.method.extra_bits_authors(state)]
        return after, {
            "round": t + 1,
            "test_accuracy": accuracy,
            "test_loss": loss,
            "train_loss": float(mean["loss"]),
            "sparsity": masks.sparsity_of(self.full_mask(m)),
            "delta": masks.pruning_error(self.layout.views(w), m or {}),
            "lambda_": self.method.lam(t),
            "learning_rate": learning_rate_at(t, eta_0=exp.learning_rate, decay=exp.learning_rate_decay),
            "downlink_bits": self.method.downlink_bits(state, chosen),
            "uplink_bits": self.method.uplink_bits(state, chosen),
            "downlink_mebibits_authors": len(chosen) * communication.authors_mebibits(billed, n) + extra[0],
            "uplink_mebibits_authors": sum(communication.authors_mebibits(float(z), n) for z in zeros) + extra[1],
            "layer_zeros": " ".join(str(int((~keep).sum())) for keep in self.full_mask(m).values()),
            "regrown": regrown,
            "dropped": dropped,
            "seconds": time.perf_counter() - began,
        }

    def select(self, t: int) -> list[int]:
        """K of the N clients, uniformly and without replacement."""
        order = torch.randperm(self.exp.clients, generator=stream(self.exp.seed, "select", t))
        return sorted(order[: self.exp.clients_per_round].tolist())

    def collect(self, state: State, chosen: list[int], train: Train) -> tuple[list[int], list[int], Iterable]:
        """Of the chosen clients those that answer, here all; how many samples each has trained on; their uploads."""
        return chosen, [len(self.parts[n]) for n in chosen], train(state, chosen)

    def ask(self, chosen: list[int], question: str, **tensors: Tensor) -> dict[int, dict[str, Tensor]]:
        """What the chosen clients answer to a question of the method before the first round, if they do; here all."""
        if question not in self.method.questions:
            known = ", ".join(self.method.questions) or "none"
            raise ValueError(f"question: {question!r} is not allowed; {self.exp.method} has {known}")
        return {n: getattr(self.method, question)(n, **tensors) for n in chosen}

    def train_clients(self, state: State, chosen: list[int]) -> Iterator[dict[str, Tensor]]:
        """One after the other, here; or those with as many samples side by side."""
        if not self.exp.stacked:
            return (self.train_client(state, n) for n in chosen)
        alike: dict[int, list[int]] = {}
        for n in chosen:
            alike.setdefault(len(self.parts[n]), []).append(n)
        done = {n: upload for group in alike.values() for n, upload in self._train_stacked(state, group)}
        return (done[n] for n in chosen)

    def _received(
        self, uploads, chosen: list[int], kept_back: dict, norms: Tensor, zeros: list
    ) -> Iterator[dict[str, Tensor]]:
        """One upload after the other, less what a client keeps back; and the fraction of zeros in each."""
        for n, upload in zip(chosen, uploads, strict=True):
            if "kept back" in upload:
                kept_back[n] = upload.pop("kept back")
            if self.own_norms:
                # They stay with the client. For the server's test alone the average has them, as if they were sent.
                norms[n] = torch.cat([upload["w"][self.norms], upload["statistics"]])
            zeros.append((upload["w"] == 0).double().mean())
            yield upload

    def train_client(self, state: State, n: int) -> dict[str, Tensor]:
        """What client n uploads: its weights, its batch-norm statistics, its mean training loss."""
        t = state.t
        w, statistics, m, terms = self._ready(state, n)
        samples = self.batches(n, t, "batches", self.exp.local_epochs)
        with global_stream(self.device, self.exp.seed, "dropout", t, n):
            loss = self.train_(w, m, samples, t, statistics, terms=terms, feedback=self.method.feedback)
        return self.method.finish({"w": w, "statistics": statistics, "loss": loss}, terms, m, state, n)

    def _ready(self, state: State, n: int) -> tuple[Tensor, Tensor, Mask | None, list[Term]]:
        """What client n begins a round with: weights and statistics to change in place, its mask, its terms."""
        m, w = self.method.client_mask(state, n), state.w
        statistics = state.statistics.clone()
        if self.own_norms:
            w = w.clone()
            w[self.norms], statistics = state.norms[n].split([len(self.norms), len(statistics)])
            statistics = statistics.clone()
        start = self.pruned(w, m)
        # Copies, since the steps change them in place, while a proximal term goes on looking at the start.
        return (w if self.method.feedback else start).clone(), statistics, m, self.method.terms(state.t, start)

    def _train_stacked(self, state: State, chosen: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Clients with as many samples, as rows of one computation; each with what it uploads."""
        t, ready = state.t, [self._ready(state, n) for n in chosen]
        w, statistics, own_masks, terms = (list(part) for part in zip(*ready, strict=True))
        samples = zip(*(self.batches(n, t, "batches", self.exp.local_epochs) for n in chosen), strict=True)
        batches = ([torch.stack(part) for part in zip(*of_all, strict=True)] for of_all in samples)
        rows = torch.stack(w)
        m = None if own_masks[0] is None else torch.stack([self.layout.flat_mask(m, like=w[0]) for m in own_masks])
        gradient = stacked_gradient(self.forward)
        losses = self._steps(rows, m, gradient, batches, t, terms=[row_by_row(terms)], feedback=self.method.feedback)
        for i, n in enumerate(chosen):
            upload = {"w": rows[i], "statistics": statistics[i], "loss": losses[i]}
            yield n, self.method.finish(upload, terms[i], own_masks[i], state, n)

    def train_(
        self, w: Tensor, m: Mask | None, batches, t: int = 0, statistics: Tensor | None = None, **step
    ) -> Tensor:
        """Take a step on each batch, as round t does, and return their mean loss."""
        flat = m and self.layout.flat_mask(m, like=w)
        return self._steps(w, flat, self.gradient(statistics, t=t), batches, t, **step)

    def _steps(self, w: Tensor, m: Tensor | None, gradient: Gradient, batches, t: int, **step) -> Tensor:
        exp = self.exp
        eta = learning_rate_at(t, eta_0=exp.learning_rate, decay=exp.learning_rate_decay)
        return train_(w, m, gradient, batches, eta, weight_decay=exp.weight_decay, momentum=exp.momentum, **step)

    def batches(self, n: int, t: int, purpose: str, epochs: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Client n's samples in an order that belongs to this round and purpose."""
        order = stream(self.exp.seed, purpose, t, n)
        return data.batches(self.data, self.parts[n], self.exp.batch_size, epochs, order)

    def batch_gradient(
        self, w: Tensor, n: int, t: int, purpose: str, loss_of=F.cross_entropy, statistics: Tensor | None = None
    ) -> Tensor:
        """The gradient at w on one batch of client n."""
        x, y = next(self.batches(n, t, purpose))
        with global_stream(self.device, self.exp.seed, purpose, t, n):
            return self.gradient(statistics, loss_of, t)(w, x, y)[1]

    def gradient(self, statistics: Tensor | None = None, loss_of=F.cross_entropy, t: int = 0) -> Gradient:
        """(u, x, y) -> loss and ∇loss at u in round t; batch norms update these statistics in place, unless frozen."""
        if self.kernel and loss_of is F.cross_entropy:
            return self.kernel.gradient
        if statistics is None:  # those of a network that is not kept
            statistics = self.statistics.flat(dict(self.net.named_buffers())).to(self.device)
        self.net.train()
        if self.exp.batch_norm == "frozen" and t > 0:  # they use what the first round left in place of a batch's own
            for module in models.batch_norms(self.net).values():
                module.eval()
        counters = {k: v.clone() for k, v in self.counters.items()}
        return eager_gradient(self.forward, self.statistics.views(statistics) | counters, loss_of)

    @torch.no_grad()
    def accuracy(self, w: Tensor, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Of these weights on these batches, in training mode, as they were trained."""
        statistics = self.statistics.flat(dict(self.net.named_buffers())).to(self.device)
        tensors = self.layout.views(w) | self.statistics.views(statistics)
        right = [(functional_call(self.net.train(), tensors, (x,)).argmax(1) == y).double() for x, y in batches]
        return float(torch.cat(right).mean())

    def evaluate(self, state: State, images: slice = slice(None)) -> tuple[float, float]:
        """Accuracy and loss on the test images, or on some of them."""
        u = self.pruned(state.w, state.m)
        tensors = self.layout.views(u) | self.statistics.views(state.statistics)

        def logits_of(x):
            return self.kernel.logits(u, x) if self.kernel else functional_call(self.net.eval(), tensors, (x,))

        return evaluate(logits_of, self.data.x_test[images], self.data.y_test[images], self.data.normalise)

    def mask_of(self, flat: Tensor) -> Mask:
        """The mask that `Layout.flat_mask` made a vector of."""
        return {k: v.bool() for k, v in self.layout.weights(flat).items()}

    def full_mask(self, m: Mask | None) -> Mask:
        """The mask itself, and of a dense model one that keeps all."""
        if m is not None:
            return m
        return {k: torch.ones(s, dtype=torch.bool, device=self.device) for k, s in self.layout.prunable_shapes.items()}

    def finished(self, state: State, metrics: pd.DataFrame, provenance: dict) -> Run:
        w = self.pruned(state.w, state.m)
        if state.m is not None:  # of a diverged model also where NaN · 0 is not 0
            w = w.masked_fill(self.layout.flat_mask(state.m, like=w) == 0, 0)
        weights = self.layout.views(w.cpu())
        statistics = self.statistics.views(state.statistics.cpu())
        self.net.cpu().eval().load_state_dict({**weights, **statistics}, strict=False)
        m = {k: v.cpu() for k, v in self.full_mask(state.m).items()}
        return Run(self.exp, metrics, weights, m, statistics, self.net, provenance)

    def pruned(self, w: Tensor, m: Mask | None) -> Tensor:
        return w if m is None else w * self.layout.flat_mask(m, like=w)

    def _remembered(self, w: Tensor, m: Mask | None) -> Tensor:
        """What of the aggregate is there when the next round begins."""
        # A dense memory need not be sent: a client's gradient is taken at m ⊙ w, so what is masked only adds
        # to its upload, and the server could add it as well. It is not counted as downlink.
        return w if self.exp.regrowth == "dense_memory" else self.pruned(w, m)

    def payload_bits(self, m: Mask | None) -> int:
        """One model under this mask; norms that are a client's own are not sent."""
        statistics = 0 if self.own_norms else self.statistics.size
        return communication.payload_bits(m, self.layout.size - len(self.norms), statistics)


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    workers: int = 1,
    until: int | None = None,
    observe: Callable[[Federation, State], None] | None = None,
    progress: bool = True,
    federation: Callable[[Experiment, data.Dataset], Federation] = Federation,
) -> Run:
    """Train, and return the metrics of every round and the final sparse model.

    With `out`, the record is kept in `out/<run_id>/` with a checkpoint: called again, the run goes on from there, to
    the same bits. `workers` processes train the clients of a round, to the same bits as one. `until` stops after a
    round of a longer experiment. `observe(federation, state)` is called after every round, so that such a run begins
    anew instead of going on, unless the observer says by an attribute `seen` that it knows the rounds until there; a
    state is never changed, and may be kept. `progress` shows a bar, in a notebook also the curves. `federation` makes
    the clients and the server; `flower.py` has one whose clients are elsewhere.
    """
    _check_device(experiment)
    _check("until", until, until is None or _whole(until, 1, experiment.rounds), f"from 1 to {experiment.rounds}")
    _check("workers", workers, _whole(workers, 1), "of at least 1")
    if workers > 1 and (experiment.device != "cpu" or experiment.threads > 1 or experiment.stacked):
        needs = "device='cpu', threads=1 and stacked=False"
        raise ValueError(f"workers: {workers} is not allowed; more than one needs {needs}")
    # Data that clients bring are not the server's to see, unless the clients are in this process.
    dataset = data.of(experiment, data_dir, None if federation is Federation else [None])
    watched = observe is not None
    with computing(experiment), ExitStack() as stack:
        federation = federation(experiment, dataset)
        made_by = dict(gradient=federation.gradient_name, numerics=numerics())
        record = records.Record(experiment, dataset.sha256, out, **made_by)
        stack.enter_context(record.alone())
        state, rows = _begin(federation, record, getattr(observe, "seen", 0) if watched else experiment.rounds)
        federation.faults = [*record.provenance.get("faults", []), *federation.faults]
        if until is not None and until < state.t:
            raise ValueError(f"until: {until} is not allowed; {record.folder} is at round {state.t} already")
        train = stack.enter_context(_workers(federation, workers)).train if workers > 1 else None
        log = stack.enter_context(_Log(record, state, rows, record.earlier if watched else 0, federation.pace))
        log.unsaved = record.earlier < state.t  # its files were lost, and only the checkpoint is left
        bar = stack.enter_context(_bar(federation, progress))
        picture = None if bar.disable else _picture(experiment)
        bar.update(state.t)
        while state.t < (until or experiment.rounds) and not (rows and records.diverged(rows[-1])):
            state, row = federation.round(state, train)
            if federation.faults:
                record.provenance["faults"] = federation.faults
            # Before the log: what a checkpoint has behind it, the observer has seen, whenever the process is killed.
            if watched:
                observe(federation, state)
            log.add(state, row)
            if picture:
                picture.show(rows)
            bar.set_postfix(accuracy=f"{row['test_accuracy']:.3f}", sparsity=f"{row['sparsity']:.3f}", refresh=False)
            bar.update()
        if picture:
            picture.show(rows, whole=True)
        if log.unsaved:
            log.save()
        return federation.finished(state, pd.DataFrame(rows), record.provenance)


class _Log:
    """A run's rows, with its record and its checkpoint: saved at the end, after an interruption, and in between."""

    def __init__(
        self, record: records.Record, state: State, rows: list[dict], floor: int = 0, share: float = SAVING_SHARE
    ):
        self.record, self.state, self.rows, self.share = record, state, rows, share
        self.floor = floor  # the round from which a checkpoint may be replaced: one that went further is kept
        self.saved, self.cost, self.unsaved = time.perf_counter(), 0.0, False

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *_) -> None:
        if self.unsaved:
            with _undisturbed():
                self.save()

    def add(self, state: State, row: dict) -> None:
        self.rows.append(row)
        self.state, self.unsaved = state, True
        # Both files are written whole, so their cost grows with the run: the longer it takes, the longer the pause.
        if self.cost <= self.share * (time.perf_counter() - self.saved):
            self.save()

    def save(self) -> None:
        began = time.perf_counter()
        rows = self.rows[: self.state.t]  # an interruption may fall between a row and its state
        if rows:
            self.record.save(rows)
        if rows and self.record.folder and len(rows) >= self.floor:
            plain = {"t": self.state.t, "mask_version": self.state.mask_version, "rows": rows}
            plain["provenance"] = self.record.provenance
            checkpoint = checkpoints.Checkpoint(self.state.tensors(), plain)
            checkpoints.save(self.record.folder, _key(self.record), checkpoint)
        self.saved, self.unsaved = time.perf_counter(), False
        self.cost = self.saved - began


@contextmanager
def _undisturbed():
    """Let no second Ctrl-C interrupt the saving that the first one has caused."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _key(record: records.Record) -> str:
    """What a checkpoint must have been made by to be gone on with: this run, this code's results, these data."""
    return " ".join([record.exp.run_id, str(REVISION), *record.provenance["data_sha256"].values()])


def _begin(federation: Federation, record: records.Record, latest: int) -> tuple[State, list[dict]]:
    """Where the last checkpoint stands, or the beginning if there is none or it is of a later round than `latest`."""
    last = checkpoints.load(record.folder, _key(record), federation.device) if record.folder and latest else None
    if last is None or last.plain["t"] > latest:
        return federation.start(), []
    plain = last.plain
    was = plain["provenance"]["gradient"]
    if was != federation.gradient_name:
        raise ValueError(
            f"gradient: {record.folder} was begun with the {was} one, and here it is {federation.gradient_name}; "
            "go on where it was begun, or choose another folder"
        )
    if last.tensors["w"].numel() != federation.layout.size:
        raise ValueError(
            f"model: {record.exp.model!r} has {federation.layout.size} parameters, and in {record.folder} it had "
            f"{last.tensors['w'].numel()}; give the changed network another name, or choose another folder"
        )
    record.resume(plain["provenance"], round=plain["t"])
    state = State.of(last.tensors, plain["t"], plain["mask_version"], federation.layout.prunable)
    return state, plain["rows"]


def _picture(exp: Experiment):
    from .live import Live, in_notebook  # bring matplotlib, which no process without a screen need wait for

    return Live(exp.method) if in_notebook() else None


def _workers(federation: Federation, count: int):
    from .workers import Workers  # which imports this module

    return Workers(federation, count)


def _whole(value, low: int, high: int | None = None) -> bool:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and low <= value and (high is None or value <= high)


def _check(name: str, value, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{name}: {value!r} is not allowed; it must be a whole number {allowed}")


def _network(exp: Experiment, dataset: data.Dataset) -> nn.Module:
    with global_stream(torch.device("cpu"), exp.seed, "initial weights"):
        if is_hook(exp.model):
            return models.build(exp.model, 0)
        return models.build(exp.model, dataset.num_classes, exp.width, exp.norm, **dataset.image)


def _kernel(exp: Experiment, net: nn.Module, dataset: data.Dataset, device: torch.device) -> native.Kernel | None:
    """The compiled gradient, if the experiment wants it and it is to be had; None is PyTorch's."""
    if exp.gradient == "eager" or exp.stacked or exp.torch_compile or exp.precision != "float32":
        return None
    try:
        return native.Kernel(net, dataset.image, device)
    except native.Unavailable as reason:
        if exp.gradient == "native":
            raise ValueError(f"gradient: 'native' is not to be had; {reason}") from reason
        if isinstance(reason, native.NotHere):
            warnings.warn(f"gradient: eager, several times slower than native; {reason}", stacklevel=2)
        return None


def _check_device(exp: Experiment) -> None:
    here = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if exp.device != "cpu" and exp.device not in (here and ["cuda", *here]):
        raise ValueError(f"device: {exp.device!r} is not allowed; this machine has {', '.join(['cpu', *here])}")


def _bar(federation: Federation, progress: bool) -> tqdm:
    exp = federation.exp
    # A terminal or a notebook shows the bar, a file does not (None leaves that to tqdm); TQDM_DISABLE silences all.
    disable = True if not progress or os.environ.get("TQDM_DISABLE") else None
    what = f"{exp.method} {exp.run_id}, {federation.gradient_name} gradient"
    return tqdm(total=exp.rounds, desc=what, unit="round", disable=disable)


@contextmanager
def computing(exp: Experiment):
    """The experiment's own number of threads, and on a GPU the kernels that give the same bits twice."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(exp.threads)
    torch.set_float32_matmul_precision("high" if exp.tf32 else "highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=exp.tf32):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def numerics() -> dict:
    """What a GPU's kernels were allowed to do."""
    cudnn = torch.backends.cudnn
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": cudnn.allow_tf32,
        "cudnn_deterministic": cudnn.deterministic,
        "cudnn_benchmark": cudnn.benchmark,
    }
