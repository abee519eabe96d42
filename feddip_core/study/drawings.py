"""Figures of the result notebooks, made from records. Each shows only seeds that all its runs share, and says so."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from . import figures
from .summary import for_figure
from .tables import BITS, RELEASED_MEBIBITS, drawn, of_seeds, over_seeds, same_seeds, sent
from .wanted import VERSION_OF, VERSIONS, Wanted

SMOOTH = 100  # a point of a curve is the mean of the last hundredth of the rounds


def _smooth(wanted: Wanted, share: int = SMOOTH) -> int:
    return max(next(iter(wanted.values()))[0].rounds // share, 1)


def noted(figure: Figure, note: str) -> Figure:
    """The figure with a note above it, which is part of its text too."""
    figure.suptitle(note, x=0.99, ha="right", fontsize=9, color="#555555")
    return figures.described(figure, f"{figure.get_label()} ({note})")


def accuracy(
    wanted: Wanted, rounds: pd.DataFrame, folder: str | Path, statistic: str, paper: Mapping, swings: bool = False
) -> Figure:
    """Accuracy by round, and each method beside the paper. With `swings`, every single round as a pale line too."""
    own, ours, released, seeds = for_figure(wanted, rounds, folder, statistic)
    smooth = _smooth(wanted, 20 if swings else SMOOTH)
    figure = figures.against_paper(own, ours, paper, statistic, smooth, raw=swings, released=released)
    return noted(figure, drawn(wanted, seeds))


def cost(wanted: Wanted, rounds: pd.DataFrame, budget: float, paper: Mapping) -> Figure:
    """Accuracy against everything sent so far, by both counts."""
    seeds = same_seeds(rounds)
    own = of_seeds(rounds, seeds)
    mebibits, megabytes = sent(own, RELEASED_MEBIBITS), sent(own, BITS) / 8e6
    return noted(figures.against_cost(own, mebibits, megabytes, budget, paper, _smooth(wanted)), drawn(wanted, seeds))


def extremes(wanted: Wanted, rounds: pd.DataFrame, paper: float) -> Figure:
    """Sparsity and accuracy of FedDIP by round, for each target."""
    seeds = same_seeds(rounds)
    figure = figures.extremes(of_seeds(rounds, seeds), list(wanted), paper, _smooth(wanted))
    return noted(figure, drawn(wanted, seeds))


def rules(wanted: Wanted, rounds: pd.DataFrame, accuracies: pd.DataFrame, paper: Mapping) -> Figure:
    """The accuracy under each set of rules, and how many weights came back."""
    seeds = same_seeds(rounds)
    own = accuracies[accuracies.index.get_level_values("seed").isin(seeds)]
    return noted(figures.rules(own, list(wanted), paper), drawn(wanted, seeds))


def versions(wanted: Wanted, rounds: pd.DataFrame, values: pd.Series, paper: Mapping) -> Figure:
    """Each baseline as published, by the released code, and in the paper."""
    seeds = same_seeds(rounds)
    own = values[values.index.get_level_values("seed").isin(seeds)]
    ours = over_seeds(own, VERSIONS)
    released = over_seeds(own, VERSION_OF).rename(index=VERSION_OF)
    return noted(figures.versions(ours, released, paper), drawn(wanted, seeds))
