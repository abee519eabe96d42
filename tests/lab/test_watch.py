"""Runs that a notebook looks into are the runs themselves."""

import torch

from feddip_core import run
from feddip_core.engine.assembly import assemble
from feddip_core.lab.watch import trained_on, watched
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
