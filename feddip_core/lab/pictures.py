"""What the explorer draws and says: a plan, runs side by side, and a layer of a mask."""

from collections.abc import Sequence
from html import escape
from io import BytesIO

import numpy as np
import pandas as pd
import torch
from PIL import Image

from ..masks import Mask
from ..method import Method
from ..study.figures import colour
from . import svg
from .background import Trained

GREY, BLUE = "#555555", "#0072B2"
PRUNED, KEPT, REGROWN = "#F2F2F2", "#7A8B99", "#D55E00"  # as in `figures.mask_history`


# A plan.


def plan_panels(planned: pd.DataFrame, method: Method) -> list[svg.Panel]:
    """Sparsity, penalty and cost of every round."""
    rounds, own, T = planned["round"].tolist(), colour(method.exp.method), method.exp.rounds
    schedule = _schedule(method)
    eq_11 = [svg.Line(range(T + 1), schedule, GREY, "s_t of Eq. 11", ":")] if schedule else []
    lam = planned["lambda_"].tolist()
    kilobytes = {k: (planned[f"{k}_bits"] / 8e3).tolist() for k in ("downlink", "uplink", "dense")}
    return [
        svg.Panel("Sparsity after each round", "round", [
            *eq_11, svg.Line(rounds, planned["sparsity"].tolist(), own, "the mask's", step=True),
        ], top=1.0),
        svg.Panel("Penalty λ_t", "round", [svg.Line(range(T + 1), [*lam, lam[-1]], BLUE, step=True)], top=1e-4),
        svg.Panel("Kilobytes per round", "round (all its clients, masks included)", [
            svg.Line(rounds, kilobytes["dense"], GREY, "dense, each way", ":"),
            svg.Line(rounds, kilobytes["uplink"], own, "up", "--"),
            svg.Line(rounds, kilobytes["downlink"], own, "down"),
        ]),
    ]  # fmt: skip


def _schedule(method: Method) -> list[float] | None:
    """s_t in every round; None for a method without such a schedule."""
    try:
        return [method.sparsity(t) for t in range(method.exp.rounds + 1)]
    except AttributeError:  # it has no setting for the beginning or the end of one
        return None


def planned_in_words(planned: pd.DataFrame, method: Method) -> str:
    down, up, dense = (planned[f"{k}_bits"].sum() / 8e6 for k in ("downlink", "uplink", "dense"))
    cost = f"{down:.2f} MB down and {up:.2f} MB up, {(down + up) / dense / 2:.0%} of a dense model's"
    most = ", at most" if method.plan_is_a_bound else ""
    return (
        f"{method.label}, {len(planned)} rounds: sparsity {planned['sparsity'].iloc[0]:.3f} after the first and "
        f"{planned['sparsity'].iloc[-1]:.3f} after the last, penalty up to {planned['lambda_'].max():g}; "
        f"the whole run sends{most} {cost}."
    )


# Runs side by side.


def compared(runs: Sequence[Trained]) -> str:
    """The curves of all runs, and a table that names them."""
    looks = _looks(runs)
    return svg.image(svg.chart(_run_panels(runs, looks)), _in_words(runs)) + _table(runs, looks)


def _looks(runs: Sequence[Trained]) -> list[tuple[str, str]]:
    """The colour of each run's method, and a line of its own among the runs of that method."""
    methods = [run.method for run in runs]
    return [(colour(m), list(svg.DASHES)[methods[:i].count(m) % len(svg.DASHES)]) for i, m in enumerate(methods)]


def _sent(run: Trained) -> pd.Series:
    return (run.metrics["downlink_bits"] + run.metrics["uplink_bits"]).cumsum() / 8e6


