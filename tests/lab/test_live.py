import io
import sys

import numpy as np
import pandas as pd
import pytest

from feddip_core import run
from feddip_core.engine import run as engine
from feddip_core.lab import live
from feddip_core.study import figures


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def watched(monkeypatch):
    """A picture that takes 0.2 s to draw, on a clock that only this test moves."""
    clock = Clock()
    picture, drawn = live.Live("feddip", clock), []

    def draw(metrics):
        clock.now += 0.2
        drawn.append((clock.now, len(metrics)))
        picture.handle = True

    monkeypatch.setattr(picture, "_draw", draw)
    return picture, clock, drawn


def test_drawing_takes_less_than_a_fiftieth_of_the_time(watched):
    picture, clock, drawn = watched
    rows = []
    for _ in range(600):
        clock.now += 1.0
        rows.append({})
        picture.show(rows)
    assert 30 < len(drawn) < 60
    assert 0.2 * len(drawn) / clock.now < 0.02
    assert drawn[0][0] < 30  # and it is not withheld for long


def test_a_short_run_is_not_drawn_and_a_shown_one_is_drawn_whole(watched):
    picture, clock, drawn = watched
    clock.now = 2.0
    picture.show([{}])
    picture.show([{}], whole=True)
    assert not drawn
    clock.now = 100.0
    picture.show([{}] * 5)
    picture.show([{}] * 6, whole=True)
    assert [rows for _, rows in drawn] == [5, 6]


def test_the_curves_are_those_of_the_metrics():
    metrics = pd.DataFrame({"round": [1, 2], "test_accuracy": [0.3, 0.6], "sparsity": [0.5, 0.9], "delta": [0.0, 0.1]})
    figure = live.panels("feddip")
    live.drawn(figure, metrics.head(1))
    first = figures.rendered(figure, "png", dpi=70)
    live.drawn(figure, metrics)
    assert [np.asarray(ax.lines[0].get_ydata()).tolist() for ax in figure.axes] == [[0.3, 0.6], [0.5, 0.9], [0.0, 0.1]]
    assert all(ax.get_xlim()[1] >= 2 and ax.get_ylim()[1] >= ax.lines[0].get_ydata().max() for ax in figure.axes)
    assert first.startswith(b"\x89PNG") and figures.rendered(figure, "png", dpi=70) != first


def test_outside_a_notebook_nothing_is_shown(tiny, capfd, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    assert not live.in_notebook()
    run(tiny(rounds=2))
    assert capfd.readouterr() == ("", "")  # this is no terminal either


@pytest.fixture
def bar_is_shown(monkeypatch):
    """A progress bar that is shown, as in a notebook, and writes nowhere."""

    class Shown(engine.tqdm):
        def __init__(self, *args, disable=None, **how):
            super().__init__(*args, file=io.StringIO(), disable=False, **how)

    monkeypatch.setattr(engine, "tqdm", Shown)


def test_in_a_notebook_every_run_is_shown(tiny, monkeypatch, bar_is_shown):
    shown = []
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr(live.Live, "show", lambda self, rows, whole: shown.append((self.method, len(rows), whole)))
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    run(tiny(rounds=2))
    assert shown == []
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    run(tiny(rounds=2))
    assert shown == [("feddip", 1, False), ("feddip", 2, False), ("feddip", 2, True)]


def test_a_kernel_that_is_no_notebooks_shows_nothing(tiny, bar_is_shown, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert live.watch(tiny()) is None
    run(tiny(rounds=1))
