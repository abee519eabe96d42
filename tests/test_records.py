import json

import pandas as pd
import pytest

from feddip_core import Experiment, records, run


def test_a_run_leaves_its_record(tiny, tmp_path):
    exp = tiny(rounds=3)
    result = run(exp, out=tmp_path)
    folder = tmp_path / exp.run_id
    record = ["config.json", "metrics.csv", "provenance.json"]
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint.safetensors", *record]
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
    exp = tiny(rounds=5)
    kept = records.Record.save

    def interrupt(self, rows):
        kept(self, rows)
        if len(rows) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(records.Record, "save", interrupt)
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


def test_without_out_nothing_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(tiny(rounds=1))
    assert list(tmp_path.iterdir()) == []
