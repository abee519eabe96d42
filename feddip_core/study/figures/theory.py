"""Figures of Theorem 1: both sides of the bound and its terms, what runs lose by pruning, and a check of the proof."""

from textwrap import wrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .style import SHADES, STYLE, Runs, described

FORMS = {
    "as printed": ("#000000", "--"), "algebra corrected": ("#888888", ":"),
    "χ repaired": ("#0072B2", "-."), "a round as a step": ("#D55E00", "-"),
}  # fmt: skip
TERMS = {"initial gap": "#56B4E9", "pruning": "#E69F00", "χ": "#CC79A7", "growth of λ": "#555555"}
VARIANTS = [(SHADES[1], "-"), ("#000000", "--"), ("#0072B2", "-."), ("#009E73", ":"), ("#CC79A7", (0, (5, 1)))]


def theorem(sides: pd.DataFrame) -> Figure:
    """The right side of each form of Theorem 1 and the left side, by round; and the terms at the end."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
        for form, (shade, style) in FORMS.items():
            left.plot(sides[form, "right side"], color=shade, linestyle=style, label=f"right side, {form}")
        left.plot(sides["left side", "mean"], color="#009E73", label="left side, mean of $\\|\\nabla f\\|^2$")
        left.axhline(
            sides["left side", "μ²"].iloc[-1], color="#009E73", linestyle=":", label="$\\mu^2$, the trivial bound"
        )
        left.set(yscale="log", xlabel="rounds $T$", ylabel="squared gradient norm", title="Both sides of Theorem 1")
        for i, form in enumerate(FORMS):
            for j, (term, shade) in enumerate(TERMS.items()):
                if (form, term) in sides:
                    right.bar(i + 0.2 * (j - 1.5), sides[form, term].iloc[-1], width=0.18, color=shade)
        names = ["\n".join(wrap(form, 9)) for form in FORMS]
        right.set(yscale="log", title=f"Terms of the right side at T = {sides.index[-1]}", xticks=range(len(FORMS)))
        right.set_xticklabels(names)
        right.legend(handles=[Patch(color=shade, label=term) for term, shade in TERMS.items()])
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    alt = "Left: both sides of Theorem 1 over the rounds, in four forms. Right: the terms of the right side at the end"
    return described(figure, alt)


def pruning_terms(tables: Runs) -> Figure:
    """δ_t and √δ_t ‖ω̄‖ per label: a line through the rounds that kept their mask, dots where it changed."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.0), layout="constrained")
        for (name, table), (shade, style) in zip(tables.items(), VARIANTS, strict=False):
            new = table["regrown"] + table["dropped"] > 0
            for ax, column in zip(axes, ("delta", "pruned_norm"), strict=True):
                if column in table:
                    ax.plot(table["round"][~new], table[column][~new], color=shade, linestyle=style, label=name)
                    ax.plot(table["round"][new], table[column][new], ".", markersize=4, color=shade)
        axes[0].set(
            title="Pruning error $\\delta_t$ (dots: a new mask)", xlabel="round", ylabel="$\\delta_t$", yscale="log"
        )
        axes[1].set(
            title="Length of what pruning removes", xlabel="round", ylabel="$\\sqrt{\\delta_t}\\,\\|\\bar\\omega\\|$"
        )
        axes[1].set_ylim(bottom=0)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    alt = f"Pruning error δ and the length of what is pruned, by round, for {', '.join(tables)}; dots mark new masks"
    return described(figure, alt)


def clients_and_pruning(tables: Runs, run: pd.DataFrame) -> Figure:
    """γ for each split; and the training loss of one run, before and after pruning."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.0), layout="constrained")
        for (name, table), (shade, style) in zip(tables.items(), VARIANTS, strict=False):
            seen = table[table["gamma"].notna()]
            left.plot(seen["round"], seen["gamma"], color=shade, linestyle=style, marker=".", label=name)
        left.set(title="How far clients disagree", xlabel="round", ylabel="$\\gamma$", yscale="log")
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter("{x:g}" if left.get_ylim()[1] < 10 else "")
        left.legend()
        seen = run[run["gradient"].notna()]
        right.plot(seen["round"], seen["loss"], color=SHADES[1], marker=".", label="after pruning, $f(\\bar\\omega')$")
        before = dict(color="#000000", linestyle="--", marker=".", label="before, $f(\\bar\\omega)$")
        right.plot(seen["round"], seen["loss_dense"], **before)
        right.set(title="Training loss before and after pruning", xlabel="round", ylabel="$f$", ylim=(0, None))
        right.legend()
    alt = (
        f"Left: γ by round for the splits {', '.join(tables)}. Right: training loss of the run before and after pruning"
    )
    return described(figure, alt)


def pruning_sums(tables: Runs) -> Figure:
    """The sparsity, and Σ √δ ‖ω̄‖ up to each round, per label."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.0), layout="constrained")
        for (name, table), (shade, style) in zip(tables.items(), VARIANTS, strict=False):
            look = dict(color=shade, linestyle=style, linewidth=1.4, label=name)
            axes[0].plot(table["round"], table["sparsity"], **look)
            if "pruned_norm" in table:
                axes[1].plot(table["round"], table["pruned_norm"].cumsum(), **look)
        axes[0].set(title="Sparsity", xlabel="round", ylabel="fraction of zeros", ylim=(0, 1))
        axes[1].set(title="The sum in the pruning term", xlabel="rounds $T$", ylim=(0, None))
        axes[1].set_ylabel("$\\sum\\sqrt{\\delta_t}\\,\\|\\bar\\omega\\|$")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return described(figure, f"Sparsity, and the sum in the pruning term, by round, for {', '.join(tables)}")


def proof(printed: pd.DataFrame, ratios: Runs) -> Figure:
    """The printed bound falls below the left side as L grows; and left over right side on random instances."""
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.0), layout="constrained")
        left.plot(printed["left side"], color="#009E73", label="left side")
        for name, (shade, style) in list(FORMS.items())[:2]:
            left.plot(printed[name], color=shade, linestyle=style, label=f"right side, {name}")
        left.set(xscale="log", yscale="log", xlabel="$L$", ylabel="squared gradient norm")
        left.set_title("Counterexample: one client, two rounds")
        left.legend()
        for (name, values), (shade, style) in zip(ratios.items(), VARIANTS, strict=False):
            heights = np.arange(1, len(values) + 1) / len(values)
            right.step(np.sort(values), heights, where="post", color=shade, linestyle=style, label=name)
        right.axvline(1, color="#555555", linewidth=1.2)
        right.set(xlabel="left side / right side", ylabel="share of instances", xscale="log", ylim=(0, 1.02))
        right.set_title("The repaired theorem on random instances")
        right.legend(loc="upper left")
    alt = (
        "Left: the printed bound falls below the truth as L grows. Right: left over right side of the repaired theorem"
    )
    return described(figure, alt)
