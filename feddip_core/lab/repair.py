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
    """From `trained` under `mask`, some rounds by each rule: metrics by round, the final weights, one client's bits.

    The metrics have a column per name and rule. Beside the usual ones they say how many of the `taken` weights are
    `back`, and the median size of those that `returned` and of those that `stayed`.
    """
    dataset, metrics, ends, bits = sources.load(exp.dataset), {}, {}, {}
    for name, (rule, feedback) in RULES.items():
        federation = assemble(exp.replace(regrowth=rule), dataset)
        federation.method.feedback = feedback
        method, layout = federation.method, federation.clients.layout
        state = federation.start().replace(w=layout.prune(layout.flat(trained), mask), m=mask)
        bits[name] = {"down": method.download(state, 0).bits(layout), "up": method.upload(state, 0).bits(layout)}
        rows = []
        for _ in range(rounds):
            before, (state, done) = state, federation.round(state)
            now = layout.weights(state.w)
            row = measure.row(federation, before, state, done, seconds=0.0)
            row |= {"back": sum(int((state.m[k] & taken[k]).sum()) for k in taken)}
            row |= {"returned": _median(now, before.m, state.m, False), "stayed": _median(now, before.m, state.m, True)}
            rows.append(row)
        metrics[name], ends[name] = pd.DataFrame(rows).set_index("round"), state.w
    return pd.concat(metrics, axis=1).swaplevel(axis=1), ends, pd.DataFrame(bits).T


def _median(w: dict[str, Tensor], before: dict, after: dict, was_kept: bool) -> float:
    """The median magnitude of the weights that are kept now and were kept, or pruned, before."""
    return torch.cat([v[after[k] & (before[k] == was_kept)] for k, v in w.items()]).abs().median().item()
