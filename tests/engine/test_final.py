"""The final model of a run: one small file beside its record, read again without its data."""

import json

import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from feddip_core import Experiment, load_model, run
from feddip_core.engine import final, measure, partitions, sources
from feddip_core.engine.checkpoints import digest
from feddip_core.engine.records import OWN_RECORDS, folder_of, load_run

CASES = {
    "lenet5": dict(rounds=2, sparsity_initial=0.5, sparsity_target=0.9, reconfigure_every=1),
    "dense": dict(method="fedavg"),
    "batch norms, dense memory": dict(model="resnet18", width=0.04, regrowth="dense_memory"),
    "own network and data": dict(dataset="own_networks:samples", model="own_networks:Residual", partition="given"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_finished_run_keeps_the_model_that_it_measured(tiny, tmp_path, monkeypatch, case):
    exp = tiny(**(dict(rounds=1, width=1.0, clients=50) | CASES[case]))
    result = run(exp, out=tmp_path)
    folder = folder_of(exp, tmp_path)
    last = load_run(folder).iloc[-1]
    assert final.tested(folder) == (last["test_accuracy"], last["test_loss"])
    monkeypatch.setattr(sources, "of", lambda *_: pytest.fail("data were read"))
    net = load_model(folder)
    kept = result.network.state_dict()
    assert all(torch.equal(v, kept[k]) for k, v in net.state_dict().items() if v.is_floating_point())
    assert net.state_dict().keys() == kept.keys() and not net.training
    if case == "lenet5":
        # 61,470 prunable weights, of which a tenth is kept, and 236 biases: 4 · 6,383 bytes and 7,684 of bits.
        arrays = load_file(folder / final.NAME)
        assert {k: (len(v), v.dtype) for k, v in arrays.items()} == {
            "w": (6383, torch.float32), "mask": (7684, torch.uint8)
        }  # fmt: skip
        assert (folder / final.NAME).stat().st_size < 34_000


COMMITTED = sorted(path.parent for path in OWN_RECORDS.glob("fashion_mnist/*/model.safetensors"))


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_a_committed_model_is_as_good_as_its_record_says(folder, fashion_mnist, monkeypatch):
    monkeypatch.setattr(sources, "load", lambda *_: fashion_mnist)  # read once for all
    last = pd.read_csv(folder / "metrics.csv").iloc[-1]
    accuracy, loss = final.tested(folder)
    assert accuracy == pytest.approx(last["test_accuracy"], abs=2e-4)  # another processor may round a near tie
    assert loss == pytest.approx(last["test_loss"], rel=1e-4)


def test_each_client_is_tested_on_its_own_share(tiny, tmp_path):
    exp = tiny("fedavg", rounds=1, partition="pathological", clients=20, learning_rate=0.2)
    accuracy = run(exp, out=tmp_path).metrics["test_accuracy"].iloc[-1]
    each = final.tested_per_client(folder_of(exp, tmp_path))
    data = sources.load("fashion_mini")
    shares = partitions.partition(data.y_test, "pathological", 20, exp.seed)
    # Four clients share each pair of classes, in training as in the test.
    assert [sorted(set(data.y_test[i].tolist())) for i in shares[::4]] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert sum(len(i) for i in shares) == len(data.y_test)
    assert sum(a * len(i) for a, i in zip(each, shares, strict=True)) / len(data.y_test) == pytest.approx(accuracy)
    assert each.max() > each.min()


def test_the_worst_tenth_is_rounded_up():
    accuracies = pd.Series([0.9, 0.8, 0.1, 0.7, 0.3, 0.6, 0.9, 0.9, 0.9, 0.9, 0.8])
    assert measure.mean_and_worst_tenth(accuracies) == pytest.approx((7.8 / 11, 0.2))


def test_a_run_that_has_not_ended_or_diverged_has_no_model(tiny, tmp_path):
    exp, bad = tiny(rounds=2), tiny(rounds=3, learning_rate=1e6)
    run(exp, out=tmp_path, until=1)
    assert run(bad, out=tmp_path).diverged
    for each in (exp, bad):
        with pytest.raises(ValueError, match=r"model.safetensors does not exist; a run writes it after its last round"):
            load_model(folder_of(each, tmp_path))


def rewritten(path, arrays=(), sign=True, **changes):
    """The same file with other arrays or other words in it, signed again or not."""
    with safe_open(path, framework="pt") as file:
        plain = json.loads(file.metadata()["model"]) | changes
    arrays = load_file(path) | dict(arrays)
    if sign:
        plain.pop("sha256")
        plain["sha256"] = digest(arrays, json.dumps(plain))
    save_file(arrays, path, {"model": json.dumps(plain)})


HUGE = {"num_classes": 10**12, "channels": 1, "size": 28}
DAMAGE = {
    "not a readable model": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "its checksum does not match": lambda path: rewritten(path, {"w": torch.zeros(6383)}, sign=False),
    "the model belongs to run 0123456789ab, not to": lambda path: rewritten(path, run_id="0123456789ab"),
    "does not fit the network; w is torch.float32 of shape": lambda path: rewritten(path, {"w": torch.zeros(9)}),
    "does not fit the network; w contains a number that is not": lambda path: rewritten(
        path, {"w": torch.full((6380,), torch.nan)}
    ),
    "does not fit the network; its layers have different names or shapes": lambda path: rewritten(path, network=HUGE),
    "does not fit the network (TypeError": lambda path: rewritten(path, network={"num_classes": "ten"}),
    "does not fit the network (ValueError: size: 2": lambda path: rewritten(path, network=HUGE | {"size": 2}),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_a_file_that_lies_is_refused_before_memory_is_taken(small_model, reason):
    kept = (small_model / final.NAME).read_bytes()
    try:
        DAMAGE[reason](small_model / final.NAME)
        with pytest.raises(ValueError) as refused:
            load_model(small_model)
    finally:
        (small_model / final.NAME).write_bytes(kept)
    assert str(small_model / final.NAME) in str(refused.value) and reason in str(refused.value)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """The record of one round of LeNet-5, of which a tenth is kept."""
    out = tmp_path_factory.mktemp("runs")
    settings = dict(
        sparsity_initial=0.9, sparsity_target=0.9, rounds=1, clients=60, clients_per_round=1, local_epochs=1
    )
    exp = Experiment.preset("smoke", width=1.0, **settings)
    run(exp, out=out)
    return folder_of(exp, out)
