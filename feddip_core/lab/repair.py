"""The experiment of notebook 03: take the largest weights away, and see under which rule they return."""

import pandas as pd
import torch
from torch import Tensor

from ..engine import measure, sources
from ..engine.assembly import assemble
from ..experiment import Experiment

# Under each rule: where the new mask is chosen (`regrowth`), and whether clients train with feedback.
RULES = {
    "paper": ("paper", True),
    "released": ("released", True),
    "dense_memory": ("dense_memory", True),
    "no feedback": ("paper", False),
}


def repair(exp: Experiment, trained: dict, mask: dict, taken: dict, rounds: int):
    """From `trained` under `mask`, some rounds by each rule: a table by round, the final weights, one client's bits.

    The table says how many of the `taken` weights are back, and the median size of weights that returned or stayed.
    """
    dataset, rows, ends, bits = sources.load(exp.dataset), [], {}, {}
    for name, (rule, feedback) in RULES.items():
        federation = assemble(exp.replace(regrowth=rule), dataset)
        federation.method.feedback = feedback
        method, layout = federation.method, federation.clients.layout
        state = federation.start().replace(w=layout.prune(layout.flat(trained), mask), m=mask)
        bits[name] = {"down": method.download(state, 0).bits(layout), "up": method.upload(state, 0).bits(layout)}
        for _ in range(rounds):
            before, (state, done) = state, federation.round(state)
            now = layout.weights(state.w)
            row = measure.row(federation, before, state, done, seconds=0.0) | {"rule": name}
            row |= {"back": sum(int((state.m[k] & taken[k]).sum()) for k in taken)}
            row |= {"returned": _median(now, before.m, state.m, False), "stayed": _median(now, before.m, state.m, True)}
            rows.append(row)
        ends[name] = state.w
    return pd.DataFrame(rows), ends, pd.DataFrame(bits).T


def _median(w: dict[str, Tensor], before: dict, after: dict, was_kept: bool) -> float:
    """The median magnitude of the weights that are kept now and were kept, or pruned, before."""
    return torch.cat([v[after[k] & (before[k] == was_kept)] for k, v in w.items()]).abs().median().item()
