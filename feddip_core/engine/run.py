"""`run`: train an experiment from first round to last, with records, resume and progress."""

import numbers
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..experiment import REVISION, Experiment, is_hook
from ..server import Federation, Round
from ..state import State
from . import checkpoints, final, measure, networks, records, sources
from .assembly import assemble, gradient_name
from .computing import check_device, computing, numerics
from .workers import Workers

SAVING_SHARE = 0.02  # of a run's time, approximately, spent on its record and its checkpoint
Observer = Callable[[Federation, State, Round], None]
WATCHERS: list[Callable[[Experiment], Callable[[list[dict], bool], None] | None]] = []  # see `watched_by`
EXPORTERS: list[Callable[["Run", str | Path, int], Path]] = []  # see `exported_by`


@dataclass(frozen=True)
class Run:
    """A finished run: one row of metrics per round, and the final model.

    If the loss became infinite or NaN, `diverged` is that round, which is the last one in the metrics.
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

    def export(self, folder: str | Path, bits: int = 16) -> Path:
        """Write the final model into a folder: safetensors with a loader, C, JavaScript, ONNX and a model card.

        Kept weights have `bits` bits, 16 or 32. ONNX needs the extra `deploy`.
        """
        return EXPORTERS[-1](self, folder, bits)


def watched_by(watcher: Callable[[Experiment], Callable[[list[dict], bool], None] | None]) -> None:
    """Register a watcher: called with an experiment, it returns a function to call with the rows so far, or None."""
    WATCHERS.append(watcher)


def exported_by(exporter: Callable[[Run, str | Path, int], Path]) -> None:
    """Let this write the files of `Run.export`."""
    EXPORTERS.append(exporter)


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    method: type | str | None = None,
    data_dir: str | Path | None = None,
    workers: int = 1,
    until: int | None = None,
    observe: Observer | None = None,
    on_round: Callable[[dict], None] | None = None,
    progress: bool = True,
    federation: Callable[..., Federation] = Federation,
) -> Run:
    """Train, and return the metrics of every round and the final sparse model.

    `out` is the folder for the record and its checkpoint. Call again to resume, to the same bits. A complete record is
    never rewritten: if its model and checkpoint are missing, the run is repeated and must reproduce the record.
    `method` replaces the experiment's, for instance with a class of your own. `workers` is the number of processes that
    train a round's clients; any number gives the same bits. `until` stops a longer experiment after this round.

    `observe(federation, state, round)` is called after every round; states are immutable and may be kept. Such a run
    starts over instead of resuming, unless the observer's attribute `seen` says how many rounds it already knows.
    `on_round(row)` is called with the metrics of every round, and the run resumes as usual. Rounds since the last
    checkpoint then come again, with the same numbers except the seconds. `progress` shows a bar, and in a notebook the
    curves. `federation` makes the server; `feddip_core.flower` has one with remote clients.
    """
    experiment = experiment if method is None else experiment.replace(method=method)
    _check_options(experiment, workers, until, federation)
    with computing(experiment), ExitStack() as stack:
        # The server never sees the data that clients bring, unless the clients are in this process.
        dataset = sources.of(experiment, data_dir, None if federation is Federation else [None])
        fed = assemble(experiment, dataset, federation)
        made_by = dict(gradient=gradient_name(fed), numerics=numerics(), federation=type(fed).__qualname__)
        made_by |= networks.described(fed.clients) | {"samples": sources.described(dataset)}
        record = records.Record(experiment, dataset.sha256, out, **made_by)
        stack.enter_context(record.alone())
        latest = experiment.rounds if observe is None else getattr(observe, "seen", 0)
        state, rows = _begin(fed, record, latest)
        fed.faults = [*record.provenance.get("faults", []), *fed.faults]
        if until is not None and until < state.t:
            raise ValueError(f"until: {until} is not allowed; {record.folder} is already at round {state.t}")
        if workers > 1 and state.t < (until or experiment.rounds):
            fed.train = stack.enter_context(Workers(fed, workers)).train
        log = stack.enter_context(_Log(fed, record, state, rows, record.earlier if observe else 0))
        log.unsaved = log.incomplete  # files were lost; only the checkpoint is left
        show = stack.enter_context(_shown(fed, rows, state.t, progress))
        state = _rounds(fed, state, log, until or experiment.rounds, observe, on_round, show)
        if log.unsaved:
            log.save()
        return finished(fed, state, pd.DataFrame(rows), record.provenance)


def _rounds(
    fed: Federation, state: State, log: "_Log", last: int, observe: Observer | None, on_round, show
) -> State:  # fmt: skip
    """Train until the last round, or until the loss is not finite."""
    while state.t < last and not (log.rows and records.diverged(log.rows[-1])):
        began = time.perf_counter()
        after, done = fed.round(state)
        row = measure.row(fed, state, after, done, 0.0)
        if records.diverged(row) and not fed.may_diverge:
            raise RuntimeError(f"round {after.t}: the loss is not finite; the round is discarded")
        row["seconds"], state = time.perf_counter() - began, after
        if fed.faults:
            log.record.provenance["faults"] = fed.faults
        log.record.confirm(row)
        # Before the log: whenever the process is killed, both have seen every round of the checkpoint.
        if observe is not None:
            observe(fed, state, done)
        if on_round is not None:
            on_round(dict(row))
        log.add(state, row)
        show(row)
    return state


def finished(fed: Federation, state: State, metrics: pd.DataFrame, provenance: dict) -> Run:
    """The final model, on the CPU."""
    layout, clients = fed.clients.layout, fed.clients
    w = layout.prune(state.w, state.m)
    if state.m is not None:  # in a diverged model NaN · 0 is not 0
        w = w.masked_fill(layout.flat_mask(state.m, like=w) == 0, 0)
    weights, statistics = layout.views(w.cpu()), clients.buffers(state.statistics.cpu())
    clients.net.cpu().eval().load_state_dict({**weights, **statistics}, strict=False)
    m = {k: v.cpu() for k, v in fed.full_mask(state.m).items()}
    return Run(fed.exp, metrics, weights, m, statistics, clients.net, provenance)


def _check_options(exp: Experiment, workers: int, until: int | None, federation: Callable[..., Federation]) -> None:
    check_device(exp)
    _check("until", until, until is None or _whole(until, 1, exp.rounds), f"from 1 to {exp.rounds}")
    _check("workers", workers, _whole(workers, 1), "of at least 1")
    if workers > 1 and (exp.device != "cpu" or exp.threads > 1 or exp.stacked):
        needs = "device='cpu', threads=1 and stacked=False"
        raise ValueError(f"workers: {workers} is not allowed; more than one needs {needs}")
    if federation is not Federation:
        check_importable(exp)
    elif workers > 1:  # they are handed the data
        check_importable(exp, "method", "model")


def check_importable(exp: Experiment, *settings: str) -> None:
    """Other processes can import your own method, network and data; `settings` limits the check."""
    for setting in settings or ("method", "model", "dataset"):
        value = getattr(exp, setting)
        module, _, name = value.partition(":")
        if is_hook(value) and (module == "__main__" or "." in name):
            raise ValueError(
                f"{setting}: {value!r} is not allowed here; other processes cannot import from a notebook cell "
                "or a function. Move it into a module, such as yours.py, and name it "
                f"yours:{name.rpartition('.')[2]}"
            )


def _check(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ValueError(f"{name}: {value!r} is not allowed; it must be a whole number {allowed}")


def _whole(value: object, low: int, high: int | None = None) -> bool:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and low <= value and (high is None or value <= high)


class _Log:
    """A run's rows, record and checkpoint: saved at intervals, on interruption and at the end."""

    def __init__(self, fed: Federation, record: records.Record, state: State, rows: list[dict], floor: int):
        self.fed, self.record, self.state, self.rows = fed, record, state, rows
        # Rounds of remote clients are few and slow: save each one.
        self.share = SAVING_SHARE if type(fed) is Federation else float("inf")
        self.floor = floor  # replace the checkpoint from this round on: one that is further is kept
        self.saved, self.cost, self.unsaved = time.perf_counter(), 0.0, False

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *_) -> None:
        if self.unsaved:
            with _undisturbed():
                self.save()

    @property
    def finished(self) -> bool:
        """Whether there is a final model."""
        return self.state.t == self.fed.exp.rounds and not records.diverged(self.rows[-1])

    @property
    def incomplete(self) -> bool:
        """Whether the record on disk lacks rows or the final model."""
        record = self.record
        model = record.folder is None or not self.finished or (record.folder / final.NAME).exists()
        return record.earlier < self.state.t or not model

    def add(self, state: State, row: dict) -> None:
        self.rows.append(row)
        self.state, self.unsaved = state, True
        # Both files are rewritten in full, so saving costs more as the run grows: pause in proportion to the cost.
        if self.cost <= self.share * (time.perf_counter() - self.saved):
            self.save()

    def save(self) -> None:
        began = time.perf_counter()
        rows = self.rows[: self.state.t]  # an interruption may come between a row and its state
        if self.record.folder and self.finished:
            final.save(self.record.folder, self.fed, self.state)  # first: a complete record has its model
        if rows:
            self.record.save(rows)
        if rows and self.record.folder and len(rows) >= self.floor:
            plain = {"t": self.state.t, "mask_version": self.state.mask_version, "rows": rows}
            plain["provenance"] = self.record.provenance
            checkpoint = checkpoints.Checkpoint(checkpoints.tensors_of(self.state), plain)
            checkpoints.save(self.record.folder, _key(self.record), checkpoint)
        self.saved, self.unsaved = time.perf_counter(), False
        self.cost = self.saved - began


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore a second Ctrl-C while the first one saves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _key(record: records.Record) -> str:
    """A checkpoint resumes only the same run, with the same revision of the code and the same data."""
    return " ".join([record.exp.run_id, str(REVISION), *record.provenance["data_sha256"].values()])


