"""A run in a thread of its own: watched after every round, stopped before any client's turn, kept as a record.

One at a time: two would draw from the same global random stream of torch.
"""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from . import data, records
from .experiment import Experiment
from .federation import Federation, computing
from .masks import Mask
from .planning import loaded
from .plots import NAMES


class Stopped(Exception):
    """The user wants no more of this run."""


class Stoppable(Federation):
    """A federation that can be stopped before each client's turn, and in the middle of a long beginning."""

    def __init__(self, exp: Experiment, dataset: data.Dataset, stop: threading.Event):
        self.stop = stop
        super().__init__(exp, dataset)

    def train_(self, *args, **how):
        if self.stop.is_set():
            raise Stopped
        return super().train_(*args, **how)


@dataclass
class Trained:
    """A run that is shown: what was measured, and for one that was trained here the mask after each round."""

    name: str
    exp: Experiment
    metrics: pd.DataFrame
    masks: list[Mask]  # the first is that of the beginning; none for a record
    provenance: dict

    def save(self, out: str | Path) -> Path:
        """Keep it as an ordinary record; one of the same run that went further is left as it is."""
        made = {k: v for k, v in self.provenance.items() if k != "data_sha256"}
        record = records.Record(self.exp, self.provenance["data_sha256"], out, **made)
        with record.alone():
            record.save(self.metrics.to_dict("records"))
        return record.folder

    @classmethod
    def open(cls, folder: Path) -> "Trained":
        """A record, if it is what it says it is."""
        rounds = len(records.load_run(folder))
        exp = Experiment(**json.loads((folder / "config.json").read_text()))
        metrics = pd.read_csv(folder / "metrics.csv").head(rounds)
        return cls(describe(exp), exp, metrics, [], json.loads((folder / "provenance.json").read_text()))


class Training:
    """One run in a thread of its own. `watch(training)` is called there, after every round and at the end."""

    def __init__(self, exp: Experiment, watch: Callable[["Training"], None]):
        self.exp, self.watch = exp, watch
        self.rows: list[dict] = []
        self.masks: list[Mask] = []
        self.provenance: dict = {}
        self.error: Exception | None = None
        self.stopping, self.over = threading.Event(), False
        self.thread = threading.Thread(target=self._work, name="training", daemon=True)

    def _work(self) -> None:
        try:
            for row, m in self._rounds():
                self.masks.append(m)
                self.rows.extend([row] if row else [])
                self.watch(self)
        except Stopped:
            pass
        except Exception as error:  # it is shown beside the button, and raised by whoever waits
            self.error = error
        self.over = True
        self.watch(self)

    def _rounds(self) -> Iterator[tuple[dict, Mask]]:
        """The beginning, without a row, then round after round; as in `run`."""
        dataset = loaded(self.exp.dataset, self.exp.normalisation)
        with computing(self.exp):
            site = Stoppable(self.exp, dataset, self.stopping)
            self.provenance = records.Record(self.exp, dataset.sha256, gradient=site.gradient_name).provenance
            state, row = site.start(), {}
            yield row, site.full_mask(state.m)
            while state.t < self.exp.rounds and not (row and records.diverged(row)):
                state, row = site.round(state)
                yield row, site.full_mask(state.m)

    def trained(self, name: str) -> Trained:
        return Trained(name, self.exp, pd.DataFrame(self.rows), self.masks, self.provenance)


def describe(exp: Experiment) -> str:
    """A name for a run: its method and what is most likely to be compared."""
    sparse = f", s_p {exp.sparsity_target:g}" if exp.sparsity_target else ""
    return f"{NAMES[exp.method]}{sparse}, {exp.partition}, T {exp.rounds}, seed {exp.seed}"
