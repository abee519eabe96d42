"""Figures made from records: the paper's tables and figures beside our runs and those of the released code."""

import re
from collections.abc import Container, Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from feddip_core.method import METHODS

from .style import APART, SHADES, STYLE, band, by_label, colour, curves, described, label, line, percent_axis, thin

OURS_AND_PAPER = [
    Line2D([], [], marker="o", linestyle="", color="#555555", label="ours"),
    Line2D([], [], marker="D", linestyle="", color="#555555", markerfacecolor="white", label="the paper's"),
]
RELEASED = Line2D(
    [], [], marker="x", linestyle="", color="#555555", markersize=8, markeredgewidth=2, label="released code"
)


def percent_curves(ax: Axes, rounds: pd.DataFrame, smooth: int = 1, raw: bool = False) -> Axes:
    """Accuracy by round, with a band from the lowest seed to the highest; with `raw`, every round as a pale line."""
    for method, own, _ in curves(rounds, smooth):
        look = dict(color=colour(method), linestyle=line(method), label=_once(ax, label(method)))
        # Broken lines over solid ones: where two methods agree, both can be seen.
        ax.plot(own["mean"], zorder=2 + (line(method) != "-"), linewidth=thin(own), **look)
        if not raw:
            band(ax, own, colour(method))
    for method, own in by_label(rounds, "test_accuracy").items() if raw else ():
        ax.plot(100 * own["mean"], linewidth=0.6, alpha=0.25, color=colour(method), zorder=1)
    ax.set_xlabel("round")
    return ax


def _once(ax: Axes, name: str) -> str:
    """A name for the legend; a second curve of the same name stays out of it."""
    return f"_{name}" if name in ax.get_legend_handles_labels()[1] else name


def paper_lines(ax: Axes, paper: Mapping, methods: Container[str] = METHODS) -> Axes:
    """The paper's values: a thin dashed line each, in the colour of the method."""
    for method, value in paper.items():
        height = value[0] if isinstance(value, list) else value
        if method in methods:
            ax.axhline(height, color=colour(method), linestyle=(0, (6, 4)), linewidth=0.9, alpha=0.8, zorder=1)
    return ax


def ends(ax: Axes, ours: pd.DataFrame, paper: Mapping, released: pd.DataFrame | None = None) -> Axes:
    """One row per method: ours as a dot with its standard deviation over seeds, the paper's as an open diamond.

    `released` adds what the released code gives, as a cross. Values far below all others, or whose seeds lie far apart,
    are written at the edge, so that the axis fits the rest.
    """
    best = ours["mean"].max()
    for i, (method, row) in enumerate(ours.iterrows()):
        _end(ax, row, i, colour(method), best, fmt="o", markersize=6)
        if released is not None and method in released.index:
            look = dict(fmt="x", markersize=8, markeredgewidth=2, zorder=3)
            _end(ax, released.loc[method], i + 0.22, colour(method), best, **look)
        if method in paper:
            value = paper[method] if isinstance(paper[method], list) else [paper[method], 0]
            look = dict(fmt="D", markersize=7, color=colour(method), mfc="white", elinewidth=0.7, zorder=1)
            ax.errorbar(value[0], i, xerr=value[1], **look)
    ax.set(yticks=range(len(ours)), yticklabels=[label(method) for method in ours.index], xlabel="test accuracy, %")
    ax.set_ylim(len(ours) - 0.5, -0.5)
    if ax.texts:  # the words at the edge need room
        low, high = ax.get_xlim()
        ax.set_xlim(low - (high - low) / 4, high)
    return ax


def _end(ax: Axes, row: pd.Series, height: float, shade: str, best: float, **look) -> None:
    """One value with its spread, or in words at the left edge."""
    if not (row["mean"] < best / 2 or row["std"] > APART):
        ax.errorbar(row["mean"], height, xerr=row["std"], capsize=3, color=shade, **look)
        return
    spread = "" if pd.isna(row["std"]) else f" ± {row['std']:.0f}"
    where = dict(transform=ax.get_yaxis_transform(), color=shade, va="center")
    ax.text(0.02, height, f"◂ {row['mean']:.0f}{spread}", **where)


