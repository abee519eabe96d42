"""The explorer: sliders that redraw a run's schedules and cost, and buttons that train it and look into its masks."""

import json
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd

from ..engine import measure, records
from ..engine.assembly import assemble
from ..experiment import Experiment, settings_of
from ..method import METHODS, Method
from ..study import figures
from . import svg
from .background import Trained, Training, describe, loaded
from .page import control, heading, named_sliders, said, wrong
from .pictures import compared, mask_png, mask_shown, mask_states, plan_panels, planned_in_words

__all__ = ["Explorer", "mask_png", "mask_states"]

SETTINGS = {  # of the controls: what a reader sees beside each
    "method": "Method", "partition": "Partition of the data", "seed": "Seed",
    "rounds": "Rounds T", "reconfigure_every": "New mask every R", "sparsity_initial": "First sparsity s_0",
    "sparsity_target": "Target sparsity s_p", "lambda_max": "Penalty λ_max", "lambda_steps": "Penalty steps Q",
}  # fmt: skip
PARTITIONS = ("iid", "pathological", "shards", "dirichlet(0.1)", "dirichlet(0.5)", "dirichlet(5)")
PENALTIES = (0.0, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)


class Explorer:
    """Sliders, a live run, runs side by side, and a look into their masks; `base` has the settings without a slider.

    What a button does is a method here too. It raises an error that the button shows beside itself instead.
    """

    def __init__(self, base: Experiment | None = None, out: str | Path = ""):
        self.base = base or Experiment.preset("smoke")
        self.exp: Experiment | None = self.base  # what the controls describe; None if they make no sense
        self.mistake = ""  # and then why
        self.planned: pd.DataFrame | None = None  # the last plan that could be made
        self.drawn: Method | None = None  # and its method
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
        # A control for what the base does not have waits for a method that does.
        base = {**Experiment.preset("smoke").to_dict(), **self.base.to_dict()}
        kinds: dict[str, tuple[type, dict[str, Any]]] = {}
        kinds["method"] = (widgets.Dropdown, dict(options=[(cls.label, name) for name, cls in METHODS.items()]))
        kinds["partition"] = (widgets.Combobox, dict(options=PARTITIONS))
        kinds["seed"] = (widgets.IntText, {})
        kinds["rounds"] = (widgets.IntSlider, dict(min=1, max=max(200, base["rounds"])))
        kinds["reconfigure_every"] = (widgets.IntSlider, dict(min=1, max=max(50, base["reconfigure_every"])))
        share = dict(min=0, max=max(0.99, base["sparsity_target"]), step=0.01, readout_format=".2f")
        kinds["sparsity_initial"] = kinds["sparsity_target"] = (widgets.FloatSlider, share)
        penalties = [(f"{value:g}", value) for value in sorted({*PENALTIES, base["lambda_max"]})]
        kinds["lambda_max"] = (widgets.SelectionSlider, dict(options=penalties))
        kinds["lambda_steps"] = (widgets.IntSlider, dict(min=1, max=max(20, base["lambda_steps"])))
        self.controls = {
            name: control(kinds[name][0], text, value=base[name], **kinds[name][1]) for name, text in SETTINGS.items()
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
            named_sliders(),
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
        page = self.box._repr_mimebundle_()
        if self.planned is None:
            return page, {}
        figure = figures.planned(self.planned, self.drawn.exp.method)
        picture, metadata = figures.show(figure, planned_in_words(self.planned, self.drawn))._repr_mimebundle_()
        return page | picture, metadata

    # Settings and schedules.

    def _renew(self) -> None:
        """Read the controls again: draw what they mean, or say beside one of them why they mean nothing."""
        method, self.train_note.value = self.controls["method"].value, ""
        try:
            self._disable(known := settings_of(method, self.base.rules).keys())
            exp = self.base.replace(**{k: widget.value for k, widget in self.controls.items() if k in known})
            federation = assemble(exp, loaded(exp))
        except ValueError as error:
            self.exp, self.mistake = None, str(error)
            self.notes.get(self.mistake.split(":")[0], self.train_note).value = wrong(error)
            return
        self.exp, self.mistake = exp, ""
        try:
            planned = measure.plan(federation)
            panels, words = plan_panels(planned, federation.method), planned_in_words(planned, federation.method)
        except Exception as error:  # whatever a method of one's own may do without an answer of its clients
            reason = f"{federation.method.label} cannot be planned without training ({type(error).__name__}: {error})"
            self.plan_view.value = wrong(f"{reason}. It can be trained all the same.")
            return
        self.planned, self.drawn = planned, federation.method
        self.plan_view.value = f'{svg.image(svg.chart(panels), words)}<div role="status">{escape(words)}</div>'

    def _disable(self, known) -> None:
        """Only a control whose setting the method has can be moved."""
        name = METHODS[self.controls["method"].value].label
        for setting, widget in self.controls.items():
            widget.disabled = setting not in known
            self.notes[setting].value = said(f"{name} has no such setting" if widget.disabled else "")

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
            exp, rows, name = training.exp, training.rows, describe(training.exp.to_dict())
            done = f"round {len(rows)} of {exp.rounds}"
            if rows:
                done += f", accuracy {rows[-1]['test_accuracy']:.3f}, sparsity {rows[-1]['sparsity']:.3f}"
            state = "being trained"
            if training.over:
                state = "stopped" if training.stopping.is_set() and len(rows) < exp.rounds else "done"
                self.train_note.value = wrong(training.error) if training.error else ""
                if rows:
                    self._add(training.trained(name))
            bar = f'<progress max="{exp.rounds}" value="{len(rows)}" aria-label="Rounds trained"></progress>'
            self.progress.value = f'{bar} <span role="status">{escape(name)}: {state}, {done}.</span>'
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
        out = Path(self.folder.value).expanduser()
        folder = self.chosen.save(out)
        rounds = records.progress(self.chosen.exp, out)[0]
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
        found = records.record_folders(Path(self.folder.value or ".").expanduser())
        self.record.options = [(_title(folder), str(folder)) for folder in found]
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
            self.compare_view.value = compared(shown)

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
        round = min(self.round.value, len(run.masks) - 1)
        self.mask_view.value = mask_shown(mask_states(run.masks, self.layer.value, round), self.layer.value, round)


def _title(folder: Path) -> str:
    """A record in the list: what it is, and its folder."""
    try:
        return f"{describe(json.loads((folder / 'config.json').read_text('utf-8')))} · {folder.name}"
    except (OSError, ValueError, TypeError, KeyError):
        return f"{folder.name}, not readable"
