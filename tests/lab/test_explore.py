import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import ipywidgets
import numpy as np
import pytest
import torch
from PIL import Image

from feddip_core import METHODS, Experiment, Method, load_runs, real, run
from feddip_core.engine.records import folder_of
from feddip_core.lab import explorer as module
from feddip_core.lab.explorer import Explorer
from feddip_core.lab.film import Film, blocks_of, film, frame, mask_png, mask_states, why
from feddip_core.lab.knobs import PRESETS, remarks


@pytest.fixture
def explorer(tiny, tmp_path):
    return Explorer(tiny(rounds=3), out=tmp_path)


@pytest.fixture(scope="module")
def finished():
    """An explorer with two runs; whoever changes it makes good for it."""
    settings = dict(rounds=3, width=0.5, clients=10, clients_per_round=2, local_epochs=1, learning_rate=0.1)
    explorer = Explorer(Experiment.preset("smoke", **settings))
    explorer.train()
    explorer.wait()
    explorer.controls["seed"].value = 1
    explorer.train()
    explorer.wait()
    return explorer


def button(explorer, text):
    """The button of that name, wherever it stands."""
    found, boxes = [], [explorer.box]
    while boxes:
        for child in boxes.pop().children:
            boxes += [child] if isinstance(child, ipywidgets.Box) else []
            found += [child] if isinstance(child, ipywidgets.Button) and child.description == text else []
    (one,) = found
    return one


def test_a_slider_redraws_schedules_and_cost(explorer):
    before = explorer.plan_view.value
    assert "sparsity 0.500 after the first" in before and "0.900 after the last" not in before  # R = 2 leaves T = 3 out
    explorer.controls["reconfigure_every"].value = 3
    assert "0.900 after the last" in explorer.plan_view.value
    explorer.controls["sparsity_target"].value = 0.75
    after = explorer.plan_view.value
    assert "0.750 after the last" in after
    (alt,) = re.findall(r'<img alt="([^"]+)"', after)
    assert "0.750 after the last" in alt and "MB up" in alt
    pictures = [re.search(r"base64,([^\"]+)", html)[1] for html in (before, after)]
    assert pictures[0] != pictures[1]
    assert b64decode(pictures[1]).startswith(b"<svg")


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("sparsity_initial", 0.95, "First sparsity 0.95 must not exceed the target 0.9"),
        ("sparsity_target", 0.1 + 0.2 + 0.14, "First sparsity 0.5 must not exceed the target 0.44"),
        ("partition", "dirichlet(no)", "Partition 'dirichlet(no)' is not allowed; it must be one of iid"),
        ("seed", -1, "Seed -1 is not allowed; it must be a whole number of at least 0"),
    ],
)
def test_a_mistake_is_named_beside_its_control_until_it_is_mended(explorer, name, value, message):
    good = explorer.controls[name].value
    explorer.controls[name].value = value
    assert explorer.mistake.startswith(message) and explorer.exp is None
    assert 'role="alert"' in explorer.notes[name].value and explorer.notes[name].layout.display == ""
    assert "Dimmed" in explorer.plan_view.value and "opacity" in explorer.plan_view.value
    assert not any(note.value for other, note in explorer.notes.items() if other != name)
    button(explorer, "Train").click()
    assert "Not trained: " in explorer.train_note.value
    assert explorer.training is None
    explorer.controls[name].value = good
    assert 'role="alert"' not in explorer.notes[name].value + explorer.train_note.value
    assert "Dimmed" not in explorer.plan_view.value
    assert explorer.exp == explorer.base


def test_a_mistake_in_a_setting_without_a_control_is_told_beside_the_control_that_was_moved(tiny):
    explorer = Explorer(tiny(clients=7))
    explorer.controls["partition"].value = "pathological"
    assert "clients 7 is not allowed" in explorer.notes["partition"].value
    explorer.controls["partition"].value = "iid"
    assert explorer.notes["partition"].value == explorer.train_note.value == ""


