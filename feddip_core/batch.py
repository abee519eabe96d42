"""Many runs with one command, each an execution of notebooks/experiment.ipynb by Papermill.

    python -m feddip_core.batch --preset paper --dataset fashion_mnist --methods all --seeds 0 1 2 --jobs 2

Runs that are done are skipped and interrupted ones resumed; a failed one does not harm the others. Several such
commands may share a folder, also from several machines: a run is only ever taken by one of them.
"""

import argparse
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
import pandas as pd
import psutil
import yaml
from tqdm import tqdm

from . import data, records, results
from .experiment import CLASSES, FIXED, HOW, PRESETS, Experiment
from .federation import EVALUATION_BATCH, Federation, computing
from .plots import NAMES

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "experiment.ipynb"
FREE = ("preset", "dataset", "method", "seed", "partition", "rules")  # the notebook's own parameters
PATIENCE = 60  # seconds for a run to save what it has after Ctrl-C


@dataclass
class Job:
    """One experiment, and how it fares."""

    exp: Experiment
    preset: str
    out: Path
    data_dir: str = ""
    state: str = "waiting"  # waiting, running, done, failed, interrupted, or elsewhere: with another process
    process: subprocess.Popen | None = None
    began: float = field(default_factory=time.monotonic)
    reason: str = ""
    rounds_done: int = 0

    def __str__(self) -> str:
        exp = self.exp
        others = [f"{k}={v}" for k, v in self.settings.items()]
        where = [exp.partition] if exp.partition != "iid" else []
        rules = [f"{exp.rules}' rules"] if exp.rules != "paper" else []
        return f"{exp.run_id} {' '.join([NAMES[exp.method], *where, *rules, *others])}, seed {exp.seed}"

    @property
    def settings(self) -> dict:
        """What the experiment has other than its preset, beside the notebook's own parameters."""
        free = {k: getattr(self.exp, k) for k in FREE if k != "preset"}
        own = {} if self.exp.dataset in CLASSES else {"model": self.exp.model}  # for which no data set speaks
        base = Experiment.preset(self.preset, **free, **own)
        return {k: v for k, v in self.exp.to_dict().items() if v != getattr(base, k)} | own

    def progress(self) -> tuple[int, bool]:
        return records.progress(self.exp, self.out / "runs")

    @property
    def notebook(self) -> Path:
        return self.out / "notebooks" / f"{self.exp.method}-seed{self.exp.seed}-{self.exp.run_id}.ipynb"

    def start(self) -> None:
        self.notebook.parent.mkdir(parents=True, exist_ok=True)
        given = {k: getattr(self.exp, k) for k in FREE if k != "preset"} | {"preset": self.preset}
        given |= {"settings": self.settings, "out": str(self.out.resolve()), "data_dir": self.data_dir}
        options = ["-k", "python3", "--no-progress-bar", "--no-log-output", "--log-level", "ERROR"]
        # The kernel, whose own folder is another, is to import this very package, also if another one is installed,
        # and a module of the user's own from here, as this process does.
        path = [str(NOTEBOOK.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()]
        command = [sys.executable, "-m", "papermill", str(NOTEBOOK), str(self.notebook), *options]
        self.process = subprocess.Popen(
            [*command, "--cwd", str(NOTEBOOK.parent), "-y", yaml.safe_dump(given)],
            env=os.environ | {"OMP_NUM_THREADS": str(self.exp.threads), "PYTHONPATH": os.pathsep.join(path)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which then interrupts the runs
        )  # fmt: skip
        self.state, self.began = "running", time.monotonic()

    def look(self) -> None:
        """Take note of the progress, and of the end if it has come."""
        if self.state != "running":
            return
        ended = self.process.poll() is not None
        self.rounds_done, whole = self.progress()  # after the end, or it might miss the last rounds
        if not ended:
            return
        self.reason = _error(self.notebook) if self.process.returncode else ""
        if self.process.returncode == 0 and whole:
            self.state = "done"
        elif self.reason.startswith(records.Taken.__name__) or (not self.reason and (whole or self.taken())):
            # Without an error in it the notebook is the other process's, which has the same name.
            self.state = "elsewhere"
        else:
            self.state = "failed"
            self.reason = self.reason or f"papermill ended with {self.process.returncode} and no record was finished"

    def taken(self) -> bool:
        return records.taken(self.exp, self.out / "runs")

    def interrupt(self) -> None:
        """As Ctrl-C in the notebook: the run saves what it has."""
        for process in _children(self.process) or [self.process]:  # there may be no kernel yet
            with suppress(psutil.Error):
                process.send_signal(signal.SIGINT)

    def end(self) -> None:
        for process in [*_children(self.process), self.process]:
            with suppress(psutil.Error):
                process.kill()


def _children(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        # Only the kernel: its workers, if it has any, are its own to end.
        return psutil.Process(process.pid).children()
    except psutil.NoSuchProcess:
        return []


def _error(notebook: Path) -> str:
    """The last error that a notebook shows, in a line."""
    try:
        cells = nbformat.read(notebook, as_version=4).cells
    except (OSError, ValueError):
        return ""
    shown = [o for cell in cells if cell.cell_type == "code" for o in cell.outputs if o.output_type == "error"]
    return f"{shown[-1].ename}: {shown[-1].evalue}".splitlines()[0] if shown else ""


def execute(jobs: list[Job], at_once: int, pause: float = 1.0) -> list[Job]:
    """Run those that are not done, `at_once` of them side by side; an interruption leaves them all resumable."""
    for job in jobs:
        job.rounds_done, whole = job.progress()
        job.state = "done" if whole else "waiting"
    skipped = sum(job.state == "done" for job in jobs)
    total, begun = sum(job.exp.rounds for job in jobs), sum(_counted(job) for job in jobs)
    with tqdm(total=total, initial=begun, unit="round", disable=None, smoothing=0.05) as bar, _interruptible():
        try:
            while any(job.state in ("waiting", "running") for job in jobs):
                _step(jobs, at_once, bar)
                time.sleep(pause)
        except BaseException as error:
            _stop(jobs)
            if not isinstance(error, KeyboardInterrupt):
                raise
    tqdm.write(f"{skipped} done before, {sum(job.state == 'done' for job in jobs) - skipped} done now")
    return jobs


def _step(jobs: list[Job], at_once: int, bar: tqdm) -> None:
    for job in jobs:
        before = job.state
        job.look()
        if job.state != before:
            minutes = (time.monotonic() - job.began) / 60
            tqdm.write(f"{job.state}: {job}, after {minutes:.1f} min" + (f" ({job.reason})" if job.reason else ""))
    running = sum(job.state == "running" for job in jobs)
    for job in [job for job in jobs if job.state == "waiting"][: at_once - running]:
        job.start()
    counts = {state: sum(job.state == state for job in jobs) for state in ("running", "done", "failed")}
    bar.set_postfix_str(", ".join(f"{n} {state}" for state, n in counts.items()), refresh=False)
    bar.update(sum(_counted(job) for job in jobs) - bar.n)


def _counted(job: Job) -> int:
    """Rounds that need no more waiting for."""
    return job.exp.rounds if job.state in ("done", "failed", "elsewhere") else job.rounds_done


def _stop(jobs: list[Job]) -> None:
    tqdm.write("stopping; the runs save what they have …")
    running = [job for job in jobs if job.state == "running"]
    try:
        # Again and again, since a kernel that is idle for a moment takes no notice.
        for _ in range(PATIENCE // 5):
            alive = [job for job in running if job.process.poll() is None]
            for job in alive:
                job.interrupt()
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and any(job.process.poll() is None for job in alive):
                time.sleep(0.1)
    except KeyboardInterrupt:
        tqdm.write("stopping at once")
    for job in running:
        if job.process.poll() is None:
            job.end()
    for job in jobs:
        job.state = "interrupted" if job.state in ("waiting", "running") else job.state


@contextmanager
def _interruptible():
    """Let a polite kill stop the batch as Ctrl-C does."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def seconds_a_round(exp: Experiment, out: Path, data_dir: str = "") -> float:
    """From the records of such runs in the folder, or else from a few steps taken now."""
    alike = ("dataset", "model", "width", "clients_per_round", "local_epochs", "batch_size")
    try:
        table = records.load_runs(out / "runs")
    except ValueError:  # a record that is not whole; it will be named when it is needed
        table = pd.DataFrame()
    for k in alike:
        table = table[table[k] == getattr(exp, k)] if len(table) else table
    return float(table["seconds"].median()) if len(table) else _measured(exp, data_dir)


def _measured(exp: Experiment, data_dir: str, steps: int = 4) -> float:
    with computing(exp):
        # PruneFL's first mask takes hundreds of steps at one client, before any round that could be measured.
        measured = exp.replace(method="fedavg") if exp.method == "prunefl" else exp
        site = Federation(measured, data.of(exp, data_dir or None))
        state = site.start()
        batches = list(itertools.islice(site.batches(0, 0, "batches", exp.local_epochs), steps))
        float(site.train_(state.w.clone(), state.m, batches[:1], statistics=state.statistics.clone()))
        began = time.perf_counter()  # float: a GPU is only done when its numbers are asked for
        float(site.train_(state.w.clone(), state.m, batches, statistics=state.statistics.clone()))
        step = (time.perf_counter() - began) / len(batches)
        tested = min(EVALUATION_BATCH, len(site.data.y_test))
        began = time.perf_counter()
        site.evaluate(state, slice(tested))
        evaluation = (time.perf_counter() - began) / tested * len(site.data.y_test)
    steps_a_client = exp.local_epochs * sum(-(-len(part) // exp.batch_size) for part in site.parts) / exp.clients
    return exp.clients_per_round * steps_a_client * step + evaluation


def plan(jobs: list[Job], at_once: int) -> str:
    """What would run, and about how long it would take."""
    rows, cost = [], {}
    for job in jobs:
        exp, (done, whole) = job.exp, job.progress()
        kind = (exp.dataset, exp.model, exp.width, exp.clients_per_round, exp.local_epochs, exp.batch_size)
        if not whole and kind not in cost:
            cost[kind] = seconds_a_round(exp, job.out, job.data_dir)
        minutes = 0.0 if whole else (exp.rounds - done) * cost[kind] / 60
        rows.append({"run": str(job), "rounds": f"{done}/{exp.rounds}", "minutes": minutes})
    hours = sum(row["minutes"] for row in rows) / 60 / min(at_once, max(1, len(jobs)))
    longest = max((len(row["run"]) for row in rows), default=0)
    lines = [f"{row['run']:{longest}}  {row['rounds']:>9} rounds  {row['minutes']:6.1f} min" for row in rows]
    return "\n".join([*lines, f"{len(jobs)} runs, about {hours:.1f} hours for {at_once} at once"])


def chosen(options: argparse.Namespace) -> list[Experiment]:
    """Each experiment once, in the order of seeds, so that the first results come early."""
    experiments = _needed(options) if options.results else _combined(options)
    if not experiments:
        raise ValueError(f"seeds: {options.seeds} is not allowed; the results have {results.SEEDS[options.preset]}")
    return list({exp.run_id: exp for exp in experiments}.values())


def _needed(options: argparse.Namespace) -> list[Experiment]:
    """What the result notebooks want, of the seeds that were asked for, computed as `--set` says."""
    how = dict(map(_setting, options.set))
    for name in how.keys() - set(HOW):
        raise ValueError(f"set: {name!r} is not allowed with --results; it must be one of {', '.join(HOW)}")
    names = list(results.RESULTS) if options.results == ["all"] else options.results
    tables = [results.wanted(name, options.preset, options.dataset or "fashion_mini") for name in names]
    found = [exp for table in tables for experiments in table.values() for exp in experiments]
    return [exp.replace(**how) for seed in options.seeds for exp in found if exp.seed == seed]


def _combined(options: argparse.Namespace) -> list[Experiment]:
    """Every combination of the options."""
    methods = list(FIXED) if options.methods == ["all"] else options.methods
    extra = dict(map(_setting, options.set))
    known = {f.name for f in dataclasses.fields(Experiment)} - set(FREE)
    for name in extra.keys() - known:
        raise ValueError(f"set: {name!r} is not allowed; it must be one of {', '.join(sorted(known))}, as name=value")
    # The notebook runs in its own folder, where a relative path would point elsewhere.
    own = options.dataset and options.dataset.endswith(".npz")
    dataset = str(Path(options.dataset).expanduser().resolve()) if own else options.dataset
    combinations = itertools.product(options.seeds, options.partitions, options.rules, methods)
    return [
        Experiment.preset(options.preset, dataset=dataset, method=m, seed=s, partition=p, rules=r, **extra)
        for s, p, r, m in combinations
    ]


def _setting(word: str) -> tuple[str, object]:
    name, given, text = word.partition("=")
    if not given:
        raise ValueError(f"set: {word!r} is not allowed; it must be name=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"set: {word!r} is not allowed; its value is not to be read") from error
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value  # to YAML, 1e-3 is a string
    return name, value


def _shard(text: str) -> tuple[int, int]:
    i, _, n = text.partition("/")
    if not (i.isdigit() and n.isdigit() and 1 <= int(i) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be i/n with i from 1 to n, such as 1/4")
    return int(i), int(n)


def _count(text: str) -> int:
    if not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be a whole number of at least 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("python -m feddip_core.batch", description=__doc__.splitlines()[0])
    p.add_argument("--preset", default="smoke", choices=PRESETS)
    p.add_argument("--dataset", help="by default the preset's own")
    p.add_argument("--methods", nargs="+", default=["feddip"], metavar="METHOD", help=f"all, or of {', '.join(FIXED)}")
    p.add_argument(
        "--results", nargs="+", metavar="RESULT", help="the runs that a result notebook needs, instead of --methods, "
        f"--partitions and --rules: all, or of {', '.join(results.RESULTS)}",
    )  # fmt: skip
    p.add_argument("--seeds", nargs="+", default=[0], type=int, metavar="SEED")
    p.add_argument("--partitions", nargs="+", default=["iid"], metavar="PARTITION")
    p.add_argument("--rules", nargs="+", default=["paper"], metavar="RULES", help="paper, authors, or both")
    p.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="any other setting of Experiment")
    p.add_argument("--jobs", default=1, type=_count, help="runs side by side, a thread each")
    p.add_argument("--shard", default=(1, 1), type=_shard, metavar="I/N", help="the I-th of N parts of the batch")
    p.add_argument("--out", default="outputs", type=Path, help="folder for records and executed notebooks")
    p.add_argument("--data-dir", default="", help="folder with the data sets")
    p.add_argument("--dry-run", action="store_true", help="list what would run, and about how long")
    return p


def main(words: Iterable[str] | None = None) -> int:
    """0: all are done. 1: some failed. 2: the options make no sense. 3: some are with other processes. 130: Ctrl-C."""
    command = parser()
    options = command.parse_args(words)
    try:
        experiments = chosen(options)
        data.load(experiments[0].dataset, options.data_dir or None)  # before any work starts
        out = options.out.expanduser()
        if not options.dry_run:
            (out / "notebooks").mkdir(parents=True, exist_ok=True)
    except (ValueError, TypeError, OSError, data.DataError) as error:
        command.error(str(error))
    i, n = options.shard
    data_dir = str(Path(options.data_dir).expanduser().resolve()) if options.data_dir else ""
    jobs = [Job(exp, options.preset, out, data_dir) for exp in experiments[i - 1 :: n]]
    if options.dry_run:
        print(plan(jobs, options.jobs))
        return 0
    execute(jobs, options.jobs)
    return report(jobs)


def report(jobs: list[Job]) -> int:
    """Say what did not end well, and where to look."""
    by_state = {state: [job for job in jobs if job.state == state] for state in ("failed", "elsewhere", "interrupted")}
    for job in by_state["failed"]:
        print(f"failed: {job}\n  {job.reason}\n  see {job.notebook}", file=sys.stderr)
    for job in by_state["elsewhere"]:
        print(f"left to another process: {job}", file=sys.stderr)
    if by_state["interrupted"]:
        print(f"{len(by_state['interrupted'])} runs are not done; the same command goes on with them", file=sys.stderr)
        return 130
    return 1 if by_state["failed"] else 3 if by_state["elsewhere"] else 0


if __name__ == "__main__":
    sys.exit(main())
