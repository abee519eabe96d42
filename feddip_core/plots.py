"""One style and one function a figure: metrics of runs in, a figure out, the same colour for a method everywhere."""

import re
from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from textwrap import wrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from .records import write

# Okabe and Ito's palette, which colour-blind readers can tell apart.
# Its yellow is too pale for a line on white: darkened; and two more are added.
COLOURS = {
    "fedavg": "#000000", "fedprox": "#888888", "feddp": "#56B4E9", "dpf": "#009E73", "feddip": "#D55E00",
    "feddip_prox": "#CC79A7", "prunefl": "#0072B2", "snip": "#E69F00", "prunetrain": "#A89B00", "feddst": "#661100",
}  # fmt: skip
NAMES = {
    "fedavg": "FedAvg", "fedprox": "FedProx", "feddp": "FedDP", "dpf": "DPF", "feddip": "FedDIP",
    "feddip_prox": "FedDIP+Prox", "prunefl": "PruneFL", "snip": "SNIP", "prunetrain": "PruneTrain", "feddst": "FedDST",
}  # fmt: skip
LINES = {
    "fedavg": "--", "fedprox": ":", "feddp": "-.", "dpf": ":", "feddip": "-",
    "feddip_prox": "--", "prunefl": "-.", "snip": "--", "prunetrain": ":", "feddst": "-.",
}  # fmt: skip

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

Runs = Mapping[str, pd.DataFrame]  # the metrics of one run for each method


def line(ax: Axes, runs: Runs, column: str, scale: float = 1.0, **style) -> Axes:
    """One curve a method over the rounds; one that diverged ends in a cross and says so."""
    for method, metrics in runs.items():
        end = diverged_at(metrics)
        look = dict(color=COLOURS[method], linestyle=LINES[method], label=label(method, end)) | style
        ax.plot(metrics["round"], metrics[column] * scale, **look)
        if end:
            last = metrics[metrics["round"] < end].tail(1)
            ax.plot(last["round"], last[column] * scale, "X", markersize=9, color=look["color"])
    ax.set_xlabel("round")
    return ax


def diverged_at(metrics: pd.DataFrame) -> int | None:
    """The round in which the loss ceased to be finite, if it did."""
    finite = np.isfinite(metrics[["train_loss", "test_loss"]]).all(axis=1)
    return None if finite.all() else int(metrics.loc[~finite, "round"].iloc[0])


def label(method: str, diverged: int | None) -> str:
    return NAMES[method] + (f" (diverged in round {diverged})" if diverged else "")


def accuracy(ax: Axes, runs: Runs) -> Axes:
    line(ax, runs, "test_accuracy")
    ax.set(title="Test accuracy", ylabel="fraction of test images", ylim=(0, 1))
    ax.legend(loc="lower right")
    return ax


def schedules(ax: Axes, metrics: pd.DataFrame, method: str) -> Axes:
    """Sparsity after each round, on the left, and the penalty during it, on the right."""
    ax.step(metrics["round"], metrics["sparsity"], where="post", color=COLOURS[method], label="sparsity $s_t$ (left)")
    right = ax.twinx()
    right.step(
        metrics["round"],
        metrics["lambda_"],
        where="mid",
        color="#0072B2",
        linestyle=":",
        label="penalty $\\lambda_t$ (right)",
    )
    right.spines["right"].set_visible(True)
    right.grid(False)
    right.set(ylabel="$\\lambda_t$", ylim=(0, None))
    right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    ax.set(title=f"What {NAMES[method]} turns up", xlabel="round", ylabel="fraction of zero weights", ylim=(0, 1))
    handles = ax.get_legend_handles_labels()[0] + right.get_legend_handles_labels()[0]
    ax.legend(handles=handles, loc="lower right")
    return ax


def pruning_error(ax: Axes, metrics: pd.DataFrame, method: str) -> Axes:
    """δ_t, with the rounds that chose a new mask marked."""
    ax.plot(metrics["round"], metrics["delta"], color=COLOURS[method])
    chosen = metrics[metrics["dropped"] + metrics["regrown"] > 0]
    ax.plot(chosen["round"], chosen["delta"], "o", markersize=5, color=COLOURS[method], label="new mask")
    ax.set(
        title="Pruning error $\\delta_t$", xlabel="round", ylabel="share of $\\|\\omega\\|^2$ removed", ylim=(0, None)
    )
    ax.legend(loc="upper right")
    return ax


def download(ax: Axes, runs: Runs, clients_per_round: int) -> Axes:
    """What one client is sent in a round, mask included."""
    line(ax, runs, "downlink_bits", scale=1 / 8 / 1000 / clients_per_round)
    ax.set(title="Model sent to a client", ylabel="kilobytes", ylim=(0, None))
    ax.legend(loc="center right")
    return ax


