import dataclasses
import hashlib
import importlib
import itertools
import json
import math
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch

from feddip_core import METHODS, Experiment, Method, choice, flag, real, whole
from feddip_core.engine import sources
from feddip_core.experiment import COMMON, EXECUTION_SETTINGS, REVISION, settings_of
from feddip_core.methods import FedAvg, FedDIP
from feddip_core.settings import matching

BUILT_IN = (
    "fedavg", "fedprox", "feddp", "dpf", "feddip", "feddip_prox", "prunefl", "snip", "prunetrain", "feddst", "fedgmp",
    "feddip_swap", "fedtiny", "fedrts", "ssfl", "fedmef", "sparsyfed", "flash",
)  # fmt: skip
LATER = BUILT_IN[12:]
SWITCHES = ("initial_mask", "regrowth", "reconfigure_at", "lambda_schedule")
RELEASED = dict.fromkeys(SWITCHES, "released")

WRONG = {
    "method": ["fedsgd", 3, "no.such.module:Mine", "math:pi"],
    "dataset": ["mnist", "", 5],
    "model": ["vgg", 1],
    "width": [0, -1, 9, "wide", math.nan],
    "norm": ["layer", "group"],
    "batch_norm": ["global", "local"],
    "partition": ["even", "dirichlet", "dirichlet(0)", "dirichlet(-1)", "dirichlet(a)", "dirichlet(1e9)", "given"],
    "clients": [0, 2.5, "ten", True],
    "clients_per_round": [0, 51],
    "rounds": [0, -3, 10.0, "10"],
    "evaluate_every": [0, 2.5, "never"],
    "local_epochs": [0, 1.5],
    "batch_size": [0, 32.0],
    "learning_rate": [0, -0.1, math.inf, "fast"],
    "learning_rate_decay": [0, 1.1],
    "momentum": [-0.1, 1.0],
    "weight_decay": [-1e-4, math.nan],
    "aggregation": ["krum", "Median", 3],
    "clip_norm": [-1, math.inf, "short"],
    "sparsity_initial": [-0.1, 1.0, 0.95, "half"],
    "sparsity_target": [1.0, -0.5, 0.3],
    "reconfigure_every": [0, 2.0],
    "lambda_max": [-1e-3, math.inf],
    "lambda_steps": [0, 0.5],
    "prox_mu": [-1, 0.1],
    "prunetrain_threshold": [-1e-4, "small", 1e-4],
    "adjust_alpha": [-0.1, 1.5, 0.5],
    "sparse_uplink": [1, "yes"],
    "prune_begin": [-1, 0.5, 600],
    "prune_end": [0, 600.0, 1001],
    "mask_score": ["random", True],
    "swap_every": [0, 20.0, 12],
    "adjust_until": [0, 0.8],
    "adjust_gradients": ["all", True],
    "vote_share": [-0.5, 1.1],
    "power": [0.5, "two"],
    "discover_share": [0, 1.5],
    "discover_epochs": [0, 2.5],
    "discover_drop": [-0.1, 2],
    "extrusion": [-1e-4, "much"],
    "extrusion_rate": [1, "yes"],
    "vote_strength": [-1, "strong"],
    "rules": ["mine", "authors"],
    "initial_mask": ["dense", "authors", "paper"],
    "regrowth": ["never", "authors"],
    "reconfigure_at": ["always", "authors"],
    "lambda_schedule": ["linear", "authors20"],
    "normalisation": ["none", "authors"],
    "seed": [-1, 0.5],
    "device": ["gpu", "cuda:x", "meta"],
    "gradient": ["fast"],
    "precision": ["float16", 16],
    "value_bits": [8, "16", 24, 16.0],
    "tf32": [1, "yes"],
    "channels_last": [1],
    "torch_compile": ["max"],
    "stacked": [2],
    "threads": [0],
}


def test_every_field_is_tried():
    ways = itertools.product(BUILT_IN, ("paper", "released"))
    assert set(WRONG) == {name for method, rules in ways for name in settings_of(method, rules)}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, values in WRONG.items() for v in values])
