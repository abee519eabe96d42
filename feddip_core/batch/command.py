"""Run many experiments: choose the runs, execute several at once, report how they ended."""

import argparse
import itertools
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import yaml

from ..engine import sources
from ..engine.run import check_importable
from ..experiment import EXECUTION_SETTINGS, METHODS, Experiment, is_hook, settings_of
from ..presets import PRESETS
from ..study import wanted
from .estimate import obstacle, plan
from .jobs import FREE, Job, execute


def chosen(options: argparse.Namespace) -> list[Experiment]:
    """Each experiment once, ordered by seed, so that the first results come early."""
    experiments = _needed(options) if options.results else _combined(options)
    return list({exp.run_id: exp for exp in experiments}.values())


def _needed(options: argparse.Namespace) -> list[Experiment]:
    """The runs that the result notebooks need, for the given seeds, computed as `--set` says."""
    how = dict(map(_setting, options.set))
    for name in how.keys() - set(EXECUTION_SETTINGS):
        raise ValueError(
            f"set: {name!r} is not allowed with --results; it must be one of {', '.join(EXECUTION_SETTINGS)}"
        )
    names = list(wanted.RESULTS) if options.results == ["all"] else options.results
    if options.methods and names not in (["league"], ["league_choices"]):
        raise ValueError(f"methods: {options.methods} is not allowed with --results, except with the league")
    own = {"methods": options.methods} if options.methods else {}
    tables = [wanted.wanted(name, options.preset, options.dataset or "fashion_mini", **own) for name in names]
    found = [exp for table in tables for experiments in table.values() for exp in experiments]
    chosen = [exp.replace(**how) for seed in options.seeds for exp in found if exp.seed == seed]
    if not chosen:
        seeds = tuple(sorted({exp.seed for exp in found}))
        raise ValueError(f"seeds: {options.seeds} is not allowed; the results have {seeds}")
    return chosen


def _combined(options: argparse.Namespace) -> list[Experiment]:
    """Every combination of the options."""
    methods = options.methods or ["feddip"]
    methods = [m for m in METHODS if not is_hook(m)] if methods == ["all"] else methods
    extra = dict(map(_setting, options.set))
    for method, rules in itertools.product(methods, options.rules):
        known = settings_of(method, rules).keys() - set(FREE)
        for name in extra.keys() - known:
            allowed = f"{method} has {', '.join(sorted(known))}, given as name=value"
            raise ValueError(f"set: {name!r} is not allowed; {allowed}")
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
        raise ValueError(f"set: {word!r} is not allowed; its value cannot be read") from error
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value  # to YAML, 1e-3 is a string
    return name, value


def _count(text: str) -> int:
    if not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be a whole number of at least 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("python -m feddip_core.batch", description=__doc__.splitlines()[0])
    p.add_argument("--preset", default="smoke", choices=PRESETS)
    p.add_argument("--dataset", help="default: the preset's own")
    p.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=f"all, or of {', '.join(METHODS)}, or your own as package.module:Class; default: feddip",
    )
    p.add_argument(
        "--results", nargs="+", metavar="RESULT", help="the runs that a result notebook needs, instead of --methods, "
        f"--partitions and --rules: all, or of {', '.join(wanted.RESULTS | wanted.OURS)}",
    )  # fmt: skip
    p.add_argument("--seeds", nargs="+", default=[0], type=int, metavar="SEED")
    p.add_argument("--partitions", nargs="+", default=["iid"], metavar="PARTITION")
    p.add_argument("--rules", nargs="+", default=["paper"], metavar="RULES", help="paper, released, or both")
    p.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="any other setting of Experiment")
    p.add_argument("--jobs", default=1, type=_count, help="runs at once, one thread each")
    p.add_argument("--out", default="outputs", type=Path, help="folder for records and executed notebooks")
    p.add_argument("--data-dir", default="", help="folder with the data sets")
    p.add_argument("--dry-run", action="store_true", help="list the runs, their estimated time, and what would fail")
    return p


def main(words: Iterable[str] | None = None) -> int:
    """0: all are done. 1: some failed. 2: the options make no sense. 3: some are with other processes. 130: Ctrl-C.

    A dry run gives 2 if it finds a run that would fail.
    """
    command = parser()
    options = command.parse_args(words)
    try:
        experiments = chosen(options)
        for exp in experiments:
            check_importable(exp)
        sources.load(experiments[0].dataset, options.data_dir or None)  # before any work starts
        out = options.out.expanduser()
        if not options.dry_run:
            (out / "notebooks").mkdir(parents=True, exist_ok=True)
    except (ValueError, TypeError, OSError, sources.DataError) as error:
        command.error(str(error))
    data_dir = str(Path(options.data_dir).expanduser().resolve()) if options.data_dir else ""
    jobs = [Job(exp, options.preset, out, data_dir) for exp in experiments]
    if options.dry_run:
        return dry_run(jobs, options.jobs)
    execute(jobs, options.jobs)
    return report(jobs)


def dry_run(jobs: list[Job], at_once: int) -> int:
    """Say what would run, and what would fail before its first round."""
    found = {job.exp.run_id: obstacle(job) for job in jobs}
    print(plan([job for job in jobs if not found[job.exp.run_id]], at_once))
    for job in jobs:
        if reason := found[job.exp.run_id]:
            print(f"would fail: {job}\n  {reason}", file=sys.stderr)
    return 2 if any(found.values()) else 0


def report(jobs: list[Job]) -> int:
    """Say what did not end well, and where to look."""
    by_state = {state: [job for job in jobs if job.state == state] for state in ("failed", "elsewhere", "interrupted")}
    for job in by_state["failed"]:
        words = "\n  ".join(job.last_words())
        print(f"failed: {job}\n  {words}\n  see {job.notebook}", file=sys.stderr)
    for job in by_state["elsewhere"]:
        print(f"left to another process: {job}", file=sys.stderr)
    if by_state["interrupted"]:
        print(f"{len(by_state['interrupted'])} runs are not done; the same command resumes them", file=sys.stderr)
        return 130
    return 1 if by_state["failed"] else 3 if by_state["elsewhere"] else 0
