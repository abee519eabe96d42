"""The exercises of the explorer, 08: each is read off a plan, and computed from one."""

from functools import cache

import pandas as pd

from ...engine.assembly import assemble
from ...engine.measure import plan
from ...experiment import Experiment
from ..knobs import PAPER, PRESETS
from .checking import Exercise

SETTINGS = dict(local_epochs=1, momentum=0.9, learning_rate=0.1, width=0.5)  # of the explorer in its notebook


@cache
def _planned(name: str) -> pd.DataFrame:
    """The plan of a preset in the explorer's notebook."""
    return plan(assemble(Experiment.preset("smoke", **SETTINGS, **PRESETS[name][0])))


def _megabytes(name: str, *ways: str) -> float:
    return _planned(name)[[f"{way}link_bits" for way in ways or ("down", "up")]].sum().sum() / 8e6


def _share(*ways: str) -> float:
    return _megabytes("Sparse both ways", *ways) / _megabytes("The paper", *ways)


def _first_above(sparsity: float) -> int:
    planned = _planned("Prune too fast")
    return int(planned["round"][planned["sparsity"] > sparsity].iloc[0])


EXPLORER = {
    "08 never": Exercise(
        lambda: _planned("Never reconfigure")["sparsity"].iloc[-1], "fraction of zeros", places=2,
        right="the first mask stays, so the target is never reached, and no error says so.",
        hint="choose the preset and read the sentence below the plan.",
        mistakes={
            "that is the target. Without a new mask the run never gets there.": PAPER["sparsity_target"],
            "that would be a dense network. The first mask is random, but it prunes.": 0,
        },
    ),
    "08 too fast": Exercise(
        lambda: _first_above(0.9), "rounds", places=0,
        right="half of the rounds, and seven eighths of the way to 98 % are behind it.",
        hint="s_t = 0.98 − 0.48 (1 − t/10)³, with a new mask after every round.",
        mistakes={
            "after that round the sparsity is 0.88.": 4,
            "that is one round late: look at the mask after the fifth.": 6,
            "that is where a straight line would pass 0.9.": 9,
        },
    ),
    "08 both ways": Exercise(
        _share, "fraction of the megabytes of the preset The paper", places=2,
        right="four of five uploads shrink to the kept weights, and the accuracy stays the same to the last bit.",
        hint="read both plans: megabytes down plus megabytes up.",
        mistakes={
            "that is the upload alone. Add the download, which does not change.": lambda: _share("up"),
            "that is the saving. Asked is what is still sent.": lambda: 1 - _share(),
            "that is against a dense model. Asked is against The paper.": lambda: (
                _megabytes("Sparse both ways") / (2 * _planned("The paper")["dense_bits"].sum() / 8e6)
            ),
        },
    ),
}  # fmt: skip
