"""FedAvg and FedProx."""

import pytest
import torch
from helpers import same, trained

from feddip_core import client, run
from feddip_core.engine.assembly import assemble


def test_fedprox_without_mu_is_fedavg(tiny):
    assert same(run(tiny("fedprox", prox_mu=0)), run(tiny("fedavg")))
    assert not same(run(tiny("fedprox", prox_mu=0.1)), run(tiny("fedavg")))


def test_fedprox_ends_between_its_anchor_and_the_optimum():
    # f = ½‖w − a‖² with a = 4, held at w_g = 1 by μ = 0.5: (4 + 0.5 · 1) / 1.5 = 3
    w, anchor = torch.tensor([1.0]), torch.tensor([1.0])

    def quadratic(u, x, y):
        return (u - 4).square().sum() / 2, u - 4

    def term(g, u):
        client.add_proximal_(g, u, anchor, mu=0.5)

    client.train_(w, None, quadratic, [(None, torch.zeros(1))] * 200, eta=0.1, terms=[term])
    assert w.item() == pytest.approx(3.0, abs=1e-5)


def test_fedproxs_first_step_does_not_depend_on_mu_and_its_drift_does(tiny, mini):
    def drift(mu, batch_size, **settings):
        federation = assemble(tiny("fedprox", prox_mu=mu, batch_size=batch_size, **settings), mini)
        start = federation.start()
        return trained(federation, start, 0) - start.w

    one_step = [drift(mu, 1000) for mu in (0.0, 10.0)]  # one batch holds all of a client's samples
    assert torch.equal(*one_step)
    norms = [drift(mu, 8, local_epochs=10).norm() for mu in (0.0, 0.1, 1.0)]
    assert norms == sorted(norms, reverse=True)
    assert norms[-1] < 0.5 * norms[0]


def test_fedprox_costs_what_fedavg_costs(tiny):
    bits = ["downlink_bits", "uplink_bits"]
    assert run(tiny("fedprox", rounds=2)).metrics[bits].equals(run(tiny("fedavg", rounds=2)).metrics[bits])


def test_fedavg_sends_every_parameter_both_ways(tiny):
    metrics = run(tiny("fedavg", width=1.0, rounds=2)).metrics  # two clients, 61,706 parameters of 32 bits
    assert metrics["downlink_bits"].tolist() == metrics["uplink_bits"].tolist() == [2 * 32 * 61_706] * 2
