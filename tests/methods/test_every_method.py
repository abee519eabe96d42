"""What all methods share: settings, limits, partitions, counting, divergence."""

import functools
import itertools
import math

import pytest
from helpers import model_and_mask_bits, same, same_model, states

from feddip_core import METHODS, Experiment, run
from feddip_core.experiment import settings_of


@pytest.fixture
def tiny(tiny):
    """Of the narrowest network: every method trains here, many times."""
    return functools.partial(tiny, width=0.2)


BUILT_IN = (
    "fedavg", "fedprox", "feddp", "dpf", "feddip", "feddip_prox", "prunefl", "snip", "prunetrain", "feddst", "fedgmp",
    "feddip_swap", "fedtiny", "fedrts", "ssfl", "fedmef", "sparsyfed", "flash",
)  # fmt: skip
LATER = BUILT_IN[12:]
SPARSE = ("prunefl", "snip", "prunetrain", "feddst")
QUESTIONS = {"prunefl": ["find_mask"], "snip": ["sensitivity"], "ssfl": ["saliency"], "flash": ["discover"]}
FAMILY = ("feddp", "dpf", "feddip", "feddip_prox")


def every(R, method, rules="paper"):
    """R, for a method that reads it."""
    return {"reconfigure_every": R} if "reconfigure_every" in settings_of(method, rules) else {}


def test_the_registry_holds_each_under_its_name():
    assert tuple(name for name in METHODS if ":" not in name) == BUILT_IN
    assert all(METHODS[name].name == name for name in BUILT_IN)
    looks = [(METHODS[name].label, METHODS[name].colour, METHODS[name].line) for name in BUILT_IN]
    assert len({label for label, *_ in looks}) == len({(colour, line) for _, colour, line in looks}) == len(BUILT_IN)
    for name in SPARSE:  # the released version has the same name and look
        cls = METHODS[name].released
        assert (cls.name, cls.label, cls.colour, cls.line) == (name, *looks[BUILT_IN.index(name)])


def test_a_method_says_what_its_settings_mean():
    for name, rules in itertools.product(BUILT_IN, ("paper", "released")):
        for setting in settings_of(name, rules).values():
            assert setting.note and setting.allowed


@pytest.mark.parametrize("method", ["snip", "prunefl", "feddst", "fedtiny", "fedrts", "ssfl", "flash"])
@pytest.mark.parametrize("rules", ["paper", "released"])
def test_without_sparsity_a_pruning_baseline_is_fedavg(tiny, method, rules):
    zero = {k: 0 for k in ("sparsity_initial", "sparsity_target") if k in settings_of(method, rules)}
    assert same_model(run(tiny(method, rules=rules, **zero)), run(tiny("fedavg")))


@pytest.mark.parametrize("method", BUILT_IN)
def test_every_method_trains_on_the_pathological_partition_and_repeats_itself(tiny, method):
    exp = tiny(method, partition="pathological", rounds=3, **every(2, method))
    first = run(exp)
    assert same(first, run(exp))
    assert first.diverged is None
    assert first.metrics.test_loss.notna().all()


@pytest.mark.parametrize("method", [*SPARSE, *FAMILY])
def test_every_methods_released_version_trains(tiny, method):
    exp = tiny(method, rules="released", rounds=3, **every(2, method, "released"))
    assert same(run(exp), run(exp))
    paper = tiny(method, rounds=3, **every(2, method))
    assert not same_model(run(exp), run(paper))


def test_four_baselines_have_a_released_version_and_four_methods_have_switches():
    assert [m for m in BUILT_IN if METHODS[m].released] == list(SPARSE)
    assert [m for m in BUILT_IN if METHODS[m].switches] == list(FAMILY)


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
def test_fedavg_and_fedprox_are_the_same_under_both_rules(tiny, method):
    assert same(run(tiny(method, rules="released", rounds=2)), run(tiny(method, rounds=2)))


@pytest.mark.parametrize("method", BUILT_IN)
def test_the_old_variant_is_refused(method):
    with pytest.raises(ValueError, match=rf"variant: 'authors' is not allowed; {method} has no such setting"):
        Experiment(method=method, variant="authors")


def test_baselines_have_the_papers_settings():
    paper = {m: Experiment.preset("paper", method=m) for m in BUILT_IN}
    read = {m: e.reconfigure_every for m, e in paper.items() if hasattr(e, "reconfigure_every")}
    every_five, every_ten = (*FAMILY, "fedgmp", "feddip_swap"), ("fedtiny", "fedrts", "fedmef")
    others = {"prunefl": 20, "feddst": 20, "prunetrain": 1}
    assert read == dict.fromkeys(every_five, 5) | dict.fromkeys(every_ten, 10) | others
    assert (paper["feddst"].adjust_alpha, paper["prunetrain"].prunetrain_threshold) == (0.5, 1e-4)
    assert paper["prunetrain"].lambda_max == 1e-4
    assert paper["snip"].sparsity_target == 0.9
    assert Experiment.preset("paper", dataset="cifar10", method="snip").sparsity_target == 0.8
    assert Experiment.preset("paper", dataset="cifar10", method="feddst").sparsity_target == 0.9
    assert all(not e.differences_from_paper() for e in paper.values())


@pytest.mark.parametrize("method", ["snip", "feddst", "prunefl"])
def test_a_sparse_method_sends_sparse_models_both_ways(tiny, mini, method):
    exp = tiny(method, rounds=4, clients=6, clients_per_round=6, **every(2, method))
    visited = list(states(exp, mini))
    for (federation, state, _), (_, _, row) in itertools.pairwise(visited):
        payload, n_w = model_and_mask_bits(federation, state)
        last_of_two = row["round"] % 2 == 0
        new_mask = state.t == 0 or (method != "snip" and state.t == 2)
        down = 6 * payload + (6 * n_w if new_mask else 0)
        # PruneFL's squared gradients come in every round; FedDST's masks when they change.
        extra = {"snip": 0, "feddst": 6 * n_w if last_of_two else 0, "prunefl": 6 * 32 * n_w}[method]
        assert (row["downlink_bits"], row["uplink_bits"]) == (down, 6 * payload + extra)


@pytest.mark.parametrize("method", BUILT_IN)
@pytest.mark.parametrize("rules", ["paper", "released"])
def test_what_clients_are_asked_before_the_first_round_is_named(method, rules):
    cls = METHODS[method].released if rules == "released" and METHODS[method].released else METHODS[method]
    assert list(cls.questions) == QUESTIONS.get(method, [])
    assert all(callable(getattr(cls, question)) for question in cls.questions)


@pytest.mark.parametrize("method", ["fedavg", "feddip", "prunefl", "feddst", "prunetrain", *LATER])
def test_divergence_ends_a_run_and_is_recorded(tiny, tmp_path, method):
    exp = tiny(method, learning_rate=1e4, rounds=6, **every(1, method))
    result = run(exp, out=tmp_path)
    assert result.diverged == len(result.metrics) < 6
    assert not math.isfinite(result.metrics.test_loss.iloc[-1] + result.metrics.train_loss.iloc[-1])
    assert result.provenance["diverged"] == result.diverged
