"""A run's record: its settings, one row of metrics per round, and its provenance.

A record is a folder `<dataset>/<method>[-what differs]-seed<k>-<run_id>/`; `index.csv` has one line per record. Files
are written under a temporary name and then moved into place, so a reader never sees a partial one.
"""

import hashlib
import io
import json
import math
import os
import re
import warnings
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pandas as pd
from filelock import FileLock, Timeout

from ..experiment import Experiment, is_hook
from ..presets import TABLE_II
from .provenance import now, provenance

# Only locks of the operating system: a lock file that outlives its process would keep everyone out.
Lock = partial(FileLock, fallback_to_soft=False)


class RecordInUse(RuntimeError):
    """Another process is working on this run."""


class AnotherRun(ValueError):
    """The folder holds another run, which stays untouched."""


# The records of this checkout; an installed package comes without any.
OWN_RECORDS = Path(__file__).parent.parent.parent / "outputs" / "runs"


def folder_name(exp: Experiment) -> str:
    """<dataset>/<method>[-what differs]-seed<k>-<run_id>; names at most three differences from Table II."""
    differs = exp.differences_from_paper() if exp.dataset in TABLE_II else {}
    named = {k: getattr(exp, k) for k in differs if k not in ("rules", *exp.method_class.switches)}
    rules = rules_of(exp).replace("=", "_").replace(", ", "-")
    words = [rules] if rules != "paper" else []
    words += [exp.partition] if exp.partition != "iid" else []
    words += [f"{k}_{v:g}" if isinstance(v, float) else f"{k}_{v}" for k, v in named.items()]
    words = words[:3] + (["more"] if len(words) > 3 else [])
    name = "-".join([exp.method.rpartition(":")[2], *words, f"seed{exp.seed}", exp.run_id])
    dataset = Path(exp.dataset).stem if exp.dataset.endswith(".npz") else exp.dataset.rpartition(":")[0] or exp.dataset
    return "/".join(re.sub(r"[^\w.=()-]", "_", part) for part in (dataset, name))


def rules_of(exp: Experiment) -> str:
    """ "paper", "released", or the switches that depart from the paper."""
    switches = exp.method_class.switches
    if not switches:
        return exp.rules if exp.method_class.released else "paper"
    others = {k: getattr(exp, k) for k, (_, values) in switches.items() if getattr(exp, k) != next(iter(values))}
    if others and all(others.get(k) == "released" for k in switches):
        return "released"
    return ", ".join(f"{k}={v}" for k, v in others.items()) or "paper"


def folder_of(exp: Experiment, out: str | Path) -> Path:
    """The folder of an experiment's record, whether or not it exists yet."""
    return next(Path(out).glob(f"*/*-{exp.run_id}"), Path(out) / folder_name(exp))


class Record:
    """A run's folder with config.json, metrics.csv and provenance.json; if `out` is None, nothing is written."""

    def __init__(self, exp: Experiment, data_sha256: dict[str, str], out: str | Path | None = None, **made_by):
        self.exp = exp
        self.out = Path(out) if out else None
        self.folder = folder_of(exp, self.out) if self.out else None
        here = {"data_sha256": data_sha256, "rounds_done": 0, "diverged": None}
        self.provenance = provenance(exp) | made_by | here
        self.before: list[dict] = []  # the rows found on disk
        self.whole = False  # whether these are complete; then they are never rewritten
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def earlier(self) -> int:
        return len(self.before)

    @contextmanager
    def alone(self):
        """Hold the run's lock: one process at a time works on a run."""
        if not self.folder:
            yield
            return
        # The operating system releases the lock when a process dies, whatever the cause.
        lock = Lock(self.folder / ".lock", blocking=False)
        try:
            lock.acquire()
        except Timeout:
            raise RecordInUse(
                f"{self.folder}: another process is working on this run; wait for it, or choose another folder"
            ) from None
        except OSError as error:  # some network file systems have no locks
            raise OSError(
                f"{self.folder} cannot be locked ({error.strerror}); choose a folder on another file system"
            ) from error
        try:
            for part in self.folder.glob(".*.part"):  # left by a killed process
                part.unlink(missing_ok=True)
            self._look()
            yield
        finally:
            lock.release()

    def _look(self) -> None:
        """Read what the folder already holds; it must have the same origin."""
        check_origin(self.folder, provenance_of(self.folder), self.provenance)
        with suppress(ValueError):  # a record that cannot be trusted is written again
            rounds = len(load_run(self.folder))
            self.before = pd.read_csv(self.folder / "metrics.csv").head(rounds).to_dict("records")
            self.whole = progress(self.exp, self.out)[1]
        try:
            known = experiment_of(self.folder).run_id
        except (OSError, ValueError, TypeError, AttributeError):
            known = None
        if known != self.exp.run_id:  # a file with equivalent settings stays as it is
            settings = self.exp.to_dict()
            if self.exp.dataset.endswith(".npz"):  # so that it is found from any working folder
                settings["dataset"] = os.path.abspath(self.exp.dataset)
            write(self.folder / "config.json", _json(settings))

    def resume(self, earlier: dict, round: int) -> None:
        """Keep the provenance of the run's start, and note where this process resumes."""
        here = {k: self.provenance[k] for k in ("commit", "cpu", "packages")} | {"after_round": round, "at": now()}
        self.provenance = earlier | {"resumed": [*earlier.get("resumed", []), here]}

    def confirm(self, row: dict) -> None:
        """A repeated run must reproduce every number of its complete record, except the seconds."""
        if not self.whole:
            return
        there = self.before[row["round"] - 1]
        for k in there.keys() & row.keys() - {"seconds"}:
            if not (there[k] == row[k] or str(there[k]) == str(row[k])):
                raise ValueError(
                    f"{self.folder} has {k} {there[k]!r} in round {row['round']}, but here it is {row[k]!r}; another "
                    "machine or other versions may give other bits: choose another folder, or move this one away"
                )

    def save(self, rows: list[dict]) -> None:
        """Write the record up to the last of these rows, unless a complete one exists."""
        ended = diverged(rows[-1])
        text = pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")
        self.provenance |= {"rounds_done": len(rows), "diverged": len(rows) if ended else None, "saved": now()}
        self.provenance["metrics_sha256"] = _checksum(text, len(rows))
        # A longer record stays until this run has caught up with it.
        if self.folder and not self.whole and (len(rows) >= self.earlier or ended):
            write(self.folder / "metrics.csv", text)
            write(self.folder / "provenance.json", _json(self.provenance))
            if ended or len(rows) == self.exp.rounds:
                enter(self.folder)


