"""Whether a record may enter the league."""

import pytest

from feddip_core import Experiment, run
from feddip_core.engine import records
from feddip_core.engine.assembly import assemble
from feddip_core.study import submission


def test_the_protocols_settings_may_enter_and_others_are_named():
    def named(**settings):
        return [fault.partition(":")[0] for fault in submission.of_settings(Experiment.preset("paper", **settings))]

    assert named(seed=1) == named(method="fedavg", seed=3, learning_rate=0.02, learning_rate_decay=1.0) == []
    assert named(method="feddip_swap", seed=2, sparsity_target=0.99, mask_score="lamp") == []
    assert named() == ["seed"] and named(seed=1, sparsity_target=0.95) == ["sparsity_target"]
    assert sorted(named(seed=1, rounds=900, partition="pathological", batch_size=32)) == [
        "batch_size", "partition", "rounds"
    ]  # fmt: skip


@pytest.fixture
def record(tiny, mini, tmp_path):
    """A tiny experiment, its rows, and its federation."""

    def made(method, **settings):
        exp = tiny(method, **settings)
        run(exp, out=tmp_path)
        return exp, records.load_run(records.folder_of(exp, tmp_path)), assemble(exp, mini)

    return made


METHODS = [("feddip", {}), ("feddip", dict(sparse_uplink=True)), ("prunefl", {}), ("sparsyfed", {}), ("flash", {})]


@pytest.mark.parametrize("method, settings", METHODS)
def test_an_honest_record_may_enter(record, method, settings):
    exp, rows, fed = record(method, **settings)
    assert [*submission.of_numbers(exp, rows, fed), *submission.of_rounds(exp, rows)] == []


def spoiled(rows, name, value, place=3):
    rows = rows.copy()
    rows.loc[place, name] = value(rows.loc[place, name])
    return rows


@pytest.mark.parametrize(
    "name, value",
    [
        ("downlink_bits", lambda bits: bits + 1),
        ("uplink_bits", lambda bits: bits - 32),
        ("sparsity", lambda s: s + 0.01),
        ("test_accuracy", lambda a: 1.01),
        ("layer_zeros", lambda zeros: zeros + "0"),
    ],
)
def test_numbers_that_contradict_each_other_are_named(record, name, value):
    exp, rows, fed = record("feddip")
    (found,) = submission.of_numbers(exp, spoiled(rows, name, value), fed)
    assert found.startswith("sparsity" if name == "layer_zeros" else name)
    (found,) = submission.of_numbers(exp, rows.head(5), fed)
    assert found == "round: 5 rounds are not those from 1 to 6"


@pytest.mark.parametrize("name", ["test_accuracy", "train_loss", "delta", "uplink_bits"])
def test_first_rounds_that_do_not_come_out_again_are_named(record, name):
    exp, rows, _ = record("feddip")
    (found,) = submission.of_rounds(
        exp, spoiled(rows, name, lambda x: x + 32 if name == "uplink_bits" else x + 0.01, 1)
    )
    assert found.startswith(name)
    assert not list(submission.of_rounds(exp, spoiled(rows, name, lambda x: x * 1.0001 if x < 1 else x, 1)))


def test_a_record_with_other_settings_than_its_name_is_refused(record, tmp_path):
    exp, *_ = record("fedavg")
    folder = records.folder_of(exp, tmp_path)
    assert {fault.partition(":")[0] for fault in submission.faults(folder)} >= {"dataset", "rounds", "seed"}
    config = folder / "config.json"
    config.write_text(config.read_text("utf-8").replace('"learning_rate": 0.1', '"learning_rate": 0.2'), "utf-8")
    (found,) = submission.faults(folder)
    assert "its settings belong to run" in found


@pytest.mark.slow
def test_a_committed_record_may_enter(fashion_mnist):
    folder = records.folder_of(Experiment.preset("paper", seed=1), records.OWN_RECORDS)
    assert submission.faults(folder) == []
