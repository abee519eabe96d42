"""The explorer: sliders that redraw a run's schedules and cost, and buttons that train it and look into its masks.

Neither `interact` nor `widgets.Output` is used: both make Papermill hang.
"""

import dataclasses
import json
import threading
from collections.abc import Callable
from html import escape
from io import BytesIO
from pathlib import Path

import ipywidgets as widgets
import numpy as np
import pandas as pd
import torch
from PIL import Image

from . import plots, records, svg
from .background import Trained, Training, describe
from .experiment import FIXED, ONE_SPARSITY, Experiment
from .masks import Mask
from .planning import plan
from .plots import COLOURS, NAMES
from .schedules import sparsity_at

GREY, BLUE = "#555555", "#0072B2"
PRUNED, KEPT, REGROWN = "#F2F2F2", "#7A8B99", "#D55E00"  # as in `plots.mask_history`
SETTINGS = {  # of the controls: what a reader sees beside each
    "method": "Method", "partition": "Partition of the data", "seed": "Seed",
    "rounds": "Rounds T", "reconfigure_every": "New mask every R", "sparsity_initial": "First sparsity s_0",
    "sparsity_target": "Target sparsity s_p", "lambda_max": "Penalty λ_max", "lambda_steps": "Penalty steps Q",
}  # fmt: skip
PARTITIONS = ("iid", "pathological", "shards", "dirichlet(0.1)", "dirichlet(0.5)", "dirichlet(5)")
# ipywidgets leaves the handle of a slider and the number beside it without a name. This names them after the label,
# also when they are made anew; it needs no network, and where scripts are not allowed nothing is lost.
NAME_SLIDERS = """
const page = this.closest('.widget-vbox');
const name = () => page.querySelectorAll('.widget-slider').forEach(slider => {
  const text = slider.querySelector('label').textContent, number = slider.querySelector('.widget-readout');
  const off = String(slider.querySelector('.slider').hasAttribute('disabled'));
  for (const handle of slider.querySelectorAll('[role=slider]')) {
    handle.setAttribute('aria-label', text);
    handle.setAttribute('aria-disabled', off);
  }
  number.setAttribute('role', 'textbox');
  number.setAttribute('aria-label', text + ', as a number');
});
new MutationObserver(name).observe(page, {childList: true, subtree: true, attributeFilter: ['disabled']});
name();
"""
DOT = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
PENALTIES = (0.0, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)


def unused(method: str) -> set[str]:
    """The settings that this method fixes or never looks at."""
    names = set(FIXED[method]) & set(SETTINGS)
    if method in ONE_SPARSITY:
        names.add("sparsity_initial")
    if method in ("fedavg", "fedprox", "snip"):
        names.add("reconfigure_every")
    if "lambda_max" in names or method == "prunetrain":
        names.add("lambda_steps")
    return names


def mask_states(masks: list[Mask], layer: str, round: int) -> np.ndarray:
    """For each weight of a layer, rows × columns: 0 pruned, 1 kept all along, 2 back after it had been pruned."""
    now = masks[round][layer].flatten(1).cpu()
    was_pruned = torch.zeros_like(now)
    for m in masks[:round]:
        was_pruned |= ~m[layer].flatten(1).cpu()
    return (now.int() + (now & was_pruned).int()).numpy()


