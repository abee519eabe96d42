import errno
import json
import re
import threading
import warnings

import pandas as pd
import pytest

from feddip_core import Experiment, load_runs, run
from feddip_core.engine import records
from feddip_core.engine import run as running
from feddip_core.engine.records import folder_of, load_run, record_folders, rules_of
from feddip_core.engine.sources import MINI
from feddip_core.methods import FedAvg
from feddip_core.server import Federation


def changed(folder, **settings):
    """Other settings in a record; None takes one out."""
    config = json.loads((folder / "config.json").read_text("utf-8")) | settings
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}), "utf-8")


def test_a_run_leaves_its_record(tiny, tmp_path):
    exp = tiny(rounds=3)
    result = run(exp, out=tmp_path)
    folder = folder_of(exp, tmp_path)
    record = ["config.json", "metrics.csv", "model.safetensors", "provenance.json"]
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "checkpoint.safetensors", *record]
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert Experiment(**config) == exp == records.experiment_of(folder)
    pd.testing.assert_frame_equal(pd.read_csv(folder / "metrics.csv"), result.metrics, check_exact=True)
    provenance = json.loads((folder / "provenance.json").read_text("utf-8"))
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
    monkeypatch.setattr(running, "SAVING_SHARE", 0.0)  # nothing is saved on the way but the first round

    def interrupt(self, state):
        if state.t == 2:
            raise KeyboardInterrupt
        return honest(self, state)

    monkeypatch.setattr(Federation, "round", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(exp, out=tmp_path)
    folder = folder_of(exp, tmp_path)
    assert pd.read_csv(folder / "metrics.csv")["round"].tolist() == [1, 2]
    assert json.loads((folder / "provenance.json").read_text("utf-8"))["rounds_done"] == 2


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    records.write(path, "old")
    monkeypatch.setattr(records.Path, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        records.write(path, "new")
    assert path.read_text("utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_second_run_that_stops_early_leaves_the_finished_record(tiny, tmp_path, monkeypatch):
    exp = tiny(rounds=3)
    run(exp, out=tmp_path)
    folder = folder_of(exp, tmp_path)
    finished = (folder / "metrics.csv").read_text("utf-8")
    for name in ("checkpoint.safetensors", "model.safetensors"):  # as in a record that was handed on
        (folder / name).unlink()
    save = records.Record.save

    def interrupt(self, rows):
        save(self, rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(records.Record, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(exp, out=tmp_path)
    assert (folder / "metrics.csv").read_text("utf-8") == finished


# Folders


@pytest.mark.parametrize(("settings", "name"), [
    (dict(dataset="fashion_mnist"), "fashion_mnist/feddip-seed0"),
    (dict(dataset="cifar10", method="fedavg", seed=7), "cifar10/fedavg-seed7"),
    (dict(dataset="fashion_mnist", partition="pathological"), "fashion_mnist/feddip-pathological-seed0"),
    (dict(dataset="fashion_mnist", partition="dirichlet(0.3)"), "fashion_mnist/feddip-dirichlet(0.3)-seed0"),
    (dict(dataset="fashion_mnist", rules="released"), "fashion_mnist/feddip-released-seed0"),
    (dict(dataset="fashion_mnist", method="snip", rules="released"), "fashion_mnist/snip-released-seed0"),
    (dict(dataset="fashion_mnist", method="fedavg", rules="released"), "fashion_mnist/fedavg-seed0"),
    (dict(dataset="fashion_mnist", regrowth="dense_memory"), "fashion_mnist/feddip-regrowth_dense_memory-seed0"),
    (dict(dataset="fashion_mnist", rounds=80), "fashion_mnist/feddip-rounds_80-seed0"),
    (dict(dataset="fashion_mnist", learning_rate=0.5, width=0.25),
     "fashion_mnist/feddip-width_0.25-learning_rate_0.5-seed0"),
    (dict(dataset="fashion_mnist", rules="released", partition="shards", rounds=5, width=0.5, clients=20),
     "fashion_mnist/feddip-released-shards-width_0.5-more-seed0"),
    (dict(dataset="fashion_mini", rounds=3), "fashion_mini/feddip-seed0"),
    (dict(dataset="own_networks:samples", model="own_networks:Residual", partition="given"),
     "own_networks/feddip-given-seed0"),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_a_folder_says_what_differs_from_the_paper(settings, name, tmp_path):
    exp = Experiment(**settings)
    assert folder_of(exp, tmp_path) == tmp_path / f"{name}-{exp.run_id}"


def test_the_folder_of_a_file_and_a_class_of_ones_own_can_be_a_path(tmp_path):
    class Mine(FedAvg):
        pass

    (tmp_path / "my data.npz").touch()
    exp = Experiment(dataset=tmp_path / "my data.npz", model="lenet5", method=Mine)
    folder = folder_of(exp, tmp_path)
    assert folder.parent == tmp_path / "my_data"
    assert re.fullmatch(rf"[\w.]*Mine-seed0-{exp.run_id}", folder.name)


def test_a_record_is_found_by_its_id_whatever_its_folder_is_called(tiny, tmp_path):
    exp = tiny(rounds=1)
    run(exp, out=tmp_path)
    moved = tmp_path / "elsewhere" / f"renamed-{exp.run_id}"
    moved.parent.mkdir()
    folder_of(exp, tmp_path).rename(moved)
    assert folder_of(exp, tmp_path) == moved
    assert records.progress(exp, tmp_path) == (1, True)
    assert record_folders(tmp_path) == [moved]


# The table


def test_many_records_are_one_table(tiny, tmp_path):
    exps = [tiny("fedavg", rounds=2), tiny("feddip", rounds=3, seed=5)]
    results = [run(exp, out=tmp_path) for exp in exps]
    table = load_runs(tmp_path)
    assert len(table) == 5
    feddip = table[table["method"] == "feddip"].reset_index(drop=True)
    assert feddip["seed"].unique().tolist() == [5]
    assert feddip["run_id"].unique().tolist() == [exps[1].run_id]
    pd.testing.assert_frame_equal(feddip[results[1].metrics.columns], results[1].metrics, check_exact=True)
    assert table[table["method"] == "fedavg"]["sparsity_target"].isna().all()  # it has none


@pytest.mark.parametrize("folder", ["nothing", "empty"])
def test_a_folder_without_records_is_named(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match=re.escape(f"{str(tmp_path / folder)!r} is not allowed; it must contain a readable")
    ):
        load_runs(tmp_path / folder)


@pytest.mark.parametrize("change", ["settings", "folder", "rounds", "digit", "torn", "no metrics", "list", "no end"])
def test_a_record_that_does_not_fit_its_run_id_is_left_out_with_its_name(tiny, tmp_path, change):
    """One damaged record costs itself, not the others."""
    exp, good = tiny(rounds=2), tiny("fedavg", rounds=2)
    for each in (exp, good):
        run(each, out=tmp_path)
    folder = folder_of(exp, tmp_path)
    if change == "settings":
        changed(folder, learning_rate=0.2)
    if change == "folder":
        folder = folder.rename(folder.with_name("feddip-seed0-0123456789ab"))
    if change == "rounds":
        lines = (folder / "metrics.csv").read_text("utf-8").splitlines()
        (folder / "metrics.csv").write_text("\n".join(lines[:-1]), "utf-8")
    if change == "digit":
        text = (folder / "metrics.csv").read_text("utf-8")
        (folder / "metrics.csv").write_text(text[:-2] + str((int(text[-2]) + 1) % 10) + "\n", "utf-8")
    if change == "torn":
        (folder / "config.json").write_text("{", "utf-8")
    if change == "no metrics":
        (folder / "metrics.csv").unlink()
    if change == "list":
        (folder / "provenance.json").write_text("[]", "utf-8")
    if change == "no end":
        kept = json.loads((folder / "provenance.json").read_text("utf-8"))
        (folder / "provenance.json").write_text(json.dumps({k: v for k, v in kept.items() if k != "diverged"}), "utf-8")
    with pytest.raises(ValueError, match=f"^{re.escape(str(folder))}: "):
        load_run(folder)
    with pytest.warns(UserWarning, match=f"skipped {re.escape(str(folder))}: "):
        table = load_runs(tmp_path)
    assert table["run_id"].unique().tolist() == [good.run_id]


def test_if_every_record_is_damaged_the_folder_is_named(tiny, tmp_path):
    exp = tiny(rounds=1)
    run(exp, out=tmp_path)
    changed(folder_of(exp, tmp_path), seed=3)
    with pytest.warns(UserWarning, match="skipped "), pytest.raises(ValueError, match="it must contain a readable"):
        load_runs(tmp_path)


@pytest.mark.parametrize("old", [dict(variant="original"), dict(regrowth="authors"), dict(rules="authors")])
def test_a_record_of_version_0_1_says_so(tiny, tmp_path, old):
    exp = tiny(rounds=1)
    run(exp, out=tmp_path)
    folder = folder_of(exp, tmp_path)
    changed(folder, **old)
    for read in (records.experiment_of, load_run):
        with pytest.raises(ValueError, match=r"it was written by version 0\.1, whose settings had other names"):
            read(folder)
    with (
        pytest.warns(UserWarning, match=r"skipped .* version 0\.1"),
        pytest.raises(ValueError, match="it must contain a readable"),
    ):
        load_runs(tmp_path)


RULES = {
    "paper": dict(),
    "released": dict(rules="released"),
    "regrowth=dense_memory": dict(regrowth="dense_memory"),
    "initial_mask=released, lambda_schedule=released": dict(initial_mask="released", lambda_schedule="released"),
    "initial_mask=released, regrowth=dense_memory, reconfigure_at=released, lambda_schedule=released": dict(
        rules="released", regrowth="dense_memory"
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_the_rules_of_a_run_are_the_papers_the_released_ones_or_what_differs(tiny, tmp_path, name):
    exp = tiny(rounds=1, **RULES[name])
    assert rules_of(exp) == name
    run(exp, out=tmp_path)
    assert load_runs(tmp_path)["rules"].tolist() == [name]


def test_all_four_switches_together_are_the_released_rules():
    switches = dict.fromkeys(("initial_mask", "regrowth", "reconfigure_at", "lambda_schedule"), "released")
    assert rules_of(Experiment(**switches)) == "released"
    assert rules_of(Experiment(method="dpf", rules="released")) == "released"
    assert rules_of(Experiment(method="prunefl", rules="released")) == "released"
    assert rules_of(Experiment(method="prunefl")) == rules_of(Experiment(method="fedavg", rules="released")) == "paper"


def test_without_a_folder_the_records_of_this_checkout_are_read(tiny, tmp_path, monkeypatch):
    exp = tiny(rounds=1)
    run(exp, out=tmp_path)
    assert records.OWN_RECORDS.parts[-2:] == ("outputs", "runs")
    monkeypatch.setattr(records, "OWN_RECORDS", tmp_path)
    assert load_runs()["run_id"].tolist() == [exp.run_id]


def test_the_records_of_this_repository_are_whole():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none is skipped
        table = load_runs()
    assert table.groupby("run_id")["round"].max().min() >= 1
    rounds = table.groupby("run_id")["rounds"].first()
    folders = {folder.name.rpartition("-")[2]: folder for folder in record_folders(records.OWN_RECORDS)}
    assert set(folders) == set(rounds.index)
    for run_id, count in rounds.items():
        parts = [folders[run_id] / name for name in ("config.json", "metrics.csv", "provenance.json")]
        assert sum(part.stat().st_size for part in parts) < 300_000 * max(1, count / 1000)
        assert folder_of(records.experiment_of(folders[run_id]), records.OWN_RECORDS) == folders[run_id]


def test_the_index_of_this_repository_has_a_line_for_each_record():
    index = pd.read_csv(records.OWN_RECORDS / "index.csv")
    folders = [str(folder.relative_to(records.OWN_RECORDS)) for folder in record_folders(records.OWN_RECORDS)]
    assert sorted(index["run"]) == folders


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


# index.csv


def test_a_finished_run_is_one_line_of_the_index(tiny, tmp_path):
    exp = tiny("fedprox", rounds=3, prox_mu=0.1)
    result = run(exp, out=tmp_path, until=2)
    assert not (tmp_path / "index.csv").exists()  # it is not finished
    result = run(exp, out=tmp_path)
    (line,) = pd.read_csv(tmp_path / "index.csv").to_dict("records")
    folder = folder_of(exp, tmp_path)
    assert line["run"] == f"fashion_mini/{folder.name}"
    assert (line["method"], line["rules"], line["rounds"], line["seed"]) == ("fedprox", "paper", "3/3", 0)
    assert line["last_five"] == line["best_five"] == round(result.metrics["test_accuracy"].mean(), 5)
    assert line["megabytes_down"] == round(result.metrics["downlink_bits"].sum() / 8e6, 3)
    assert pd.isna(line["diverged"])


def test_a_run_that_is_done_again_replaces_its_line(tiny, tmp_path):
    first, other = tiny(rounds=2), tiny("fedavg", rounds=2)
    for exp in (first, other):
        run(exp, out=tmp_path)
    for name in ("checkpoint.safetensors", "metrics.csv"):
        (folder_of(first, tmp_path) / name).unlink()
    before = pd.read_csv(tmp_path / "index.csv")
    run(first, out=tmp_path)
    after = pd.read_csv(tmp_path / "index.csv")
    assert after["run"].tolist() == before["run"].tolist() == sorted(before["run"])
    assert len(after) == 2


def test_a_run_that_diverged_has_its_round_in_the_index(tiny, tmp_path):
    good, bad = tiny("fedavg", rounds=2), tiny("fedavg", rounds=6, learning_rate=1e4)
    run(good, out=tmp_path)
    diverged = run(bad, out=tmp_path).diverged
    index = pd.read_csv(tmp_path / "index.csv").set_index("run")
    line = index.loc[f"fashion_mini/{folder_of(bad, tmp_path).name}"]
    assert (line["diverged"], line["rounds"]) == (diverged, f"{diverged}/6")
    assert index["diverged"].isna().sum() == 1
    assert f",{diverged}," in (tmp_path / "index.csv").read_text("utf-8")  # a whole number


def test_many_runs_that_end_at_once_lose_no_line(tiny, tmp_path):
    exps = [tiny("fedavg", rounds=1, seed=seed) for seed in range(6)]
    for exp in exps:
        run(exp, out=tmp_path)
    (tmp_path / "index.csv").unlink()
    threads = [threading.Thread(target=records.enter, args=(folder_of(exp, tmp_path),)) for exp in exps * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(pd.read_csv(tmp_path / "index.csv")["seed"]) == list(range(6))


def test_an_index_that_cannot_be_written_stays_as_it_was(tiny, tmp_path, monkeypatch):
    exp = tiny("fedavg", rounds=1)
    run(exp, out=tmp_path)
    before = (tmp_path / "index.csv").read_text("utf-8")
    monkeypatch.setattr(records.Path, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        records.enter(folder_of(exp, tmp_path))
    assert (tmp_path / "index.csv").read_text("utf-8") == before
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(tiny, tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match=r"cannot be locked \(No locks available\); choose a folder"):
        run(tiny(), out=tmp_path)
