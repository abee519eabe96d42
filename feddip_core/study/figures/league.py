"""The league's figure: accuracy against bytes, one panel per target."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from .style import STYLE, colour, described, label

HOW = {"sparse uplink": "D"}  # a diamond: the same model for fewer bytes


def fronts(table: pd.DataFrame, targets: tuple[float, ...]) -> Figure:
    """Each ranked row of the league as a dot, and the front as a line; dense methods stand in every panel."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(targets), figsize=(5.2 * len(targets), 4.4), constrained_layout=True)
        words = [_panel(ax, table[table["target"].isin([0.0, s])], s) for ax, s in zip(axes, targets, strict=True)]
    axes[0].set_ylabel("test accuracy (%), last five rounds")
    return described(figure, "Accuracy against megabytes sent. " + " ".join(words))


def _panel(ax: Axes, table: pd.DataFrame, target: float) -> str:
    """Draw one target; what it shows, in words."""
    own = table[table["ranked"].astype(bool)].assign(MB=lambda t: (t["MB down"] + t["MB up"]).astype(float))
    for place, row in own.iterrows():
        method, _, how = row["entrant"].partition(", ")
        look = dict(marker=HOW.get(how, "o"), color=colour(method), markersize=8 if row["front"] else 5, linestyle="")
        ax.errorbar(row["MB"], row["accuracy"], yerr=row["std"], capsize=3, **look)
        others = own.drop(place)
        above = (others["accuracy"] - row["accuracy"]).between(0, 0.4) & (others["MB"] / row["MB"]).between(0.67, 1.5)
        where = dict(xytext=(7, -11 if above.any() else 4), textcoords="offset points", fontsize=9)
        ax.annotate(label(method) + (f", {how}" if how else ""), (row["MB"], row["accuracy"]), **where)
    front = own[own["front"].astype(bool)].sort_values("MB")
    ax.step(front["MB"], front["accuracy"].astype(float), where="post", color="#555555", linewidth=1, zorder=1)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.margins(0.2)
    ax.set(title=f"{target:.0%} zeros, {len(own)} of {table['entrant'].nunique()} methods", xlabel="MB, both ways")
    best = ", ".join(label(name.partition(",")[0]) for name in front["entrant"]) or "no method yet"
    return f"At {target:.0%} zeros {len(own)} of {table['entrant'].nunique()} methods have a run; on the front: {best}."
