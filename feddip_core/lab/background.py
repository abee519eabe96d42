"""A run in its own thread: watched after every round, stopped before any client's turn, kept as a record.

Only one runs at a time: two would draw from the same global random stream of torch.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

from ..client import Clients
from ..data import Dataset
from ..engine import measure, records, sources
from ..engine.assembly import assemble, gradient_name
from ..engine.computing import computing, numerics
from ..experiment import Experiment, is_hook
from ..masks import Mask
from ..study.figures import label
from .film import Frame


def loaded(exp: Experiment) -> Dataset:
    """An experiment's data. They are cached, because reading them takes longer than anything else a slider does."""
    return _loaded(exp.dataset, exp.normalisation, exp.clients if is_hook(exp.dataset) else 0)


@lru_cache(maxsize=4)
def _loaded(name: str, normalisation: str, clients: int) -> Dataset:
    if clients:
        return sources.brought(name, [None, *range(clients)])
    return sources.load(name, None, normalisation)


class Stopped(Exception):
    """The user has stopped this run."""


class Stoppable(Clients):
    """Clients that can be stopped before each one's turn, and during a long start."""

    def __init__(self, *args: Any, stop: threading.Event):
        self.stop = stop
        super().__init__(*args)

    def batches(self, *args, **how):
        self.go_on()
        return super().batches(*args, **how)

    def train_(self, *args, **how):
        self.go_on()
        return super().train_(*args, **how)

    def go_on(self) -> None:
        if self.stop.is_set():
            raise Stopped


@dataclass
class Trained:
    """A run on the page: its metrics and, if it was trained here, what its film needs."""

    name: str
    exp: Experiment | None  # None for a record whose method is not available here
    metrics: pd.DataFrame
    masks: list[Mask]  # the first is the initial one; empty for a record
    provenance: dict
    settings: Mapping[str, Any] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)  # as many as there are masks

    def __post_init__(self) -> None:
        if self.exp:
            self.settings = self.exp.to_dict()

    @property
    def method(self) -> str:
        return self.settings["method"]

    @property
    def rounds(self) -> int:
        """T, which a stopped run has not reached."""
        return self.settings["rounds"]

    def save(self, out: str | Path) -> Path:
        """Keep it as an ordinary record; one of the same run that went further is left as it is."""
        if self.exp is None:
            raise ValueError(f"method: {self.method!r} is not available here; the run stays in the record it came from")
        made = {k: v for k, v in self.provenance.items() if k != "data_sha256"}
        record = records.Record(self.exp, self.provenance["data_sha256"], out, **made)
        with record.alone():
            record.save(self.metrics.to_dict("records"))
        return record.folder

    @classmethod
    def open(cls, folder: Path) -> "Trained":
        """A record, if it is what it says it is."""
        rounds = len(records.load_run(folder))
        settings, kept = (json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("config", "provenance"))
        metrics = pd.read_csv(folder / "metrics.csv").head(rounds)
        return cls(describe(settings), _experiment(folder, kept["run_id"]), metrics, [], kept, settings)


def _experiment(folder: Path, run_id: str) -> Experiment | None:
    """The experiment of a record; None if its method, a reader's own, cannot be imported or has changed."""
    try:
        exp = records.experiment_of(folder)
    except ValueError:
        return None
    return exp if exp.run_id == run_id else None


class Training:
    """One run in its own thread. `watch(training)` is called there, after every round and at the end."""

    def __init__(self, exp: Experiment, watch: Callable[["Training"], None]):
        self.exp, self.watch = exp, watch
        self.rows: list[dict] = []
        self.masks: list[Mask] = []
        self.frames: list[Frame] = []
        self.provenance: dict = {}
        self.error: Exception | None = None
        self.stopping, self.over = threading.Event(), False
        self.thread = threading.Thread(target=self._work, name="training", daemon=True)

    def _work(self) -> None:
        try:
            for row, m, frame in self._rounds():
                self.masks.append(m)
                self.frames.append(frame)
                self.rows.extend([row] if row else [])
                self.watch(self)
        except Stopped:
            pass
        except Exception as error:  # it is shown beside the button, and raised by whoever waits
            self.error = error
        self.over = True
        self.watch(self)

    def _rounds(self) -> Iterator[tuple[dict, Mask, Frame]]:
        """The initial state, without a row, then round after round, as in `run`."""
        exp, dataset = self.exp, loaded(self.exp)
        with computing(exp):
            federation = assemble(exp, dataset, clients=partial(Stoppable, stop=self.stopping))
            made_by = dict(gradient=gradient_name(federation), numerics=numerics())
            self.provenance = records.Record(exp, dataset.sha256, **made_by).provenance
            state, row, weights = federation.start(), {}, federation.clients.layout.weights
            m = federation.full_mask(state.m)
            yield row, m, Frame.of(weights(state.w), m, chosen=False)
            while state.t < exp.rounds and not (row and records.diverged(row)):
                began = time.perf_counter()
                after, done = federation.round(state)
                row = measure.row(federation, state, after, done, 0.0)
                row["seconds"] = time.perf_counter() - began
                m, chosen, state = federation.full_mask(after.m), row["regrown"] + row["dropped"] > 0, after
                yield row, m, Frame.of(weights(done.w), m, chosen)

    def trained(self, name: str) -> Trained:
        return Trained(name, self.exp, pd.DataFrame(self.rows), self.masks, self.provenance, frames=self.frames)


def describe(settings: Mapping[str, Any]) -> str:
    """A name for a run: its method and the settings that are most likely compared."""
    sparse = f", s_p {settings['sparsity_target']:g}" if settings.get("sparsity_target") else ""
    released = ", released" if settings.get("rules") == "released" else ""
    what = f"{label(settings['method'])}{released}{sparse}, {settings['partition']}"
    return f"{what}, T {settings['rounds']}, seed {settings['seed']}"
