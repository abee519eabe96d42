"""PruneFL: weights earn their place by squared gradient for the time that they cost."""

import itertools

import pytest
import reference
import torch
from helpers import lists, model_and_mask_bits, states, tensors, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from small_nets import small_nets

from feddip_core import masks, models
from feddip_core.engine.assembly import assemble
from feddip_core.methods import prunefl
from feddip_core.methods.prunefl import prunefl_mask, uses_of
from feddip_core.schedules import sparsity_at


def test_prunefls_keep_set_and_greedy_fill_by_hand():
    w = {"a": torch.tensor([9.0, 8.0, 1.0, 0.0]), "b": torch.tensor([0.1, 0.2, 0.0, 0.0])}
    value = {"a": torch.tensor([0.0, 0.0, 5.0, 1.0]), "b": torch.tensor([2.0, 0.0, 7.0, 0.0])}
    m = {"a": torch.tensor([True, True, True, False]), "b": torch.tensor([True, True, False, False])}
    # Of three and two active weights a half may go, one of each layer: 9, 8 and 0.2 are safe. Two more places: 7 and 5.
    mask = prunefl_mask(w, value, m, keep=5, drop=0.5)
    assert lists(mask) == [[True, True, True, False], [False, True, True, False]]
    # With room for two only, the smallest of the safe goes.
    assert lists(prunefl_mask(w, value, m, keep=2, drop=0.5)) == [[True, True, False, False], [False] * 4]


def test_prunefl_changes_nothing_when_nothing_may_go():
    w, value = {"a": torch.tensor([1.0, 2.0, 0.0])}, {"a": torch.tensor([0.0, 0.0, 99.0])}
    m = {"a": torch.tensor([True, True, False])}
    assert prunefl_mask(w, value, m, keep=2, drop=0.0)["a"].tolist() == [True, True, False]


def test_prunefl_at_equal_times_takes_the_largest_gradients():
    w = {"a": torch.zeros(4)}
    value, m = {"a": torch.tensor([3.0, 1.0, 4.0, 2.0])}, {"a": torch.tensor([True, True, False, False])}
    assert prunefl_mask(w, value, m, keep=2, drop=1.0)["a"].tolist() == [True, False, True, False]


@settings(deadline=None, max_examples=60)
@given(small_nets(), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.data())
def test_prunefls_rule_is_the_naive_one(net, drop, draw):
    w, g, m = net
    keep = draw.draw(st.integers(1, sum(len(v) for v in w)))
    value = [[v * v for v in layer] for layer in g]
    ours = prunefl_mask(tensors(w), tensors(value), tensors(m), keep, drop)
    assert lists(ours) == reference.prunefl_mask(w, value, m, keep, drop)
    assert masks.kept(ours) == keep


def test_prunefl_follows_the_schedule_with_inactive_weights_at_zero(tiny, mini):
    exp = tiny("prunefl", rounds=4, reconfigure_every=2, sparsity_initial=0.5)
    for federation, state, row in states(exp, mini):
        n_w = sum(v.numel() for v in state.m.values())
        tau = row["round"] // 2 * 2 if row else 0
        s = sparsity_at(tau, T=4, s_0=0.5, s_p=0.9)
        assert masks.kept(state.m) == n_w - round(s * n_w)
        layout = federation.clients.layout
        assert not any(v[~state.m[k]].any() for k, v in layout.weights(state.w).items())
        upload = trained(federation, state, 0)
        assert not any(v[~state.m[k]].any() for k, v in layout.weights(upload).items())


def test_prunefl_sums_gradients_over_steps_rounds_and_clients(tiny, mini):
    federation = assemble(tiny("prunefl", rounds=4, reconfigure_every=3), mini)
    state = federation.start()
    sums = 0
    for _ in range(2):
        chosen = federation.select(state.t)
        sums = sums + sum(federation.train_client(state, n).values["g2"] for n in chosen) / len(chosen)
        state, _ = federation.round(state)
    torch.testing.assert_close(state.memory["g2"], sums)
    state, _ = federation.round(state)
    assert not state.memory  # with the new mask the sum begins anew


def test_prunefls_squared_gradients_are_those_of_prunable_weights(tiny, mini):
    """The rest decides nothing; of the prunable weights the pruned ones count too."""
    federation = assemble(tiny("prunefl"), mini)
    state, layout = federation.start(), federation.clients.layout
    g2 = federation.train_client(state, 0).values["g2"]
    pruned = layout.flat_mask(state.m, like=g2) == 0
    biases = torch.ones_like(g2, dtype=torch.bool)
    for layer in layout.layers:
        biases[layer] = False
    assert not g2[biases].any() and g2[pruned].any() and (g2 >= 0).all()


def test_a_weight_costs_the_time_of_its_layer():
    net = models.build("lenet5", 10)
    uses = uses_of(net, torch.zeros(1, 1, 28, 28))
    assert uses == dict(zip(models.prunable(net), (784, 100, 1, 1, 1), strict=True))


