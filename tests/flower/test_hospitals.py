"""Data and a network of one's own: two functions, in every engine, with errors that say what is wrong with them."""

import sys

import pytest
import torch
from helpers import same
from torch import nn

from feddip_core import Experiment, run
from feddip_core.data import Dataset
from feddip_core.engine import sources
from feddip_core.engine.assembly import assemble
from feddip_core.engine.networks import outputs
from feddip_core.engine.sources import DataError
from feddip_core.lab import hospitals
from feddip_core.methods.prunefl import uses_of

HERE = "feddip_core.lab.hospitals"
OWN = dict(
    dataset=f"{HERE}:samples", model=f"{HERE}:network", partition="given", clients=4,
    clients_per_round=2, rounds=4, local_epochs=2, batch_size=16, learning_rate=0.05,
)  # fmt: skip


def test_every_client_trains_on_what_it_has_brought():
    exp = Experiment(**OWN)
    fed = assemble(exp).clients
    for n, part in enumerate(fed.parts):
        x, y = hospitals.samples(n)
        assert torch.equal(fed.data.x_train[part], x) and torch.equal(fed.data.y_train[part], y)
    x, y = hospitals.samples(None)
    assert torch.equal(fed.data.x_test, x) and torch.equal(fed.data.y_test, y)
    assert [len(part) for part in fed.parts] == [120, 130, 140, 150]


def test_numbers_that_are_no_image_are_taken_as_they_are():
    x = torch.tensor([[0.5, -300.0]])
    dataset = Dataset(x, torch.tensor([0]), x, torch.tensor([0]), sha256={})
    assert dataset.normalise(x).tolist() == [[0.5, -300.0]]


def test_it_learns_sparsely():
    one = run(Experiment(**OWN | dict(rounds=20)))
    assert one.metrics["test_accuracy"].iloc[-1] > 0.8  # chance is a third
    assert one.metrics["sparsity"].iloc[-1] == pytest.approx(0.9, abs=1e-3)
    assert isinstance(one.network, nn.Sequential)


def test_a_run_of_ones_own_data_resumes_after_an_interruption(tmp_path):
    exp = Experiment(**OWN)
    run(exp, tmp_path, until=2)
    assert run(exp, tmp_path).metrics.drop(columns="seconds").equals(run(exp).metrics.drop(columns="seconds"))


@pytest.mark.slow
def test_a_module_beside_the_notebook_is_found_by_workers_too(tmp_path, monkeypatch):
    """Its batch norm counts batches: those of a client alone, whoever trains it. The data of a cell are handed on."""
    monkeypatch.setattr(sys.modules["__main__"], "samples", hospitals.samples, raising=False)
    source = "from test_hospitals import counting_norms as network\n"
    (tmp_path / "beside_the_notebook.py").write_text(source, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    exp = Experiment(**OWN | dict(dataset="__main__:samples", model="beside_the_notebook:network"))
    assert same(run(exp, workers=2), run(exp))


def test_ones_own_network_takes_a_known_data_set():
    exp = Experiment.preset("smoke", model="test_hospitals:small", rounds=2, clients=40, clients_per_round=2)
    fed = assemble(exp).clients
    assert fed.layout.prunable == ("1.weight", "3.weight") and outputs(fed.net, fed.data.sample, "small") == 10
    assert uses_of(fed.net, fed.data.sample) == {"1.weight": 1, "3.weight": 1}
    assert run(exp).metrics["sparsity"].iloc[-1] == pytest.approx(0.9, abs=1e-4)


def test_layers_keep_their_order_after_an_interruption(tmp_path):
    """In a file '10.weight' comes before '2.weight'."""
    exp = Experiment.preset(
        "smoke", model="test_hospitals:deep", rules="released", rounds=4, clients=60, clients_per_round=1
    )
    run(exp, tmp_path, until=2)
    assert run(exp, tmp_path).metrics.drop(columns="seconds").equals(run(exp).metrics.drop(columns="seconds"))


def deep():
    between = [layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), *between, nn.Linear(16, 10))


def small():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


def no_network():
    return "a network"


def nothing_to_prune():
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784))


def one_logit_too_flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.Flatten(0))


