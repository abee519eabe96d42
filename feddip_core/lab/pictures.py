"""What the explorer draws and says of a plan, and of runs side by side."""

from collections.abc import Sequence
from html import escape

import pandas as pd

from ..method import Method
from ..study.figures import colour
from . import svg
from .background import Trained
from .knobs import SETTINGS

GREY, BLUE = "#555555", "#0072B2"


# A plan.


def plan_panels(planned: pd.DataFrame, method: Method) -> list[svg.Panel]:
    """Sparsity, penalty and cost of every round, and the cost so far."""
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
        svg.Panel("Kilobytes per round", "round (all clients, with masks)", [
            svg.Line(rounds, kilobytes["dense"], GREY, "dense, each way", ":"),
            svg.Line(rounds, kilobytes["uplink"], own, "up", "--"),
            svg.Line(rounds, kilobytes["downlink"], own, "down"),
        ]),
        svg.Panel("Megabytes so far, both ways", "round", [
            svg.Line([0, *rounds], _so_far(2 * planned["dense_bits"]), GREY, "dense", ":"),
            svg.Line([0, *rounds], _so_far(planned["downlink_bits"] + planned["uplink_bits"]), own, "this run"),
        ]),
    ]  # fmt: skip


def _so_far(bits: pd.Series) -> list[float]:
    """Megabytes sent before the first round, and up to the end of each."""
    return [0.0, *(bits.cumsum() / 8e6)]


def _schedule(method: Method) -> list[float] | None:
    """s_t of every round; None for a method without such a schedule."""
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


def compared(runs: Sequence[Trained], pair: Sequence[Trained] = ()) -> str:
    """The curves of all runs, those of a pair in front, a table that names them, and how the pair differs."""
    looks = _looks(runs)
    picture = svg.image(svg.chart(_run_panels(runs, looks, pair)), _in_words(runs))
    words = f"<div>{escape(difference(*reversed(pair)))}</div>" if len(pair) == 2 else ""
    return picture + _table(runs, looks) + words


def difference(a: Trained, b: Trained) -> str:
    """Which settings differ, and what that did to accuracy and cost."""
    missing = "none"
    settings = [k for k in dict(a.settings) | dict(b.settings) if a.settings.get(k) != b.settings.get(k)]
    changed = [f"{SETTINGS.get(k, k)} {a.settings.get(k, missing)} → {b.settings.get(k, missing)}" for k in settings]
    last = [_accuracy(run) for run in (a, b)]
    sent = [_sent(run).iloc[-1] for run in (a, b)]
    return (
        f"{a.name} → {b.name}: accuracy {last[1] - last[0]:+.3f}, megabytes {sent[1] - sent[0]:+.2f}. "
        f"Settings: {', '.join(changed) or 'the same'}. One run each: a small gap may be noise."
    )


def _looks(runs: Sequence[Trained]) -> list[tuple[str, str]]:
    """The colour of each run's method, and a line of its own among the runs of that method."""
    methods = [run.method for run in runs]
    return [(colour(m), list(svg.DASHES)[methods[:i].count(m) % len(svg.DASHES)]) for i, m in enumerate(methods)]


def _accuracy(run: Trained) -> float:
    """Of the last round that was evaluated."""
    return run.metrics["test_accuracy"].ffill().iloc[-1]


def _sent(run: Trained) -> pd.Series:
    return (run.metrics["downlink_bits"] + run.metrics["uplink_bits"]).cumsum() / 8e6


def _run_panels(runs: Sequence[Trained], looks: list[tuple[str, str]], pair: Sequence[Trained]) -> list[svg.Panel]:
    """Accuracy by round, and beside it by what was sent."""

    def line(run, look, x):
        faint = bool(pair) and not any(run is one for one in pair)
        return svg.Line(x.tolist(), run.metrics["test_accuracy"].tolist(), look[0], style=look[1], faint=faint)

    by_round = [line(run, look, run.metrics["round"]) for run, look in zip(runs, looks, strict=True)]
    by_bits = [line(run, look, _sent(run)) for run, look in zip(runs, looks, strict=True)]
    return [
        svg.Panel("Test accuracy by round", "round", by_round, top=1.0),
        svg.Panel("… by megabytes sent", "megabytes, both ways, with masks", by_bits, top=1.0),
    ]


def _in_words(runs: Sequence[Trained]) -> str:
    ends = [f"{run.name}: {_accuracy(run):.3f}" for run in runs]
    return f"Test accuracy of {len(runs)} runs by round and by megabytes sent. At the end: {'; '.join(ends)}."


def _table(runs: Sequence[Trained], looks: list[tuple[str, str]]) -> str:
    heads = ("line", "run", "rounds", "accuracy", "sparsity", "MB sent", "returns")
    left = 'style="text-align: left; padding: 0 .8em 0 0"'
    short = left.replace("left;", "left; white-space: nowrap;")  # so that a long name gives way, and no number
    out = ["<table><tr>", *(f'<th scope="col" {left}>{h}</th>' for h in heads), "</tr>"]
    for run, look in zip(runs, looks, strict=True):
        last = run.metrics.iloc[-1]
        cells = [svg.swatch(*look), escape(run.name), f"{len(run.metrics)} of {run.rounds}"]
        cells += [f"{_accuracy(run):.3f}", f"{last['sparsity']:.3f}", f"{_sent(run).iloc[-1]:.2f}"]
        cells += [f"{run.metrics['regrown'].sum():,}"]
        out += ["<tr>", *(f"<td {left if i == 1 else short}>{c}</td>" for i, c in enumerate(cells)), "</tr>"]
    return "".join([*out, "</table>"])
