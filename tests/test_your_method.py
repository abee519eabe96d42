"""A method of one's own, with a setting of its own, through every part of the house; no other file is touched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import torch
import yaml
from helpers import same

from feddip_core import METHODS, Experiment, Method, load_runs, real, run, whole
from feddip_core.engine import records
from feddip_core.engine.assembly import assemble
from feddip_core.engine.measure import plan
from feddip_core.masks import kept, magnitude_mask
from feddip_core.study import figures

SOURCE = '''
from feddip_core import Method, real, whole
from feddip_core.masks import magnitude_mask


class Mine(Method):
    """Keep a share of the weights, chosen anew every R rounds."""

    feedback = False
    settings = dict(share=real(0.5, 0, 1, "of the weights that stay"), reconfigure_every=whole(2, 1, "R"))

    def next_mask(self, w, m, t):
        return m if self.tau(t) is None else magnitude_mask(w, 1 - self.exp.share)
'''
ROOT = Path(__file__).parent.parent
SMALL = dict(rounds=4, width=0.5, clients=20, clients_per_round=2, local_epochs=1, learning_rate=0.1)


class Local(Method):
    """As a class in a cell: its name is known to this process alone."""

    feedback = False
    settings = dict(share=real(0.5, 0, 1, "of the weights that stay"), reconfigure_every=whole(2, 1, "R"))  # noqa: RUF012

    def next_mask(self, w, m, t):
        return m if self.tau(t) is None else magnitude_mask(w, 1 - self.exp.share)


Local.__module__ = "__main__"  # where a notebook's classes stand


@pytest.fixture
def yours(tmp_path, monkeypatch):
    """A module of the reader's own on the path; its method's name."""
    (tmp_path / "yours.py").write_text(SOURCE, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield "yours:Mine"
    METHODS.pop("yours:Mine", None)
    sys.modules.pop("yours", None)


def small(**settings):
    return Experiment.preset("smoke", **(SMALL | settings))


def test_a_class_is_given_to_run_and_its_settings_are_the_experiments():
    result = run(small(), method=Local)
    exp = result.experiment
    assert (exp.method, exp.share, exp.reconfigure_every) == ("__main__:Local", 0.5, 2)
    assert result.metrics["sparsity"].round(3).tolist() == [0, 0.5, 0.5, 0.5]
    assert small(method=Local, share=0.2).share == 0.2
    assert exp.replace(share=0.1).run_id != exp.run_id
    assert exp.replace(method="fedavg").method == "fedavg"


@pytest.mark.parametrize("value", [1.5, "half", None.__class__, True])
def test_its_settings_are_checked_like_ours(value):
    with pytest.raises(ValueError, match=r"share: .* is not allowed; it must be a number in \[0, 1\]"):
        small(method=Local, share=value)
    with pytest.raises(ValueError, match=r"lambda_max: 1 is not allowed; __main__:Local has no such setting; .*share"):
        small(method=Local, lambda_max=1)


def test_a_setting_may_not_have_a_common_name():
    class Greedy(Method):
        settings = dict(rounds=whole(1, 1, "…"))  # noqa: RUF012

    with pytest.raises(ValueError, match=r"rounds: .* may not have a setting of that name"):
        small(method=Greedy)


def test_what_is_no_method_is_refused():
    with pytest.raises(ValueError, match=r"method: 'fedavgg' is not allowed; it must be one of fedavg, .*"):
        small(method="fedavgg")
    with pytest.raises(ValueError, match="method: 'json:loads' is not allowed"):
        small(method="json:loads")
    with pytest.raises(ValueError, match=r"method: 'nowhere:Mine' is not allowed; it cannot be imported .*yours.py"):
        small(method="nowhere:Mine")


def test_other_code_of_the_same_name_is_another_run():
    first = small(method=Local).run_id

    class Changed(Local):
        def next_mask(self, w, m, t):
            return None

    Changed.__module__, Changed.__qualname__ = Local.__module__, Local.__qualname__
    try:
        assert small(method=Changed).run_id != first
    finally:
        METHODS[Local.__module__ + ":" + Local.__qualname__] = Local
    assert small(method=Local).run_id == first


def test_its_record_has_its_name_its_settings_and_a_hash_of_its_source(tmp_path):
    exp = small(method=Local, share=0.3)
    run(exp, tmp_path)
    folder = records.folder_of(exp, tmp_path)
    assert folder.name.startswith("Local-") and folder.parent.name == "fashion_mini"
    assert json.loads((folder / "config.json").read_text("utf-8"))["share"] == 0.3
    assert json.loads((folder / "provenance.json").read_text("utf-8"))["method_sha256"] == exp.source_sha256
    table = load_runs(tmp_path)
    assert (table["share"] == 0.3).all() and (table["run_id"] == exp.run_id).all()
    assert pd.read_csv(tmp_path / "index.csv")["method"].tolist() == ["__main__:Local"]


def test_it_is_resumed_to_the_same_bits(tmp_path):
    exp = small(method=Local)
    whole_run = run(exp)
    run(exp, tmp_path, until=2)
    resumed = run(exp, tmp_path)
    assert "resumed" in resumed.provenance
    assert same(whole_run, resumed)


def test_a_class_that_workers_cannot_import_is_refused_before_training(tmp_path):
    for where in (dict(workers=2), dict(federation=lambda *_: None)):
        with pytest.raises(ValueError, match=r"method: '__main__:Local' is not allowed here; .*yours:Local"):
            run(small(method=Local), tmp_path, **where)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_workers_train_it_to_the_same_bits(yours):
    exp = small(method=yours, share=0.4)
    assert same(run(exp), run(exp, workers=2))


def test_its_bits_are_counted_and_planned():
    exp = small(method=Local)
    metrics = run(exp).metrics
    known = ["sparsity", "downlink_bits", "uplink_bits"]
    assert plan(assemble(exp))[known].to_dict() == metrics[known].to_dict()
    layout = assemble(exp).clients.layout
    left = layout.size - layout.prunable_size + kept(magnitude_mask(layout.weights(torch.rand(layout.size)), 0.5))
    assert metrics["uplink_bits"].tolist() == [64 * layout.size, 64 * layout.size, 64 * left, 64 * left]


def test_figures_know_it(tmp_path):
    exp = small(method=Local)
    metrics = run(exp).metrics
    picture = figures.show(figures.side_by_side({"feddip": metrics, exp.method: metrics}), "two curves")
    assert picture.png[:4] == b"\x89PNG"
    assert figures.label(exp.method) == "Local"
    # Where the class is not at hand, as in the record of somebody else, there is still a name and a colour.
    assert figures.label("somewhere:Theirs") == "Theirs"
    assert figures.colour("somewhere:Theirs").startswith("#")


def test_the_explorer_plans_and_trains_it(tmp_path):
    from feddip_core.lab.explorer import Explorer

    exp = small(method=Local)
    explorer = Explorer(exp, tmp_path)
    assert explorer.mistake == ""
    assert "Local, 4 rounds: sparsity 0.000 after the first and 0.500 after the last" in explorer.plan_view.value
    assert explorer.controls["lambda_max"].disabled and not explorer.controls["reconfigure_every"].disabled
    explorer.train()
    trained = explorer.wait()
    assert trained.metrics["sparsity"].iloc[-1] == pytest.approx(0.5, abs=1e-4)
    explorer.save()
    assert records.folder_of(exp, tmp_path).is_dir()


def test_live_curves_show_it(monkeypatch):
    from feddip_core.lab import live

    rows = run(small(method=Local)).metrics.to_dict("records")
    figure = live.drawn(live.panels("__main__:Local"), pd.DataFrame(rows))
    assert len(figure.axes) == 3


@pytest.mark.slow
def test_a_batch_has_papermill_run_it_by_name_with_its_settings(yours, tmp_path, monkeypatch):
    from feddip_core.batch.command import main as batch

    monkeypatch.chdir(tmp_path)
    given = [f"{k}={v}" for k, v in SMALL.items()]
    command = ["--methods", yours, "--set", "share=0.25", *given, "--out", str(tmp_path / "out")]
    assert batch([*command, "--dry-run"]) == 0
    assert batch(command) == 0
    table = load_runs(tmp_path / "out" / "runs")
    assert set(table["method"]) == {yours} and set(table["share"]) == {0.25}
    with pytest.raises(SystemExit):
        batch([*command, "--set", "shares=1"])
    with pytest.raises(SystemExit):
        batch(["--methods", "__main__:Local", "--out", str(tmp_path / "out")])


def test_flower_runs_it_to_the_same_bits(yours, tmp_path):
    pytest.importorskip("flwr")
    from grid import LocalGrid, run_on

    from feddip_core.flower import configured

    config = dict(preset="smoke", method=yours, dataset="", settings=yaml.safe_dump(SMALL | dict(share=0.25)))
    exp = configured(config)
    assert exp == small(method=yours, share=0.25)
    assert same(run(exp), run_on(LocalGrid(exp.clients), exp))


@pytest.mark.slow
def test_another_process_reads_the_record_without_the_class(tmp_path):
    run(small(method=Local), tmp_path)
    code = (
        "import sys; from feddip_core import load_runs; t = load_runs(sys.argv[1]); print(t['share'].iloc[0], len(t))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)],
        capture_output=True,
        encoding="utf-8",
        env=os.environ,
    )
    assert done.stdout.split() == ["0.5", "4"], done.stderr


def test_the_notebook_builds_one_step_by_step():
    notebook = nbformat.read(ROOT / "notebooks" / "32_own_method.ipynb", as_version=4)
    classes = [cell.source for cell in notebook.cells if cell.cell_type == "code" and "(Method):" in cell.source]
    assert len(classes) >= 2 and all(len(source.splitlines()) <= 20 for source in classes)


def test_a_class_whose_source_is_nowhere_is_refused():
    space = {"Method": Method}
    exec("class Ghost(Method):\n    def lam(self, t):\n        return 0.0", space)
    with pytest.raises(ValueError, match=r"method: .*Ghost' is not allowed; the source of lam cannot be read"):
        small(method=space["Ghost"]).run_id  # noqa: B018