def test_prunefl_weighs_the_time_and_spares_the_largest(tiny, mini, monkeypatch):
    federation = assemble(tiny("prunefl"), mini)
    method, w, m = federation.method, federation.clients.first_weights, federation.full_mask(None)
    g2 = torch.ones_like(w)
    kept = method.adjusted(w, g2, m, keep=2000, r=0)
    assert masks.kept({k: v for k, v in kept.items() if k.startswith("conv")}) < sum(
        v.numel() for k, v in m.items() if k.startswith("conv")
    )
    uses = dict.fromkeys(m, 0) | {"fc1.weight": 10**9}  # this layer takes for ever, and gets no more than its keep-set
    monkeypatch.setattr(prunefl, "uses_of", lambda *_: uses)
    n = m["fc1.weight"].numel()
    kept = method.adjusted(w, g2, m, keep=sum(v.numel() for v in m.values()) - int(0.3 * n), r=0)
    assert int(kept["fc1.weight"].sum()) == n - int(0.3 * n)
    late = method.adjusted(w, g2, m, keep=sum(v.numel() for v in m.values()) - int(0.15 * n), r=10_000)
    assert int(late["fc1.weight"].sum()) == n - int(0.15 * n)  # after 10,000 rounds half as much may go


def test_the_released_prunefl_can_begin_dense(tiny, mini):
    federation = assemble(tiny("prunefl", rules="released", sparsity_initial=0.0), mini)
    assert all(keep.all() for keep in federation.full_mask(federation.start().m).values())


def test_the_released_prunefls_g2_is_of_the_last_batch(tiny, mini):
    ours, released = (assemble(tiny("prunefl", rules=r, reconfigure_every=1), mini) for r in ("paper", "released"))
    state = ours.start()
    sums = [f.train_client(state, 0).values["g2"].sum() for f in (ours, released)]
    assert sums[0] > 2 * sums[1]


@pytest.mark.parametrize("model", ["alexnet", "resnet18"])
@pytest.mark.parametrize("rules", ["paper", "released"])
def test_prunefls_start_is_its_own(tiny, mini, monkeypatch, model, rules):
    """It draws from no global generator, and leaves nothing behind in the network."""
    federation = assemble(tiny("prunefl", model=model, width=0.03, rules=rules, clients=200), mini)
    monkeypatch.setattr(prunefl, "PASSES", 2)
    torch.manual_seed(1)
    first = federation.start()
    torch.manual_seed(2)
    second = federation.start()
    assert torch.equal(first.w, second.w)
    assert torch.equal(first.statistics, second.statistics)


# What travels. The old code broadcast the first model to all N, and billed g² when the mask changed.


def test_prunefl_sends_the_first_model_to_those_who_take_part_alone(tiny, mini):
    """By hand: 61,470 prunable weights and 236 biases; s_0 = 0.5 keeps 30,735."""
    exp = tiny("prunefl", width=1.0, rounds=3, reconfigure_every=4, clients=8, clients_per_round=2, sparsity_target=0.5)
    visited = list(states(exp, mini))
    federation = visited[0][0]
    model, mask, g2 = 32 * (30_735 + 236), 61_470, 32 * 61_470
    assert (model, mask, g2) == (991_072, 61_470, 1_967_040)
    seen, expected = set(), []
    for t in range(3):
        chosen = set(federation.select(t))
        expected.append(2 * model + len(chosen - seen) * mask)  # a client that comes later gets the mask then
        seen |= chosen
    assert expected[0] == 2 * (991_072 + 61_470) == 2_105_084
    assert len(set(expected)) > 1  # some of the later clients are new, some are not
    assert [row["downlink_bits"] for _, _, row in visited[1:]] == expected
    # Every client sends its kept weights and a squared gradient for every prunable weight, in every round.
    assert [row["uplink_bits"] for _, _, row in visited[1:]] == [2 * (model + g2)] * 3 == [5_916_224] * 3


def test_the_released_prunefl_sends_squared_gradients_when_it_reconfigures_alone(tiny, mini):
    exp = tiny("prunefl", rules="released", width=1.0, rounds=4, reconfigure_every=2, clients=4, clients_per_round=4)
    visited = list(states(exp, mini))
    for (federation, state, _), (_, _, row) in itertools.pairwise(visited):
        model, mask = model_and_mask_bits(federation, state)
        assert masks.kept(state.m) == 61_470 - round((0.9 - 0.4 * (1 - state.t // 2 * 2 / 4) ** 3) * 61_470) + 1
        new = state.t in (0, 2)
        assert row["downlink_bits"] == 4 * (model + new * mask)
        assert row["uplink_bits"] == 4 * (model + (row["round"] % 2 == 0) * 32 * 61_470)


def test_in_the_released_unit_prunefl_pays_for_masks_and_gradients(tiny, mini):
    exp = tiny("prunefl", rounds=2, reconfigure_every=2, clients=8, clients_per_round=2)
    _, first, second = (row for _, _, row in states(exp, mini))
    federation = assemble(exp, mini)
    n, s = federation.clients.layout.size, masks.sparsity_of(federation.start().m)
    model, mask = 32 * (1 - s) * n / 2**20, 4 * (1 - s) * n / 2**20
    assert first["downlink_mebibits_released"] == pytest.approx(2 * model + 8 * (model + mask), rel=1e-6)
    assert second["downlink_mebibits_released"] == pytest.approx(2 * (model + mask), rel=1e-6)
    assert second["uplink_mebibits_released"] > 2 * 32 * n / 2**20  # the dense g² alone
