"""Figures of the course: what clients hold, weights and masks as pictures, one weight, one round, forms of a model."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor

from .style import SPARE, STYLE, colour

FASHION = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


def holdings(dataset, splits: Mapping[str, list], images: int = 10) -> Figure:
    """What each client holds, a row per client. Above: some of its images. Below: how many of each class."""
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
            below.set(yticks=range(len(parts)))
            below.set_xticks(range(len(FASHION)), FASHION, rotation=60, ha="right", rotation_mode="anchor")
        axes[0, 0].set_ylabel("client, and ten of its images")
        axes[1, 0].set_ylabel("client, and its images of each class")
    return figure


def mosaic(x, parts: list, images: int) -> np.ndarray:
    """Images of each part, evenly spaced over it, as one picture with a row per part."""
    rows = []
    for part in parts:
        chosen = part[np.linspace(0, len(part) - 1, images).astype(int)]
        rows.append(np.concatenate(list(x[chosen, 0].numpy()), axis=1))
    return np.concatenate(rows)


def matrices(weights: Mapping[str, Tensor | tuple], numbers: bool = False, columns: int = 5) -> Figure:
    """Layers side by side on one colour scale: blue negative, red positive, grey where pruned.

    Each is its weights, or a pair of weights and mask; None as mask keeps all.
    """
    pictures = {k: _picture(*w) if isinstance(w, tuple) else _picture(w) for k, w in weights.items()}
    high = max(np.nanmax(np.abs(w)) for w in pictures.values() if not np.isnan(w).all())
    rows = -(-len(pictures) // columns)
    with plt.rc_context(STYLE | {"axes.grid": False}):
        colours = plt.get_cmap("RdBu_r").with_extremes(bad="#D0D0D0")
        across = min(columns, len(pictures))
        flat = np.mean([w.shape[0] / w.shape[1] for w in pictures.values()])
        width = min(3.2 / min(1, flat), 11 / across)
        height = width * flat
        figure, axes = plt.subplots(rows, across, figsize=(width * across, rows * (height + 0.35)), squeeze=False,
                                    layout="constrained")  # fmt: skip
        for ax, (title, w) in zip(axes.flat, pictures.items(), strict=False):
            ax.imshow(w, cmap=colours, vmin=-high, vmax=high, interpolation="nearest")
            ax.set(title=title, xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
            for (i, j), value in np.ndenumerate(w) if numbers else ():
                text = "×" if np.isnan(value) else f"{value:g}".replace("-", "−")
                bright = not np.isnan(value) and abs(value) > 0.6 * high
                ax.text(j, i, text, ha="center", va="center", fontsize=9, color="white" if bright else "black")
        for ax in axes.flat[len(pictures) :]:
            ax.set_axis_off()
    return figure


def _picture(w: Tensor, keep: Tensor | None = None) -> np.ndarray:
    """A layer's weights as a picture, NaN where pruned. Kernels are tiled."""
    picture = w.detach().clone()
    if keep is not None:
        picture[~keep] = np.nan
    if picture.ndim == 4:  # out × in × height × width: a tile for each pair of channels
        picture = picture.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    return picture.numpy()