def against_paper(
    rounds: pd.DataFrame,
    ours: pd.DataFrame,
    paper: Mapping,
    statistic: str,
    smooth: int = 1,
    raw: bool = False,
    released: pd.DataFrame | None = None,
) -> Figure:
    """Accuracy by round; and the result beside the paper's value and that of the released code."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.4), layout="constrained", gridspec_kw={"width_ratios": [3, 2]}
        )
        percent_axis(paper_lines(percent_curves(left, rounds, smooth, raw), paper), collapsed=False)
        left.set(title="Test accuracy by round (thin dashes: the paper's values)")
        ends(right, ours, paper, released).set(title=f"Mean of the {statistic} rounds ± std")
        marks = [OURS_AND_PAPER[0], *([] if released is None else [RELEASED]), OURS_AND_PAPER[1]]
        handles = [*left.get_legend_handles_labels()[0], *marks]
        columns = len(handles) if len(handles) < 8 else -(-len(handles) // 2)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    names = ", ".join(map(label, ours.index))
    beside = "the paper's values" if released is None else "the paper's values and the released code's"
    alt = f"Left: test accuracy by round of {names}. Right: the mean of the {statistic} rounds beside {beside}"
    return described(figure, alt)


def versions(ours: pd.DataFrame, released: pd.DataFrame, paper: Mapping) -> Figure:
    """Each method as we run it, by the released code, and in the paper."""
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(9, 0.55 * len(ours) + 1.4), layout="constrained")
        ends(ax, ours, paper, released).set(title="Each baseline as published, by the released code, and in the paper")
        figure.legend(handles=[OURS_AND_PAPER[0], RELEASED, OURS_AND_PAPER[1]], loc="outside lower center", ncols=3)
    names = ", ".join(map(label, ours.index))
    return described(figure, f"Test accuracy of {names}: as published, by the released code, and in the paper")


def distances(sides: Mapping[str, pd.DataFrame], reach: float = 8) -> Figure:
    """ours − paper for each number of the paper, with its interval, a panel per set of rules.

    An open dot has one seed. A triangle at the edge stands for a value beyond it.
    """
    with plt.rc_context(STYLE):
        rows = next(iter(sides.values())).index
        figure, axes = plt.subplots(1, len(sides), figsize=(11, 0.26 * len(rows) + 1.2), sharey=True,
                                    layout="constrained")  # fmt: skip
        for ax, (title, own) in zip(axes, sides.items(), strict=True):
            for i, ((_, method), row) in enumerate(own.iterrows()):
                shade, one = colour(method), row["n"] == 1
                mark = "o" if not abs(row["mean"]) > reach else "<" if row["mean"] < 0 else ">"
                look = dict(color=shade, markerfacecolor="white" if one else shade, clip_on=mark == "o")
                ax.plot(np.clip(row["mean"], -reach, reach), i, mark, **look)
                ax.plot([max(row["low"], -reach), min(row["high"], reach)], [i, i], color=shade, linewidth=1.5)
            ax.axvline(0, color="#555555", linewidth=1)
            ax.set(title=f"{title[0].upper()}{title[1:]}", xlabel="ours − paper, points", xlim=(-reach, reach))
        axes[0].set(yticks=range(len(rows)), yticklabels=[f"{name}: {label(method)}" for name, method in rows])
        axes[0].set_ylim(len(rows) - 0.5, -0.5)
    alt = "For each number of the paper: how many points ours is away from it, with a 95 % interval"
    return described(figure, f"{alt}, under both sets of rules")


def cost_curves(ax: Axes, rounds: pd.DataFrame, cost: pd.Series, smooth: int = 1) -> Axes:
    """Accuracy against everything sent so far, mean over seeds. A dot marks the end of a run."""
    for method, own, behind in curves(rounds.assign(cost=cost), smooth):
        look = dict(color=colour(method), zorder=2 + (line(method) != "-"))
        x, y = behind.groupby("round")["cost"].mean()[own.index], own["mean"]
        ax.plot(x, y, linestyle=line(method), label=_once(ax, label(method)), linewidth=thin(own), **look)
        ax.plot(x.iloc[-1:], y.iloc[-1:], "o", markersize=5, **look)
    ax.set_xscale("log")
    # By default a range of one decade has so many labels that they overlap.
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    return ax


def against_cost(
    rounds: pd.DataFrame, mebibits: pd.Series, megabytes: pd.Series, budget: float, paper: Mapping, smooth: int = 1
) -> Figure:
    """Accuracy against everything sent: in the released code's unit, with the paper's budget, and in bytes."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
        cost_curves(left, rounds, mebibits, smooth).set(xlabel="mebibits sent, both ways, without masks")
        cost_curves(right, rounds, megabytes, smooth).set(xlabel="megabytes sent, both ways, masks included")
        left.set(title="Counted as the released code counts")
        right.set(title="Counted exactly, with masks")
        for method, value in paper.items():
            left.plot(budget, value, "D", markersize=6, color=colour(method), mfc="white", zorder=4)
        for ax in (percent_axis(paper_lines(left, paper), collapsed=False), right):
            seen = [
                x[y >= left.get_ylim()[0]]
                for x, y in (drawn.get_data() for drawn in ax.lines if len(drawn.get_xdata()) > 2)
            ]
            ax.set_xlim(left=0.7 * min((x[0] for x in seen if len(x)), default=1))
        left.axvline(budget, color="#555555", linewidth=1.2)
        left.text(budget, 0.1, " budget", color="#555555", transform=left.get_xaxis_transform())
        handles = [*left.get_legend_handles_labels()[0], OURS_AND_PAPER[1]]
        figure.legend(handles=handles, loc="outside lower center", ncols=8)
    alt = "Test accuracy against everything sent so far. Left: in the released code's mebibits, with the paper's budget"
    return described(figure, f"{alt}. Right: in megabytes, masks included")


