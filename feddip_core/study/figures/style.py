"""What every figure shares: one style, the look of each method, a few helpers for axes, and pictures for notebooks.

A method carries its own label, colour and line, so it looks the same in every figure.
"""

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import feddip_core.methods  # noqa: F401  (fills METHODS)
from feddip_core.engine.records import write
from feddip_core.method import METHODS

STYLE = {
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "svg.hashsalt": "feddip",
}

# The methods use Okabe and Ito's palette, which colour-blind readers can tell apart. Its yellow is darkened, because it
# is too pale for a line on white; grey, and FedDST's brown, are added.
SPARE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#555555", "#56B4E9"]  # for curves that are not a method
SHADES = ["#F2A36B", "#D55E00", "#6B2F00"]  # of FedDIP's colour, from light to dark

# For a reader's own method that is not registered here. No registered method has one of these colours.
OWN_COLOURS = ["#3333CC", "#CC2244", "#660044", "#006677"]
OWN_LINES = ["-", "--", "-.", ":"]

APART = 20  # points: seeds that end further apart are drawn one by one

Runs = Mapping[str, pd.DataFrame]  # the metrics of one run per method


def label(method: str) -> str:
    """The method's name in figures and tables; of a name such as "yours:Mine" that is not registered, "Mine"."""
    return METHODS[method].label if method in METHODS else re.sub(r".*:(?=\S)", "", method)


def colour(method: str) -> str:
    """The method's colour; a method that has none gets a spare one."""
    return getattr(METHODS.get(method), "colour", "") or OWN_COLOURS[_place(method) % len(OWN_COLOURS)]


def line(method: str) -> str:
    """The method's line style; a method that has none gets a spare one."""
    return getattr(METHODS.get(method), "line", "") or OWN_LINES[_place(method) % len(OWN_LINES)]


def _place(method: str) -> int:
    """Which spare look a method gets: the next one, or where its class is not known one that depends on its name."""
    own = [name for name, cls in METHODS.items() if not cls.colour]
    return own.index(method) if method in own else int.from_bytes(sha256(method.encode()).digest()[:8])


class Picture:
    """A figure in a notebook, with a text for readers who cannot see it."""

    def __init__(self, png: bytes, alt: str):
        self.png, self.alt = png, alt

    def _repr_mimebundle_(self, include=None, exclude=None):
        picture = {"image/png": b64encode(self.png).decode(), "text/plain": self.alt}
        return picture, {"image/png": {"alt": self.alt}}


def described(figure: Figure, alt: str) -> Figure:
    """The figure with its text for readers who cannot see it, which `show` uses."""
    figure.set_label(alt)
    return figure


def show(figure: Figure, alt: str = "", out: str | Path = "", name: str = "", note: str = "") -> Picture:
    """Show the figure in the notebook. With `out`, also save it as `out`/figures/`name`.png and .svg.

    A figure that describes itself needs no `alt`. A note is printed above the figure and added to its text.
    """
    alt = alt or figure.get_label()
    if not alt:
        raise ValueError("alt: '' is not allowed; a figure needs a text for readers who cannot see it")
    if note:
        figure.suptitle(note, x=0.99, ha="right", fontsize=9, color="#555555")
        alt = f"{alt} ({note})"
    if out:
        save(figure, Path(out) / "figures", name)
    picture = Picture(rendered(figure, "png", dpi=STYLE["figure.dpi"]), alt)
    plt.close(figure)  # or the notebook would show it a second time
    return picture


def save(figure: Figure, folder: str | Path, name: str) -> None:
    """Write `name`.png and `name`.svg, the same bytes for the same figure."""
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for form in ("png", "svg"):
        write(path.with_name(f"{path.name}.{form}"), rendered(figure, form))


def rendered(figure: Figure, form: str, **how) -> bytes:
    """The figure as a PNG or SVG file. Equal figures give equal bytes."""
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}[form]  # they change from day to day
    picture = BytesIO()
    with plt.rc_context(STYLE):
        figure.savefig(picture, format=form, metadata=metadata, **how)
    return picture.getvalue()


def by_label(rounds: pd.DataFrame, column: str, smooth: int = 1) -> dict[str, pd.DataFrame]:
    """For each label, one row per round that has a value: mean, lowest and highest seed, over the last `smooth`."""
    groups = rounds.groupby("label", sort=False)
    curves = {name: own.groupby("round")[column].agg(["mean", "min", "max"]) for name, own in groups}
    return {name: own.rolling(smooth, min_periods=1).mean()[own["mean"].notna()] for name, own in curves.items()}


def curves(rounds: pd.DataFrame, smooth: int = 1) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """For each label its test accuracy as `by_label` has it, in percent, and the rounds behind it.

    Where seeds end far apart, a mean is no run's accuracy. Then each seed is a curve of its own.
    """
    for name, own in by_label(rounds, "test_accuracy", smooth).items():
        behind, last = rounds[rounds["label"] == name], own.iloc[-1]
        alone = 100 * (last["max"] - last["min"]) > APART
        for part in (one for _, one in behind.groupby("seed")) if alone else [behind]:
            yield name, 100 * by_label(part, "test_accuracy", smooth)[name], part


def band(ax: Axes, curve: pd.DataFrame, shade: str) -> None:
    """Shade the range from the lowest seed to the highest. A single seed has none."""
    # A band without height is invisible, and its points would make the SVG larger.
    if (curve["max"] > curve["min"]).any():
        ax.fill_between(curve.index, curve["min"], curve["max"], color=shade, alpha=0.15, linewidth=0)


def thin(curve: pd.DataFrame) -> float:
    """The width of a line. Over many rounds a thick broken line would look solid."""
    return 1.8 if len(curve) <= 100 else 1.3


def percent_axis(ax: Axes, collapsed: bool = True) -> Axes:
    """Scale the axis to the second half of the rounds, in whole tens. The first rounds may fall below it.

    Without `collapsed`, so may curves that end below half of the best; the axis then names them.
    """
    drawn = [curve for curve in ax.lines if len(curve.get_ydata())]
    runs = [curve for curve in drawn if len(curve.get_ydata()) > 2]  # the others are values of the paper
    best = max((curve.get_ydata()[-1] for curve in runs), default=0)
    gone = [curve for curve in drawn if not collapsed and curve.get_ydata()[-1] < best / 2]
    heights = [curve.get_ydata() for curve in drawn if curve not in gone]
    low = min((min(y[len(y) // 2 :]) for y in heights), default=0)
    high = max((max(y) for y in heights), default=100)
    ax.set(ylabel="test accuracy, %", ylim=(max(0, 10 * ((low - 2) // 10)), min(100, 10 * (high // 10 + 1))))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    gone = [curve for curve in gone if curve in runs and curve.get_ydata()[-1] < ax.get_ylim()[0]]
    names = Counter(curve.get_label().removeprefix("_") for curve in gone if not curve.get_label().startswith("_child"))
    if names:
        words = ", ".join(f"{n} run{'s' * (n != 1)} of {name}" for name, n in names.items())
        look = dict(ha="right", color="#555555", bbox=dict(facecolor="white", edgecolor="none", pad=1), zorder=5)
        ax.text(0.98, 0.03, f"off the scale: {words}", transform=ax.transAxes, **look)
    return ax