def trajectories(paths: Mapping[str, list[float]], steps: int, threshold: float) -> Figure:
    """One pruned weight, step by step: a panel per rule, a vertical line where a round ends."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(paths), figsize=(11, 3.4), sharey=True, layout="constrained")
        for ax, (rule, path) in zip(axes, paths.items(), strict=True):
            x = np.arange(len(path)) - np.arange(len(path)) // (steps + 1)  # a round's end and the next's start meet
            ax.plot(x, path, "o-", color=colour("feddip"), markersize=3)
            ends = range(0, x[-1] + 1, steps)
            for end in ends:
                ax.axvline(end, color="#999999", linewidth=0.8, linestyle=":")
            ax.axhline(threshold, color="#0072B2", linestyle="--")
            ax.annotate("the kept weight", (0, threshold), (4, 4), textcoords="offset points", color="#0072B2")
            ax.set(title=rule, xlabel="local step (dotted: a round ends)", xticks=ends)
        axes[0].set_ylabel("the pruned weight $\\omega$")
    return figure


def one_round(bits: Mapping[int, Mapping[str, int]]) -> Figure:
    """The paper's Figure 1, redrawn: who sends what to whom in a round of FedDIP, and how many bits.

    For each client, `bits` has the keys `weights`, `mask` and `upload`.
    """
    server = (
        "average the uploads\n$\\omega_G = \\sum_n \\rho_n\\,\\omega_n$",
        "every $R$ rounds, a new mask $m$:\nthe largest $|\\omega_G|$, to sparsity $s_t$",
        "prune\n$\\omega^{\\prime}_G = m \\odot \\omega_G$",
    )
    step = "$\\omega_n \\leftarrow \\omega_n - \\eta\\,\\nabla f_n(\\omega_n \\odot m)$"
    clients = {
        f"client {n}\n{step}": (
            f"$\\omega^{{\\prime}}_G$, pruned\n{sent['weights']:,} bits\nmask {sent['mask']:,} bits",
            f"$\\omega_{{{n}}}$, dense\n{sent['upload']:,} bits",
        )
        for n, sent in bits.items()
    }
    return _round(server, clients, note="… and sent in the next round")


def algorithm() -> Figure:
    """A round of FedDIP in words, its six steps numbered."""
    server = (
        "④ average\nwhat comes back",
        "⑤ every few rounds, a new mask:\nkeep the largest, fewer each time",
        "⑥ prune: set all other\nweights to zero",
    )
    sent = ("② send the weights\nthat are kept,\nand the mask", "send all\nweights back")
    clients = {f"client {n}\n③ trains on its own data;\npruned weights move too": sent for n in "ABC"}
    return _round(server, clients, note="① draw a few clients for the next round")


def _round(server: tuple[str, ...], clients: Mapping[str, tuple[str, str]], note: str) -> Figure:
    """The server's three boxes, and below them a box per client between an arrow down and an arrow up."""

    def box(x, y, w, h, text, fill):
        ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0.08", facecolor=fill, edgecolor="#333333"))
        ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=9.5)

    def arrow(start, end, shade):
        ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, color=shade, linewidth=2))

    down, up, inside = colour("prunefl"), colour("feddip"), "#555555"
    width = 12 / len(clients)
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, ax = plt.subplots(figsize=(11, 6), layout="constrained")
        ax.set(xlim=(0, 12), ylim=(0, 7))
        ax.set_axis_off()
        box(0.2, 4.6, 11.6, 2.2, "", "#F4F8FB")
        ax.text(0.3, 6.6, "server", fontweight="bold", va="center")
        for x, text in zip((0.5, 4.5, 8.5), server, strict=True):
            box(x, 4.9, 3.0, 1.1, text, "#DCE9F2")
        arrow((3.6, 5.45), (4.4, 5.45), inside)
        arrow((7.6, 5.45), (8.4, 5.45), inside)
        ax.text(11.7, 6.45, note, ha="right", color=inside, fontsize=9.5)
        for i, (text, (received, returned)) in enumerate(clients.items()):
            x = i * width + 0.25
            box(x, 0.75, width - 0.5, 1.2, text, "#FDF0E6")
            arrow((x + 0.25, 4.45), (x + 0.25, 2.1), down)
            ax.text(x + 0.36, 3.65, received, color=down, fontsize=9, va="center")
            arrow((x + width - 0.75, 2.1), (x + width - 0.75, 4.45), up)
            ax.text(x + width - 0.86, 2.75, returned, color=up, fontsize=9, va="center", ha="right")
        ax.text(6.0, 0.3, "the data never leave the clients", ha="center", color=inside, style="italic", fontsize=9.5)
    return figure


def lesson(plan: Mapping[str, int], breaks: tuple[str, ...] = ()) -> Figure:
    """A lesson as a bar: one piece per part, as long as its minutes. Breaks are grey."""
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, ax = plt.subplots(figsize=(11, 3.2), layout="constrained")
        begin = 0
        for i, (part, minutes) in enumerate(plan.items()):
            shade = "#D0D0D0" if part in breaks else ("#DCE9F2", "#FDF0E6")[i % 2]
            ax.barh(-i, minutes, left=begin, color=shade, edgecolor="#333333", linewidth=0.8)
            late = begin > sum(plan.values()) / 2
            x, side = (begin - 1, "right") if late else (begin + minutes + 1, "left")
            ax.text(x, -i, f"{part}, {minutes} min", ha=side, va="center", fontsize=9.5)
            begin += minutes
        ax.set(xlabel="minutes from the start", xlim=(0, begin), yticks=[], xticks=range(0, begin + 1, 10))
        ax.spines["left"].set_visible(False)
    return figure


# A form keeps its colour and its mark in both halves of `forms`.
FORMS = {
    "PyTorch": (SPARE[0], "o"), "sparse PyTorch": (SPARE[1], "s"), "ONNX": (SPARE[2], "D"), "C": (SPARE[3], "^"),
    "our file": (SPARE[4], "v"), "its arrays": (SPARE[5], "P"),
}  # fmt: skip


def forms(table: pd.DataFrame) -> Figure:
    """Kilobytes and microseconds of a model in each form, by the share of zeros: columns such as "kB, ONNX"."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
        for ax, unit, title in zip(axes, ("kB", "µs"), ("Size", "CPU time per image"), strict=True):
            for name in [column.removeprefix(f"{unit}, ") for column in table if column.startswith(f"{unit}, ")]:
                shade, mark = FORMS[name.removesuffix(" Runtime")]
                ax.plot(range(len(table)), table[f"{unit}, {name}"], color=shade, marker=mark, label=name)
            ax.set(title=title, xlabel="zeros", ylabel=unit, yscale="log", xticks=range(len(table)))
            ax.set_xticklabels([f"{100 * s:g} %" for s in table.index])
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter(NullFormatter())
            ax.legend()
    return figure
