"""Whether a record may enter the league: its settings, its numbers, and its first rounds, which are run again.

python -m feddip_core.study.submission RECORD… says what is wrong with each record, and ends with 1 if anything is.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from ..engine import measure, records
from ..engine.assembly import assemble
from ..engine.run import run
from ..experiment import COMMON, EXECUTION_SETTINGS, Experiment
from ..server import Federation
from . import choosing
from .league import SEEDS, TARGETS
from .tables import BITS, layout

ROUNDS = 2  # that are run again
TUNED = (
    "method",
    "seed",
    "learning_rate",
    "learning_rate_decay",
)  # what an entrant may choose, beside its own settings
CLOSE = 1e-3  # relative: another processor gives other last digits


def faults(record: str | Path, data_dir: str | Path | None = None) -> list[str]:
    """What is wrong with a record; empty if it may enter."""
    record = Path(record)
    try:
        rows, exp = records.load_run(record), records.experiment_of(record)
    except (ValueError, TypeError, OSError) as error:
        return [str(error)]
    if found := list(of_settings(exp)):
        return found  # what follows would take another experiment's time
    return [*of_numbers(exp, rows, assemble(exp, data_dir=data_dir)), *of_rounds(exp, rows, data_dir)]


def of_settings(exp: Experiment) -> Iterator[str]:
    """Everything is the protocol's but what a method may choose."""
    # What is run on the seed of the choice is seldom tested.
    how = choosing.SELDOM if exp.seed == choosing.SEED else {}
    fixed = Experiment.preset("paper", "fashion_mnist", exp.method, **how)
    for name in COMMON.keys() - {*TUNED, *EXECUTION_SETTINGS}:
        if (own := getattr(exp, name)) != (wants := getattr(fixed, name)):
            yield f"{name}: {own!r} is not the protocol's {wants!r}"
    if exp.seed not in (*SEEDS, choosing.SEED):
        yield f"seed: {exp.seed} is none of {SEEDS}, nor {choosing.SEED}, on which settings are chosen"
    target = getattr(exp, "sparsity_target", TARGETS[0])
    if target not in TARGETS:
        yield f"sparsity_target: {target} is none of {TARGETS}"


def of_numbers(exp: Experiment, rows: pd.DataFrame, fed: Federation) -> Iterator[str]:
    """Every round is there, its zeros give its sparsity, and it sends what the method's own rules say."""
    if rows["round"].tolist() != list(range(1, exp.rounds + 1)):
        yield f"round: {len(rows)} rounds are not those from 1 to {exp.rounds}"
        return
    due = (rows["round"] % exp.evaluate_every == 0) | (rows["round"] > exp.rounds - measure.ALWAYS)
    if not rows["test_accuracy"][due].between(0, 1).all():
        yield "test_accuracy: it leaves the range from 0 to 1"
    zeros = rows["layer_zeros"].map(lambda row: sum(map(int, row.split()))) / fed.clients.layout.prunable_size
    if not np.allclose(zeros, rows["sparsity"], atol=1e-9):
        yield "sparsity: it is not that of layer_zeros"
    # A plan has a mask for every client whenever one is chosen. A run sends none if the choice changes nothing.
    masks = exp.clients_per_round * fed.clients.layout.prunable_size
    plan = measure.plan(fed)
    for name, most in zip(BITS, (masks, 0), strict=True):
        less = plan[name].to_numpy() - rows[name].to_numpy()
        wrong = (less < 0) | ((less > most) & (not fed.method.plan_is_a_bound))
        if wrong.any():
            first = int(wrong.argmax())
            yield f"{name}: {rows[name][first]} in round {first + 1}, where the method's rules give {plan[name][first]}"


def of_rounds(exp: Experiment, rows: pd.DataFrame, data_dir: str | Path | None = None) -> Iterator[str]:
    """The first rounds, run again here, send the same bits; what they measure is the same up to rounding."""
    again = run(exp, until=min(ROUNDS, exp.rounds), data_dir=data_dir).metrics
    theirs, size = rows.head(len(again)), layout(exp).prunable_size
    for name in again.columns.drop("seconds"):
        pair = [_numbers(side[name]) for side in (theirs, again)]
        near = {"layer_zeros": CLOSE * size, "regrown": CLOSE * size, "dropped": CLOSE * size, "round": 0.0}
        off = near.get(name, 0.0 if name in BITS else CLOSE)
        if not np.allclose(*pair, rtol=CLOSE if off == CLOSE else 0.0, atol=off, equal_nan=True):
            yield f"{name}: {theirs[name].tolist()} in the first rounds, but {again[name].tolist()} when run again"


def _numbers(column: pd.Series) -> np.ndarray:
    """A column as numbers; the zeros of all layers stand in one text."""
    texts = column.map(lambda row: [float(x) for x in row.split()] if isinstance(row, str) else [float(row)])
    return np.array(texts.tolist())


if __name__ == "__main__":
    found = {path: faults(path) for path in sys.argv[1:]}
    for path, own in found.items():
        print("\n  ".join([f"{path}: {'not accepted' if own else 'may enter'}", *own]))
    sys.exit(any(found.values()))