def test_a_wrong_value_is_named_before_any_data_is_read(name, value, monkeypatch):
    monkeypatch.setattr(sources, "load", lambda *a: pytest.fail("data were read"))
    with pytest.raises(ValueError, match=r" is not allowed; \S+") as caught:
        Experiment(**{name: value})
    message = str(caught.value)
    if name == "sparsity_target" and value == 0.3:  # s_0 = 0.5 is what does not fit
        assert message == "sparsity_initial: 0.5 is not allowed; it must be at most sparsity_target, 0.3"
    else:
        assert message.startswith(f"{name}: {value!r} is not allowed; ")


def owner_of(name):
    """A method that reads this setting, under the paper's rules."""
    return next(m for m in ("feddip", *BUILT_IN) if name in settings_of(m))


@pytest.mark.parametrize("name", [k for k in WRONG if k not in COMMON])
def test_a_methods_own_setting_is_checked_where_it_is_read(name):
    """FedDIP refuses prox_mu whatever its value; FedProx must refuse the wrong values alone."""
    method = owner_of(name)
    fits = {"prox_mu": 0.1, "prunetrain_threshold": 1e-4, "adjust_alpha": 0.5}
    for value in WRONG[name]:
        if fits.get(name) == value:
            assert getattr(Experiment(method=method, **{name: value}), name) == value
        elif (name, value) != ("sparsity_target", 0.3):
            with pytest.raises(ValueError, match=rf"^{name}: .* is not allowed; "):
                Experiment(method=method, **{name: value})


HOSTILE = [
    pd.NA,
    np.array([1, 2]),
    np.array(["feddip", "snip"]),
    ["feddip"],
    {"a": 1},
    b"iid",
    10**400,
    -(10**400),
    3.5e38,
]


@pytest.mark.parametrize("name", WRONG)
def test_no_value_whatever_its_type_gets_another_error(name):
    method = "feddip" if name == "method" else owner_of(name)
    for value in HOSTILE:
        with pytest.raises(ValueError, match=rf"^{name}: ") as caught:
            Experiment(**({"method": method} | {name: value}))
        assert " is not allowed; it must be " in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: type(v).__name__)
def test_presets_and_replace_check_what_they_choose_by(value):
    for name in ("method", "rules"):
        with pytest.raises(ValueError, match=rf"^{name}: .* is not allowed; it must be "):
            Experiment.preset("smoke", **{name: value})
        with pytest.raises(ValueError, match=rf"^{name}: .* is not allowed; it must be "):
            Experiment().replace(**{name: value})
    with pytest.raises(ValueError, match=r"^preset: .* is not allowed; it must be one of paper, narrow, smoke$"):
        Experiment.preset(value)
    for preset in ("smoke", "narrow"):
        with pytest.raises(ValueError, match=r"^dataset: .* is not allowed; "):
            Experiment.preset(preset, dataset=value)


def test_zero_has_one_sign_and_a_word_one_type():
    zero = Experiment(weight_decay=-0.0, momentum=np.float32(-0.0))
    assert zero.run_id == Experiment(weight_decay=0.0).run_id
    assert [math.copysign(1, zero.weight_decay), math.copysign(1, zero.momentum)] == [1, 1]
    assert type(Experiment(rules=np.str_("paper"), dataset=np.str_("cifar10")).dataset) is str


def test_the_largest_number_is_one_that_single_precision_holds():
    assert Experiment(learning_rate=3.4e38).learning_rate == 3.4e38 < torch.finfo(torch.float32).max < 3.5e38
    assert real(0.0, -math.inf, math.inf, "").checked("x", -3.4e38) == -3.4e38


@pytest.mark.parametrize("name", WRONG)
def test_none_leaves_a_setting_at_its_default(name):
    method = "feddip" if name == "method" else owner_of(name)
    assert Experiment(**({"method": method} | {name: None})) == Experiment(method=method)


