"""Batch norms in federation: averaged, each client's own, or frozen; and group norms."""

import dataclasses

import pytest
import torch

from feddip_core import data, models, run
from feddip_core.federation import Federation


@pytest.fixture
def site(tiny):
    def make(**settings):
        defaults = dict(model="resnet18", width=0.05, clients=20, partition="pathological")
        return Federation(tiny(**(dict(method="fedavg") | defaults | settings)), data.load("fashion_mini"))

    return make


def test_the_names_of_the_norms():
    names = models.norm_names(models.build("resnet18", 100))
    assert len(names) == 2 * 20 and "bn1.weight" in names and "layer4.0.shortcut.1.bias" in names
    assert not models.norm_names(models.build("resnet18", 100, norm="group"))


def test_a_clients_own_norms_come_back_to_it_and_to_nobody_else(site):
    own = site(batch_norm="local")
    first = own.start()
    assert first.norms.shape == (20, len(own.norms) + own.statistics.size)
    after, _ = own.round(first)
    chosen = own.select(0)
    moved = (after.norms != first.norms).any(1)
    assert sorted(moved.nonzero().flatten().tolist()) == chosen
    w, statistics, _, _ = own._ready(after, chosen[0])
    assert torch.equal(torch.cat([w[own.norms], statistics]), after.norms[chosen[0]])
    stranger = next(n for n in range(20) if n not in chosen)
    w, statistics, _, _ = own._ready(after, stranger)
    assert torch.equal(torch.cat([w[own.norms], statistics]), first.norms[stranger])
    everything_else = torch.ones(own.layout.size, dtype=torch.bool)
    everything_else[own.norms] = False
    assert torch.equal(w[everything_else], after.w[everything_else])


def test_own_norms_are_not_sent(site):
    bits = {
        rule: site(batch_norm=rule).round(site(batch_norm=rule).start())[1]["uplink_bits"]
        for rule in ("average", "local")
    }
    net = models.build("resnet18", 10, 0.05, channels=1, size=28)
    norms = sum(2 * m.num_features for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d))
    assert bits["average"] - bits["local"] == 2 * 32 * (
        norms + norms
    )  # two clients; scales and shifts, means and variances


def test_frozen_norms_are_those_of_the_first_round(site):
    frozen, averaged = site(batch_norm="frozen"), site()
    first, _ = frozen.round(frozen.start())
    assert torch.equal(first.w, averaged.round(averaged.start())[0].w)
    second, _ = frozen.round(first)
    assert torch.equal(second.statistics, first.statistics)
    other, _ = averaged.round(first)
    assert not torch.equal(other.statistics, first.statistics)
    assert not torch.equal(other.w, second.w)  # a batch's own mean is not the frozen one


def test_frozen_norms_are_frozen_in_every_gradient_and_nothing_else_is(site):
    frozen = site(method="feddst", batch_norm="frozen", reconfigure_every=1)
    frozen.net.dropout = torch.nn.Dropout()
    first, _ = frozen.round(frozen.start())
    modes = []
    frozen.net.bn1.register_forward_hook(lambda module, *_: modes.append(module.training))
    frozen.train_client(first, 0)  # its steps, and the gradient that brings weights back
    steps = len(list(frozen.batches(0, 1, "batches", frozen.exp.local_epochs)))
    assert modes == [False] * (steps + 1) and frozen.net.dropout.training


def test_a_group_norm_is_of_a_sample_by_itself():
    torch.manual_seed(0)
    net = models.build("resnet18", 10, 0.125, norm="group").train()
    x = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(net(x)[:1], net(x[:1]))
    assert models.Layout.of_statistics(net).size == 0
    assert {m.num_groups for m in net.modules() if isinstance(m, torch.nn.GroupNorm)} == {8}
    batch = models.build("resnet18", 10, 0.125)
    assert models.Layout.of(net).sizes == models.Layout.of(batch).sizes


@pytest.mark.parametrize("settings", [dict(batch_norm="local"), dict(batch_norm="frozen"), dict(norm="group")])
def test_a_run_with_them_goes_on_to_the_same_bits(tiny, tmp_path, settings):
    exp = tiny(model="resnet18", width=0.05, clients=60, rounds=2, **settings)
    whole = run(exp)
    run(exp, out=tmp_path, until=1)
    resumed = run(exp, out=tmp_path)
    assert all(torch.equal(whole.weights[k], resumed.weights[k]) for k in whole.weights)
    assert whole.metrics.drop(columns="seconds").equals(resumed.metrics.drop(columns="seconds"))


def test_a_state_without_norms_of_its_own_can_be_read(site):
    """As a checkpoint has it that was written before there were any."""
    state = site().start()
    tensors = {k: v for k, v in state.tensors().items() if k != "norms"}
    assert type(state).of(tensors, 0, 0, ()).norms.numel() == 0
    assert dataclasses.replace(state).norms.numel() == 0
