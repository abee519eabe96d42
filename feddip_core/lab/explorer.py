"""The explorer: sliders that redraw a run's schedules and cost, buttons that train it, and the film of its masks."""

import json
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path

import ipywidgets as widgets
import pandas as pd

from ..engine import measure, records
from ..engine.assembly import assemble
from ..experiment import Experiment, settings_of
from ..method import METHODS, Method
from ..study import figures
from . import knobs, svg
from .background import Trained, Training, describe, loaded
from .film import film, frame, shown_best
from .page import Note, control, named, said, stale, wrong
from .pictures import compared, plan_panels, planned_in_words

__all__ = ["Explorer"]

VIEWS = ("Plan", "Compare", "Film")


class Explorer:
    """Sliders, a live run, runs side by side, and a look into their masks; `base` has the settings without a slider.

    What a button does is a method here too. It raises the error that the button would show.
    """

    def __init__(self, base: Experiment | None = None, out: str | Path = ""):
        self.base = base or Experiment.preset("smoke")
        self.exp: Experiment | None = self.base  # what the controls describe; None if they do not fit together
        self.mistake = ""  # and then why
        self.planned: pd.DataFrame | None = None  # the last plan that could be made
        self.drawn: Method | None = None  # and its method
        self.preset = ""  # the one that the controls are at
        self.runs: list[Trained] = []
        self.training: Training | None = None
        self.lock = threading.RLock()  # a training and a click may want to show the runs at the same time
        self._make_settings()
        self._make_runs(str(out) or "records")
        self.box = self._page()
        self._renew()
        self._show_runs()
        self._list_records()

    def _make_settings(self) -> None:
        self.controls = knobs.controls(self.base)
        self.notes = {name: Note() for name in self.controls}
        self.held = False  # while a preset moves several controls
        for name, widget in self.controls.items():
            widget.observe(lambda _, name=name: self._moved(name), "value")
        self.plan_view, self.preset_note = widgets.HTML(), Note()
        self._plan = ""  # what was drawn last

    def _make_runs(self, out: str) -> None:
        self.progress, self.compare_view, self.film_view = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.train_note, self.run_note, self.record_note = Note(), Note(), Note()
        half = dict(width="49%")
        self.choice, self.beside = control(widgets.Dropdown, "Run", **half), control(widgets.Dropdown, "Beside", **half)
        self.name = control(widgets.Text, "Name of the run", **half)
        self.folder = control(widgets.Text, "Folder of records", **half)
        self.record = control(widgets.Dropdown, "Record", **half)
        self.layer = control(widgets.Dropdown, "Layer", **half)
        self.folder.value, self.choosing = out, False  # choosing: while several of them are changed at once
        self.choice.observe(lambda change: self.choosing or self._swap(change.old), "value")
        self.beside.observe(lambda _: self.choosing or self._show_choice(), "value")
        self.layer.observe(lambda _: self.choosing or self._show_film(), "value")
        self.name.observe(lambda change: self._attempt(self.run_note, self.rename, change.new), "value")
        self.folder.observe(lambda _: self._attempt(self.record_note, self._list_records), "value")

    def _page(self) -> widgets.VBox:
        row = dict(layout=dict(flex_flow="row wrap", align_items="center"))
        presets = [self._preset_button(name) for name in knobs.PRESETS]
        settings = [widget for name, control in self.controls.items() for widget in (control, self.notes[name])]
        train = self._button("Train", self.train_note, self.train, "primary")
        left = [
            widgets.HBox(presets, **row), self.preset_note, *settings,
            widgets.HBox([train, self._button("Stop", self.train_note, self.stop)]), self.train_note, self.progress,
        ]  # fmt: skip
        compare = [
            self.compare_view,
            widgets.HBox([self.choice, self.beside], **row),
            widgets.HBox([self.name, self._button("Remove run", self.run_note, self.remove)]), self.run_note,
            widgets.HBox([self.folder, self._button("Save run", self.record_note, self.save)]),
            widgets.HBox([self.record, self._button("Open record", self.record_note, self.open)]), self.record_note,
        ]  # fmt: skip
        self.views = [widgets.VBox(part) for part in ([self.plan_view], compare, [self.layer, self.film_view])]
        self.view = widgets.ToggleButtons(options=VIEWS, style=dict(button_width="8em"))
        self.view.observe(lambda _: self._show_view(), "value")
        self._show_view()
        sides = [
            widgets.VBox(left, layout=dict(flex="1 1 19em", max_width="25em", padding="0 1em 0 0")),
            widgets.VBox([self.view, *self.views], layout=dict(flex="2 1 30em", min_width="0")),
        ]
        return named(widgets.HBox(sides, layout=dict(flex_flow="row wrap", align_items="flex-start")))

    def _show_view(self) -> None:
        for name, view in zip(VIEWS, self.views, strict=True):
            view.layout.display = "" if name == self.view.value else "none"

    def _preset_button(self, name: str) -> widgets.Button:
        button = widgets.Button(description=name, layout=dict(width="auto", margin="1px"))
        button.on_click(lambda _: self.set_preset(name))
        return button

    def _button(
        self, text: str, note: widgets.HTML, action: Callable[[], str | None], style: str = ""
    ) -> widgets.Button:
        button = widgets.Button(description=text, button_style=style)
        button.on_click(lambda _: self._attempt(note, action))
        return button

    def _attempt(self, note: widgets.HTML, action: Callable[..., str | None], *args) -> None:
        """Do it, and say beside the control what came of it or what was wrong."""
        note.value = ""  # first, so that it cannot erase what a training says that has just begun
        try:
            if text := action(*args):
                note.value = said(text)
        except (ValueError, RuntimeError, OSError) as error:
            note.value = wrong(error)

    def _repr_mimebundle_(self, **_):
        """The page in JupyterLab; without widgets, the schedules that it starts with."""
        page = self.box._repr_mimebundle_()
        if self.planned is None:
            return page, {}
        figure = figures.planned(self.planned, self.drawn.exp.method)
        picture, metadata = figures.show(figure, planned_in_words(self.planned, self.drawn))._repr_mimebundle_()
        return page | picture, metadata

    # Settings and schedules.

    def set_preset(self, name: str) -> None:
        """Move the controls to a named experiment."""
        settings, words = knobs.PRESETS[name]
        self.held = True
        for setting, value in settings.items():
            self.controls[setting].value = value
        self.held = False
        self._moved("")
        self.preset, self.preset_note.value = name, said(words)

    def _name(self) -> str:
        """The preset's name while every control is where the preset put it, else the settings in words."""
        settings = knobs.PRESETS[self.preset][0] if self.preset else {}
        at_preset = settings and all(self.controls[k].value == v for k, v in settings.items())
        return self.preset if at_preset else describe(self.exp.to_dict())

    def _moved(self, name: str) -> None:
        if not self.held:
            self.preset = self.preset_note.value = ""
            self._renew(name)
            self.view.value = "Plan"

    def _renew(self, moved: str = "") -> None:
        """Read the controls again: draw what they describe, or say beside the moved one why they are not allowed."""
        self.train_note.value, values = "", {k: knobs.value_of(widget) for k, widget in self.controls.items()}
        try:
            self._disable(known := settings_of(values["method"], self.base.rules).keys())
            exp = self.base.replace(**{k: v for k, v in values.items() if k in known})
            federation = assemble(exp, loaded(exp))
        except ValueError as error:
            place, self.mistake = knobs.mistake(error, values, moved)
            self.exp, self.plan_view.value = None, stale(self._plan)
            self.notes.get(place, self.train_note).value = wrong(self.mistake)
            return
        self.exp, self.mistake = exp, ""
        try:
            planned = measure.plan(federation)
            panels, words = plan_panels(planned, federation.method), planned_in_words(planned, federation.method)
        except Exception as error:  # your own method may fail in any way without its clients' answers
            reason = f"{federation.method.label} cannot be planned without training ({type(error).__name__}: {error})"
            self.plan_view.value = wrong(f"{reason}. It can be trained all the same.")
            return
        self.planned, self.drawn = planned, federation.method
        self._plan = f'{svg.image(svg.chart(panels), words)}<div role="status">{escape(words)}</div>'
        self.plan_view.value = self._plan
        for name, text in knobs.remarks(exp, planned).items():
            self.notes[name].value = said(text)

    def _disable(self, known) -> None:
        """Only a control whose setting the method has can be moved."""
        for setting, widget in self.controls.items():
            widget.disabled, self.notes[setting].value = setting not in known, ""
        if off := [knobs.SETTINGS[k] for k, widget in self.controls.items() if widget.disabled]:
            label = METHODS[self.controls["method"].value].label
            self.notes["method"].value = said(f"{label} does not use: {', '.join(off)}.")

    # Training.

    def train(self) -> None:
        """Start training the experiment that the controls describe, in the background."""
        if self.training and not self.training.over:
            raise RuntimeError("A run is being trained; stop it first, or wait for it.")
        if self.exp is None:
            raise ValueError(f"Not trained: {self.mistake}")
        self.training, self.running = Training(self.exp, self._watch), self._name()
        self.view.value = "Compare"
        self.training.thread.start()

    def stop(self) -> None:
        """Stop the training before its next client; finished rounds are kept."""
        if not self.training or self.training.over:
            raise RuntimeError("Nothing is being trained.")
        self.training.stopping.set()

    def wait(self) -> Trained:
        """Wait until the training is over; return its run, or raise the error that ended it."""
        if not self.training:
            raise RuntimeError("Nothing is being trained.")
        self.training.thread.join()
        if self.training.error:
            raise self.training.error
        return self.runs[-1]

    def _watch(self, training: Training) -> None:
        with self.lock:
            exp, rows, name = training.exp, training.rows, self.running
            done = f"round {len(rows)} of {exp.rounds}"
            if rows:
                done += f", accuracy {records.last_accuracy(rows):.3f}, sparsity {rows[-1]['sparsity']:.3f}"
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
        """Show it beside the others, under a unique name."""
        with self.lock:
            names, name, i = {other.name for other in self.runs}, run.name, 2
            while run.name in names:
                run.name, i = f"{name} ({i})", i + 1
            self.runs.append(run)
            self._choose(run)

    def _choose(self, run: Trained | None) -> None:
        """Show this run, beside the one that was shown before."""
        before, options = self.choice.label, [(other.name, i) for i, other in enumerate(self.runs)]
        self.choosing = True
        self.choice.options, self.beside.options = options, [("no other run", -1), *options]
        self.choice.value = self.runs.index(run) if run else None
        self.beside.value = next((i for name, i in options if name == before and self.runs[i] is not run), -1)
        self.choosing = False
        self._show_choice()

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
        """The curves of all runs, including the one in training, and a table that names them."""
        with self.lock:
            shown = list(self.runs)
            if self.training and not self.training.over and self.training.rows:
                shown.append(self.training.trained("being trained"))
            if not shown:
                self.compare_view.value = said("No run yet: train one, or open a record.")
                return
            self.compare_view.value = compared(shown, self.pair)

    @property
    def pair(self) -> list[Trained]:
        """The chosen run, and the one beside it."""
        places = dict.fromkeys(i for i in (self.choice.value, self.beside.value) if i is not None and i >= 0)
        return [self.runs[i] for i in places]

    def _swap(self, before: int | None) -> None:
        """If the chosen run is already the one beside, the two change places."""
        if self.choice.value == self.beside.value and before is not None:
            self.beside.value = before
        self._show_choice()

    # The film.

    def _show_choice(self) -> None:
        with self.lock:
            run = self.pair[0] if self.runs else None
            self.name.value = run.name if run else ""
            layers, before, self.choosing = list(run.masks[0]) if run and run.masks else [], self.layer.value, True
            self.layer.options = layers
            if layers:
                self.layer.value = before if before in layers else shown_best(run.masks[0])
            self.choosing = False
            self._show_runs()
            self._show_film()

    def _show_film(self) -> None:
        with self.lock:
            if self.layer.value is None:
                words = "A record keeps no masks: train the run here." if self.runs else "No run yet: train one."
                self.film_view.value = said(words)
                return
            shapes = [{k: v.shape for k, v in run.masks[0].items()} if run.masks else {} for run in self.pair]
            alike = [run for run, shape in zip(self.pair, shapes, strict=True) if shape == shapes[0]]
            self.film_view.value = frame(film(alike, self.layer.value))


def _title(folder: Path) -> str:
    """A record in the list: what it is, and its folder."""
    try:
        return f"{describe(json.loads((folder / 'config.json').read_text('utf-8')))} · {folder.name}"
    except (OSError, ValueError, TypeError, KeyError):
        return f"{folder.name}, not readable"
