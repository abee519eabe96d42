"""A method of one's own: a class, which gets records, resume, workers and counting without another file."""

import json
import sys
from typing import ClassVar

import own_methods
import pytest
import torch
from helpers import same, states

from feddip_core import METHODS, Experiment, Method, load_runs, real, run
from feddip_core.communication import DENSE, Payload
from feddip_core.engine import measure, records
from feddip_core.engine.assembly import assemble
from feddip_core.methods import FedAvg


def test_a_class_that_changes_nothing_is_fedavg(tiny):
    class Nothing(Method):
        """The base class is FedAvg."""

    plain, mine = run(tiny("fedavg", rounds=2)), run(tiny(Nothing, rounds=2))
    assert same(plain, mine)
    assert mine.experiment.method.endswith("Nothing")


def test_run_takes_the_class_itself(tiny, tmp_path):
    class Held(FedAvg):
        settings: ClassVar = dict(hold=real(0.0, 0, 1, "how much of the old model stays"))

        def next(self, average, state):
            w = average.mean["w"]
            return torch.lerp(w, state.w, self.exp.hold), state.m, {}

    plain = tiny("fedavg", rounds=2)
    assert same(run(plain), run(plain, method=Held))
    held = run(tiny(Held, rounds=2, hold=0.5), out=tmp_path)
    assert not same(run(plain), held)
    table = load_runs(tmp_path)
    assert table["hold"].unique().tolist() == [0.5] and table["rules"].unique().tolist() == ["paper"]
    assert records.folder_of(held.experiment, tmp_path).name.endswith(f"Held-seed0-{held.experiment.run_id}")


def test_half_is_kept_by_a_method_in_a_module(tiny, mini, tmp_path):
    """Resumed after a round to the same bits; test_your_method.py has one that workers train."""
    exp = tiny(own_methods.Half, rounds=3, clients=60)
    assert exp.method == "own_methods:Half"
    whole = run(exp)
    run(exp, out=tmp_path, until=1)
    assert same(run(exp, out=tmp_path), whole)
    assert whole.metrics["sparsity"].tolist() == pytest.approx([0.5] * 3, abs=1e-4)
    n, n_w, kept = 15_738, 15_615, 7_807  # a LeNet-5 of half the width
    layout = assemble(exp, mini).clients.layout
    assert (layout.size, layout.prunable_size) == (n, n_w)
    # Round 1 sends a dense model, later rounds the kept half; all weights come back.
    rows = [row for _, _, row in states(exp, mini)][1:]
    assert rows[0]["downlink_bits"] == 2 * 32 * n
    assert rows[1]["downlink_bits"] == 2 * (32 * (n - n_w + kept) + n_w)
    assert {row["uplink_bits"] for row in rows} == {2 * 32 * n}


def test_a_plan_works_for_a_method_of_ones_own(tiny, mini):
    exp = tiny(own_methods.Half, rounds=3, clients=60)
    known = ["sparsity", "lambda_", "downlink_bits", "uplink_bits"]
    assert measure.plan(assemble(exp, mini))[known].to_dict() == run(exp).metrics[known].to_dict()


def test_what_it_sends_is_what_is_counted(tiny, mini):
    class Twice(FedAvg):
        def finish(self, upload, terms, m, state, n):
            return upload.plus(again=upload.values["w"])

        def upload(self, state, n):
            return Payload({**super().upload(state, n).parts, "again": DENSE})

    rows = [row for _, _, row in states(tiny(Twice, rounds=1), mini)]
    assert rows[1]["uplink_bits"] == 2 * rows[1]["downlink_bits"]


def test_a_class_in_a_notebooks_cell_cannot_go_to_other_processes(tiny):
    class Cell(FedAvg):
        pass

    with pytest.raises(ValueError, match=r"method: '.*Cell' is not allowed here; other processes cannot import"):
        run(tiny(Cell, rounds=1), workers=2)
    in_main = type("Mine", (FedAvg,), {"__module__": "__main__", "__qualname__": "Mine"})
    with pytest.raises(ValueError, match=r"method: '__main__:Mine' is not allowed here; .* Move it into a module"):
        run(tiny(in_main, rounds=1), workers=2)


def test_a_record_whose_method_cannot_be_imported_is_still_readable(tiny, tmp_path, monkeypatch):
    (tmp_path / "gone_tomorrow.py").write_text(
        "from feddip_core import real\nfrom feddip_core.methods import FedAvg\n\n\n"
        "class Mine(FedAvg):\n    settings = dict(pull=real(0.5, 0, 1, 'how strongly'))\n",
        "utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    exp = tiny("gone_tomorrow:Mine", rounds=2, pull=0.25)
    result = run(exp, out=tmp_path / "runs")
    folder = records.folder_of(exp, tmp_path / "runs")
    monkeypatch.delitem(METHODS, "gone_tomorrow:Mine")
    (tmp_path / "gone_tomorrow.py").unlink()
    monkeypatch.delitem(sys.modules, "gone_tomorrow")
    with pytest.raises(ValueError, match=r"method: 'gone_tomorrow:Mine' is not allowed; it cannot be imported"):
        records.experiment_of(folder)
    table = load_runs(tmp_path / "runs")
    assert table["pull"].tolist() == [0.25] * 2 and table["method"].tolist() == ["gone_tomorrow:Mine"] * 2
    assert table["test_accuracy"].tolist() == result.metrics["test_accuracy"].tolist()


def test_a_record_of_a_class_that_has_changed_since_keeps_its_id(tiny, tmp_path, monkeypatch):
    exp = tiny(own_methods.Half, rounds=1, clients=60)
    run(exp, out=tmp_path)
    monkeypatch.setattr(own_methods.Half, "SHARE", 0.25)
    assert Experiment(**exp.to_dict()).run_id != exp.run_id
    assert load_runs(tmp_path)["run_id"].tolist() == [exp.run_id]
    folder = records.folder_of(exp, tmp_path)
    kept = json.loads((folder / "provenance.json").read_text("utf-8"))
    assert kept["method_sha256"] == exp.source_sha256 != Experiment(**exp.to_dict()).source_sha256


def test_it_looks_as_it_says_or_is_called_by_its_name():
    class Plain(FedAvg):
        pass

    class Dressed(FedAvg):
        label, colour = "My method", "#123456"

    assert (Plain.label, Plain.colour, Plain.line) == ("Plain", "", "")
    assert (Dressed.label, Dressed.colour, Dressed.line) == ("My method", "#123456", "")