def quickstart(runs: Runs, clients_per_round: int, pruned: str = "feddip") -> Figure:
    """Accuracy, schedules, δ_t and the size of what is sent, for a pruned method beside the others."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
        accuracy(axes[0, 0], runs)
        schedules(axes[0, 1], runs[pruned], pruned)
        pruning_error(axes[1, 0], runs[pruned], pruned)
        download(axes[1, 1], runs, clients_per_round)
    return figure


def layers(ax: Axes, metrics: pd.DataFrame, sizes: Mapping[str, int]) -> Axes:
    """The share of zeros in each prunable layer, from the first (dark) to the last (light)."""
    zeros = np.array([row.split() for row in metrics["layer_zeros"].astype(str)], dtype=int)
    for i, (name, size) in enumerate(sizes.items()):
        colour = plt.get_cmap("viridis")(0.85 * i / max(1, len(sizes) - 1))
        few = name.removesuffix(".weight") if len(sizes) <= 8 or i in (0, len(sizes) - 1) else None
        ax.step(metrics["round"], zeros[:, i] / size, where="post", color=colour, label=few)
    ax.set(title="The mask, layer by layer", xlabel="round", ylabel="fraction of zero weights", ylim=(-0.02, 1.02))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return ax


def cost(ax: Axes, metrics: pd.DataFrame, dense_bits_a_round: float, method: str) -> Axes:
    """All that was sent until a round, beside what a dense model would have cost."""
    for column, text, style in (("downlink_bits", "down", "-"), ("uplink_bits", "up", "--")):
        sent = metrics[column].cumsum() / 8e6
        ax.plot(metrics["round"], sent, linestyle=style, color=COLOURS[method], label=f"{NAMES[method]}, {text}")
    dense = metrics["round"] * dense_bits_a_round / 8e6
    ax.plot(metrics["round"], dense, ":", color="#555555", label="dense model, each way")
    ax.set(title="Sent so far, masks included", xlabel="round", ylabel="megabytes", ylim=(0, None))
    ax.legend(loc="upper left")
    return ax


def one_run(metrics: pd.DataFrame, method: str, sizes: Mapping[str, int], dense_bits_a_round: float) -> Figure:
    """Accuracy, δ_t, the mask of each layer and the cost of one run."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
        accuracy(axes[0, 0], {method: metrics})
        pruning_error(axes[0, 1], metrics, method)
        layers(axes[1, 0], metrics, sizes)
        cost(axes[1, 1], metrics, dense_bits_a_round, method)
    return figure


def planned(plan: pd.DataFrame, method: str) -> Figure:
    """What a run will do and cost, before it is trained."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
        schedules(left, plan, method)
        cost(right, plan, plan["dense_bits"].iloc[0], method)
    return figure


def side_by_side(runs: Runs) -> Figure:
    """Accuracy by round, and accuracy by what was sent until then, both ways."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
        accuracy(left, runs)
        for method, metrics in runs.items():
            sent = (metrics["downlink_bits"] + metrics["uplink_bits"]).cumsum() / 8e6
            right.plot(sent, metrics["test_accuracy"], color=COLOURS[method], linestyle=LINES[method])
            right.plot(sent.iloc[-1], metrics["test_accuracy"].iloc[-1], "o", markersize=5, color=COLOURS[method])
        right.set(title="… against everything sent so far", xlabel="megabytes, both ways, masks included")
        left.get_legend().remove()
        figure.legend(*left.get_legend_handles_labels(), loc="outside right center")
    return figure