def test_every_method_can_be_chosen_and_turns_off_what_it_does_not_have(explorer):
    off = {}
    for method in METHODS:
        explorer.controls["method"].value = method
        assert explorer.exp is not None and explorer.exp.method == method, explorer.mistake
        assert f"{METHODS[method].label}, 3 rounds" in explorer.plan_view.value
        off[method] = {name for name, control in explorer.controls.items() if control.disabled}
        assert ("does not use: " in explorer.notes["method"].value) == bool(off[method])
        assert not off[method] & explorer.exp.to_dict().keys()
        assert ("at most" in explorer.plan_view.value) == METHODS[method].plan_is_a_bound
    assert off["feddip"] == set()
    assert off["dpf"] == {"sparsity_initial", "lambda_max", "lambda_steps"}
    assert off["snip"] == {"sparsity_initial", "lambda_max", "lambda_steps", "reconfigure_every", "sparse_uplink"}
    assert off["fedavg"] == off["snip"] | {"sparsity_target"}
    assert off["prunetrain"] == {"sparsity_initial", "sparsity_target", "lambda_steps", "sparse_uplink"}
    explorer.controls["method"].value = "fedprox"
    assert explorer.exp.prox_mu == 0.01  # a method brings its own


@pytest.mark.parametrize("method", [method for method, cls in METHODS.items() if cls.released or cls.switches])
def test_released_versions_are_planned_too(tiny, method):
    explorer = Explorer(tiny(method, rounds=3, rules="released"))
    assert explorer.exp == explorer.base and explorer.exp.rules == "released"
    assert f"{METHODS[method].label}, 3 rounds" in explorer.plan_view.value
    assert ("at most" in explorer.plan_view.value) == (method == "feddst")
    assert not explorer.controls["sparsity_target"].disabled


def test_a_base_without_a_setting_has_a_control_that_waits(tiny):
    explorer = Explorer(tiny("fedavg", rounds=3))
    assert explorer.exp == explorer.base
    assert explorer.controls["sparsity_target"].disabled
    explorer.controls["method"].value = "feddip"
    assert explorer.exp.sparsity_target == explorer.controls["sparsity_target"].value == 0.9


class Halved(Method):
    """One of a reader's own, with a setting of its own."""

    label = "<Halved>"
    settings = dict(share=real(0.5, 0, 1, "of the weights that go"))  # noqa: RUF012

    def first_mask(self, w):
        return self.erk_mask(self.exp.share)


class Shy(Method):
    """One that cannot do without its clients, and does not say what to do instead."""

    questions = {"score": {}}  # noqa: RUF012

    def start(self, w, ask):
        return w * ask([0], "score", w=w)[0]["score"], None, {}

    def score(self, n, w):
        return {"score": torch.ones_like(w)}


def test_a_method_of_ones_own_is_planned_trained_saved_and_opened(tiny, tmp_path):
    explorer = Explorer(tiny(Halved, rounds=1, share=0.8), out=tmp_path)
    assert explorer.exp == explorer.base
    assert "&lt;Halved&gt;, 1 rounds: sparsity 0.800 after the first" in explorer.plan_view.value
    assert "<Halved>" not in explorer.plan_view.value
    assert explorer.controls["sparsity_target"].disabled
    explorer.train()
    explorer.wait()
    button(explorer, "Save run").click()
    button(explorer, "Open record").click()
    assert "is open" in explorer.record_note.value
    assert "Halved" in explorer.chosen.name


def test_a_record_whose_method_is_not_here_is_shown(tiny, tmp_path):
    class Mine(Method):
        pass

    exp = tiny(Mine, rounds=1)
    run(exp, tmp_path)
    METHODS.pop(exp.method)
    explorer = Explorer(tiny(rounds=1), out=tmp_path)
    assert "Mine, iid, T 1, seed 0" in explorer.record.options[0][0]
    button(explorer, "Open record").click()
    assert explorer.chosen.exp is None
    assert "Mine, iid, T 1, seed 0" in explorer.compare_view.value and "1 of 1" in explorer.compare_view.value
    button(explorer, "Save run").click()
    assert "is not available here" in explorer.record_note.value


