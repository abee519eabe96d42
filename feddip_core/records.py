"""What a run leaves behind: its settings, one row of metrics a round, and where it came from.

Files are written beside their place and moved into it, so that a reader never sees half of one.
"""

import json
import math
import os
import platform
import subprocess
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch
from filelock import FileLock, Timeout

from .experiment import REVISION, Experiment


class Taken(RuntimeError):
    """The run is under way in another process."""


class Record:
    """The folder `out/<run_id>/` with config.json, metrics.csv and provenance.json; nothing if `out` is None."""

    def __init__(self, exp: Experiment, data_sha256: dict[str, str], out: str | Path | None = None, **made_by):
        self.exp = exp
        self.folder = out and Path(out) / exp.run_id
        here = {"data_sha256": data_sha256, "rounds_done": 0, "diverged": None}
        self.provenance = provenance(exp) | made_by | here
        self.earlier = 0
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)

    def _rounds_of_an_earlier_run(self) -> int:
        try:
            return int(json.loads((self.folder / "provenance.json").read_text())["rounds_done"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    @contextmanager
    def alone(self):
        """Keep every other process from this run while it is under way, and be kept from theirs."""
        if not self.folder:
            yield
            return
        # The operating system lets go of the lock when a process dies, however it dies.
        lock = FileLock(self.folder / ".lock", blocking=False)
        try:
            lock.acquire()
        except Timeout:
            raise Taken(
                f"{self.folder}: another process is at this run; wait for it, or choose another folder"
            ) from None
        try:
            for part in self.folder.glob(".*.part"):  # of a process that was killed
                part.unlink(missing_ok=True)
            self.earlier = self._rounds_of_an_earlier_run()
            settings = self.exp.to_dict()
            if self.exp.dataset.endswith(".npz"):  # to be found from every working folder
                settings["dataset"] = os.path.abspath(self.exp.dataset)
            write(self.folder / "config.json", _json(settings))
            yield
        finally:
            lock.release()

    def resume(self, earlier: dict, round: int) -> None:
        """Go on with the provenance of the run's beginning, and note where this process took it up."""
        here = {k: self.provenance[k] for k in ("commit", "cpu", "packages")} | {"after_round": round, "at": _now()}
        self.provenance = earlier | {"resumed": [*earlier.get("resumed", []), here]}

    def save(self, rows: list[dict]) -> None:
        """Replace the record by one that ends with the last of these rows."""
        ended = diverged(rows[-1])
        self.provenance |= {"rounds_done": len(rows), "diverged": len(rows) if ended else None, "saved": _now()}
        # A record that went further stays until this run has caught up with it.
        if self.folder and (len(rows) >= self.earlier or ended):
            write(self.folder / "metrics.csv", pd.DataFrame(rows).to_csv(index=False, lineterminator="\n"))
            write(self.folder / "provenance.json", _json(self.provenance))


def diverged(row: dict) -> bool:
    """Whether a loss of this round is not finite."""
    return not all(math.isfinite(row[k]) for k in ("train_loss", "test_loss"))


def progress(exp: Experiment, out: str | Path) -> tuple[int, bool]:
    """How many rounds the record has, and whether it is whole: all of them, or all until it diverged."""
    try:
        kept = json.loads((Path(out) / exp.run_id / "provenance.json").read_text())
        done = int(kept["rounds_done"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, False
    return done, done == exp.rounds or kept.get("diverged") is not None


def taken(exp: Experiment, out: str | Path) -> bool:
    """Whether another process is at this run."""
    lock = Path(out) / exp.run_id / ".lock"
    try:
        if lock.exists():
            FileLock(lock, blocking=False).acquire().lock.release()
    except Timeout:
        return True
    return False


def load_runs(folder: str | Path) -> pd.DataFrame:
    """The records below a folder as one table: a row a round, the settings of its run beside the metrics.

    A record whose settings do not give its run_id, or whose metrics do not fit its provenance, is refused by name.
    """
    tables = [load_run(path.parent) for path in sorted(Path(folder).glob("*/provenance.json"))]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def load_run(folder: Path) -> pd.DataFrame:
    try:
        exp = Experiment(**json.loads((folder / "config.json").read_text()))
        kept = json.loads((folder / "provenance.json").read_text())
        # They are written first: a kill, or a look at a run under way, may find more of them than provenance knows.
        metrics = pd.read_csv(folder / "metrics.csv").head(kept["rounds_done"])
        known, rounds = kept["run_id"], metrics["round"].tolist()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder}: not a readable record ({error})") from error
    if not exp.run_id == known == folder.name:
        raise ValueError(f"{folder}: its settings belong to the run {exp.run_id}, its provenance to {known}")
    if rounds != list(range(1, kept["rounds_done"] + 1)):
        raise ValueError(f"{folder}: {len(metrics)} rounds of metrics, but provenance says {kept['rounds_done']}")
    settings = {k: v for k, v in exp.to_dict().items() if k not in metrics} | {
        "learning_rate_initial": exp.learning_rate
    }
    faults = len(kept.get("faults", []))  # answers that rounds of a run on Flower went without
    return metrics.assign(run_id=exp.run_id, diverged=kept["diverged"], faults=faults, **settings)


def provenance(exp: Experiment) -> dict:
    """What a reader needs to trust a number, or to doubt it."""
    return {
        "run_id": exp.run_id,
        "revision": REVISION,
        "differs_from_paper": exp.differences_from_paper(),
        "seed": exp.seed,
        "device": exp.device,
        "threads": exp.threads,
        "cpu": _cpu(),
        "gpu": torch.cuda.get_device_name(exp.device) if exp.device != "cpu" and torch.cuda.is_available() else None,
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "torchvision", "numpy", "pandas")},
        "commit": _commit(),
        "started": _now(),
    }


def write(path: Path, content: str | bytes) -> None:
    """Replace the file at once or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except OSError as error:
        raise OSError(
            error.errno, f"{path} could not be written ({error.strerror or error}); what was there is kept"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _json(value) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or "unknown"
    return f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"


def _commit() -> str | None:
    """The commit of this code, with a + if files were changed since; None outside a repository."""
    here = Path(__file__).parent

    def git(*words):
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Of a package installed into another project's repository, that project's commit would say nothing.
        if not git("ls-files", "federation.py"):
            return None
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