def mask_history(histories: Mapping[str, np.ndarray]) -> Figure:
    """For each method one picture, a row a round and a column a weight: pruned, kept, or brought back in that round.

    A history is a boolean array, rounds × weights. Weights are sorted by how long they were kept.
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
            ax.set(title=NAMES[method], yticks=[0, len(kept) - 1], yticklabels=["first", "last"])
        for ax in axes[-1]:
            ax.set_xlabel("weights of one layer, longest kept first")
        figure.supylabel("round", fontsize=10)
        patches = [
            Patch(color=c, label=t) for c, t in zip(colours.colors, ("pruned", "kept", "brought back"), strict=True)
        ]
        figure.legend(handles=patches, loc="outside upper right", ncols=3)
    return figure


def final_weights(weights: Mapping[str, np.ndarray]) -> Figure:
    """Where the weights that are not zero ended, one box a method: quartiles, and whiskers from 1 % to 99 %."""
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(9, 3.8), layout="constrained")
        magnitudes = [np.abs(w[w != 0]) for w in weights.values()]
        boxes = ax.boxplot(
            magnitudes, whis=(1, 99), showfliers=False, patch_artist=True, medianprops={"color": "white"}
        )
        for box, method in zip(boxes["boxes"], weights, strict=True):
            box.set(facecolor=COLOURS[method], edgecolor=COLOURS[method])
        shares = [f"{NAMES[k]}\n{len(m) / len(w):.0%}" for (k, w), m in zip(weights.items(), magnitudes, strict=True)]
        ax.set(yscale="log", ylabel="|w|", title="Magnitude of the weights that are left, and their share")
        ax.set_xticks(range(1, len(shares) + 1), shares, fontsize=8)
    return figure


class Picture:
    """A figure in a notebook, with words for those who cannot see it."""

    def __init__(self, png: bytes, alt: str):
        self.png, self.alt = png, alt

    def _repr_mimebundle_(self, include=None, exclude=None):
        picture = {"image/png": b64encode(self.png).decode(), "text/plain": self.alt}
        return picture, {"image/png": {"alt": self.alt}}


def show(figure: Figure, alt: str, out: str | Path = "", name: str = "", note: str = "") -> Picture:
    """Hand the figure to the notebook; with `out` also keep it as `out`/figures/`name`.png and .svg.

    A note stands above the figure, wherever it goes.
    """
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
    metadata = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}[form]  # they change with the day
    picture = BytesIO()
    with plt.rc_context(STYLE):
        figure.savefig(picture, format=form, metadata=metadata, **how)
    return picture.getvalue()


def by_label(rounds: pd.DataFrame, column: str, smooth: int = 1) -> dict[str, pd.DataFrame]:
    """For each label a row a round: mean, lowest and highest of its seeds, over the last `smooth` rounds."""
    groups = rounds.groupby("label", sort=False)
    curves = {label: own.groupby("round")[column].agg(["mean", "min", "max"]) for label, own in groups}
    return {label: own.rolling(smooth, min_periods=1).mean() for label, own in curves.items()}


def percent_curves(ax: Axes, rounds: pd.DataFrame, smooth: int = 1, raw: bool = False) -> Axes:
    """Accuracy of each method by round, with a band from the lowest to the highest seed, or with every round, pale."""
    for method, own in by_label(rounds, "test_accuracy", smooth).items():
        own, look = 100 * own, dict(color=COLOURS[method], linestyle=LINES[method])
        # Broken lines over solid ones: where two methods agree, both can be seen.
        ax.plot(own["mean"], label=NAMES[method], zorder=2 + (LINES[method] != "-"), linewidth=thin(own), **look)
        if not raw:
            band(ax, own, COLOURS[method])
    for method, own in by_label(rounds, "test_accuracy").items() if raw else ():
        ax.plot(100 * own["mean"], linewidth=0.6, alpha=0.25, color=COLOURS[method], zorder=1)
    ax.set_xlabel("round")
    return ax


def band(ax: Axes, curve: pd.DataFrame, colour: str) -> None:
    """From the lowest seed to the highest; of a single one there is none, and its points would only fill the file."""
    if (curve["max"] > curve["min"]).any():
        ax.fill_between(curve.index, curve["min"], curve["max"], color=colour, alpha=0.15, linewidth=0)


def thin(curve: pd.DataFrame) -> float:
    """A line's width: many rounds make a thick broken line a solid one."""
    return 1.8 if len(curve) <= 100 else 1.3


