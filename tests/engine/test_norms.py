"""Batch norms in federation: averaged, each client's own, or frozen; and group norms."""

import pytest
import torch
from helpers import one_round, same

from feddip_core import models, run
from feddip_core.engine.assembly import assemble
from feddip_core.engine.checkpoints import state_of, tensors_of
from feddip_core.layout import Layout


@pytest.fixture
def made(tiny, hardly_tested):
    def make(**settings):
        defaults = dict(model="resnet18", width=0.05, clients=20, partition="pathological", batch_size=150)
        return assemble(tiny(**(dict(method="fedavg") | defaults | settings)), hardly_tested)

    return make


def test_the_names_of_the_norms():
    names = models.norm_names(models.build("resnet18", 100))
    assert len(names) == 2 * 20 and "bn1.weight" in names and "layer4.0.shortcut.1.bias" in names
    assert not models.norm_names(models.build("resnet18", 100, norm="group"))


def test_a_clients_own_norms_come_back_to_it_and_to_nobody_else(made):
    own = made(batch_norm="local")
    clients, first = own.clients, own.start()
    size = len(clients.norms) + clients.layout.statistics.size
    assert sorted(first.own) == list(range(20)) and {kept["norms"].shape for kept in first.own.values()} == {(size,)}
    after, _ = own.round(first)
    chosen = own.select(0)
    moved = [n for n in range(20) if not torch.equal(after.own[n]["norms"], first.own[n]["norms"])]
    assert moved == chosen
    w, statistics, _, _ = own.ready(after, chosen[0])
    assert torch.equal(torch.cat([w[clients.norms], statistics]), after.own[chosen[0]]["norms"])
    stranger = next(n for n in range(20) if n not in chosen)
    w, statistics, _, _ = own.ready(after, stranger)
    assert torch.equal(torch.cat([w[clients.norms], statistics]), first.own[stranger]["norms"])
    everything_else = torch.ones(clients.layout.size, dtype=torch.bool)
    everything_else[clients.norms] = False
    assert torch.equal(w[everything_else], after.w[everything_else])


def test_own_norms_are_counted_like_averaged_ones(made):
    """They travel for the server's test model, so they cost what averaged ones cost. The old code left them out."""
    rows = {}
    for rule in ("average", "local"):
        federation = made(batch_norm=rule)
        rows[rule] = one_round(federation, federation.start())[1]
    net = models.build("resnet18", 10, 0.05, channels=1, size=28)
    parameters = sum(p.numel() for p in net.parameters())
    norms = sum(2 * m.num_features for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d))
    dense = 2 * 32 * (parameters + norms)  # two clients; all parameters, and a mean and a variance for each channel
    for row in rows.values():
        assert (row["downlink_bits"], row["uplink_bits"]) == (dense, dense)


@pytest.mark.slow
def test_frozen_norms_are_those_of_the_first_round(made):
    frozen, averaged = made(batch_norm="frozen"), made()
    first, _ = frozen.round(frozen.start())
    assert torch.equal(first.w, averaged.round(averaged.start())[0].w)
    second, _ = frozen.round(first)
    assert torch.equal(second.statistics, first.statistics)
    other, _ = averaged.round(first)
    assert not torch.equal(other.statistics, first.statistics)
    assert not torch.equal(other.w, second.w)  # a batch's own mean is not the frozen one


def test_frozen_norms_are_frozen_in_every_gradient_and_nothing_else_is(made):
    frozen = made(method="feddst", batch_norm="frozen", reconfigure_every=1)
    frozen.clients.net.dropout = torch.nn.Dropout()
    first, _ = frozen.round(frozen.start())
    modes = []
    frozen.clients.net.bn1.register_forward_hook(lambda module, *_: modes.append(module.training))
    frozen.train_client(first, 0)  # its steps, and the gradient that brings weights back
    steps = len(list(frozen.clients.batches(0, 1, "batches", frozen.exp.local_epochs)))
    assert modes == [False] * (steps + 1) and frozen.clients.net.dropout.training


def test_a_group_norm_is_of_a_sample_by_itself():
    torch.manual_seed(0)
    net = models.build("resnet18", 10, 0.125, norm="group").train()
    x = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(net(x)[:1], net(x[:1]))
    assert Layout.of(net).statistics.size == 0
    assert {m.num_groups for m in net.modules() if isinstance(m, torch.nn.GroupNorm)} == {8}
    batch = models.build("resnet18", 10, 0.125)
    assert Layout.of(net).sizes == Layout.of(batch).sizes


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(batch_norm="local"), dict(batch_norm="frozen"), dict(norm="group")])
def test_a_run_with_them_resumes_to_the_same_bits(tiny, tmp_path, settings):
    exp = tiny(model="resnet18", width=0.05, clients=60, rounds=2, **settings)
    whole = run(exp)
    run(exp, out=tmp_path, until=1)
    assert same(run(exp, out=tmp_path), whole)


def test_a_state_is_taken_apart_and_put_together_again(made):
    """With what each client keeps for itself, and without."""
    for rule in ("average", "local"):
        federation = made(method="feddip", batch_norm=rule)
        state, _ = federation.round(federation.start())
        tensors = tensors_of(state)
        assert any(k.startswith("own/") for k in tensors) == (rule == "local")
        back = state_of(tensors, state.t, state.mask_version, federation.clients.layout.prunable)
        assert (back.t, back.mask_version, back.client_mask_versions) == (
            state.t,
            state.mask_version,
            state.client_mask_versions,
        )
        assert list(back.m) == list(state.m) and tensors_of(back).keys() == tensors.keys()
        assert all(torch.equal(v, tensors_of(back)[k]) for k, v in tensors.items())
        without = {k: v for k, v in tensors.items() if not k.startswith("own/")}
        assert state_of(without, 0, 0, federation.clients.layout.prunable).own == {}