def _begin(fed: Federation, record: records.Record, latest: int) -> tuple[State, list[dict]]:
    """The saved state and rows; the initial ones if nothing is saved, or only a round after `latest`."""
    if record.folder is None or not latest:
        return fed.start(), []
    if record.whole and latest >= fed.exp.rounds and (record.folder / final.NAME).exists():
        _check_network(record, records.provenance_of(record.folder))
        record.provenance = records.provenance_of(record.folder)
        return final.load(record.folder, fed), record.before
    last = checkpoints.load(record.folder, _key(record), fed.clients.device)
    if last is None or last.plain["t"] > latest:
        return fed.start(), []
    _check_resumable(fed, record, last)
    record.resume(last.plain["provenance"], round=last.plain["t"])
    prunable = fed.clients.layout.prunable
    return checkpoints.state_of(last.tensors, last.plain["t"], last.plain["mask_version"], prunable), last.plain["rows"]


def _check_resumable(fed: Federation, record: records.Record, last: checkpoints.Checkpoint) -> None:
    """A run resumes as it started: same origin, numerics, gradient and network."""
    records.check_origin(record.folder, last.plain["provenance"], record.provenance)
    pinned = last.plain["provenance"].get("numerics", {})
    for k, v in numerics().items():
        if pinned.get(k, v) != v:
            raise ValueError(
                f"{k}: {record.folder} was started with {pinned[k]}, but here it is {v}; "
                "resume it where it was started, or choose another folder"
            )
    was = last.plain["provenance"]["gradient"]
    if was != gradient_name(fed):
        raise ValueError(
            f"gradient: {record.folder} was started with {was}, but here it is {gradient_name(fed)}; "
            "resume it where it was started, or choose another folder"
        )
    _check_network(record, last.plain["provenance"])