NOT_READ = {  # in the old code these were accepted and ignored, or held at a fixed value
    "fedavg": ["sparsity_initial", "sparsity_target", "reconfigure_every", "lambda_max", "lambda_steps", "prox_mu"],
    "fedprox": ["sparsity_initial", "sparsity_target", "reconfigure_every", "lambda_max", "lambda_steps"],
    "feddp": ["lambda_max", "lambda_steps", "prox_mu", "lambda_schedule"],
    "dpf": ["sparsity_initial", "lambda_max", "lambda_steps", "prox_mu", "lambda_schedule", "initial_mask"],
    "feddip": ["prox_mu", "adjust_alpha", "prunetrain_threshold"],
    "feddip_prox": ["adjust_alpha", "prunetrain_threshold"],
    "prunefl": ["lambda_max", "lambda_steps", "prox_mu", *SWITCHES],
    "snip": ["sparsity_initial", "reconfigure_every", "lambda_max", "lambda_steps", "prox_mu", *SWITCHES],
    "prunetrain": ["sparsity_initial", "sparsity_target", "lambda_steps", "prox_mu", *SWITCHES],
    "feddst": ["sparsity_initial", "lambda_max", "lambda_steps", "prox_mu", *SWITCHES],
    "fedgmp": ["sparsity_initial", "lambda_max", "sparse_uplink", "adjust_alpha", "swap_every", *SWITCHES],
    "feddip_swap": ["sparsity_initial", "lambda_max", "sparse_uplink", *SWITCHES],
    "fedtiny": ["sparsity_initial", "lambda_max", "prune_end", *SWITCHES],
    "fedmef": ["sparsity_initial", "vote_share", *SWITCHES],
    "sparsyfed": ["sparsity_initial", "reconfigure_every", *SWITCHES],
    "flash": ["sparsity_initial", "reconfigure_every", *SWITCHES],
    "ssfl": ["sparsity_initial", "reconfigure_every", *SWITCHES],
    "fedrts": ["sparsity_initial", "lambda_max", "adjust_gradients", *SWITCHES],
}


@pytest.mark.parametrize("method", BUILT_IN)
def test_a_setting_that_the_method_does_not_read_is_refused_by_name(method):
    for name in NOT_READ[method]:
        value = getattr(Experiment(method=owner_of(name)), name)  # good, but for another method
        with pytest.raises(ValueError, match=rf"^{name}: {value!r} is not allowed; {method} has no such setting"):
            Experiment(method=method, **{name: value})
        with pytest.raises(AttributeError, match=f"{method} has no setting '{name}'"):
            getattr(Experiment(method=method), name)
        assert getattr(Experiment(method=method), name, "missing") == "missing"


def test_a_refusal_says_which_settings_there_are():
    with pytest.raises(ValueError, match=r"fedprox has no such setting; its own are prox_mu; .* method, dataset, "):
        Experiment(method="fedprox", sparsity_target=0.9)
    with pytest.raises(ValueError, match=r"fedavg has no such setting; its own are none; "):
        Experiment(method="fedavg", sparsity_target=0.9)
    with pytest.raises(ValueError, match=r"^variant: 'authors' is not allowed; snip has no such setting"):
        Experiment(method="snip", variant="authors")


def test_the_released_prunetrain_reads_other_settings_than_the_papers():
    released = Experiment(method="prunetrain", rules="released")
    assert (released.sparsity_initial, released.sparsity_target, released.lambda_max) == (0.5, 0.9, 0.01)
    for name in ("reconfigure_every", "prunetrain_threshold"):
        with pytest.raises(ValueError, match=f"^{name}: .* prunetrain has no such setting"):
            Experiment(method="prunetrain", rules="released", **{name: 1})