def check_origin(folder: Path, there: dict, here: dict) -> None:
    """A folder's content comes from the same data and the same kind of federation; otherwise refuse it."""
    for name in ("data_sha256", "federation"):
        theirs, ours = there.get(name), here.get(name)
        if theirs and ours and theirs != ours:
            if name == "data_sha256":
                theirs, ours = (", ".join(f"{k} {v[:12]}" for k, v in each.items()) for each in (theirs, ours))
            raise AnotherRun(
                f"{folder} was made with {name} {theirs}, but here it is {ours}; choose another folder, "
                "such as run(exp, out='elsewhere'), or move this one away"
            )


def diverged(row: dict) -> bool:
    """Whether the round's training or test loss is not finite. A round without an evaluation has no test loss."""
    evaluated = not math.isnan(row["test_accuracy"])
    return not (math.isfinite(row["train_loss"]) and (math.isfinite(row["test_loss"]) or not evaluated))


def last_accuracy(rows: list[dict]) -> float:
    """Of the last round that was evaluated; NaN if none was."""
    return next((row["test_accuracy"] for row in reversed(rows) if not math.isnan(row["test_accuracy"])), math.nan)


def progress(exp: Experiment, out: str | Path) -> tuple[int, bool]:
    """The number of recorded rounds, and whether the record is complete: all rounds, or all until it diverged."""
    folder = folder_of(exp, out)
    kept = provenance_of(folder)
    done = kept.get("rounds_done")
    if type(done) is not int:
        return 0, False
    if done < exp.rounds and kept.get("diverged") is None:
        return done, False
    try:
        load_run(folder)
    except ValueError:  # its metrics are missing or have been altered
        return 0, False
    return done, True