def _check_network(record: records.Record, made_by: dict) -> None:
    """A network of your own is the one that the run started with."""
    if made_by.get("network_sha256", "") not in ("", record.provenance.get("network_sha256")):
        raise ValueError(
            f"model: {record.exp.model!r} is not the network that {record.folder} was started with; give the changed "
            "network another name, or choose another folder"
        )


@contextmanager
def _shown(fed: Federation, rows: list[dict], done: int, progress: bool) -> Iterator[Callable[[dict], None]]:
    """A progress bar, and every registered watcher."""
    # None leaves it to tqdm: a terminal or notebook shows the bar, a file does not. TQDM_DISABLE silences everything.
    disable = True if not progress or os.environ.get("TQDM_DISABLE") else None
    what = f"{fed.method.label} {fed.exp.run_id}, {gradient_name(fed)} gradient"
    if disable is None and is_hook(fed.exp.model):
        tqdm.write(networks.parameters(fed.clients.net))
    with tqdm(total=fed.exp.rounds, desc=what, unit="round", disable=disable) as bar:
        bar.update(done)
        watching = [] if bar.disable else [show for watcher in WATCHERS if (show := watcher(fed.exp))]

        def show(row: dict) -> None:
            for watch in watching:
                watch(rows, False)
            accuracy = records.last_accuracy(rows)
            bar.set_postfix(accuracy=f"{accuracy:.3f}", sparsity=f"{row['sparsity']:.3f}", refresh=False)
            bar.update()

        yield show
        for watch in watching:
            watch(rows, True)