@pytest.mark.parametrize("changes, message", [
    (dict(partition="iid"), "partition: 'iid' is not allowed; use 'given' if dataset is your own function"),
    (dict(dataset="fashion_mini", model="lenet5"), "partition: 'given' is not allowed"),
    (dict(model="lenet5"), f"model: 'lenet5' is not allowed; {HERE}:samples needs your own network"),
    (dict(model=None), "model: None is not allowed"),
    (dict(width=0.5), "width: 0.5 is not allowed"),
    (dict(stacked=True), "stacked: True is not allowed"),
    (dict(dataset="hospital samples"), "dataset: 'hospital samples' is not allowed; it must be .*module:samples"),
    (dict(model="no/module:f"), "model: 'no/module:f' is not allowed"),
])  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Experiment(**OWN | changes)


@pytest.mark.parametrize("settings, message", [
    (dict(dataset="nowhere:samples"), "dataset: 'nowhere:samples' is not allowed; it cannot be imported"),
    (dict(dataset=f"{HERE}:patients"), f"dataset: '{HERE}:patients' .* cannot be imported"),
    (dict(dataset=f"{HERE}:FEATURES"), "must be a function"),
    (dict(model="nowhere:network"), "model: 'nowhere:network' is not allowed; it cannot be imported"),
    (dict(model="test_hospitals:no_network"), "it must return an nn.Module with a prunable layer"),
    (dict(model="test_hospitals:nothing_to_prune"), "it must return an nn.Module with a prunable layer"),
])  # fmt: skip
def test_functions_that_are_none_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        run(Experiment(**OWN | settings))


def test_a_network_gives_a_row_of_logits_per_sample():
    with pytest.raises(
        ValueError, match=r"for 1 samples it returns torch.float32 of shape \(10,\); it must return one tensor"
    ):
        run(Experiment.preset("smoke", model="test_hospitals:one_logit_too_flat"))


GOOD = torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)


@pytest.mark.parametrize("bad, message", [
    (None, r"\(2\): it must return a pair \(x, y\) of arrays"),
    ((torch.zeros(5), GOOD[1]), r"\(2\): x is torch.float32 of shape \(5,\)"),
    ((torch.zeros(0, 3), GOOD[1][:0]), r"\(2\): x is torch.float32 of shape \(0, 3\)"),
    ((torch.zeros(5, 3, dtype=torch.int32), GOOD[1]), r"\(2\): x is torch.int32 .* use .long\(\) in the network"),
    ((torch.full((5, 3), torch.nan), GOOD[1]), r"\(2\): x contains a number that is not finite"),
    ((GOOD[0], GOOD[1][:4]), r"\(2\): y is \S+ of shape .* one label 0, 1, … per sample, 5 in all"),
    ((GOOD[0], GOOD[1] - 1), r"\(2\): y is \S+ of shape .* it must hold one label"),
    ((GOOD[0], GOOD[1].float()), r"\(2\): y is \S+ of shape .* it must hold one label"),
    ((GOOD[0], GOOD[1] + 0j), r"\(2\): y is complex64 of shape"),
    ((GOOD[0], GOOD[1] + 10**12), r"\(2\): y contains the label 1000000000000; it must be below 1,000,000"),
    ((GOOD[0], GOOD[1].bfloat16()), r"\(2\): it must return a pair"),
    ((torch.zeros(5, 4), GOOD[1]),
     r"a sample of the server is .*\(3,\), but of client 2 torch.float32 of shape \(4,\)"),
], ids=str)  # fmt: skip
def test_data_that_cannot_be_right_are_named_with_their_client(monkeypatch, bad, message):
    monkeypatch.setattr(sys.modules[__name__], "brought", lambda client: bad if client == 2 else GOOD, raising=False)
    with pytest.raises(DataError, match=message):
        sources.brought(f"{__name__}:brought", [None, *range(4)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8])
def test_labels_of_any_whole_type_and_numbers_with_a_gradient_are_taken(monkeypatch, dtype):
    x, y = torch.ones(3, 2, dtype=torch.float16, requires_grad=True), torch.tensor([2, 0, 1], dtype=dtype)
    monkeypatch.setattr(sys.modules[__name__], "brought", lambda client: (x, y), raising=False)
    data = sources.brought(f"{__name__}:brought", [None, 0, 1])
    assert data.y_train.dtype == torch.int64 and data.y_train.tolist() == [2, 0, 1] * 2
    assert data.x_test.dtype == torch.float32 and not data.x_test.requires_grad
    assert data.owner.tolist() == [0, 0, 0, 1, 1, 1]


