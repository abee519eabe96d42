"""About how long a batch would take: from records of such runs, or from a few steps taken now."""

import functools
import itertools
import time
from pathlib import Path

import pandas as pd

from ..data import Dataset
from ..engine import records, sources
from ..engine.assembly import assemble
from ..engine.computing import check_device, computing
from ..engine.measure import EVALUATION_BATCH, evaluate
from ..experiment import Experiment, is_hook
from .jobs import Job


def seconds_per_round(exp: Experiment, out: Path, data_dir: str = "") -> float:
    """From the records of such runs in the folder, or else from a few steps taken now."""
    alike = ("dataset", "model", "width", "clients_per_round", "local_epochs", "batch_size")
    known = records.record_folders(out / "runs")
    table = records.load_runs(out / "runs") if known else pd.DataFrame()
    for k in alike:
        table = table[table[k] == getattr(exp, k)] if len(table) else table
    return float(table["seconds"].median()) if len(table) else _measured(exp, data_dir)


def _measured(exp: Experiment, data_dir: str, steps: int = 4) -> float:
    with computing(exp):
        fed = assemble(exp, data_dir=data_dir or None)
        clients, state = fed.clients, fed.start(sketch=True)  # a client may take hundreds of steps
        batches = list(itertools.islice(clients.batches(0, 0, "batches", exp.local_epochs), steps))
        float(clients.train_(state.w.clone(), state.m, batches[:1], statistics=state.statistics.clone()))
        began = time.perf_counter()  # float: waits until a GPU is done
        float(clients.train_(state.w.clone(), state.m, batches, statistics=state.statistics.clone()))
        step = (time.perf_counter() - began) / len(batches)
        tested = min(EVALUATION_BATCH, len(clients.data.y_test))
        began = time.perf_counter()
        evaluate(fed, state, slice(tested))
        evaluation = (time.perf_counter() - began) / tested * len(clients.data.y_test)
    steps_per_client = exp.local_epochs * sum(-(-len(part) // exp.batch_size) for part in clients.parts) / exp.clients
    return exp.clients_per_round * steps_per_client * step + evaluation / exp.evaluate_every


@functools.cache
def _dataset(name: str, normalisation: str, data_dir: str) -> Dataset:
    return sources.load(name, data_dir or None, normalisation)


def obstacle(job: Job) -> str:
    """Why a run would fail before its first round; empty if nothing blocks it."""
    exp, folder = job.exp, records.folder_of(job.exp, job.out / "runs")
    try:
        check_device(exp)
        blocked = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
        if blocked:
            raise FileExistsError(f"{blocked} is in the way of the record's folder")
        if not job.progress()[1]:
            with computing(exp):
                hook = is_hook(exp.dataset)
                dataset = sources.of(exp) if hook else _dataset(exp.dataset, exp.normalisation, job.data_dir)
                assemble(exp, dataset)
                here = {"data_sha256": dataset.sha256, "federation": "Federation"}
                records.check_origin(folder, records.provenance_of(folder), here)
    except Exception as error:  # whatever would stop it
        return f"{type(error).__name__}: {error}"
    return ""


def plan(jobs: list[Job], at_once: int) -> str:
    """What would run, and about how long it would take."""
    rows, cost = [], {}
    for job in jobs:
        exp, (done, whole) = job.exp, job.progress()
        kind = (exp.dataset, exp.model, exp.width, exp.clients_per_round, exp.local_epochs, exp.batch_size)
        if not whole and kind not in cost:
            cost[kind] = seconds_per_round(exp, job.out, job.data_dir)
        minutes = 0.0 if whole else (exp.rounds - done) * cost[kind] / 60
        rows.append({"run": str(job), "rounds": f"{done}/{exp.rounds}", "minutes": minutes})
    hours = sum(row["minutes"] for row in rows) / 60 / min(at_once, max(1, len(jobs)))
    longest = max((len(row["run"]) for row in rows), default=0)
    lines = [f"{row['run']:{longest}}  {row['rounds']:>9} rounds  {row['minutes']:6.1f} min" for row in rows]
    return "\n".join([*lines, f"{len(jobs)} runs, about {hours:.1f} hours for {at_once} at once"])
