"""Figures that compare: methods side by side, their masks and weights, and any table with a curve per column."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from feddip_core.method import METHODS

from .run import accuracy
from .style import SPARE, STYLE, Runs, colour, label, line

RANDOM = {"random mask": ("#661100", ":"), "random mask, rescaled": ("#CC2266", "-")}  # the first as FedDST


def side_by_side(runs: Runs) -> Figure:
    """Accuracy by round, and accuracy against everything sent so far, both ways."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
        accuracy(left, runs)
        for method, metrics in runs.items():
            sent = (metrics["downlink_bits"] + metrics["uplink_bits"]).cumsum() / 8e6
            known = metrics["test_accuracy"].dropna()
            right.plot(sent[known.index], known, color=colour(method), linestyle=line(method))
            right.plot(sent[known.index[-1:]], known.tail(1), "o", markersize=5, color=colour(method))
        right.set(title="… against everything sent so far", xlabel="megabytes, both ways, masks included")
        left.get_legend().remove()
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
    return figure


def mask_history(histories: Mapping[str, np.ndarray]) -> Figure:
    """One picture per method, a row per round and a column per weight: pruned, kept, or brought back in that round.

    A history is a boolean array, rounds × weights. Weights that were kept longest come first.
    """
    colours = ListedColormap(["#F2F2F2", "#7A8B99", "#D55E00"])
    with plt.rc_context(STYLE | {"axes.grid": False}):
        rows = -(-len(histories) // 2)
        figure, axes = plt.subplots(rows, 2, figsize=(11, 1.25 * rows + 0.6), sharex=True, layout="constrained")
        for ax, (method, kept) in zip(axes.flat, histories.items(), strict=False):
            back = np.zeros_like(kept)
            back[1:] = kept[1:] & ~kept[:-1]
            order = np.argsort(-kept.sum(0), kind="stable")
            picture = kept[:, order].astype(int) + back[:, order]
            ax.imshow(picture, cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
            ax.set(title=label(method), yticks=[0, len(kept) - 1], yticklabels=["first", "last"])
        for ax in axes[-1]:
            ax.set_xlabel("weights of one layer, longest kept first")
        figure.supylabel("round", fontsize=10)
        patches = [
            Patch(color=c, label=t) for c, t in zip(colours.colors, ("pruned", "kept", "brought back"), strict=True)
        ]
        figure.legend(handles=patches, loc="outside upper right", ncols=3)
    return figure


def final_weights(weights: Mapping[str, np.ndarray]) -> Figure:
    """Magnitudes of the nonzero weights at the end, one box per method. Whiskers run from 1 % to 99 %."""
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(9, 3.8), layout="constrained")
        magnitudes = [np.abs(w[w != 0]) for w in weights.values()]
        boxes = ax.boxplot(
            magnitudes, whis=(1, 99), showfliers=False, patch_artist=True, medianprops={"color": "white"}
        )
        for box, method in zip(boxes["boxes"], weights, strict=True):
            box.set(facecolor=colour(method), edgecolor=colour(method))
        shares = [f"{label(k)}\n{len(m) / len(w):.0%}" for (k, w), m in zip(weights.items(), magnitudes, strict=True)]
        ax.set(yscale="log", ylabel="|w|", title="Magnitude of the weights that are left, and their share")
        ax.set_xticks(range(1, len(shares) + 1), shares, fontsize=8)
    return figure


def lines(ax: Axes, table: pd.DataFrame, **style) -> Axes:
    """One curve per column over the table's index. A method keeps its own look; a gap is bridged."""
    own = {label(method): (colour(method), line(method)) for method in METHODS} | RANDOM
    others = [name for name in table if name not in own]
    spare = zip(others, zip(SPARE, ("-", "--", "-.", ":", (0, (1, 1)), "-"), strict=True), strict=False)
    looks = own | dict(spare)
    for name in table:
        shade, dashes = looks[name]
        curve = table[name].dropna()
        over = 2 + (dashes != "-")  # broken lines over solid ones: where two agree, both can be seen
        ax.plot(curve.index, curve, color=shade, linestyle=dashes, zorder=over, markersize=4, label=name, **style)
    if pd.api.types.is_integer_dtype(table.index):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return ax


def accuracies(runs: Mapping[str, pd.DataFrame], cost: bool = False) -> pd.DataFrame:
    """The test accuracy of each run by round, or by the megabytes that it has sent so far, both ways."""
    places = {
        name: (m["downlink_bits"] + m["uplink_bits"]).cumsum() / 8e6 if cost else m["round"] for name, m in runs.items()
    }
    return pd.DataFrame({name: m["test_accuracy"].set_axis(places[name]) for name, m in runs.items()})


def panels(
    tables: Mapping[str, pd.DataFrame], xlabel: str, ylabel: str, marker: str | None = None, steps: bool = False,
    size: tuple[float, float] | None = None, **axis,
) -> Figure:  # fmt: skip
    """One panel per table, side by side on one scale. `axis` is passed to each panel.

    One legend serves all panels that have the same curves. Panels with other curves get a legend each.
    """
    style = dict(marker=marker, drawstyle="steps-post" if steps else "default")
    with plt.rc_context(STYLE):
        size = size or (min(11.0, 3.4 + 3.4 * len(tables)), 3.8)
        figure, axes = plt.subplots(1, len(tables), figsize=size, sharey=True, squeeze=False,
                                    layout="constrained")  # fmt: skip
        found = {}
        for ax, (title, table) in zip(axes[0], tables.items(), strict=True):
            lines(ax, table, **style).set(title=title, xlabel=xlabel, **axis)
            found |= {handle.get_label(): handle for handle in ax.get_lines()}
        axes[0, 0].set_ylabel(ylabel)
        if len(found) > max(len(table.columns) for table in tables.values()):
            for ax in axes[0]:
                ax.legend(loc="lower right")
        else:
            figure.legend(handles=list(found.values()), loc="outside lower center", ncols=6)
    return figure
