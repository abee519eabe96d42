"""Figures of a run, and of a few runs beside it: accuracy, schedules, pruning error, layers and cost by round."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from feddip_core.engine.records import diverged

from .style import STYLE, Runs, colour, label, line


def curves(ax: Axes, runs: Runs, column: str, scale: float = 1.0, **style) -> Axes:
    """One curve per method over the rounds. A run that diverged ends in a cross, and its label says so."""
    for method, metrics in runs.items():
        end = diverged_at(metrics)
        look = dict(color=colour(method), linestyle=line(method), label=label_with_divergence(method, end)) | style
        known = metrics.dropna(subset=column) if column == "test_accuracy" else metrics
        ax.plot(known["round"], known[column] * scale, **look)
        if end:
            last = known[known["round"] < end].tail(1)
            ax.plot(last["round"], last[column] * scale, "X", markersize=9, color=look["color"])
    ax.set_xlabel("round")
    return ax


def diverged_at(metrics: pd.DataFrame) -> int | None:
    """The first round whose loss is not finite, if there is one."""
    ended = metrics[[diverged(row) for row in metrics.to_dict("records")]]
    return None if ended.empty else int(ended["round"].iloc[0])


def label_with_divergence(method: str, diverged: int | None) -> str:
    """The method's label, and the round in which its run diverged, if it did."""
    return label(method) + (f" (diverged in round {diverged})" if diverged else "")


def accuracy(ax: Axes, runs: Runs) -> Axes:
    """Test accuracy by round."""
    curves(ax, runs, "test_accuracy")
    ax.set(title="Test accuracy", ylabel="fraction of test images", ylim=(0, 1))
    ax.legend(loc="lower right")
    return ax


def schedules(ax: Axes, metrics: pd.DataFrame, method: str) -> Axes:
    """Sparsity after each round, on the left axis, and the penalty during it, on the right axis."""
    ax.step(metrics["round"], metrics["sparsity"], where="post", color=colour(method), label="sparsity $s_t$ (left)")
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
    ax.set(title=f"What {label(method)} turns up", xlabel="round", ylabel="fraction of zero weights", ylim=(0, 1))
    handles = ax.get_legend_handles_labels()[0] + right.get_legend_handles_labels()[0]
    ax.legend(handles=handles, loc="lower right")
    return ax


def pruning_error(ax: Axes, metrics: pd.DataFrame, method: str) -> Axes:
    """δ_t by round, where it is known. Dots mark the rounds that chose a new mask."""
    metrics = metrics.dropna(subset="delta")
    ax.plot(metrics["round"], metrics["delta"], color=colour(method))
    chosen = metrics[metrics["dropped"] + metrics["regrown"] > 0]
    ax.plot(chosen["round"], chosen["delta"], "o", markersize=5, color=colour(method), label="new mask")
    ax.set(
        title="Pruning error $\\delta_t$", xlabel="round", ylabel="share of $\\|\\omega\\|^2$ removed", ylim=(0, None)
    )
    ax.legend(loc="upper right")
    return ax


def download(ax: Axes, runs: Runs, clients_per_round: int) -> Axes:
    """What the server sends to one client per round, mask included."""
    curves(ax, runs, "downlink_bits", scale=1 / 8 / 1000 / clients_per_round)
    ax.set(title="Model sent to a client", ylabel="kilobytes", ylim=(0, None))
    ax.legend(loc="center right")
    return ax


def layers(ax: Axes, metrics: pd.DataFrame, sizes: Mapping[str, int]) -> Axes:
    """The share of zeros in each prunable layer, from the first (dark) to the last (light)."""
    zeros = np.array([row.split() for row in metrics["layer_zeros"].astype(str)], dtype=int)
    for i, (name, size) in enumerate(sizes.items()):
        shade = plt.get_cmap("viridis")(0.85 * i / max(1, len(sizes) - 1))
        few = name.removesuffix(".weight") if len(sizes) <= 8 or i in (0, len(sizes) - 1) else None
        ax.step(metrics["round"], zeros[:, i] / size, where="post", color=shade, label=few)
    ax.set(title="The mask, layer by layer", xlabel="round", ylabel="fraction of zero weights", ylim=(-0.02, 1.02))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    return ax


def cost(ax: Axes, metrics: pd.DataFrame, dense_bits_a_round: float, method: str) -> Axes:
    """Everything sent up to each round, beside the cost of a dense model."""
    for column, text, style in (("downlink_bits", "down", "-"), ("uplink_bits", "up", "--")):
        sent = metrics[column].cumsum() / 8e6
        ax.plot(metrics["round"], sent, linestyle=style, color=colour(method), label=f"{label(method)}, {text}")
    dense = metrics["round"] * dense_bits_a_round / 8e6
    ax.plot(metrics["round"], dense, ":", color="#555555", label="dense model, each way")
    ax.set(title="Sent so far, masks included", xlabel="round", ylabel="megabytes", ylim=(0, None))
    ax.legend(loc="upper left")
    return ax


def quickstart(runs: Runs, clients_per_round: int, pruned: str = "feddip") -> Figure:
    """Four panels: accuracy, schedules, δ_t and the size of a download, for a pruned method beside the others."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
        accuracy(axes[0, 0], runs)
        schedules(axes[0, 1], runs[pruned], pruned)
        pruning_error(axes[1, 0], runs[pruned], pruned)
        download(axes[1, 1], runs, clients_per_round)
    return figure


def one_run(metrics: pd.DataFrame, method: str, sizes: Mapping[str, int], dense_bits_a_round: float) -> Figure:
    """Four panels of one run: accuracy, δ_t, the mask of each layer and the cost."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
        accuracy(axes[0, 0], {method: metrics})
        pruning_error(axes[0, 1], metrics, method)
        layers(axes[1, 0], metrics, sizes)
        cost(axes[1, 1], metrics, dense_bits_a_round, method)
    return figure


def planned(plan: pd.DataFrame, method: str) -> Figure:
    """What a run will do and cost, known before training."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
        schedules(left, plan, method)
        cost(right, plan, plan["dense_bits"].iloc[0], method)
    return figure
