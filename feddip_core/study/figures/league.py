"""The league's figure: accuracy against bytes, one panel per target."""

from textwrap import wrap

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from matplotlib.transforms import Bbox

from ..league import GUESSING
from .style import STYLE, colour, described, label

PLACES = [(x, y) for y in (4, -11, 16, -23, 28, -35, 40, -47) for x in (7, -7)]  # of a name, in points
HOW = {"sparse uplink": "D"}  # a diamond: the same model for fewer bytes


def fronts(table: pd.DataFrame, targets: tuple[float, ...]) -> Figure:
    """Each ranked row of the league as a dot, and the front as a line; dense methods stand in every panel."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(targets), figsize=(5.2 * len(targets), 4.4), constrained_layout=True)
        words = [_panel(ax, table[table["target"].isin([0.0, s])], s) for ax, s in zip(axes, targets, strict=True)]
        axes[0].set_ylabel("test accuracy (%), last five rounds")
        figure.draw_without_rendering()  # only now is it known where each name stands
        for ax in axes:
            _untangle(ax)
    return described(figure, "Accuracy against megabytes sent. " + " ".join(words))


def _untangle(ax: Axes) -> None:
    """Move each name to the first place beside its dot where it covers no earlier name and no other dot."""
    own = [t for t in ax.texts if hasattr(t, "xy")]
    dots = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in (ax.transData.transform(t.xy) for t in own)]
    taken: list[Bbox] = []
    for i, text in enumerate(own):
        for x, y in PLACES:
            text.set(position=(x, y), ha="left" if x > 0 else "right")
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken + dots[:i] + dots[i + 1 :]):
                break
        taken.append(box)


def _panel(ax: Axes, table: pd.DataFrame, target: float) -> str:
    """Draw one target; what it shows, in words."""
    own = table[table["ranked"].astype(bool)].assign(MB=lambda t: (t["MB down"] + t["MB up"]).astype(float))
    guessing = [_named(row["entrant"]) for _, row in own.iterrows() if row["accuracy"] <= GUESSING]
    for _, row in own[own["accuracy"] > GUESSING].iterrows():
        method, _, how = row["entrant"].partition(", ")
        look = dict(marker=HOW.get(how, "o"), color=colour(method), markersize=8 if row["front"] else 5, linestyle="")
        ax.errorbar(row["MB"], row["accuracy"], yerr=row["std"], capsize=3, **look)
        # In its dot's colour, and tied to it: in a crowd the nearest dot may be another's.
        tie = dict(arrowstyle="-", color=colour(method), linewidth=0.6, shrinkA=0, shrinkB=3)
        where = dict(xytext=PLACES[0], textcoords="offset points", fontsize=9, color=colour(method), arrowprops=tie)
        ax.annotate(_named(row["entrant"]), (row["MB"], row["accuracy"]), **where)
    front = own[own["front"].astype(bool)].sort_values("MB")
    ax.step(front["MB"], front["accuracy"].astype(float), where="post", color="#555555", linewidth=1, zorder=1)
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.margins(0.2)
    ax.set(title=f"{target:.0%} zeros, {len(own)} of {table['entrant'].nunique()} methods", xlabel="MB, both ways")
    best = ", ".join(map(_named, front["entrant"])) or "no method yet"
    there = f"{len(own)} of {table['entrant'].nunique()} methods"
    words = f"At {target:.0%} zeros {there} have a run; on the front: {best}."
    if guessing:
        note = f"not drawn, since they guess (10 %): {', '.join(guessing)}"
        ax.text(0.98, 0.02, "\n".join(wrap(note, 45)), transform=ax.transAxes, ha="right", fontsize=8)
        words += f" {note[0].upper()}{note[1:]}."
    return words


def _named(entrant: str) -> str:
    method, _, how = entrant.partition(", ")
    return label(method) + (f", {how}" if how else "")