def test_messages_say_what_is_allowed():
    with pytest.raises(
        ValueError, match=r"rounds: 0 is not allowed; it must be a whole number of at least 1, below 2\*\*63$"
    ):
        Experiment(rounds=0)
    with pytest.raises(ValueError, match=r"width: 9 is not allowed; it must be a number in \(0, 8\]$"):
        Experiment(width=9)
    with pytest.raises(ValueError, match=r"learning_rate: 0 is not allowed; it must be a number in \(0, 3.4e\+38\]$"):
        Experiment(learning_rate=0)
    with pytest.raises(
        ValueError, match=r"it must be one of fedavg, fedprox, feddp, dpf, feddip, feddip_prox, prunefl, "
    ):
        Experiment(method="fedsgd")
    with pytest.raises(ValueError, match=r"clients_per_round: 51 is not allowed; it must be at most clients, 50"):
        Experiment(clients_per_round=51)
    with pytest.raises(ValueError, match=r"clients: 12 is not allowed; .* needs a multiple of 5"):
        Experiment(clients=12, partition="pathological")
    with pytest.raises(ValueError, match=r"dataset: 'no/such.npz' is not allowed; there is no such file"):
        Experiment(dataset="no/such.npz", model="lenet5")
    with pytest.raises(ValueError, match=r"preset: 'huge' is not allowed; it must be one of paper, narrow, smoke"):
        Experiment.preset("huge")
    with pytest.raises(
        ValueError, match=r"dataset: 'fashion_mini' is not allowed; the paper preset has fashion_mnist, c"
    ):
        Experiment.preset("paper", dataset="fashion_mini")


def test_own_data_needs_a_model(tmp_path):
    path = tmp_path / "own.npz"
    path.touch()
    with pytest.raises(ValueError, match="model: None is not allowed; for your own data set"):
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
    assert Experiment.preset("paper", regrowth="released", seed=4).differences_from_paper() == {"regrowth": "paper"}
    assert "dataset" in Experiment.preset("smoke").differences_from_paper()


def test_the_narrow_preset_is_table_ii_with_an_eighth_of_the_channels():
    """And for CIFAR-100 a fifth of the rounds: nothing else, so that its runs are the paper's with those settings."""
    for dataset, less in (("cifar10", dict(width=0.125)), ("cifar100", dict(width=0.125, rounds=200))):
        for method in BUILT_IN:
            narrow = Experiment.preset("narrow", dataset, method)
            assert narrow.run_id == Experiment.preset("paper", dataset, method, **less).run_id
        assert narrow.differences_from_paper().keys() == less.keys()
    assert Experiment.preset("narrow").dataset == "cifar10"
    with pytest.raises(ValueError, match=r"^dataset: 'fashion_mnist' .*; the narrow preset has cifar10, cifar100$"):
        Experiment.preset("narrow", "fashion_mnist")


def test_only_the_large_networks_are_tested_every_tenth_round():
    every = {dataset: Experiment.preset("paper", dataset).evaluate_every for dataset in TABLE_II}
    assert every == {"fashion_mnist": 1, "cifar10": 10, "cifar100": 10}
    assert Experiment.preset("smoke", "cifar10").evaluate_every == Experiment(dataset="cifar10").evaluate_every == 1
    assert Experiment(evaluate_every=1).run_id == Experiment().run_id != Experiment(evaluate_every=2).run_id


def test_the_released_rules_are_a_difference_where_there_are_any():
    assert Experiment.preset("paper", method="snip", rules="released").differences_from_paper() == {"rules": "paper"}
    assert Experiment.preset("paper", method="fedavg", rules="released").differences_from_paper() == {}
    of_feddip = Experiment.preset("paper", rules="released").differences_from_paper()
    assert of_feddip == {"initial_mask": "erk"} | dict.fromkeys(SWITCHES[1:], "paper")


@pytest.mark.parametrize("preset", ["paper", "narrow", "smoke"])
@pytest.mark.parametrize("method", BUILT_IN)
def test_every_preset_has_every_method(preset, method):
    for rules in ("paper", "released"):
        e = Experiment.preset(preset, method=method, rules=rules)
        assert e.method == method
        assert e.replace() == e
        assert set(e.to_dict()) == set(settings_of(method, rules))
        assert None not in e.to_dict().values()


