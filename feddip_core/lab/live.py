"""A run's curves while it runs: in a notebook, a picture that is redrawn; elsewhere, nothing."""

import time
from collections.abc import Callable

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from ..experiment import Experiment
from ..study import figures

SHARE = 0.015  # of the run's time, at most, for drawing
CURVES = {"test_accuracy": "Test accuracy", "sparsity": "Sparsity $s_t$", "delta": "Pruning error $\\delta_t$"}


def watch(exp: Experiment) -> Callable[[list[dict], bool], None] | None:
    """What shows the rows of a run so far: its curves in a notebook, nothing elsewhere. For `engine.run.watched_by`."""
    return Live(exp.method).show if in_notebook() else None


class Live:
    """Shows accuracy, sparsity and δ_t of the rows so far, as often as `SHARE` of the time allows."""

    def __init__(self, method: str, clock=time.perf_counter):
        self.method, self.clock = method, clock
        self.began, self.spent, self.last = clock(), 0.0, 0.1
        self.figure, self.handle = None, None

    def show(self, rows: list[dict], whole: bool = False) -> None:
        """Draw, if the share of time allows it; a run that was shown is also shown `whole` at its end."""
        now = self.clock()
        in_time = self.spent + self.last <= SHARE * (now - self.began)
        if rows and (in_time or (whole and self.handle)):
            self._draw(pd.DataFrame(rows))
            self.last = self.clock() - now
            self.spent += self.last

    def _draw(self, metrics: pd.DataFrame) -> None:
        from IPython.display import display  # only ever called in a notebook

        self.figure = self.figure or panels(self.method)
        last = metrics.iloc[-1]
        accuracy = metrics["test_accuracy"].ffill().iloc[-1]
        alt = f"round {last['round']:.0f}: accuracy {accuracy:.3f}, sparsity {last['sparsity']:.3f}"
        picture = figures.Picture(figures.rendered(drawn(self.figure, metrics), "png", dpi=70), alt)
        if self.handle:
            self.handle.update(picture)
        else:
            self.handle = display(picture, display_id=True)


def panels(method: str) -> Figure:
    """Room for the three curves. It is made once: placing axes and text is most of the work of drawing."""
    with plt.rc_context(figures.STYLE):
        figure = Figure(figsize=(11, 2.8))
        for ax, title in zip(figure.subplots(1, 3), CURVES.values(), strict=True):
            ax.plot([], [], color=figures.colour(method))
            ax.set(title=title, xlabel="round")
        figure.subplots_adjust(left=0.04, right=0.99, bottom=0.18, top=0.9, wspace=0.18)
    return figure


def drawn(figure: Figure, metrics: pd.DataFrame) -> Figure:
    """The panels with the curves of these rounds."""
    for ax, column in zip(figure.axes, CURVES, strict=True):
        known = metrics.dropna(subset=column)  # not every round knows its accuracy and its δ_t
        ax.lines[0].set_data(known["round"], known[column])
        highest = metrics[column].max() * 1.05 if column == "delta" else 1.0
        ax.set(xlim=(0, metrics["round"].iloc[-1] + 1), ylim=(0, highest if highest > 0 else 1.0))
    return figure


def in_notebook() -> bool:
    """Whether a notebook shows or keeps what is displayed."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None
