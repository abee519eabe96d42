"""A run's curves while it runs: in a notebook a picture that is drawn again and again, elsewhere nothing."""

import time

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from . import plots

SHARE = 0.015  # of the run's time, at most, for drawing


class Live:
    """Shows accuracy, sparsity and δ_t of the rows so far, as often as `SHARE` of the time allows."""

    def __init__(self, method: str, clock=time.perf_counter):
        self.method, self.clock = method, clock
        self.began, self.spent, self.last, self.handle = clock(), 0.0, 0.1, None

    def show(self, rows: list[dict], whole: bool = False) -> None:
        """Draw, if there is time for it; a run that was shown at all is shown `whole` at its end."""
        now = self.clock()
        in_time = self.spent + self.last <= SHARE * (now - self.began)
        if rows and (in_time or (whole and self.handle)):
            self._draw(pd.DataFrame(rows))
            self.last = self.clock() - now
            self.spent += self.last

    def _draw(self, metrics: pd.DataFrame) -> None:
        from IPython.display import display  # only ever called in a notebook

        figure = curves(metrics, self.method)
        last = metrics.iloc[-1]
        alt = f"round {last['round']:.0f}: accuracy {last['test_accuracy']:.3f}, sparsity {last['sparsity']:.3f}"
        picture = plots.Picture(plots.rendered(figure, "png", dpi=70), alt)
        if self.handle:
            self.handle.update(picture)
        else:
            self.handle = display(picture, display_id=True)


def curves(metrics: pd.DataFrame, method: str) -> Figure:
    """Accuracy, sparsity and δ_t by round."""
    columns = {
        "test_accuracy": "Test accuracy", "sparsity": "Sparsity $s_t$", "delta": "Pruning error $\\delta_t$"
    }  # fmt: skip
    with plt.rc_context(plots.STYLE):
        figure = Figure(figsize=(11, 2.8), layout="constrained")
        for ax, (column, title) in zip(figure.subplots(1, 3), columns.items(), strict=True):
            ax.plot(metrics["round"], metrics[column], color=plots.COLOURS[method])
            ax.set(title=title, xlabel="round", ylim=(0, None if column == "delta" else 1))
    return figure


def in_notebook() -> bool:
    """Whether what is displayed is seen, or kept, by a notebook."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None
