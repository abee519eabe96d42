"""Runs that a notebook looks into: with a look after every round, or on from any state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from ..engine import measure
from ..engine.run import Run, run
from ..experiment import Experiment
from ..server import Federation
from ..state import State


def watched(
    exp: Experiment, look: Callable[[Federation, State], Any], out: str | Path | None = None
) -> tuple[Run, list]:
    """A run, and what `look(federation, state)` saw after each of its rounds."""
    seen: list = []
    result = run(exp, out=out, observe=lambda federation, state, _: seen.append(look(federation, state)))
    return result, seen


def trained_on(federation: Federation, state: State, rounds: int) -> tuple[pd.DataFrame, State]:
    """Some rounds from this state: their metrics, and the state after them."""
    rows = []
    for _ in range(rounds):
        before, (state, done) = state, federation.round(state)
        rows.append(measure.row(federation, before, state, done, seconds=0.0))
    return pd.DataFrame(rows), state
