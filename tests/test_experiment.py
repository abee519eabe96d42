import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from feddip_core import Experiment, data
from feddip_core.experiment import FIXED, RULES

WRONG = {
    "method": ["fedsgd", 3, None],
    "dataset": ["mnist", "", 5, None],
    "model": ["vgg", 1],
    "width": [0, -1, 9, "wide", math.nan],
    "norm": ["layer", "group", None],
    "batch_norm": ["global", "local", None],
    "partition": ["even", "dirichlet", "dirichlet(0)", "dirichlet(-1)", "dirichlet(a)", "dirichlet(1e9)"],
    "clients": [0, 2.5, "ten", True],
    "clients_per_round": [0, 51, None],
    "rounds": [0, -3, 10.0, "10"],
    "local_epochs": [0, 1.5],
    "batch_size": [0, 32.0],
    "learning_rate": [0, -0.1, math.inf, "fast"],
    "learning_rate_decay": [0, 1.1],
    "momentum": [-0.1, 1.0],
    "weight_decay": [-1e-4, math.nan],
    "sparsity_initial": [-0.1, 1.0, 0.95, "half"],
    "sparsity_target": [1.0, -0.5, 0.3],
    "reconfigure_every": [0, 2.0],
    "lambda_max": [-1e-3, math.inf],
    "lambda_steps": [0, 0.5],
    "prox_mu": [-1, 0.1],
    "prunetrain_threshold": [-1e-4, "small"],
    "feddst_alpha": [-0.1, 1.5],
    "variant": ["mine", None, "authors"],
    "rules": ["mine", None],
    "initial_mask": ["dense"],
    "regrowth": ["never"],
    "reconfigure_at": ["always"],
    "lambda_schedule": ["linear"],
    "normalisation": ["none"],
    "seed": [-1, 0.5],
    "device": ["gpu", "cuda:x", "meta"],
    "gradient": ["fast", None],
    "precision": ["float16", 16],
    "tf32": [1, "yes"],
    "channels_last": [1, None],
    "torch_compile": ["max", None],
    "stacked": [2, None],
    "threads": [0, None],
}


def test_every_field_is_tried():
    assert set(WRONG) == {f.name for f in dataclasses.fields(Experiment)}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, values in WRONG.items() for v in values])
def test_a_wrong_value_is_named_before_any_data_is_read(name, value, monkeypatch):
    monkeypatch.setattr(data, "load", lambda *a: pytest.fail("data were read"))
    with pytest.raises(ValueError, match=r" is not allowed; \S+") as caught:
        Experiment(**{name: value})
    message = str(caught.value)
    if name == "sparsity_target" and value == 0.3:  # s_0 = 0.5 is what does not fit
        assert message == "sparsity_initial: 0.5 is not allowed; it must be at most sparsity_target, 0.3"
    else:
        assert message.startswith(f"{name}: {value!r} is not allowed; ")


def test_messages_say_what_is_allowed():
    with pytest.raises(ValueError, match=r"rounds: 0 is not allowed; it must be a whole number of at least 1$"):
        Experiment(rounds=0)
    with pytest.raises(ValueError, match=r"width: 9 is not allowed; it must be a number in \(0, 8\]$"):
        Experiment(width=9)
    with pytest.raises(ValueError, match=r"learning_rate: 0 is not allowed; it must be a number in \(0, ∞\)$"):
        Experiment(learning_rate=0)
    with pytest.raises(
        ValueError, match=r"it must be one of fedavg, fedprox, feddp, dpf, feddip, feddip_prox, prunefl, "
    ):
        Experiment(method="fedsgd")
    with pytest.raises(ValueError, match=r"clients_per_round: 51 is not allowed; it must be at most clients, 50"):
        Experiment(clients_per_round=51)
    with pytest.raises(ValueError, match=r"lambda_max: 0.001 is not allowed; the method feddp has it at 0"):
        Experiment(method="feddp", lambda_max=1e-3)
    with pytest.raises(ValueError, match=r"sparsity_initial: 0.5 is not allowed; the method snip has it at sparsity_t"):
        Experiment(method="snip", sparsity_initial=0.5)
    with pytest.raises(ValueError, match=r"regrowth: 'dense_memory' is not allowed; feddst masks every step"):
        Experiment(method="feddst", regrowth="dense_memory")
    with pytest.raises(ValueError, match=r"clients: 12 is not allowed; .* needs a multiple of 5"):
        Experiment(clients=12, partition="pathological")
    with pytest.raises(ValueError, match=r"dataset: 'no/such.npz' is not allowed; there is no such file"):
        Experiment(dataset="no/such.npz", model="lenet5")
    with pytest.raises(ValueError, match=r"preset: 'huge' is not allowed; it must be one of paper, laptop, smoke"):
        Experiment.preset("huge")
    with pytest.raises(
        ValueError, match=r"dataset: 'fashion_mini' is not allowed; the paper preset has fashion_mnist, c"
    ):
        Experiment.preset("paper", dataset="fashion_mini")


def test_own_data_needs_a_model(tmp_path):
    path = tmp_path / "own.npz"
    path.touch()
    with pytest.raises(ValueError, match="model: None is not allowed; a data set of your own"):
        Experiment(dataset=str(path))


TABLE_II = {  # literals from the paper
    "fashion_mnist": ("lenet5", 0.01, 64, 0.5, 0.9, 1e-3),
    "cifar10": ("alexnet", 0.1, 128, 0.5, 0.9, 1e-3),
    "cifar100": ("resnet18", 0.1, 128, 0.05, 0.8, 5e-3),
}


