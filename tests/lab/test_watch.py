"""Runs that a notebook looks into are the runs themselves."""

import torch

from feddip_core import masks, run
from feddip_core.engine.assembly import assemble
from feddip_core.lab.watch import accuracy_under, messages, trained_on, watched, with_masks
from feddip_core.study import figures


def test_a_watched_run_is_the_run_and_its_rounds_can_be_made_from_its_start(tiny):
    exp = tiny(rounds=2)
    result, seen = watched(exp, lambda federation, state: state.t)
    federation = assemble(exp)
    metrics, state = trained_on(federation, federation.start(), rounds=2)
    assert seen == [1, 2] and state.t == 2
    for found in (result.metrics, metrics):
        assert found["test_loss"].tolist() == run(exp).metrics["test_loss"].tolist()
    assert all(torch.equal(result.mask[k], state.m[k]) for k in state.m)


def test_accuracies_by_round_and_by_what_was_sent(tiny):
    metrics = run(tiny(rounds=2)).metrics
    by_round, by_cost = (figures.accuracies({"a": metrics}, cost=cost) for cost in (False, True))
    assert by_round.index.tolist() == [1, 2] and by_round["a"].tolist() == by_cost["a"].tolist()
    assert by_cost.index[-1] == metrics[["downlink_bits", "uplink_bits"]].sum().sum() / 8e6


def test_the_mask_of_a_layer_after_each_round(tiny):
    exp = tiny(rounds=2)
    result, history = with_masks(exp, "fc2.weight")
    assert history.shape == (2, result.mask["fc2.weight"].numel())
    assert (history[-1] == result.mask["fc2.weight"].flatten().numpy()).all()


def test_under_its_own_mask_a_network_is_as_accurate_as_it_was_and_under_none_it_guesses(tiny):
    result = run(tiny(rounds=2))
    weights = {k: result.weights[k] for k in result.mask}
    ways = {"magnitude": lambda s: masks.magnitude_mask(weights, s), "its own": lambda s: result.mask}
    table = accuracy_under(result, ways, [0.0, 1.0])
    assert table["its own"].tolist() == [result.metrics["test_accuracy"].iloc[-1]] * 2
    assert table["magnitude"].tolist() == [result.metrics["test_accuracy"].iloc[-1], 0.1]


def test_the_parts_of_both_messages_add_up_to_the_bits_of_a_round(tiny):
    exp = tiny(rounds=1, clients_per_round=1)
    bits = messages(exp, t=0)
    assert bits["down", "mask"] == 15_615  # prunable weights at half the width
    for way in ("down", "up"):
        assert sum(v for (to, _), v in bits.items() if to == way) == run(exp).metrics[f"{way}link_bits"].iloc[0]