def test_methods_differ_in_what_they_read():
    """In the old code the others had these at 0: λ_max, s_0, s_p."""
    read = {
        m: {k for k in ("lambda_max", "sparsity_initial", "sparsity_target") if k in settings_of(m)} for m in BUILT_IN
    }
    both = {"sparsity_initial", "sparsity_target"}
    assert read == {
        "fedavg": set(), "fedprox": set(), "feddp": both, "dpf": {"sparsity_target"},
        "feddip": both | {"lambda_max"}, "feddip_prox": both | {"lambda_max"}, "prunefl": both,
        "snip": {"sparsity_target"}, "prunetrain": {"lambda_max"}, "feddst": {"sparsity_target"},
        "fedgmp": {"sparsity_target"}, "feddip_swap": {"sparsity_target"},
    } | {m: {"sparsity_target"} for m in LATER}  # fmt: skip


def test_rules_set_four_switches_and_each_can_be_set_alone():
    e = Experiment(rules="released")
    assert {k: getattr(e, k) for k in SWITCHES} == RELEASED
    e = Experiment(rules="released", regrowth="dense_memory")
    assert {k: getattr(e, k) for k in SWITCHES} == RELEASED | dict(regrowth="dense_memory")
    e = e.replace(rules="paper")  # keeps the one that was set by hand
    assert [getattr(e, k) for k in SWITCHES] == ["erk", "dense_memory", "paper", "paper"]


def test_replacing_the_method_brings_its_own_settings():
    feddip = Experiment.preset("smoke")
    fedavg = feddip.replace(method="fedavg")
    assert (getattr(fedavg, "sparsity_target", 0.0), getattr(fedavg, "lambda_max", 0.0)) == (0.0, 0.0)
    assert fedavg.rounds == feddip.rounds
    assert fedavg.replace(method="feddp", seed=1).sparsity_target == 0.9


def test_replacing_the_method_keeps_what_was_set_by_hand():
    mine = Experiment.preset("smoke", sparsity_target=0.95, sparsity_initial=0.3, reconfigure_every=3)
    feddp = mine.replace(method="feddp")
    assert (feddp.sparsity_initial, feddp.sparsity_target, feddp.reconfigure_every) == (0.3, 0.95, 3)
    assert not hasattr(mine.replace(method="fedavg"), "sparsity_target")
    assert mine.replace(method="snip").sparsity_target == 0.95
    remembering = mine.replace(regrowth="dense_memory")
    assert remembering.replace(method="dpf").regrowth == "dense_memory"
    assert not hasattr(remembering.replace(method="snip"), "regrowth")


def test_the_data_set_brings_its_own_column():
    assert Experiment(dataset="cifar100", evaluate_every=10) == Experiment.preset("paper", dataset="cifar100")
    assert Experiment().replace(dataset="cifar10", evaluate_every=10) == Experiment.preset("paper", dataset="cifar10")
    assert Experiment(learning_rate=0.3).replace(dataset="cifar10").learning_rate == 0.3


def test_a_path_is_a_path(tmp_path):
    (tmp_path / "own.npz").touch()
    assert Experiment(dataset=tmp_path / "own.npz", model="lenet5").dataset == str(tmp_path / "own.npz")


def test_an_experiment_shows_what_makes_it_again():
    e = Experiment(method="fedprox", prox_mu=0.3, seed=4)
    assert eval(repr(e)) == e
    assert "rounds" not in repr(e)


# The run_id


def test_fedavgs_id_does_not_depend_on_what_it_does_not_use():
    fedavg = Experiment(method="fedavg")
    assert fedavg.replace(rules="released").run_id == fedavg.run_id
    assert Experiment(method="fedprox", rules="released").run_id == Experiment(method="fedprox").run_id
    assert Experiment.preset("paper", method="fedavg").run_id == fedavg.run_id  # the preset's R, Q, s_p are not its own
    assert Experiment(rules="released").run_id != Experiment().run_id
    with pytest.raises(ValueError, match="reconfigure_every: 7 is not allowed; fedavg has no such setting"):
        fedavg.replace(reconfigure_every=7)


