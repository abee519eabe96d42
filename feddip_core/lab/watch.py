"""What a notebook looks into: a run after every round, rounds from any state, other masks, the parts of a message."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..communication import Payload
from ..engine import measure
from ..engine.assembly import assemble
from ..engine.run import Run, run
from ..experiment import Experiment
from ..layout import Layout
from ..masks import Mask
from ..server import Federation
from ..state import State


def watched(
    exp: Experiment, look: Callable[[Federation, State], Any], out: str | Path | None = None
) -> tuple[Run, list]:
    """A run, and what `look(federation, state)` saw after each of its rounds."""
    seen: list = []
    result = run(exp, out=out, observe=lambda federation, state, _: seen.append(look(federation, state)))
    return result, seen


def with_masks(exp: Experiment, layer: str, out: str | Path | None = None) -> tuple[Run, np.ndarray]:
    """A run, and the mask of one of its layers after each round, flat: rounds × weights."""
    result, seen = watched(exp, lambda federation, state: federation.full_mask(state.m)[layer].flatten(), out)
    return result, torch.stack(seen).numpy()


def trained_on(federation: Federation, state: State, rounds: int) -> tuple[pd.DataFrame, State]:
    """Some rounds from this state: their metrics, and the state after them."""
    rows = []
    for _ in range(rounds):
        before, (state, done) = state, federation.round(state)
        rows.append(measure.row(federation, before, state, done, seconds=0.0))
    return pd.DataFrame(rows), state


def accuracy_under(run: Run, ways: Mapping[str, Callable[[float], Mask]], levels: Iterable[float]) -> pd.DataFrame:
    """A run's accuracy under other masks, without another step: a row per sparsity, a column per way to choose."""
    federation = assemble(run.experiment)
    layout = federation.clients.layout
    end = dict(w=layout.flat(run.weights), statistics=layout.statistics.flat(run.statistics))
    state = federation.start().replace(**end)
    tested = {k: [measure.evaluate(federation, state.replace(m=way(s)))[0] for s in levels] for k, way in ways.items()}
    return pd.DataFrame(tested, index=list(levels))


def parts_of(payload: Payload, layout: Layout) -> dict[str, int]:
    """The bits of each part of a message."""
    return {k: form.bits_each * form.count(layout, payload.kept) for k, form in payload.parts.items()}


def messages(exp: Experiment, t: int) -> dict[tuple[str, str], int]:
    """The bits of one client's two messages in round t, by way and part, for the model that the method starts with."""
    federation = assemble(exp)
    method, layout, state = federation.method, federation.clients.layout, federation.start(sketch=True).replace(t=t)
    ways = {"down": method.download(state, 0), "up": method.upload(state, 0)}
    return {(way, k): bits for way, sent in ways.items() for k, bits in parts_of(sent, layout).items() if bits}