def test_a_method_that_cannot_be_planned_says_so_and_is_trained(tiny):
    explorer = Explorer(tiny(Shy, rounds=1))
    assert "Shy cannot be planned without training (KeyError: 0)" in explorer.plan_view.value
    assert 'role="alert"' in explorer.plan_view.value
    data, _ = explorer._repr_mimebundle_()
    assert "image/png" not in data and "application/vnd.jupyter.widget-view+json" in data
    explorer.train()
    assert len(explorer.wait().metrics) == 1
    explorer.controls["method"].value = "feddip"
    assert "FedDIP, 1 rounds" in explorer.plan_view.value


def test_one_training_at_a_time(explorer):
    explorer.controls["rounds"].value = 200
    explorer.train()
    button(explorer, "Train").click()
    assert "A run is being trained; stop it first" in explorer.train_note.value
    with pytest.raises(RuntimeError, match="A run is being trained"):
        explorer.train()
    button(explorer, "Stop").click()
    explorer.training.thread.join(60)
    assert explorer.training.over
    assert "stopped, round" in explorer.progress.value
    explorer.controls["rounds"].value = 1
    explorer.train()  # and now again
    assert len(explorer.wait().metrics) == 1
    with pytest.raises(RuntimeError, match="Nothing is being trained"):
        explorer.stop()


def test_a_failing_run_is_told_beside_the_button_and_raised_by_wait(explorer, monkeypatch):
    def broken(*_):
        raise MemoryError("too <large>")

    monkeypatch.setattr("feddip_core.server.Federation.round", broken)
    explorer.train()
    with pytest.raises(MemoryError):
        explorer.wait()
    assert "too &lt;large&gt;" in explorer.train_note.value
    assert explorer.runs == []


def test_runs_stay_and_are_compared(finished):
    view = finished.compare_view.value
    assert [one.exp.seed for one in finished.runs] == [0, 1]
    assert view.count("<tr>") == 3
    for one in finished.runs:
        assert f"{one.name}: {one.metrics['test_accuracy'].iloc[-1]:.3f}" in view  # in the picture's words
    picture = b64decode(re.search(r"base64,([^\"]+)", view)[1]).decode()
    looks = set(re.findall(r'stroke="#D55E00" stroke-width="2" stroke-dasharray="([^"]*)"', picture))
    assert looks == {"", "7 3"}  # two runs of one method can be told apart


def test_runs_are_named_removed_saved_and_opened(finished, tmp_path):
    first, second = finished.runs
    finished.choice.value = 0
    finished.name.value = "<i>mine</i>"
    assert first.name == "<i>mine</i>"
    assert "&lt;i&gt;mine" in finished.compare_view.value and "<i>mine" not in finished.compare_view.value
    finished.name.value = second.name
    assert "is not allowed; it must be one that no other run has" in finished.run_note.value
    assert first.name == "<i>mine</i>"

    finished.folder.value = " "
    button(finished, "Save run").click()
    assert "it must be the name of a folder" in finished.record_note.value
    finished.folder.value = str(tmp_path)
    assert finished.record.options == ()
    button(finished, "Open record").click()
    assert "There is no record in" in finished.record_note.value
    button(finished, "Save run").click()
    assert f"Saved in {tmp_path}" in finished.record_note.value
    assert load_runs(tmp_path)["test_accuracy"].tolist() == first.metrics["test_accuracy"].tolist()

    button(finished, "Open record").click()
    opened = finished.runs[2]
    assert opened.exp == first.exp and finished.chosen is opened
    assert "A record keeps no masks" in finished.film_view.value
    button(finished, "Remove run").click()
    assert finished.runs == [first, second]
    assert folder_of(first.exp, tmp_path).exists()


