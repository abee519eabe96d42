import json
from pathlib import Path

import pandas as pd
import pytest

from feddip_core import Experiment, federation, load_runs, records, run
from feddip_core.data import MINI
from feddip_core.federation import Federation


def test_a_run_leaves_its_record(tiny, tmp_path):
    exp = tiny(rounds=3)
    result = run(exp, out=tmp_path)
    folder = tmp_path / exp.run_id
    record = ["config.json", "metrics.csv", "provenance.json"]
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "checkpoint.safetensors", *record]
    config = json.loads((folder / "config.json").read_text())
    assert Experiment(**config) == exp
    pd.testing.assert_frame_equal(pd.read_csv(folder / "metrics.csv"), result.metrics, check_exact=True)
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance == result.provenance
    assert provenance["run_id"] == exp.run_id
    assert provenance["rounds_done"] == 3
    assert provenance["threads"] == 1
    assert provenance["packages"]["torch"].startswith("2.")
    assert provenance["differs_from_paper"]
    for key in ("commit", "cpu", "seed", "python", "data_sha256"):
        assert key in provenance


def test_an_interrupted_run_keeps_what_it_measured(tiny, tmp_path, monkeypatch):
    exp, honest = tiny(rounds=5), Federation.round
    monkeypatch.setattr(federation, "SAVING_SHARE", 0.0)  # nothing is saved on the way but the first round

    def interrupt(self, state, train):
        if state.t == 2:
            raise KeyboardInterrupt
        return honest(self, state, train)

    monkeypatch.setattr(Federation, "round", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(exp, out=tmp_path)
    assert pd.read_csv(tmp_path / exp.run_id / "metrics.csv")["round"].tolist() == [1, 2]
    assert json.loads((tmp_path / exp.run_id / "provenance.json").read_text())["rounds_done"] == 2


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    records.write(path, "old")
    monkeypatch.setattr(records.Path, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        records.write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_second_run_that_stops_early_leaves_the_finished_record(tiny, tmp_path, monkeypatch):
    exp = tiny(rounds=3)
    run(exp, out=tmp_path)
    finished = (tmp_path / exp.run_id / "metrics.csv").read_text()
    (tmp_path / exp.run_id / "checkpoint.safetensors").unlink()  # as in a record that was handed on
    save = records.Record.save

    def interrupt(self, rows):
        save(self, rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(records.Record, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(exp, out=tmp_path)
    assert (tmp_path / exp.run_id / "metrics.csv").read_text() == finished


def test_many_records_are_one_table(tiny, tmp_path):
    exps = [tiny("fedavg", rounds=2), tiny("feddip", rounds=3, seed=5)]
    results = [run(exp, out=tmp_path) for exp in exps]
    table = load_runs(tmp_path)
    assert len(table) == 5
    feddip = table[table["method"] == "feddip"].reset_index(drop=True)
    assert feddip["seed"].unique().tolist() == [5]
    assert feddip["run_id"].unique().tolist() == [exps[1].run_id]
    pd.testing.assert_frame_equal(feddip[results[1].metrics.columns], results[1].metrics, check_exact=True)
    assert load_runs(tmp_path / "nothing").empty


@pytest.mark.parametrize("change", ["settings", "folder", "rounds", "torn"])
def test_a_record_that_does_not_fit_its_run_id_is_refused(tiny, tmp_path, change):
    exp = tiny(rounds=2)
    run(exp, out=tmp_path)
    folder = tmp_path / exp.run_id
    config = json.loads((folder / "config.json").read_text())
    if change == "settings":
        (folder / "config.json").write_text(json.dumps(config | {"learning_rate": 0.2}))
    if change == "folder":
        folder = folder.rename(tmp_path / "0123456789ab")
    if change == "rounds":
        lines = (folder / "metrics.csv").read_text().splitlines()
        (folder / "metrics.csv").write_text("\n".join(lines[:-1]))
    if change == "torn":
        (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=f"{folder}: "):
        load_runs(tmp_path)


def test_the_records_of_this_repository_are_whole():
    folder = Path(__file__).parent.parent / "outputs" / "runs"
    table = load_runs(folder)
    assert table.groupby("run_id")["round"].max().min() >= 1
    for run_id, rounds in table.groupby("run_id")["rounds"].first().items():
        parts = [folder / run_id / name for name in ("config.json", "metrics.csv", "provenance.json")]
        assert sum(part.stat().st_size for part in parts) < 300_000 * max(1, rounds / 1000)


def test_without_out_nothing_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(tiny(rounds=1))
    assert list(tmp_path.iterdir()) == []


def test_a_record_of_ones_own_data_is_read_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.npz").write_bytes(MINI.read_bytes())
    exp = Experiment.preset("smoke", dataset="own.npz", model="lenet5", rounds=1, clients=60, clients_per_round=1)
    run(exp, out=tmp_path / "runs")
    monkeypatch.chdir("/")
    assert load_runs(tmp_path / "runs")["run_id"].tolist() == [exp.run_id]