@pytest.mark.parametrize("dataset", TABLE_II)
def test_the_paper_preset_is_table_ii(dataset):
    e = Experiment.preset("paper", dataset=dataset)
    own = (e.model, e.learning_rate, e.batch_size, e.sparsity_initial, e.sparsity_target, e.lambda_max)
    assert own == TABLE_II[dataset]
    assert (e.clients, e.clients_per_round, e.rounds, e.local_epochs) == (50, 5, 1000, 5)
    assert (e.reconfigure_every, e.lambda_steps, e.width, e.partition) == (5, 10, 1.0, "iid")
    assert (e.weight_decay, e.momentum, e.learning_rate_decay) == (5e-4, 0.0, 0.998)
    assert e.differences_from_paper() == {}
    assert e == Experiment.preset("paper", dataset=dataset, rules="paper")


def test_what_is_less_than_the_paper_says_so():
    assert Experiment.preset("paper", rounds=200).differences_from_paper() == {"rounds": 1000}
    assert Experiment.preset("paper", regrowth="authors", seed=4).differences_from_paper() == {"regrowth": "paper"}
    for dataset, less in (("cifar10", {"rounds", "width"}), ("cifar100", {"rounds", "width", "local_epochs"})):
        assert set(Experiment.preset("laptop", dataset).differences_from_paper()) == less
    assert "dataset" in Experiment.preset("smoke").differences_from_paper()


@pytest.mark.parametrize("preset", ["paper", "laptop", "smoke"])
@pytest.mark.parametrize("method", FIXED)
def test_every_preset_has_every_method(preset, method):
    e = Experiment.preset(preset, method=method)
    assert {k: getattr(e, k) for k in FIXED[method]} == FIXED[method]
    assert e.replace() == e


def test_rules_set_four_switches_and_each_can_be_set_alone():
    e = Experiment(rules="authors")
    assert {k: getattr(e, k) for k in RULES["authors"]} == RULES["authors"]
    e = Experiment(rules="authors", regrowth="dense_memory")
    assert {k: getattr(e, k) for k in RULES["authors"]} == RULES["authors"] | dict(regrowth="dense_memory")
    e = e.replace(rules="paper")  # keeps the one that was set by hand
    assert (e.initial_mask, e.regrowth, e.reconfigure_at, e.lambda_schedule) == (
        "erk",
        "dense_memory",
        "paper",
        "paper",
    )


def test_replacing_the_method_brings_its_own_settings():
    feddip = Experiment.preset("smoke")
    fedavg = feddip.replace(method="fedavg")
    assert (fedavg.sparsity_target, fedavg.lambda_max, fedavg.rounds) == (0.0, 0.0, feddip.rounds)
    assert fedavg.replace(method="feddp", seed=1).sparsity_target == 0.9


def test_replacing_the_method_keeps_what_was_set_by_hand():
    mine = Experiment.preset("smoke", sparsity_target=0.95, sparsity_initial=0.3, reconfigure_every=3)
    feddp = mine.replace(method="feddp")
    assert (feddp.sparsity_initial, feddp.sparsity_target, feddp.reconfigure_every) == (0.3, 0.95, 3)
    assert mine.replace(method="fedavg").sparsity_target == 0
    assert mine.replace(method="snip").sparsity_initial == 0.95
    remembering = mine.replace(regrowth="dense_memory")
    assert [remembering.replace(method=m).regrowth for m in ("dpf", "snip")] == ["dense_memory", "paper"]


def test_the_data_set_brings_its_own_column():
    assert Experiment(dataset="cifar100") == Experiment.preset("paper", dataset="cifar100")
    assert Experiment().replace(dataset="cifar10") == Experiment.preset("paper", dataset="cifar10")
    assert Experiment(learning_rate=0.3).replace(dataset="cifar10").learning_rate == 0.3


def test_a_path_is_a_path(tmp_path):
    (tmp_path / "own.npz").touch()
    assert Experiment(dataset=tmp_path / "own.npz", model="lenet5").dataset == str(tmp_path / "own.npz")


def test_fedavgs_id_does_not_depend_on_what_it_does_not_use():
    fedavg = Experiment(method="fedavg")
    assert fedavg.replace(rules="authors", reconfigure_every=7).run_id == fedavg.run_id
    assert Experiment(rules="authors").run_id != Experiment().run_id


def test_run_id_is_a_hash_of_what_affects_the_result():
    e = Experiment()
    changes = dict(seed=1, rounds=999, width=0.5, regrowth="authors")
    ids = {e.run_id, *(e.replace(**{k: v}).run_id for k, v in changes.items())}
    assert len(ids) == 5
    assert all(len(i) == 12 for i in ids)
    assert Experiment(learning_rate=np.float64(0.01), clients=np.int64(50)).run_id == e.run_id
    named = Experiment(rules="authors")
    assert named.run_id == Experiment(**RULES["authors"]).run_id


def test_run_id_is_the_same_in_another_process():
    code = "from feddip_core import Experiment; print(Experiment.preset('smoke').run_id)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == Experiment.preset("smoke").run_id


def test_run_id_of_own_data_follows_the_content_not_the_path(tmp_path):
    ids = []
    for folder, value in (("a", 1), ("b", 1), ("c", 2)):
        path = tmp_path / folder / "own.npz"
        path.parent.mkdir()
        np.savez(path, x_train=np.full(3, value))
        ids.append(Experiment(dataset=str(path), model="lenet5").run_id)
    assert ids[0] == ids[1] != ids[2]


def test_an_experiment_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Experiment().rounds = 3