def test_a_damaged_record_is_an_error_beside_the_button(finished, tmp_path):
    finished.runs[0].save(tmp_path)
    (folder_of(finished.runs[0].exp, tmp_path) / "config.json").write_text("{", "utf-8")
    finished.folder.value = str(tmp_path)
    button(finished, "Open record").click()
    assert "not a readable record" in finished.record_note.value
    assert len(finished.runs) == 2


def test_the_records_below_the_folder_are_listed(explorer, tiny, tmp_path):
    runs = {"FedAvg, iid, T 1, seed 0": tiny("fedavg", rounds=1), "FedDIP, s_p 0.9, iid, T 1, seed 0": tiny(rounds=1)}
    for exp in runs.values():
        run(exp, tmp_path)
    explorer.folder.value = f"{tmp_path}/"
    folders = {name: folder_of(exp, tmp_path) for name, exp in runs.items()}
    assert list(explorer.record.options) == [(f"{name} · {f.name}", str(f)) for name, f in folders.items()]


def test_without_a_run_its_buttons_say_so(explorer):
    for text, note in (("Remove run", explorer.run_note), ("Save run", explorer.record_note)):
        button(explorer, text).click()
        assert "There is no run yet" in note.value
    explorer.name.value = "a name for nothing"
    assert explorer.runs == []


def test_presets_move_the_controls_and_any_later_move_leaves_them(explorer):
    ends = {"The paper": 0.9, "Prune too fast": 0.98, "Never reconfigure": 0.5, "Kill the network": 0.9}
    for name in PRESETS:
        button(explorer, name).click()
        assert explorer.mistake == "" and explorer.exp.method == "feddip", name
        assert explorer.planned["sparsity"].iloc[-1] == pytest.approx(ends.get(name, 0.9), abs=1e-3)
        assert explorer.preset == name and explorer.preset_note.value
    sparse = explorer.planned["uplink_bits"].sum()
    button(explorer, "The paper").click()
    assert sparse < 0.5 * explorer.planned["uplink_bits"].sum()
    explorer.controls["seed"].value = 5
    assert explorer.preset == explorer.preset_note.value == ""


@pytest.mark.parametrize("settings, name, words", [
    (dict(reconfigure_every=9), "reconfigure_every", "R 9 is more than T 3: no new mask. The run ends at sparsity"),
    (dict(reconfigure_every=2), "reconfigure_every", "after round 2 of 3: the run ends at sparsity 0.885, not"),
    (dict(lambda_steps=1), "lambda_steps", "One step means no penalty"),
    (dict(lambda_steps=9), "lambda_steps", "Q 9 is more than T 3"),
    (dict(lambda_max=0.0), "lambda_steps", "No effect: the penalty is 0"),
    (dict(sparsity_initial=0.9), "sparsity_target", "Equal to the first sparsity"),
    (dict(reconfigure_every=1, sparse_uplink=True), "sparse_uplink", "Saves nothing at R 1"),
])  # fmt: skip
def test_what_settings_do_in_silence_is_said_beside_their_control(tiny, settings, name, words):
    explorer = Explorer(tiny(rounds=3, **(dict(reconfigure_every=3, lambda_steps=3) | settings)))
    assert words in explorer.notes[name].value and 'role="status"' in explorer.notes[name].value


def test_a_plain_experiment_needs_no_remark(tiny):
    explorer = Explorer(tiny(rounds=4, reconfigure_every=2))
    assert remarks(explorer.exp, explorer.planned) == {}


def test_two_runs_stand_side_by_side(finished):
    finished.choice.value, finished.beside.value = 0, 1
    assert [run.exp.seed for run in finished.pair] == [0, 1]
    assert "Settings: Seed 1 → 0. One run each" in finished.compare_view.value
    finished.choice.value = 1  # which stood beside it
    assert [run.exp.seed for run in finished.pair] == [1, 0]
    data = film(finished.pair, "fc3.weight")
    assert [reel["name"] for reel in data["runs"]] == [run.name for run in finished.pair]
    assert "<iframe title=" in finished.film_view.value