def layer_bars(layers: pd.DataFrame, columns: list[str], first: tuple[float, float] | None = None) -> Figure:
    """Sparsity of each layer: a bar per method, ERK's own allocation as marks; and against the layer's size.

    `first` is the range that the paper gives for the first layer.
    """
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.6), sharey=True, layout="constrained", gridspec_kw={"width_ratios": [3, 2]}
        )
        x = np.arange(len(layers))
        for i, method in enumerate(columns):
            place = x + 0.36 * (i - (len(columns) - 1) / 2)
            left.bar(place, layers[method], width=0.34, color=colour(method), label=label(method))
        for column, mark in (("ERK at s_0", "_"), ("ERK at s_p", "x")):
            left.plot(
                x,
                layers[column],
                mark,
                color="black",
                markersize=12 if mark == "_" else 7,
                markeredgewidth=2,
                label=column.replace("s_0", "$s_0$").replace("s_p", "$s_p$"),
            )
        if first:
            look = dict(color="#555555", linestyle=(0, (4, 2)), linewidth=1.5, label="first layer in the paper")
            left.hlines(first, -0.45, 0.45, **look)
            left.set_xlim(-0.6, len(x) - 0.4)
        left.set(title="Fraction of zeros in each layer", ylabel="fraction of zeros", ylim=(0, 1), xticks=x)
        left.set_xticklabels(layers.index, rotation=0 if len(x) < 7 else 90)
        for kind, mark in (("convolution", "o"), ("fully connected", "s")):
            own = layers[layers["kind"] == kind]
            for method in columns:
                right.plot(own["size"], own[method], mark, color=colour(method), markersize=7)
            right.plot([], [], mark, color="#555555", label=kind)
        right.set(title="… against its size", xlabel="weights in the layer", xscale="log")
        figure.legend(loc="outside lower center", ncols=7)
    names = " and ".join(map(label, columns)) or "no run"
    alt = f"Left: fraction of zeros in each layer for {names}, beside ERK's allocation"
    return described(figure, f"{alt}. Right: the same against the layer's size")


def extremes(rounds: pd.DataFrame, labels: list[str], paper: float, smooth: int = 1) -> Figure:
    """FedDIP at several targets: sparsity and accuracy by round."""
    looks = dict(zip(labels, zip(SHADES, ("-", "--", "-."), strict=True), strict=True))
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        for target, own in by_label(rounds, "sparsity").items():
            shade, style = looks[target]
            left.plot(own["mean"], color=shade, linestyle=style, label=f"$s_p$ = {target}")
        for target, own, _ in curves(rounds, smooth):
            shade, style = looks[target]
            right.plot(own["mean"], color=shade, linestyle=style, linewidth=thin(own))
            band(right, own, shade)
        left.set(title="Sparsity after each round", xlabel="round", ylabel="fraction of zeros", ylim=(0, 1.02))
        right.set(title="Test accuracy", xlabel="round")
        name = f"the paper's value at $s_p$ = {labels[0]}"
        right.axhline(paper, color=SHADES[0], linestyle=(0, (6, 4)), linewidth=0.9, label=name)
        percent_axis(right)
        figure.legend(loc="outside lower center", ncols=4)
    alt = f"FedDIP with targets of {', '.join(labels)}. Left: sparsity by round. Right: test accuracy by round"
    return described(figure, alt)


def rules(runs: pd.DataFrame, labels: list[str], paper: Mapping) -> Figure:
    """One row per set of rules: the accuracy of each seed and their mean, and how many weights came back."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
        for i, name in enumerate(labels):
            own = runs.loc[[name]] if name in runs.index.get_level_values("label") else runs.iloc[:0]
            shade = colour({"FedDP": "feddp", "DPF": "dpf"}.get(re.split("[:,]", name)[0], "feddip"))
            left.plot(own["last five"], [i] * len(own), "o", color=shade, alpha=0.5, markersize=6)
            left.plot([own["last five"].mean()], [i], "|", color=shade, markersize=20, markeredgewidth=2.5)
            right.barh(i, own["regrown"].mean() if len(own) else 0, color=shade, height=0.6)
            right.annotate(
                f"{own['regrown'].mean():,.0f}" if len(own) else "no run",
                (own["regrown"].mean() if len(own) else 0, i),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
            )
        for method in ("feddip", "feddp"):
            left.axvline(
                paper[method][0],
                color=colour(method),
                linestyle=(0, (6, 4)),
                linewidth=0.9,
                label=f"{label(method)} in the paper",
            )
        left.set(
            title="Mean of the last five rounds",
            xlabel="test accuracy, %",
            yticks=range(len(labels)),
            yticklabels=labels,
        )
        left.set_ylim(len(labels) - 0.5, -0.5)
        right.set(title="Weights that came back in the whole run", xlabel="weights (mean over seeds)", xscale="symlog")
        right.margins(x=0.15)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    alt = "For each set of rules. Left: the accuracy of every seed and their mean, beside the paper's"
    return described(figure, f"{alt}. Right: how many weights came back")