def test_run_id_is_a_hash_of_what_affects_the_result():
    e = Experiment()
    changes = dict(seed=1, rounds=999, width=0.5, regrowth="released")
    ids = {e.run_id, *(e.replace(**{k: v}).run_id for k, v in changes.items())}
    assert len(ids) == 5
    assert all(len(i) == 12 for i in ids)
    assert Experiment(learning_rate=np.float64(0.01), clients=np.int64(50)).run_id == e.run_id
    named = Experiment(rules="released")
    assert named.run_id == Experiment(**RELEASED).run_id


def test_a_run_id_by_hand():
    """FedAvg on Fashion-MNIST: what the data set gives, and nothing that FedAvg does not read."""
    counted = dict(model="lenet5", batch_size=64, learning_rate=0.01, method="fedavg", revision=REVISION, source=None)
    expected = hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:12]
    assert Experiment(method="fedavg").run_id == expected
    assert REVISION == 2


def test_every_setting_of_its_method_is_in_the_run_id():
    plain = Experiment(method="feddst")
    others = dict(sparsity_target=0.8, reconfigure_every=7, adjust_alpha=0.4)
    assert set(others) == set(settings_of("feddst")) - set(COMMON)
    assert len({plain.run_id, *(plain.replace(**{k: v}).run_id for k, v in others.items())}) == 4


def test_two_methods_and_two_rules_never_share_an_id():
    ids = {(m, r): Experiment(method=m, rules=r).run_id for m in BUILT_IN for r in ("paper", "released")}
    assert len(set(ids.values())) == len(BUILT_IN) + 8  # of the methods with a released version
    assert Experiment(method="dpf").run_id != Experiment(method="feddp", sparsity_initial=0.0).run_id


@pytest.mark.parametrize("method", ["fedavg", "feddip", "prunetrain"])
def test_a_new_setting_at_its_default_leaves_ids_alone(method, monkeypatch):
    before = Experiment(method=method).run_id
    new = flag(False, "a setting that a later version brings")
    monkeypatch.setitem(COMMON, "novelty", new)
    monkeypatch.setattr(METHODS[method], "settings", METHODS[method].settings | {"own_novelty": new})
    later = Experiment(method=method)
    assert {"novelty", "own_novelty"} <= later.to_dict().keys()
    assert later.run_id == before
    assert len({later.replace(novelty=True).run_id, later.replace(own_novelty=True).run_id, before}) == 3


def test_how_a_result_is_computed_can_be_left_out():
    e = Experiment()
    changed = [
        e.replace(**{k: {"device": "cuda", "gradient": "eager", "threads": 2}.get(k, True)}) for k in EXECUTION_SETTINGS
    ]
    assert len({e.run_id, *(other.run_id for other in changed)}) == 1 + len(EXECUTION_SETTINGS)
    assert {other.on_any_machine().run_id for other in changed} == {e.run_id}


@pytest.mark.slow
def test_run_id_is_the_same_in_another_process():
    code = "from feddip_core import Experiment; print(Experiment.preset('smoke').run_id)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert other.stdout.strip() == Experiment.preset("smoke").run_id


def test_run_id_of_own_data_follows_the_content_not_the_path(tmp_path):
    ids = []
    for folder, value in (("a", 1), ("b", 1), ("c", 2)):
        path = tmp_path / folder / "own.npz"
        path.parent.mkdir()
        np.savez(path, x_train=np.full(3, value))
        ids.append(Experiment(dataset=str(path), model="lenet5").run_id)
    assert ids[0] == ids[1] != ids[2]


# Methods of your own


PULL = dict(pull=real(0.5, 0, 1, "how strongly"), steps=whole(3, 1, "how often"))


def mine(strength):
    """Two classes of one name: their code differs where `strength` does."""
    if strength == "weak":

        class Mine(FedAvg):
            settings = PULL

            def lam(self, t):
                return 0.1

    else:

        class Mine(FedAvg):
            settings = PULL

            def lam(self, t):
                return 0.9

    return Mine


