"""Settings chosen by records of a seed that is never reported."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine import records
from ..experiment import Experiment

SEED = 10  # seed 0 was looked at while the methods were made, and seeds 1 to 3 are reported
SELDOM = dict(evaluate_every=50)  # only the last five rounds count, and a test takes as long as a sparse round


def best(tried: Sequence[dict[str, Any]], dataset: str, folder: str | Path) -> int | None:
    """Which of these ends with the highest accuracy over the last five rounds; None while one has no record."""
    found = [_last_five(experiment(dataset, changes, SEED), folder) for changes in tried]
    return None if not found or None in found else max(range(len(found)), key=lambda i: found[i] or 0.0)


def experiment(dataset: str, changes: dict[str, Any], seed: int = 0) -> Experiment:
    """A run at full scale with these settings; the embedded data take the choices of the whole data set.

    The seed of the choice is seldom tested.
    """
    known = dataset if dataset != "fashion_mini" else "fashion_mnist"
    return Experiment.preset("paper", known, seed=seed, **changes, **(SELDOM if seed == SEED else {}))


def _last_five(exp: Experiment, folder: str | Path) -> float | None:
    """A finished run's accuracy over its last five rounds; 0 if it diverged."""
    record = records.folder_of(exp, folder)
    if not (record / "provenance.json").exists():
        return None
    try:
        rows = records.load_run(record)
    except ValueError:  # damaged
        return None
    if rows["diverged"].notna().any():
        return 0.0
    return float(rows["test_accuracy"].tail(5).mean()) if len(rows) == exp.rounds else None