def percent_axis(ax: Axes) -> Axes:
    """All of the second half of the rounds, in whole tens, and a little below: the first rounds may be out of sight."""
    heights = [line.get_ydata() for line in ax.lines if len(line.get_ydata())]
    low = min((min(y[len(y) // 2 :]) for y in heights), default=0)
    high = max((max(y) for y in heights), default=100)
    ax.set(ylabel="test accuracy, %", ylim=(max(0, 10 * ((low - 2) // 10)), min(100, 10 * (high // 10 + 1))))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return ax


def paper_lines(ax: Axes, paper: Mapping, methods=COLOURS) -> Axes:
    """What the paper printed, a thin dashed line across in the colour of its method."""
    for method, value in paper.items():
        height = value[0] if isinstance(value, list) else value
        if method in methods:
            ax.axhline(height, color=COLOURS[method], linestyle=(0, (6, 4)), linewidth=0.9, alpha=0.8, zorder=1)
    return ax


def ends(ax: Axes, ours: pd.DataFrame, paper: Mapping, theirs: pd.DataFrame | None = None) -> Axes:
    """One row a method: ours as a dot with its standard deviation over seeds, the paper's as an open diamond.

    `theirs` adds what the authors' code gives, as a cross.
    """
    for i, (method, row) in enumerate(ours.iterrows()):
        ax.errorbar(row["mean"], i, xerr=row["std"], fmt="o", markersize=6, capsize=3, color=COLOURS[method])
        if theirs is not None and method in theirs.index:
            other = theirs.loc[method]
            look = dict(fmt="x", markersize=8, markeredgewidth=2, capsize=3, color=COLOURS[method], zorder=3)
            ax.errorbar(other["mean"], i + 0.22, xerr=other["std"], **look)
        if method in paper:
            value = paper[method] if isinstance(paper[method], list) else [paper[method], 0]
            ax.errorbar(
                *value[:1], i, xerr=value[1], fmt="D", markersize=7, color=COLOURS[method], mfc="white", zorder=1
            )
    ax.set(yticks=range(len(ours)), yticklabels=[NAMES[method] for method in ours.index], xlabel="test accuracy, %")
    ax.set_ylim(len(ours) - 0.5, -0.5)
    return ax


OURS_AND_PAPER = [
    Line2D([], [], marker="o", linestyle="", color="#555555", label="ours"),
    Line2D([], [], marker="D", linestyle="", color="#555555", markerfacecolor="white", label="the paper's"),
]
THEIRS = Line2D(
    [], [], marker="x", linestyle="", color="#555555", markersize=8, markeredgewidth=2, label="by its authors' code"
)


def against_paper(
    rounds: pd.DataFrame,
    ours: pd.DataFrame,
    paper: Mapping,
    statistic: str,
    smooth: int = 1,
    raw: bool = False,
    theirs: pd.DataFrame | None = None,
) -> Figure:
    """Accuracy by round, and what came of it beside the paper's value and that of its authors' code."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.4), layout="constrained", gridspec_kw={"width_ratios": [3, 2]}
        )
        percent_axis(paper_lines(percent_curves(left, rounds, smooth, raw), paper))
        left.set(title="Test accuracy by round (thin dashes: the paper's value)")
        ends(right, ours, paper, theirs).set(title=f"{statistic.capitalize()}, mean ± std over seeds")
        marks = [OURS_AND_PAPER[0], *([] if theirs is None else [THEIRS]), OURS_AND_PAPER[1]]
        handles = [*left.get_legend_handles_labels()[0], *marks]
        columns = len(handles) if len(handles) < 8 else -(-len(handles) // 2)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure


def versions(ours: pd.DataFrame, theirs: pd.DataFrame, paper: Mapping) -> Figure:
    """For each method: as we run it, by its authors' code, and what the paper printed."""
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(9, 0.55 * len(ours) + 1.4), layout="constrained")
        ends(ax, ours, paper, theirs).set(title="As published, by the authors' code, and in the paper")
        figure.legend(handles=[OURS_AND_PAPER[0], THEIRS, OURS_AND_PAPER[1]], loc="outside lower center", ncols=3)
    return figure


def cost_curves(ax: Axes, rounds: pd.DataFrame, cost: pd.Series, smooth: int = 1) -> Axes:
    """Accuracy against what was sent until then, mean over seeds; a dot marks the end of a run."""
    sent = rounds.assign(cost=cost).groupby(["label", "round"], sort=False)["cost"].mean()
    for method, own in by_label(rounds, "test_accuracy", smooth).items():
        look = dict(color=COLOURS[method], zorder=2 + (LINES[method] != "-"))
        x, y = sent[method], 100 * own["mean"]
        ax.plot(x, y, linestyle=LINES[method], label=NAMES[method], linewidth=thin(own), **look)
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
    """Accuracy against all that was sent, in the authors' unit with the paper's budget, and in bytes with masks."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
        cost_curves(left, rounds, mebibits, smooth).set(xlabel="mebibits sent, both ways, as the authors count")
        cost_curves(right, rounds, megabytes, smooth).set(xlabel="megabytes sent, both ways, masks included")
        left.set(title="In the authors' unit")
        right.set(title="In bytes, with mask bits")
        for method, value in paper.items():
            left.plot(budget, value, "D", markersize=6, color=COLOURS[method], mfc="white", zorder=4)
        for ax in (percent_axis(paper_lines(left, paper)), right):
            seen = [
                x[y >= left.get_ylim()[0]]
                for x, y in (line.get_data() for line in ax.lines if len(line.get_xdata()) > 2)
            ]
            ax.set_xlim(left=0.7 * min((x[0] for x in seen if len(x)), default=1))
        left.axvline(budget, color="#555555", linewidth=1.2)
        left.text(budget, 0.02, " budget", color="#555555", transform=left.get_xaxis_transform())
        handles = [*left.get_legend_handles_labels()[0], OURS_AND_PAPER[1]]
        figure.legend(handles=handles, loc="outside lower center", ncols=8)
    return figure


def layer_bars(layers: pd.DataFrame, columns: list[str], first: tuple[float, float] | None = None) -> Figure:
    """Sparsity of each layer: one bar a method, ERK's own allocation as marks; and against the layer's size.

    `first`: between which values the paper has the first layer.
    """
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.6), sharey=True, layout="constrained", gridspec_kw={"width_ratios": [3, 2]}
        )
        x = np.arange(len(layers))
        for i, method in enumerate(columns):
            place = x + 0.36 * (i - (len(columns) - 1) / 2)
            left.bar(place, layers[method], width=0.34, color=COLOURS[method], label=NAMES[method])
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
            look = dict(color="#555555", linestyle=(0, (4, 2)), linewidth=1.5, label="the paper's first layer")
            left.hlines(first, -0.45, 0.45, **look)
            left.set_xlim(-0.6, len(x) - 0.4)
        left.set(title="Fraction of zeros in each layer", ylabel="fraction of zeros", ylim=(0, 1), xticks=x)
        left.set_xticklabels(layers.index, rotation=0 if len(x) < 7 else 90)
        for kind, mark in (("convolution", "o"), ("fully connected", "s")):
            own = layers[layers["kind"] == kind]
            for method in columns:
                right.plot(own["size"], own[method], mark, color=COLOURS[method], markersize=7)
            right.plot([], [], mark, color="#555555", label=kind)
        right.set(title="… against its size", xlabel="weights in the layer", xscale="log")
        figure.legend(loc="outside lower center", ncols=7)
    return figure


SHADES = ["#F2A36B", "#D55E00", "#6B2F00"]  # of FedDIP's colour, lighter to darker


def extremes(rounds: pd.DataFrame, labels: list[str], paper: float, smooth: int = 1) -> Figure:
    """FedDIP at several targets: the sparsity over the rounds, and the accuracy that is left."""
    looks = dict(zip(labels, zip(SHADES, ("-", "--", "-."), strict=True), strict=True))
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        for label, own in by_label(rounds, "sparsity").items():
            colour, style = looks[label]
            left.plot(own["mean"], color=colour, linestyle=style, label=f"$s_p$ = {label}")
        for label, own in by_label(rounds, "test_accuracy", smooth).items():
            colour, style = looks[label]
            right.plot(100 * own["mean"], color=colour, linestyle=style, linewidth=thin(own))
            band(right, 100 * own, colour)
        left.set(title="Sparsity after each round", xlabel="round", ylabel="fraction of zeros", ylim=(0, 1.02))
        right.set(title="Test accuracy", xlabel="round")
        name = f"the paper's at {labels[0]}"
        right.axhline(paper, color=SHADES[0], linestyle=(0, (6, 4)), linewidth=0.9, label=name)
        percent_axis(right)
        figure.legend(loc="outside lower center", ncols=4)
    return figure


def rules(runs: pd.DataFrame, labels: list[str], paper: Mapping) -> Figure:
    """One row a set of rules: the accuracy of every seed and their mean, and how many weights ever came back."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
        for i, label in enumerate(labels):
            own = runs.loc[[label]] if label in runs.index.get_level_values("label") else runs.iloc[:0]
            colour = COLOURS[{"FedDP": "feddp", "DPF": "dpf"}.get(re.split("[:,]", label)[0], "feddip")]
            left.plot(own["last five"], [i] * len(own), "o", color=colour, alpha=0.5, markersize=6)
            left.plot([own["last five"].mean()], [i], "|", color=colour, markersize=20, markeredgewidth=2.5)
            right.barh(i, own["regrown"].mean() if len(own) else 0, color=colour, height=0.6)
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
                color=COLOURS[method],
                linestyle=(0, (6, 4)),
                linewidth=0.9,
                label=f"the paper's {NAMES[method]}",
            )
        left.set(
            title="Accuracy, mean of the last five rounds",
            xlabel="test accuracy, %",
            yticks=range(len(labels)),
            yticklabels=labels,
        )
        left.set_ylim(len(labels) - 0.5, -0.5)
        right.set(title="Weights brought back in the whole run", xlabel="weights (mean over seeds)", xscale="symlog")
        right.margins(x=0.15)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


SPARE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#555555", "#56B4E9"]  # for what is not a method
RANDOM = {"random mask": ("#661100", ":"), "random mask, rescaled": ("#661100", "-")}  # FedDST's colour


def lines(ax: Axes, table: pd.DataFrame, **style) -> Axes:
    """One curve a column over the table's index; a method has its own colour, and gaps are bridged."""
    own = {NAMES[method]: (COLOURS[method], LINES[method]) for method in NAMES} | RANDOM
    others = [name for name in table if name not in own]
    spare = zip(others, zip(SPARE, ("-", "--", "-.", ":", (0, (1, 1)), "-"), strict=True), strict=False)
    looks = own | dict(spare)
    for name in table:
        colour, dashes = looks[name]
        curve = table[name].dropna()
        over = 2 + (dashes != "-")  # broken lines over solid ones: where two agree, both can be seen
        ax.plot(curve.index, curve, color=colour, linestyle=dashes, zorder=over, markersize=4, label=name, **style)
    if pd.api.types.is_integer_dtype(table.index):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax


def panels(
    tables: Mapping[str, pd.DataFrame], xlabel: str, ylabel: str, marker: str | None = None, steps: bool = False, **axis
) -> Figure:
    """One panel a table, side by side on one scale, and one legend for all; `axis` goes to each of them."""
    style = dict(marker=marker, drawstyle="steps-post" if steps else "default")
    with plt.rc_context(STYLE):
        width = min(11.0, 3.4 + 3.4 * len(tables))
        figure, axes = plt.subplots(1, len(tables), figsize=(width, 3.8), sharey=True, squeeze=False,
                                    layout="constrained")  # fmt: skip
        found = {}
        for ax, (title, table) in zip(axes[0], tables.items(), strict=True):
            lines(ax, table, **style).set(title=title, xlabel=xlabel, **axis)
            found |= {handle.get_label(): handle for handle in ax.get_lines()}
        axes[0, 0].set_ylabel(ylabel)
        figure.legend(handles=list(found.values()), loc="outside lower center", ncols=6)
    return figure


def holdings(dataset, splits: Mapping[str, list], images: int = 10) -> Figure:
    """What each client holds: above, some of its images, a row a client; below, how many of each class."""
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, axes = plt.subplots(2, len(splits), figsize=(11, 8.4), squeeze=False, layout="constrained")
        counts = {rule: np.array([np.bincount(dataset.y_train[i], minlength=10) for i in parts])
                  for rule, parts in splits.items()}  # fmt: skip
        most = max(count.max() for count in counts.values())
        for (above, below), (rule, parts) in zip(axes.T, splits.items(), strict=True):
            above.imshow(mosaic(dataset.x_train, parts, images), cmap="gray_r", interpolation="nearest")
            size = dataset.x_train.shape[-1]
            above.set(title=rule, xticks=[], yticks=[size * (n + 0.5) for n in range(len(parts))])
            above.set_yticklabels(range(len(parts)))
            below.imshow(counts[rule], cmap="Blues", vmin=0, vmax=most, aspect="auto")
            for (n, c), count in np.ndenumerate(counts[rule]):
                if count:
                    below.text(c, n, count, ha="center", va="center", fontsize=7,
                               color="white" if count > most / 2 else "black")  # fmt: skip
            below.set(xlabel="class", xticks=range(counts[rule].shape[1]), yticks=range(len(parts)))
        axes[0, 0].set_ylabel("client, and ten of its images")
        axes[1, 0].set_ylabel("client, and its images of each class")
    return figure


def mosaic(x, parts: list, images: int) -> np.ndarray:
    """The first images of each part, spread over it, as one picture with a row a part."""
    rows = []
    for part in parts:
        chosen = part[np.linspace(0, len(part) - 1, images).astype(int)]
        rows.append(np.concatenate(list(x[chosen, 0].numpy()), axis=1))
    return np.concatenate(rows)


def matrices(weights: Mapping[str, np.ndarray], numbers: bool = False, columns: int = 5) -> Figure:
    """Matrices side by side on one colour scale: blue negative, red positive, grey where pruned (NaN)."""
    high = max(np.nanmax(np.abs(w)) for w in weights.values() if not np.isnan(w).all())
    rows = -(-len(weights) // columns)
    with plt.rc_context(STYLE | {"axes.grid": False}):
        colours = plt.get_cmap("RdBu_r").with_extremes(bad="#D0D0D0")
        across = min(columns, len(weights))
        width = min(3.2, 11 / across)
        height = width * np.mean([w.shape[0] / w.shape[1] for w in weights.values()])
        figure, axes = plt.subplots(rows, across, figsize=(width * across, rows * (height + 0.35)), squeeze=False,
                                    layout="constrained")  # fmt: skip
        for ax, (title, w) in zip(axes.flat, weights.items(), strict=False):
            ax.imshow(w, cmap=colours, vmin=-high, vmax=high, interpolation="nearest")
            ax.set(title=title, xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
            for (i, j), value in np.ndenumerate(w) if numbers else ():
                text = "×" if np.isnan(value) else f"{value:g}".replace("-", "−")
                bright = not np.isnan(value) and abs(value) > 0.6 * high
                ax.text(j, i, text, ha="center", va="center", fontsize=9, color="white" if bright else "black")
        for ax in axes.flat[len(weights) :]:
            ax.set_axis_off()
    return figure


def pruned_picture(w, keep) -> np.ndarray:
    """A layer's weights as a picture, NaN where the mask does not keep them; kernels stand beside each other."""
    picture = w.detach().clone()
    picture[~keep] = np.nan
    if picture.ndim == 4:  # out × in × height × width: a tile for each pair of channels
        picture = picture.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    return picture.numpy()


def trajectories(paths: Mapping[str, list[float]], steps: int, threshold: float) -> Figure:
    """One pruned weight, step by step: a panel a rule, a vertical line where a round ends."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(paths), figsize=(11, 3.4), sharey=True, layout="constrained")
        for ax, (rule, path) in zip(axes, paths.items(), strict=True):
            x = np.arange(len(path)) - np.arange(len(path)) // (steps + 1)  # a round's end and the next's start meet
            ax.plot(x, path, "o-", color=COLOURS["feddip"], markersize=3)
            ends = range(0, x[-1] + 1, steps)
            for end in ends:
                ax.axvline(end, color="#999999", linewidth=0.8, linestyle=":")
            ax.axhline(threshold, color="#0072B2", linestyle="--")
            ax.annotate("the kept weight", (0, threshold), (4, 4), textcoords="offset points", color="#0072B2")
            ax.set(title=rule, xlabel="local step (dotted: a round ends)", xticks=ends)
        axes[0].set_ylabel("the pruned weight $\\omega$")
    return figure


def one_round(bits: Mapping[int, Mapping[str, int]]) -> Figure:
    """The paper's Figure 1, drawn anew: who sends what to whom in a round of FedDIP, with the bits of each arrow.

    `bits` has for each client the keys `weights`, `mask` and `upload`.
    """

    def box(x, y, w, h, text, colour):
        ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0.08", facecolor=colour, edgecolor="#333333"))
        ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=9.5)

    def arrow(start, end, colour):
        ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, color=colour, linewidth=2))

    down, up, inside = COLOURS["prunefl"], COLOURS["feddip"], "#555555"
    width = 12 / len(bits)
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, ax = plt.subplots(figsize=(11, 6), layout="constrained")
        ax.set(xlim=(0, 12), ylim=(0, 7))
        ax.set_axis_off()
        box(0.2, 4.6, 11.6, 2.2, "", "#F4F8FB")
        ax.text(0.3, 6.6, "server", fontweight="bold", va="center")
        for x, text in zip((0.5, 4.5, 8.5), (
            "average the uploads\n$\\omega_G = \\sum_n \\rho_n\\,\\omega_n$",
            "every $R$ rounds, a new mask $m$:\nthe largest $|\\omega_G|$, to sparsity $s_t$",
            "prune\n$\\omega^{\\prime}_G = m \\odot \\omega_G$",
        ), strict=True):  # fmt: skip
            box(x, 4.9, 3.0, 1.1, text, "#DCE9F2")
        arrow((3.6, 5.45), (4.4, 5.45), inside)
        arrow((7.6, 5.45), (8.4, 5.45), inside)
        ax.text(11.7, 6.45, "… and sent in the next round", ha="right", color=inside, fontsize=9.5)
        for i, (n, sent) in enumerate(bits.items()):
            x = i * width + 0.25
            text = f"client {n}\n$\\omega_n \\leftarrow \\omega_n - \\eta\\,\\nabla f_n(\\omega_n \\odot m)$"
            box(x, 0.75, width - 0.5, 1.2, text, "#FDF0E6")
            arrow((x + 0.25, 4.45), (x + 0.25, 2.1), down)
            told = f"$\\omega^{{\\prime}}_G$, pruned\n{sent['weights']:,} bits\nmask {sent['mask']:,} bits"
            ax.text(x + 0.36, 3.65, told, color=down, fontsize=9, va="center")
            arrow((x + width - 0.75, 2.1), (x + width - 0.75, 4.45), up)
            told = f"$\\omega_{{{n}}}$, dense\n{sent['upload']:,} bits"
            ax.text(x + width - 0.86, 2.75, told, color=up, fontsize=9, va="center", ha="right")
        ax.text(6.0, 0.3, "the data never leave the clients", ha="center", color=inside, style="italic", fontsize=9.5)
    return figure


FORMS = {
    "as printed": ("#000000", "--"), "algebra corrected": ("#888888", ":"),
    "χ repaired": ("#0072B2", "-."), "a round as a step": ("#D55E00", "-"),
}  # fmt: skip
TERMS = {"initial gap": "#56B4E9", "pruning": "#E69F00", "χ": "#CC79A7", "growth of λ": "#555555"}
VARIANTS = [(SHADES[1], "-"), ("#000000", "--"), ("#0072B2", "-."), ("#009E73", ":"), ("#CC79A7", (0, (5, 1)))]


def theorem(sides: pd.DataFrame) -> Figure:
    """The right side of each form of Theorem 1 over the rounds, over the left side; and its terms at the end."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
        for form, (colour, style) in FORMS.items():
            left.plot(sides[form, "right side"], color=colour, linestyle=style, label=f"right side, {form}")
        left.plot(sides["left side", "mean"], color="#009E73", label="left side, mean of $\\|\\nabla f\\|^2$")
        left.axhline(sides["left side", "μ²"].iloc[-1], color="#009E73", linestyle=":", label="$\\mu^2$, bounds it too")
        left.set(yscale="log", xlabel="rounds $T$", ylabel="squared gradient norm", title="Both sides")
        for i, form in enumerate(FORMS):
            for j, (term, colour) in enumerate(TERMS.items()):
                if (form, term) in sides:
                    right.bar(i + 0.2 * (j - 1.5), sides[form, term].iloc[-1], width=0.18, color=colour)
        names = ["\n".join(wrap(form, 9)) for form in FORMS]
        right.set(yscale="log", title=f"The right sides' terms at T = {sides.index[-1]}", xticks=range(len(FORMS)))
        right.set_xticklabels(names)
        right.legend(handles=[Patch(color=colour, label=term) for term, colour in TERMS.items()])
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def pruning_terms(tables: Runs) -> Figure:
    """δ_t and √δ_t ‖ω̄‖ for each label: a line through the rounds that kept their mask, dots where one was chosen."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.0), layout="constrained")
        for (label, table), (colour, style) in zip(tables.items(), VARIANTS, strict=False):
            new = table["regrown"] + table["dropped"] > 0
            for ax, column in zip(axes, ("delta", "pruned_norm"), strict=True):
                if column in table:
                    ax.plot(table["round"][~new], table[column][~new], color=colour, linestyle=style, label=label)
                    ax.plot(table["round"][new], table[column][new], ".", markersize=4, color=colour)
        axes[0].set(
            title="Quality of pruning (dots: a new mask was chosen)", xlabel="round", ylabel="$\\delta_t$", yscale="log"
        )
        axes[1].set(title="What pruning takes away", xlabel="round", ylabel="$\\sqrt{\\delta_t}\\,\\|\\bar\\omega\\|$")
        axes[1].set_ylim(bottom=0)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def clients_and_pruning(tables: Runs, run: pd.DataFrame) -> Figure:
    """γ by split; and of one run f before and after pruning."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.0), layout="constrained")
        for (label, table), (colour, style) in zip(tables.items(), VARIANTS, strict=False):
            seen = table[table["gamma"].notna()]
            left.plot(seen["round"], seen["gamma"], color=colour, linestyle=style, marker=".", label=label)
        left.set(title="How far clients disagree", xlabel="round", ylabel="$\\gamma$", yscale="log")
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter("{x:g}" if left.get_ylim()[1] < 10 else "")
        left.legend()
        seen = run[run["gradient"].notna()]
        right.plot(seen["round"], seen["loss"], color=SHADES[1], marker=".", label="after pruning, $f(\\bar\\omega')$")
        before = dict(color="#000000", linestyle="--", marker=".", label="before, $f(\\bar\\omega)$")
        right.plot(seen["round"], seen["loss_dense"], **before)
        right.set(title="The training loss before and after pruning", xlabel="round", ylabel="$f$", ylim=(0, None))
        right.legend()
    return figure


def pruning_sums(tables: Runs) -> Figure:
    """Σ √δ ‖ω̄‖ until each round, and the sparsity, for each label."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.0), layout="constrained")
        for (label, table), (colour, style) in zip(tables.items(), VARIANTS, strict=False):
            look = dict(color=colour, linestyle=style, linewidth=1.4, label=label)
            axes[0].plot(table["round"], table["sparsity"], **look)
            if "pruned_norm" in table:
                axes[1].plot(table["round"], table["pruned_norm"].cumsum(), **look)
        axes[0].set(title="Sparsity", xlabel="round", ylabel="fraction of zeros", ylim=(0, 1))
        axes[1].set(title="The sum in the pruning term", xlabel="rounds $T$", ylim=(0, None))
        axes[1].set_ylabel("$\\sum\\sqrt{\\delta_t}\\,\\|\\bar\\omega\\|$")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def proof(printed: pd.DataFrame, ratios: Runs) -> Figure:
    """Where the printed bound falls below the truth as L grows; and left over right side on random instances."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.0), layout="constrained")
        left.plot(printed["left side"], color="#009E73", label="left side")
        for name, (colour, style) in list(FORMS.items())[:2]:
            left.plot(printed[name], color=colour, linestyle=style, label=f"right side, {name}")
        left.set(xscale="log", yscale="log", xlabel="$L$", ylabel="squared gradient norm")
        left.set_title("One client, noise 1, two rounds from the minimum")
        left.legend()
        for (name, values), (colour, style) in zip(ratios.items(), VARIANTS, strict=False):
            heights = np.arange(1, len(values) + 1) / len(values)
            right.step(np.sort(values), heights, where="post", color=colour, linestyle=style, label=name)
        right.axvline(1, color="#555555", linewidth=1.2)
        right.set(xlabel="left side / right side", ylabel="share of instances", xscale="log", ylim=(0, 1.02))
        right.set_title("The repaired theorem on random instances")
        right.legend(loc="upper left")
    return figure