def provenance_of(folder: Path) -> dict:
    """A record's provenance; empty if it cannot be read."""
    try:
        kept = json.loads((folder / "provenance.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def taken(exp: Experiment, out: str | Path) -> bool:
    """Whether another process is working on this run."""
    lock = folder_of(exp, out) / ".lock"
    try:
        if lock.exists():
            Lock(lock, blocking=False).acquire().lock.release()
    except Timeout:
        return True
    return False


def load_runs(folder: str | Path | None = None) -> pd.DataFrame:
    """All records below a folder as one table, with one row per round of each run.

    The default folder is this checkout's `outputs/runs`. Each row has the run's settings beside its metrics; `rules`
    says "paper", "released" or what differs. A record that cannot be trusted is skipped, with a warning that names it.
    """
    folder = Path(OWN_RECORDS if folder is None else folder)
    tables, faults = [], []
    for path in record_folders(folder):
        try:
            tables.append(load_run(path))
        except ValueError as error:
            faults.append(str(error))
            warnings.warn(f"skipped {error}", stacklevel=2)
    if not tables:
        why = f" ({faults[0]})" if faults else ""
        raise ValueError(f"folder: {str(folder)!r} is not allowed; it must contain a readable record{why}")
    return pd.concat(tables, ignore_index=True)


def record_folders(folder: str | Path) -> list[Path]:
    """The folders of all records below a folder; version 0.1's too, which lie directly in it and cannot be read."""
    return sorted(path.parent for form in ("*/*", "*") for path in Path(folder).glob(f"{form}/provenance.json"))


def experiment_of(folder: Path) -> Experiment:
    """A record's experiment, if this version can build it."""
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    if "variant" in settings or "authors" in map(str, settings.values()):
        raise ValueError("it was written by version 0.1, whose settings had other names")
    return Experiment(**settings)


def load_run(folder: Path) -> pd.DataFrame:
    """One record as a table; a ValueError says why it cannot be trusted."""
    folder = Path(folder)
    try:
        settings, exp = _settings(folder)
        kept = json.loads((folder / "provenance.json").read_text("utf-8"))
        # Metrics are written before provenance: a killed or running run may have more rows than provenance counts.
        text = (folder / "metrics.csv").read_text("utf-8")
        metrics = pd.read_csv(io.StringIO(text)).head(kept["rounds_done"])
        known, rounds, ended = kept["run_id"], metrics["round"].tolist(), kept["diverged"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder}: not a readable record ({error})") from error
    own = exp.run_id if exp else known
    if not own == known == folder.name.rpartition("-")[2]:
        raise ValueError(f"{folder}: its settings belong to run {own}, but its provenance to run {known}")
    if rounds != list(range(1, kept["rounds_done"] + 1)):
        raise ValueError(f"{folder}: {len(metrics)} rounds of metrics, but provenance says {kept['rounds_done']}")
    if kept.get("metrics_sha256", sha256 := _checksum(text, len(rounds))) != sha256:
        raise ValueError(f"{folder}: metrics.csv was changed after the run; its checksum does not match")
    columns = {k: v for k, v in settings.items() if k not in metrics}
    columns |= {"learning_rate_initial": settings["learning_rate"], "rules": rules_of(exp) if exp else "paper"}
    faults = len(kept.get("faults", []))  # client answers that rounds on Flower lacked
    return metrics.assign(run_id=known, diverged=ended, faults=faults, **columns)


def _settings(folder: Path) -> tuple[dict, Experiment | None]:
    """A record's settings and its experiment; None if its method is your own and cannot be imported here."""
    settings = json.loads((folder / "config.json").read_text("utf-8"))
    try:
        exp = experiment_of(folder)
    except ValueError as error:
        if is_hook(str(settings.get("method"))) and str(error).startswith("method:"):
            return settings, None
        raise
    # A class of your own that has changed since did not make this record.
    kept = json.loads((folder / "provenance.json").read_text("utf-8"))
    return settings, None if kept.get("method_sha256") != exp.source_sha256 else exp


def summary(folder: Path) -> dict:
    """A record's line in `index.csv`."""
    table, kept = load_run(folder), json.loads((folder / "provenance.json").read_text("utf-8"))
    last, accuracy = table.iloc[-1], table["test_accuracy"]
    return {
        "run": str(folder.relative_to(folder.parent.parent)),
        "dataset": last["dataset"], "method": last["method"], "rules": last["rules"], "partition": last["partition"],
        "seed": last["seed"], "rounds": f"{len(table)}/{last['rounds']}",
        "differs_from_table_ii": " ".join(sorted(kept["differs_from_paper"])),
        "last_five": round(accuracy.tail(5).mean(), 5), "best_five": round(accuracy.nlargest(5).mean(), 5),
        "sparsity": round(last["sparsity"], 5),
        "megabytes_down": round(table["downlink_bits"].sum() / 8e6, 3),
        "megabytes_up": round(table["uplink_bits"].sum() / 8e6, 3),
        "hours": round(table["seconds"].sum() / 3600, 3), "processor": kept["cpu"], "diverged": kept["diverged"],
        "saved": kept.get("saved", ""),
    }  # fmt: skip


def enter(folder: Path) -> None:
    """Write the record's line into `index.csv`, replacing an older one."""
    index = folder.parent.parent / "index.csv"
    with Lock(index.with_name(".index.lock")):
        line = summary(folder)
        try:
            others = [old for old in pd.read_csv(index).to_dict("records") if old["run"] != line["run"]]
            write_index(index, [*others, line])
        except (OSError, ValueError, KeyError, TypeError):  # there is none yet, or it is damaged
            write_index(index, lines(index.parent))


def lines(folder: Path) -> list[dict]:
    """One line per readable record."""
    found = []
    for path in record_folders(folder):
        with suppress(ValueError):
            found.append(summary(path))
    return found


def write_index(index: Path, found: list[dict]) -> None:
    """Write the lines, sorted."""
    table = pd.DataFrame(found).sort_values("run").astype({"diverged": "Int64"})
    write(index, table.to_csv(index=False, lineterminator="\n"))


def write(path: Path, content: str | bytes) -> None:
    """Replace the file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except OSError as error:
        raise OSError(
            error.errno, f"{path} could not be written ({error.strerror or error}); an earlier file is kept"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _checksum(text: str, rounds: int) -> str:
    """The hash of the first `rounds` rows, independent of line endings."""
    return hashlib.sha256("\n".join(text.splitlines()[: rounds + 1]).encode()).hexdigest()


def _json(value) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
