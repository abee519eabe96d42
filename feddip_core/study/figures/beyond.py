"""Beyond the paper in one figure: accuracy against everything that a run sends."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from .style import STYLE, colour, described

SHAPES = {"90%": "o", "95%": "s", "99%": "^"}
# Each curve: the first words of its labels, and its colour.
CURVES = {
    "best": ("our best", colour("feddip_swap")),
    "FedGMP": ("FedGMP", colour("fedgmp")),
    "FedDIP, sparse uplink": ("FedDIP, sparse uplink", "#E69F00"),
    "FedDIP, released": ("FedDIP, released code", "#6B2F00"),
    "FedDIP": ("FedDIP", colour("feddip")),
    "FedAvg": ("FedAvg", colour("fedavg")),
}
DENSE = "D"
STEPS = "steps of"
MOST = 3  # seeds; fewer are said beside the point


def gains(table: pd.DataFrame, paper: Mapping[str, float]) -> Figure:
    """A point per setting that has a record, a line per method, and the paper's values as crosses.

    `paper` gives the paper's accuracy under the labels whose bytes it has here. Open points are seed 0.
    """
    own = table.dropna(subset=["accuracy"])
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(9.5, 5.2), layout="constrained")
        drawn = {curve: _curve(ax, own, curve) for curve in CURVES}
        said = [words for words in drawn.values() if words]
        for label, accuracy in paper.items():
            if label in own.index:
                ax.plot(own.loc[label, "MB"], accuracy, "x", color="#555555", markersize=8, zorder=3)
                said.append(f"the paper's {label} {accuracy:.2f} %")
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.margins(0.12)
        ax.set(xlabel="MB sent in the whole run, both ways", ylabel="test accuracy (%), last five rounds",
               title=f"{len(own)} of {len(table)} settings have a record")  # fmt: skip
        curves = [curve for curve, words in drawn.items() if words]
        figure.legend(handles=_legend(curves, own), loc="outside right upper")
    words = "; ".join(said) or "no setting has a record"
    return described(
        figure, f"Accuracy against megabytes sent. {len(own)} of {len(table)} settings have a record: {words}"
    )


def curve_of(label: str) -> str:
    """The curve that a run belongs to: the longest that its label begins with."""
    return max((curve for curve in CURVES if label.startswith(curve)), key=len)


def _curve(ax: Axes, table: pd.DataFrame, curve: str) -> str:
    """Draw one curve through the settings as they are, and those with other steps or 16 bits beside it; in words."""
    name, shade = CURVES[curve]
    own = table.loc[[curve_of(label) == curve for label in table.index]].sort_values("MB")
    plain = own.loc[[_rest(label, curve) == "" for label in own.index]]
    # Only points of the same seeds lie on one line. While one setting has seed 0 alone, all show it.
    told = plain[plain["n"] > 0]
    ax.plot(told["MB"], told["accuracy"], color=shade, linewidth=1.2, zorder=1)
    if (table["n"] == 0).any():
        ax.plot(plain["MB"], plain["seed 0"], ":", marker="", color=shade, linewidth=1.2, zorder=1)
    for label, row in own.iterrows():
        rest, few = _rest(label, curve), _seeds(row["n"]) if 0 < row["n"] < MOST else ""
        look = dict(color=shade, capsize=2, markersize=5 if rest else 8, fmt=_shape(label), elinewidth=1, zorder=2)
        if rest.startswith(STEPS):  # always those of our best there: a look of their own instead of words that collide
            rest, look = "", look | dict(markersize=7, fillstyle="left", markerfacecoloralt="white", zorder=3)
        if row["n"]:
            ax.errorbar(row["MB"], row["accuracy"], yerr=row["std"], **look)
        if (table["n"] == 0).any():
            ax.errorbar(row["MB"], row["seed 0"], mfc="white", **look)
        if beside := ", ".join(filter(None, [rest, few])):
            halo = [withStroke(linewidth=2.5, foreground="white")]  # a curve may pass behind
            where = dict(xytext=(8, -3), textcoords="offset points", fontsize=8, path_effects=halo)
            ax.annotate(beside, (row["MB"], row["accuracy"]), **where)
    said = [
        f"{_at(label)}{row['accuracy']:.2f} % for {row['MB']:,.0f} MB ({_seeds(row['n'])})"
        for label, row in own.iterrows()
    ]
    return f"{name} {', '.join(said)}" if said else ""


def _seeds(n: float) -> str:
    return f"n = {n:.0f}" if n else "seed 0"


def _target(label: str) -> str:
    return next((target for target in SHAPES if target in label), "")


def _shape(label: str) -> str:
    return SHAPES.get(_target(label), DENSE)


def _rest(label: str, curve: str) -> str:
    """What a label says beside its curve and its target."""
    words = label.removeprefix(curve).split(", ")
    return ", ".join(word for word in words if word and word != _target(label))


def _at(label: str) -> str:
    parts = [_target(label), _rest(label, curve_of(label))]
    return f"{' '.join(filter(None, parts))}: " if any(parts) else ""


def _legend(curves: list[str], table: pd.DataFrame) -> list[Line2D]:
    def mark(shape: str, shade: str, name: str, **how) -> Line2D:
        return Line2D([], [], marker=shape, color=shade, linestyle="", label=name, **how)

    lines = [Line2D([], [], color=CURVES[curve][1], label=CURVES[curve][0]) for curve in curves]
    shapes = [mark(shape, "#555555", f"{target} zeros") for target, shape in SHAPES.items()]
    others = [mark(DENSE, "#555555", "dense")]
    if any(STEPS in label for label in table.index):
        half = dict(fillstyle="left", markerfacecoloralt="white")
        others.append(mark("o", "#555555", "with the steps of our best", **half))
    if (table["n"] == 0).any():
        others.append(mark("o", "#555555", "seed 0", mfc="white"))
    return [*lines, *shapes, *others, mark("x", "#555555", "the paper's accuracy,\nat our bytes")]