def _run_panels(runs: Sequence[Trained], looks: list[tuple[str, str]]) -> list[svg.Panel]:
    by = {"round": lambda run: run.metrics["round"], "megabytes so far, both ways, masks included": _sent}
    panels = []
    for xlabel, x_of in by.items():
        lines = [
            svg.Line(x_of(run).tolist(), run.metrics["test_accuracy"].tolist(), shade, style=style)
            for run, (shade, style) in zip(runs, looks, strict=True)
        ]
        title = "Test accuracy" if xlabel == "round" else "… for what was sent"
        panels.append(svg.Panel(title, xlabel, lines, top=1.0))
    sparsities = [
        svg.Line(run.metrics["round"].tolist(), run.metrics["sparsity"].tolist(), shade, style=style, step=True)
        for run, (shade, style) in zip(runs, looks, strict=True)
    ]
    return [*panels, svg.Panel("Sparsity", "round", sparsities, top=1.0)]


def _in_words(runs: Sequence[Trained]) -> str:
    ends = [f"{run.name}: {run.metrics['test_accuracy'].iloc[-1]:.3f}" for run in runs]
    return f"Test accuracy and sparsity of {len(runs)} runs by round. Accuracy at the end: {'; '.join(ends)}."


def _table(runs: Sequence[Trained], looks: list[tuple[str, str]]) -> str:
    heads = ("line", "run", "rounds", "accuracy", "sparsity", "MB sent", "regrown")
    left = 'style="text-align: left; padding: 0 1em 0 0"'
    out = ["<table><tr>", *(f'<th scope="col" {left}>{h}</th>' for h in heads), "</tr>"]
    for run, look in zip(runs, looks, strict=True):
        last = run.metrics.iloc[-1]
        cells = [svg.swatch(*look), escape(run.name), f"{len(run.metrics)} of {run.rounds}"]
        cells += [f"{last['test_accuracy']:.3f}", f"{last['sparsity']:.3f}", f"{_sent(run).iloc[-1]:.2f}"]
        cells += [f"{run.metrics['regrown'].sum():,}"]
        out += ["<tr>", *(f"<td {left}>{c}</td>" for c in cells), "</tr>"]
    return "".join([*out, "</table>"])


# A mask.


def mask_states(masks: list[Mask], layer: str, round: int) -> np.ndarray:
    """For each weight of a layer, rows × columns: 0 pruned, 1 kept all along, 2 back after it had been pruned."""
    now = masks[round][layer].flatten(1).cpu()
    was_pruned = torch.zeros_like(now)
    for m in masks[:round]:
        was_pruned |= ~m[layer].flatten(1).cpu()
    return (now.int() + (now & was_pruned).int()).numpy()


def mask_png(states: np.ndarray) -> bytes:
    """One square per weight, at most about 800 × 320 points in all."""
    rows, columns = states.shape
    side = max(1, min(800 // columns, 320 // rows))
    picture = Image.fromarray(states.astype(np.uint8).repeat(side, 0).repeat(side, 1), mode="P")
    picture.putpalette([int(shade[i : i + 2], 16) for shade in (PRUNED, KEPT, REGROWN) for i in (1, 3, 5)])
    file = BytesIO()
    picture.save(file, format="png")
    return file.getvalue()


def mask_shown(states: np.ndarray, layer: str, round: int) -> str:
    """The picture of a layer's mask with its legend and its words."""
    pruned, stayed, back = np.bincount(states.ravel(), minlength=3).tolist()
    words = (
        f"{layer} after round {round}, {states.shape[0]} outputs × {states.shape[1]} inputs: "
        f"{pruned:,} weights pruned, {stayed:,} kept all along, {back:,} regrown"
    )
    legend = zip((PRUNED, KEPT, REGROWN), ("pruned", "kept all along", "regrown"), strict=True)
    square = '<span style="background: {}; border: 1px solid #555" aria-hidden="true">&emsp;</span>&ensp;{}'
    key = " &emsp; ".join(square.format(*pair) for pair in legend)
    return f'{svg.image(mask_png(states), words, "png")}<div>{key}</div><div role="status">{words}.</div>'