def mask_png(states: np.ndarray) -> bytes:
    """One square a weight, at most about 800 × 320 points in all."""
    rows, columns = states.shape
    side = max(1, min(800 // columns, 320 // rows))
    picture = Image.fromarray(states.astype(np.uint8).repeat(side, 0).repeat(side, 1), mode="P")
    picture.putpalette([int(colour[i : i + 2], 16) for colour in (PRUNED, KEPT, REGROWN) for i in (1, 3, 5)])
    file = BytesIO()
    picture.save(file, format="png")
    return file.getvalue()


class Explorer:
    """Sliders, a live run, runs side by side, and a look into their masks; `base` has the settings without a slider.

    What a button does is a method here too. It raises an error that the button shows beside itself instead.
    """

    def __init__(self, base: Experiment | None = None, out: str | Path = ""):
        self.base = base or Experiment.preset("smoke")
        if self.base.variant != "original":
            raise ValueError(f"variant: {self.base.variant!r} is not allowed; the explorer has the published methods")
        self.exp: Experiment | None = self.base  # what the controls describe; None if they make no sense
        self.mistake = ""  # and then why
        self.drawn, self.planned = self.base, plan(self.base)  # the last that made sense
        self.runs: list[Trained] = []
        self.training: Training | None = None
        self.lock = threading.RLock()  # a training and a click may want to show the runs at the same time
        self._make_settings()
        self._make_runs(str(out) or "records")
        self._make_viewer()
        self.box = self._page()
        self._renew()
        self._show_runs()
        self._list_records()

    def _make_settings(self) -> None:
        base, kinds = self.base, {}
        kinds["method"] = (widgets.Dropdown, dict(options=[(text, name) for name, text in NAMES.items()]))
        kinds["partition"] = (widgets.Combobox, dict(options=PARTITIONS))
        kinds["seed"] = (widgets.IntText, {})
        kinds["rounds"] = (widgets.IntSlider, dict(min=1, max=max(200, base.rounds)))
        kinds["reconfigure_every"] = (widgets.IntSlider, dict(min=1, max=max(50, base.reconfigure_every)))
        share = dict(min=0, max=max(0.99, base.sparsity_target), step=0.01, readout_format=".2f")
        kinds["sparsity_initial"] = kinds["sparsity_target"] = (widgets.FloatSlider, share)
        penalties = [(f"{value:g}", value) for value in sorted({*PENALTIES, base.lambda_max})]
        kinds["lambda_max"] = (widgets.SelectionSlider, dict(options=penalties))
        kinds["lambda_steps"] = (widgets.IntSlider, dict(min=1, max=max(20, base.lambda_steps)))
        self.controls = {
            name: control(kinds[name][0], text, value=getattr(base, name), **kinds[name][1])
            for name, text in SETTINGS.items()
        }
        self.notes = {name: widgets.HTML() for name in self.controls}
        for widget in self.controls.values():
            widget.observe(lambda _: self._renew(), "value")
        self.plan_view = widgets.HTML()

    def _make_runs(self, out: str) -> None:
        self.progress, self.compare_view = widgets.HTML(), widgets.HTML()
        self.train_note, self.run_note, self.record_note = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.choice, self.name = control(widgets.Dropdown, "Run"), control(widgets.Text, "Name of the run")
        self.folder, self.record = control(widgets.Text, "Folder of records"), control(widgets.Dropdown, "Record")
        self.folder.value = out
        self.choice.observe(lambda _: self._show_choice(), "value")
        self.name.observe(lambda change: self._attempt(self.run_note, self.rename, change.new), "value")
        self.folder.observe(lambda _: self._attempt(self.record_note, self._list_records), "value")

    def _make_viewer(self) -> None:
        self.layer, self.mask_view = control(widgets.Dropdown, "Layer"), widgets.HTML()
        self.layer.observe(lambda _: self._show_mask(), "value")
        self.viewer = widgets.VBox()
        self._make_round_slider(1)

    def _make_round_slider(self, last: int) -> None:
        # A new one for each run: the End key of a slider whose range has changed still goes to the end it had at first.
        self.round = control(widgets.IntSlider, "After round", max=last, value=last)
        self.round.observe(lambda _: self._show_mask(), "value")
        self.viewer.children = [self.layer, self.round, self.mask_view]

    def _page(self) -> widgets.VBox:
        settings = [widgets.HBox([widget, self.notes[name]]) for name, widget in self.controls.items()]
        buttons = widgets.HBox([
            self._button("Train", self.train_note, self.train, "primary"),
            self._button("Stop", self.train_note, self.stop), self.train_note,
        ])  # fmt: skip
        managed = widgets.HBox([
            self.name, self._button("Remove run", self.run_note, self.remove), self.run_note,
        ])  # fmt: skip
        saved = widgets.HBox([
            self.folder, self._button("Save run", self.record_note, self.save), self.record_note,
        ])  # fmt: skip
        opened = widgets.HBox([self.record, self._button("Open record", self.record_note, self.open)])
        return widgets.VBox([
            heading("Settings"), *settings, heading("What it will do and cost"), self.plan_view,
            heading("Train"), buttons, self.progress, heading("Runs"), self.compare_view, self.choice, managed,
            saved, opened, heading("Masks"), self.viewer,
            widgets.HTML(f'<img alt="" src="{DOT}" onload="{escape(NAME_SLIDERS)}">'),
        ])  # fmt: skip

    def _button(
        self, text: str, note: widgets.HTML, action: Callable[[], str | None], style: str = ""
    ) -> widgets.Button:
        button = widgets.Button(description=text, button_style=style)
        button.on_click(lambda _: self._attempt(note, action))
        return button

    def _attempt(self, note: widgets.HTML, action: Callable[..., str | None], *args) -> None:
        """Do it, and say beside the control what came of it or what was wrong."""
        note.value = ""  # beforehand: what a training says that has just begun must not be wiped away
        try:
            if text := action(*args):
                note.value = said(text)
        except (ValueError, RuntimeError, OSError) as error:
            note.value = wrong(error)

    def _repr_mimebundle_(self, **_):
        """The page in JupyterLab; where there are no widgets, the schedules that it begins with."""
        picture, metadata = plots.show(
            plots.planned(self.planned, self.drawn.method), self._planned_in_words()
        )._repr_mimebundle_()
        return self.box._repr_mimebundle_() | picture, metadata

    # Settings and schedules.

    def _renew(self) -> None:
        """Read the controls again: draw what they mean, or say beside one of them why they mean nothing."""
        method = self.controls["method"].value
        idle, self.train_note.value = unused(method), ""
        for name, widget in self.controls.items():
            widget.disabled = name in idle
            self.notes[name].value = said(f"{NAMES[method]} has no use for it" if name in idle else "")
        chosen = {
            name: None if name in idle & {*FIXED[method], "sparsity_initial"} else widget.value
            for name, widget in self.controls.items()
        }
        try:
            exp = dataclasses.replace(self.base.replace(method=method), **chosen)
            self.planned = plan(exp)
        except ValueError as error:
            self.exp, self.mistake = None, str(error)
            self.notes.get(self.mistake.split(":")[0], self.train_note).value = wrong(error)
            return
        self.exp, self.drawn, self.mistake = exp, exp, ""
        self.plan_view.value = svg.image(svg.chart(self._plan_panels()), self._planned_in_words())
        self.plan_view.value += f'<div role="status">{self._planned_in_words()}</div>'

    def _plan_panels(self) -> list[svg.Panel]:
        exp, rounds = self.drawn, self.planned["round"].tolist()
        colour, T = COLOURS[exp.method], exp.rounds
        eq_11 = [sparsity_at(t, T=T, s_0=exp.sparsity_initial, s_p=exp.sparsity_target) for t in range(T + 1)]
        lam = self.planned["lambda_"].tolist()
        kilobytes = {k: (self.planned[f"{k}_bits"] / 8e3).tolist() for k in ("downlink", "uplink", "dense")}
        return [
            svg.Panel("Sparsity after each round", "round", [
                svg.Line(range(T + 1), eq_11, GREY, "s_t of Eq. 11", ":"),
                svg.Line(rounds, self.planned["sparsity"].tolist(), colour, "the mask's", step=True),
            ], top=1.0),
            svg.Panel("Penalty λ_t", "round", [svg.Line(range(T + 1), [*lam, lam[-1]], BLUE, step=True)], top=1e-4),
            svg.Panel("Kilobytes a round", "round (all its clients, masks included)", [
                svg.Line(rounds, kilobytes["dense"], GREY, "dense, each way", ":"),
                svg.Line(rounds, kilobytes["uplink"], colour, "up", "--"),
                svg.Line(rounds, kilobytes["downlink"], colour, "down"),
            ]),
        ]  # fmt: skip

    def _planned_in_words(self) -> str:
        rows, name = self.planned, NAMES[self.drawn.method]
        down, up, dense = (rows[f"{k}_bits"].sum() / 8e6 for k in ("downlink", "uplink", "dense"))
        cost = f"{down:.2f} MB down and {up:.2f} MB up, {(down + up) / dense / 2:.0%} of a dense model's"
        most = ", at most" if self.drawn.method == "prunetrain" else ""
        return (
            f"{name}, {len(rows)} rounds: sparsity {rows['sparsity'].iloc[0]:.3f} after the first and "
            f"{rows['sparsity'].iloc[-1]:.3f} after the last, penalty up to {rows['lambda_'].max():g}; "
            f"the whole run sends{most} {cost}."
        )

    # Training.

    def train(self) -> None:
        """Begin to train the experiment that the controls describe, in the background."""
        if self.training and not self.training.over:
            raise RuntimeError("A run is being trained; stop it first, or wait for it.")
        if self.exp is None:
            raise ValueError("Not trained: a setting above is not allowed.")
        self.training = Training(self.exp, self._watch)
        self.training.thread.start()

    def stop(self) -> None:
        """End the training before its next client; the rounds that are done are kept."""
        if not self.training or self.training.over:
            raise RuntimeError("Nothing is being trained.")
        self.training.stopping.set()

    def wait(self) -> Trained:
        """Until the training is over; its run, or the error that ended it."""
        if not self.training:
            raise RuntimeError("Nothing is being trained.")
        self.training.thread.join()
        if self.training.error:
            raise self.training.error
        return self.runs[-1]

    def _watch(self, training: Training) -> None:
        with self.lock:
            exp, rows = training.exp, training.rows
            done = f"round {len(rows)} of {exp.rounds}"
            if rows:
                done += f", accuracy {rows[-1]['test_accuracy']:.3f}, sparsity {rows[-1]['sparsity']:.3f}"
            state = "being trained"
            if training.over:
                state = "stopped" if training.stopping.is_set() and len(rows) < exp.rounds else "done"
                self.train_note.value = wrong(training.error) if training.error else ""
                if rows:
                    self._add(training.trained(describe(exp)))
            bar = f'<progress max="{exp.rounds}" value="{len(rows)}" aria-label="Rounds trained"></progress>'
            self.progress.value = f'{bar} <span role="status">{escape(describe(exp))}: {state}, {done}.</span>'
            if not training.over:
                self._show_runs()

    # Runs.

    def _add(self, run: Trained) -> None:
        """Show it beside the others, under a name of its own."""
        with self.lock:
            names, name, i = {other.name for other in self.runs}, run.name, 2
            while run.name in names:
                run.name, i = f"{name} ({i})", i + 1
            self.runs.append(run)
            self._choose(run)

    def _choose(self, run: Trained | None) -> None:
        self.choice.options = [(other.name, i) for i, other in enumerate(self.runs)]
        self.choice.value = self.runs.index(run) if run else None
        self._show_choice()
        self._show_runs()

    @property
    def chosen(self) -> Trained:
        if self.choice.value is None:
            raise ValueError("There is no run yet: train one, or open a record.")
        return self.runs[self.choice.value]

    def rename(self, name: str) -> str | None:
        """Give the chosen run another name."""
        with self.lock:
            if not self.runs or name == self.chosen.name:
                return None
            if not name.strip() or name in {run.name for run in self.runs}:
                raise ValueError(f"name: {name!r} is not allowed; it must be one that no other run has, and not empty")
            self.chosen.name = name
            self._choose(self.chosen)
            return "Renamed."

    def remove(self) -> str:
        """Take the chosen run off the page; a record of it stays."""
        with self.lock:
            self.runs.remove(run := self.chosen)
            self._choose(self.runs[-1] if self.runs else None)
            return f"{run.name} is removed."

    def save(self) -> str:
        """Keep the chosen run as a record in the folder."""
        if not self.folder.value.strip():
            raise ValueError("folder: '' is not allowed; it must be the name of a folder, which need not be there yet")
        folder = self.chosen.save(Path(self.folder.value).expanduser())
        rounds = records.progress(self.chosen.exp, folder.parent)[0]
        self._list_records()
        self.record.value = str(folder)
        if rounds > len(self.chosen.metrics):
            return f"{folder} has the same run with {rounds} rounds already, and is left as it is."
        return f"Saved in {folder}."

    def open(self) -> str:
        """Show the chosen record beside the other runs."""
        if self.record.value is None:
            raise ValueError(f"There is no record in {self.folder.value or 'a folder without a name'}.")
        self._add(run := Trained.open(Path(self.record.value)))
        return f"{run.name} is open."

    def _list_records(self) -> None:
        found = sorted(Path(self.folder.value or ".").expanduser().glob("*/provenance.json"))
        self.record.options = [(_title(path.parent), str(path.parent)) for path in found]
        self.record.index = 0 if found else None

    def _show_runs(self) -> None:
        """The curves of all runs, that of the training among them, and a table that names them."""
        with self.lock:
            shown = list(self.runs)
            if self.training and not self.training.over and self.training.rows:
                shown.append(self.training.trained("being trained"))
            if not shown:
                self.compare_view.value = said("No run yet: train one, or open a record.")
                return
            looks = _looks(shown)
            self.compare_view.value = svg.image(svg.chart(_run_panels(shown, looks)), _in_words(shown)) + _table(
                shown, looks
            )

    # Masks.

    def _show_choice(self) -> None:
        run = self.runs[self.choice.value] if self.choice.value is not None else None
        self.name.value = run.name if run else ""
        layers = list(run.masks[0]) if run and run.masks else []
        before = self.layer.value
        self.layer.options = layers
        if layers:
            self.layer.value = before if before in layers else layers[0]
            self._make_round_slider(len(run.masks) - 1)
        self._show_mask()

    def _show_mask(self) -> None:
        run = self.runs[self.choice.value] if self.choice.value is not None else None
        if not run or not run.masks or self.layer.value is None:
            self.mask_view.value = said("Records keep no masks: train the run here." if run else "No run yet.")
            return
        states = mask_states(run.masks, self.layer.value, min(self.round.value, len(run.masks) - 1))
        pruned, stayed, back = np.bincount(states.ravel(), minlength=3).tolist()
        words = (
            f"{self.layer.value} after round {self.round.value}, {states.shape[0]} outputs × {states.shape[1]} inputs: "
            f"{pruned:,} weights pruned, {stayed:,} kept all along, {back:,} regrown"
        )
        legend = zip((PRUNED, KEPT, REGROWN), ("pruned", "kept all along", "regrown"), strict=True)
        square = '<span style="background: {}; border: 1px solid #555" aria-hidden="true">&emsp;</span>&ensp;{}'
        key = " &emsp; ".join(square.format(*pair) for pair in legend)
        self.mask_view.value = (
            f'{svg.image(mask_png(states), words, "png")}<div>{key}</div><div role="status">{words}.</div>'
        )


def control(kind: type, description: str, **how) -> widgets.Widget:
    """A control with a name; it reports a value when the user has settled on it."""
    settled = {"continuous_update": False} if "continuous_update" in kind.class_trait_names() else {}
    look = dict(style={"description_width": "11em"}, layout=dict(width="32em", flex="0 0 auto"))
    return kind(description=description, tooltip=description, **settled, **look, **how)


def heading(text: str) -> widgets.HTML:
    return widgets.HTML(f"<h3>{text}</h3>")


def said(text: str) -> str:
    return f'<span role="status">{escape(text)}</span>' if text else ""


def wrong(error: Exception) -> str:
    return f'<span role="alert" style="color: #A00000"><b>⚠</b> {escape(str(error))}</span>'


def _title(folder: Path) -> str:
    try:
        return f"{describe(Experiment(**json.loads((folder / 'config.json').read_text())))} · {folder.name}"
    except (OSError, ValueError, TypeError):
        return f"{folder.name}, not readable"


def _looks(runs: list[Trained]) -> list[tuple[str, str]]:
    """The colour of each run's method, and a line of its own among the runs of that method."""
    methods = [run.exp.method for run in runs]
    return [(COLOURS[m], list(svg.DASHES)[methods[:i].count(m) % len(svg.DASHES)]) for i, m in enumerate(methods)]


def _sent(run: Trained) -> pd.Series:
    return (run.metrics["downlink_bits"] + run.metrics["uplink_bits"]).cumsum() / 8e6


def _run_panels(runs: list[Trained], looks: list[tuple[str, str]]) -> list[svg.Panel]:
    by = {"round": lambda run: run.metrics["round"], "megabytes so far, both ways, masks included": _sent}
    panels = []
    for xlabel, x_of in by.items():
        lines = [
            svg.Line(x_of(run).tolist(), run.metrics["test_accuracy"].tolist(), colour, style=style)
            for run, (colour, style) in zip(runs, looks, strict=True)
        ]
        panels.append(
            svg.Panel("Test accuracy" if xlabel == "round" else "… for what was sent", xlabel, lines, top=1.0)
        )
    sparsities = [
        svg.Line(run.metrics["round"].tolist(), run.metrics["sparsity"].tolist(), colour, style=style, step=True)
        for run, (colour, style) in zip(runs, looks, strict=True)
    ]
    return [*panels, svg.Panel("Sparsity", "round", sparsities, top=1.0)]


def _in_words(runs: list[Trained]) -> str:
    ends = [f"{run.name}: {run.metrics['test_accuracy'].iloc[-1]:.3f}" for run in runs]
    return f"Test accuracy and sparsity of {len(runs)} runs by round. Accuracy at the end: {'; '.join(ends)}."


def _table(runs: list[Trained], looks: list[tuple[str, str]]) -> str:
    heads = ("line", "run", "rounds", "accuracy", "sparsity", "MB sent", "regrown")
    out = [
        "<table><tr>",
        *(f'<th scope="col" style="text-align: left; padding: 0 1em 0 0">{h}</th>' for h in heads),
        "</tr>",
    ]
    for run, look in zip(runs, looks, strict=True):
        last = run.metrics.iloc[-1]
        cells = [svg.swatch(*look), escape(run.name), f"{len(run.metrics)} of {run.exp.rounds}"]
        cells += [f"{last['test_accuracy']:.3f}", f"{last['sparsity']:.3f}", f"{_sent(run).iloc[-1]:.2f}"]
        cells += [f"{run.metrics['regrown'].sum():,}"]
        out += ["<tr>", *(f'<td style="text-align: left; padding: 0 1em 0 0">{c}</td>' for c in cells), "</tr>"]
    return "".join([*out, "</table>"])