def few_outputs():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4))


def test_a_label_of_a_known_data_set_without_an_output_is_named():
    exp = Experiment.preset("smoke", model="test_hospitals:few_outputs", clients=60)
    with pytest.raises(DataError, match=r"the test data contain the label [4-9]; the network has 4 outputs"):
        assemble(exp)


@pytest.mark.parametrize("whose, who", [(None, "the test data"), (2, "client 2's data")])
def test_a_label_that_the_network_has_no_output_for_is_named(monkeypatch, whose, who):
    def samples(client):
        x, y = hospitals.samples(client)
        return x, y + 3 * (client == whose)

    monkeypatch.setattr(sys.modules[__name__], "samples", samples, raising=False)
    with pytest.raises(DataError, match=f"{who} contain the label [345]; the network has 3 outputs"):
        run(Experiment(**OWN | dict(dataset="test_hospitals:samples")))


def with_norms():
    return nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def test_norms_of_ones_own_network_can_stay_with_the_clients():
    exp = Experiment(**OWN | dict(model="test_hospitals:with_norms", batch_norm="local"))
    fed = assemble(exp).clients
    assert fed.norms.tolist() == list(range(168, 184))  # scale and shift of eight channels, after 20 · 8 + 8 others
    assert run(exp).metrics["test_loss"].notna().all()
    with pytest.raises(ValueError, match=r"batch_norm: 'local' is not allowed; .*:network has no batch norms"):
        run(Experiment(**OWN | dict(batch_norm="local")))


def test_the_id_of_a_run_knows_the_functions_by_their_names():
    ids = {Experiment(**OWN | changes).run_id for changes in (
        {}, dict(dataset=f"{HERE}:others"), dict(model=f"{HERE}:others"), dict(clients=5),
    )}  # fmt: skip
    assert len(ids) == 4


def counting_norms():
    return nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 3))


def test_a_norm_that_counts_its_batches_counts_those_of_a_client_alone(tmp_path):
    exp = Experiment(**OWN | dict(model="test_hospitals:counting_norms"))
    run(exp, tmp_path, until=2)
    assert same(run(exp, tmp_path), run(exp))


def bare():
    return nn.Linear(20, 3)


def tied():
    net = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 3))
    net[1].weight = net[0].weight
    return net


def frozen():
    net = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3))
    net[0].weight.requires_grad_(False)
    return net


def without_scales():
    return nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3))


@pytest.mark.parametrize("settings, message", [
    (dict(model="test_hospitals:bare"), "'.weight' has no unique name: a layer must be part of a module"),
    (dict(model="test_hospitals:tied"), "'1.weight' has no unique name: .* must not share weights"),
    (dict(model="test_hospitals:frozen"), "'0.weight' is frozen; every parameter must require a gradient"),
    (dict(model="test_hospitals:with_norms", batch_size=7),
     "batch_size: 7 is not allowed; client 0's 120 samples leave a batch of one, which .*with_norms"),
    (dict(model="test_hospitals:with_norms", method="prunetrain", rules="released"),
     "rules: 'released' is not allowed; .*needs at least three"),
])  # fmt: skip
def test_networks_that_cannot_be_trained_here_are_refused(settings, message):
    exp = Experiment(**OWN | settings)
    with pytest.raises(ValueError, match=message):
        assemble(exp)


@pytest.mark.parametrize("settings", [
    dict(model="test_hospitals:without_scales", batch_norm="local"), dict(channels_last=True), dict(batch_size=7),
], ids=str)  # fmt: skip
def test_networks_that_are_unusual_train(settings):
    assert run(Experiment(**OWN | dict(rounds=1) | settings)).metrics["test_loss"].notna().all()


def test_a_network_that_was_changed_does_not_resume_from_the_old_ones_weights(tmp_path, monkeypatch):
    here = sys.modules[__name__]
    exp = Experiment(**OWN | dict(model="test_hospitals:changing"))
    monkeypatch.setattr(here, "changing", hospitals.network, raising=False)
    run(exp, tmp_path, until=2)
    monkeypatch.setattr(here, "changing", with_norms)
    with pytest.raises(
        ValueError, match=r"model: 'test_hospitals:changing' is not the network that .* was started with"
    ):
        run(exp, tmp_path)
