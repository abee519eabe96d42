"""Runs as executions of notebooks/31_experiment.ipynb by Papermill, several side by side, each interruptible."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import nbformat
import psutil
import yaml
from tqdm import tqdm

from ..engine import records
from ..engine.checkout import PACKAGE, beside
from ..experiment import Experiment
from ..presets import CLASSES

NOTEBOOK = beside("notebooks/31_experiment.ipynb")
FREE = ("preset", "dataset", "method", "seed", "partition", "rules")  # the notebook's own parameters
PATIENCE = 60  # seconds for a run to save what it has after Ctrl-C


@dataclass
class Job:
    """One experiment and its progress."""

    exp: Experiment
    preset: str
    out: Path
    data_dir: str = ""
    state: str = "waiting"  # waiting, running, done, failed, interrupted, or elsewhere: with another process
    process: subprocess.Popen | None = None
    began: float = field(default_factory=time.monotonic)
    reason: str = ""
    said: BinaryIO | None = None  # what Papermill has to say
    rounds_done: int = 0

    def __str__(self) -> str:
        exp = self.exp
        others = [f"{k}={v}" for k, v in self.settings.items()]
        where = [exp.partition] if exp.partition != "iid" else []
        rules = ["released"] if exp.rules != "paper" else []
        return f"{exp.run_id} {' '.join([exp.method_class.label, *where, *rules, *others])}, seed {exp.seed}"

    @property
    def settings(self) -> dict:
        """The settings that differ from the preset, without those that are the notebook's own parameters."""
        free = {k: getattr(self.exp, k) for k in FREE if k != "preset"}
        own = {} if self.exp.dataset in CLASSES else {"model": self.exp.model}  # for which no data set speaks
        base = Experiment.preset(self.preset, **free, **own)
        return {k: v for k, v in self.exp.to_dict().items() if v != getattr(base, k)} | own

    def progress(self) -> tuple[int, bool]:
        return records.progress(self.exp, self.out / "runs")

    @property
    def notebook(self) -> Path:
        return self.out / "notebooks" / f"{Path(records.folder_name(self.exp)).name}.ipynb"

    def start(self) -> None:
        self.notebook.parent.mkdir(parents=True, exist_ok=True)
        given = {k: getattr(self.exp, k) for k in FREE if k != "preset"} | {"preset": self.preset}
        given |= {"settings": self.settings, "out": str(self.out.resolve()), "data_dir": self.data_dir}
        options = ["-k", "python3", "--no-progress-bar", "--no-log-output", "--log-level", "ERROR"]
        # The kernel runs in another folder. It must import this very package, even if another one is installed,
        # and the user's own modules from here, as this process does.
        path = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()]
        # To Papermill a path is a template: {seed} would be replaced.
        paths = [str(file).replace("{", "{{").replace("}", "}}") for file in (NOTEBOOK, self.notebook)]
        command = [sys.executable, "-m", "papermill", *paths, *options, "--cwd", str(NOTEBOOK.parent)]
        self.said = tempfile.TemporaryFile()  # noqa: SIM115, it goes with this object
        self.process = subprocess.Popen(
            [*command, "-y", yaml.safe_dump(given)],
            env=os.environ | {"OMP_NUM_THREADS": str(self.exp.threads), "PYTHONPATH": os.pathsep.join(path)},
            stdout=subprocess.DEVNULL, stderr=self.said,
            start_new_session=True,  # Ctrl-C is for this process, which then interrupts the runs
        )  # fmt: skip
        self.state, self.began = "running", time.monotonic()

    def look(self) -> None:
        """Note the progress, and the end if it has come."""
        if self.state != "running":
            return
        ended = self.process.poll() is not None
        self.rounds_done, whole = self.progress()  # after the end, or it might miss the last rounds
        if not ended:
            return
        self.reason = _error(self.notebook) if self.process.returncode else ""
        if self.process.returncode == 0 and whole:
            self.state = "done"
        elif self.reason.startswith(records.RecordInUse.__name__) or (not self.reason and (whole or self.taken())):
            # A notebook without an error belongs to the other process, whose notebook has the same name.
            self.state = "elsewhere"
        else:
            self.state = "failed"
            self.reason = self.reason or f"papermill ended with {self.process.returncode} and no record was finished"

    def last_words(self, count: int = 8) -> list[str]:
        """The last lines of the error: the notebook's, or what Papermill said if it never came to that."""
        text = "\n".join(shown["traceback"]) if (shown := _shown_error(self.notebook)) else ""
        if not text and self.said:
            self.said.seek(0)
            text = self.said.read().decode(errors="replace")
        lines = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]
        return [line for line in lines if line][-count:] or [self.reason]

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
    error = _shown_error(notebook)
    return f"{error.ename}: {error.evalue}".splitlines()[0] if error else ""


def _shown_error(notebook: Path) -> nbformat.NotebookNode | None:
    try:
        cells = nbformat.read(notebook, as_version=4).cells
    except (OSError, ValueError):
        return None
    shown = [o for cell in cells if cell.cell_type == "code" for o in cell.outputs if o.output_type == "error"]
    return shown[-1] if shown else None


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
    """Finished rounds for the progress bar; a run that has ended counts as a whole."""
    return job.exp.rounds if job.state in ("done", "failed", "elsewhere") else job.rounds_done


def _stop(jobs: list[Job]) -> None:
    tqdm.write("stopping; the runs save what they have …")
    running = [job for job in jobs if job.state == "running"]
    try:
        # Repeatedly, because a kernel that happens to be idle ignores it.
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
def _interruptible() -> Iterator[None]:
    """Let SIGTERM stop the batch as Ctrl-C does."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