def test_a_class_of_your_own_is_a_method():
    e = Experiment(method=mine("weak"), pull=0.25)
    assert (e.pull, e.steps) == (0.25, 3)
    assert e.method == f"{__name__}:mine.<locals>.Mine"
    assert e.method_class.label == "Mine"
    assert Experiment(**e.to_dict()) == e
    with pytest.raises(ValueError, match=r"pull: 2 is not allowed; it must be a number in \[0, 1\]"):
        Experiment(method=mine("weak"), pull=2)
    with pytest.raises(ValueError, match=r"sparsity_target: 0\.9 is not allowed; .* its own are pull, steps"):
        Experiment(method=mine("weak"), sparsity_target=0.9)


def test_the_code_and_the_settings_of_your_own_method_enter_the_run_id():
    weak, strong = Experiment(method=mine("weak")), Experiment(method=mine("strong"))
    assert weak.method == strong.method
    assert weak.run_id != strong.run_id
    again = Experiment(method=mine("weak"))
    assert again.run_id == Experiment(method=mine("weak"), pull=0.5).run_id
    assert again.run_id != Experiment(method=mine("weak"), pull=0.25).run_id
    assert again.source_sha256 != strong.source_sha256
    assert Experiment().source_sha256 is None


def test_an_experiment_keeps_its_class_when_another_of_that_name_comes():
    """As in a notebook, where a cell is changed and run again."""
    old, new = mine("weak"), mine("strong")
    first = Experiment(method=old)
    second = Experiment(method=new)
    assert (first.method_class, second.method_class) == (old, new)
    assert first.run_id != second.run_id


def test_what_a_class_of_your_own_inherits_from_another_of_your_own_counts_too():
    class Base(FedDIP):
        strength = 1

    class Child(Base):
        pass

    before = Experiment(method=Child).run_id
    Base.strength = 2
    assert Experiment(method=Child).run_id != before


def test_a_setting_of_your_own_may_not_take_a_common_name():
    class Greedy(Method):
        settings: ClassVar = dict(rounds=whole(3, 1, "mine"))

    with pytest.raises(ValueError, match=r"rounds: '.*Greedy' may not have a setting of that name"):
        Experiment(method=Greedy)


def test_a_setting_of_your_own_without_a_default_must_be_given():
    class Strict(Method):
        settings: ClassVar = dict(word=choice(None, ("a", "b"), "which"))

    with pytest.raises(ValueError, match="word: a value is needed; it must be one of a, b"):
        Experiment(method=Strict)
    assert Experiment(method=Strict, word="b").word == "b"


def test_a_class_can_be_named_by_its_module(tmp_path, monkeypatch):
    # A name that no other test has: methods and modules stay known to the process.
    (tmp_path / "my_methods.py").write_text(
        "from feddip_core.methods import FedAvg\n\nclass Mine(FedAvg):\n    pass\n", "utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    by_name = Experiment(method="my_methods:Mine")
    assert by_name == Experiment(method=importlib.import_module("my_methods").Mine)
    with pytest.raises(
        ValueError, match=r"'my_methods:Nobody' .* cannot be imported .* put it in a module, such as yours.py"
    ):
        Experiment(method="my_methods:Nobody")


def test_settings_check_themselves():
    assert whole(1, 1, "").checked("n", np.int64(4)) == 4
    assert real(0.0, 0, math.inf, "").checked("x", 3) == 3.0
    assert flag(False, "").checked("f", True) is True
    assert matching(None, r"a+", "some a", "").checked("word", "aa") == "aa"
    for setting, value in ((whole(1, 1, ""), True), (flag(False, ""), 1), (real(0, 0, 1, "", open_high=True), 1.0)):
        with pytest.raises(ValueError, match=r"^x: .* is not allowed; it must be "):
            setting.checked("x", value)


def test_an_experiment_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Experiment().rounds = 3