def test_the_film_has_values_masks_and_thresholds_of_every_round(finished):
    run, layer = finished.runs[0], "fc3.weight"
    (reel,) = film([run], layer)["runs"]
    assert (reel["frames"], reel["rows"], reel["columns"]) == (4, 10, 42)
    values = np.frombuffer(b64decode(reel["values"]), "<i2").reshape(4, 10, 42) * reel["scale"]
    kept = np.unpackbits(np.frombuffer(b64decode(reel["kept"]), np.uint8))[: 4 * 420].reshape(4, 10, 42)
    for round in range(4):
        assert (kept[round] == run.masks[round][layer].numpy()).all()
        assert sum(reel["counts"][round]) == 420 and reel["counts"][round][0] == (kept[round] == 0).sum()
        assert np.allclose(values[round], run.frames[round].values[layer], atol=reel["scale"])
    assert [bar is None for bar in reel["thresholds"]] == [True, True, False, True]  # R = 2
    assert (abs(values[2][kept[2] == 1]) >= reel["thresholds"][2] - reel["scale"]).all()
    assert (abs(values[2][kept[2] == 0]) <= reel["thresholds"][2] + reel["scale"]).all()


def test_why_returns_differ_is_said_from_the_record_at_full_scale(finished):
    words = why(finished.runs[0])
    assert f"{finished.runs[0].metrics['regrown'].sum():,} returns among 15,615 weights in 3 rounds" in words
    assert "At the paper's scale: 1,257 among 61,470 in 1,000 rounds" in words
    assert "η 0.1, momentum 0, epochs 1 here; η 0.01, momentum 0, epochs 5 there" in words


def test_a_film_in_a_notebook_is_a_picture_and_in_the_gallery_a_film(finished):
    data, metadata = Film(finished.runs[0], "fc3.weight")._repr_mimebundle_()
    assert metadata["image/png"]["alt"].startswith("fc3.weight after round 3: ")
    cell = {"metadata": {"tags": ["play-schedules"]}, "outputs": [{"data": data}]}
    assert re.findall('data-play="([a-z]+)"', blocks_of(cell)) == ["schedules", "film"]
    assert blocks_of({"metadata": {}, "outputs": [{"data": {"image/png": ""}}]}) == ""


def test_a_name_cannot_break_out_of_the_film(finished):
    data = film(finished.runs[:1], "fc3.weight")
    data["runs"][0]["name"] = "</script><b>"
    assert "</script><b>" not in frame(data) and "script&gt;&lt;b" not in frame(data)


def test_pruned_kept_and_returned_by_hand():
    history = [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 0]]
    masks = [{"layer": torch.tensor(row, dtype=torch.bool).view(2, 2, 1)} for row in history]
    states = [state.tolist() for state in mask_states(masks, "layer")]
    assert states == [[[1, 1], [0, 0]], [[1, 0], [2, 0]], [[1, 2], [2, 0]]]
    picture = Image.open(BytesIO(mask_png(np.array([[0, 1, 2]])))).convert("RGB")
    colours = [picture.getpixel((int(picture.width * x), picture.height // 2)) for x in (1 / 6, 3 / 6, 5 / 6)]
    assert colours == [(0xF2, 0xF2, 0xF2), (0x7A, 0x8B, 0x99), (0xD5, 0x5E, 0x00)]


def test_where_there_are_no_widgets_there_is_a_picture(explorer):
    data, metadata = explorer._repr_mimebundle_()
    assert b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.box.model_id
    assert "the whole run sends" in metadata["image/png"]["alt"]
    explorer.controls["seed"].value = -1
    explorer._repr_mimebundle_()  # the last that made sense


def test_no_widget_that_makes_papermill_hang():
    for path in Path(module.__file__).parent.glob("*.py"):
        assert not re.search(r"widgets\.(Output|interact|interactive)\(", path.read_text("utf-8")), path.name
