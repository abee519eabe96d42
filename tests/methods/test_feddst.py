"""FedDST: sparse from the start; clients drop weights and bring others back."""

import math

import pytest
import reference
import torch
from helpers import lists, states, tensors, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from small_nets import small_nets

from feddip_core import masks
from feddip_core.engine.assembly import assemble
from feddip_core.methods.feddst import drop_and_regrow, layer_mask, regrowth_fraction_at
from feddip_core.state import Average, aggregate


@pytest.mark.parametrize(("t", "a"), [(0, 0.5), (19, 0.49955477), (250, 0.4267767), (500, 0.25), (999, 1.23e-6)])
def test_feddst_replaces_ever_less(t, a):
    assert regrowth_fraction_at(t, T=1000, alpha=0.5) == pytest.approx(a, rel=1e-3, abs=1e-8)


def test_feddst_drops_and_regrows_by_hand():
    w = {"a": torch.tensor([5.0, -1.0, 2.0, 0.0, 0.0, 0.0])}
    g = {"a": torch.tensor([9.0, 0.5, 9.0, 0.1, -3.0, 0.2])}
    m = {"a": torch.tensor([True, True, True, False, False, False])}
    # ⌈0.3 · 3⌉ = 1: the −1 goes; the largest gradient of what is not active is −3
    stays, new = drop_and_regrow(w, g, m, 0.3)
    assert stays["a"].tolist() == [True, False, True, False, False, False]
    assert new["a"].tolist() == [True, False, True, False, True, False]
    # Dropped and brought back at once: new, so that it starts from zero, but not among those that stay.
    stays, new = drop_and_regrow(w, {"a": torch.tensor([0.0, 8.0, 0.0, 1.0, 1.0, 1.0])}, m, 0.3)
    assert (stays["a"][1].item(), new["a"][1].item()) == (False, True)


@settings(deadline=None, max_examples=60)
@given(small_nets(), st.sampled_from([0.0, 0.25, 0.3, 0.5, 0.9]))
def test_feddsts_rule_is_the_naive_one_and_keeps_every_layers_count(net, fraction):
    w, g, m = net
    _, ours = drop_and_regrow(tensors(w), tensors(g), tensors(m), fraction)
    assert lists(ours) == reference.feddst_mask(w, g, m, fraction)
    assert [int(v.sum()) for v in ours.values()] == [sum(v) for v in m]


@settings(deadline=None, max_examples=60)
@given(small_nets(), st.data())
def test_the_layer_rule_is_the_naive_one(net, draw):
    w, _, _ = net
    counts = [draw.draw(st.integers(0, len(v))) for v in w]
    votes = [draw.draw(st.lists(st.integers(0, 2).map(float), min_size=len(v), max_size=len(v))) for v in w]
    ours = layer_mask(tensors(w), dict(zip(tensors(w), counts, strict=True)), tensors(votes))
    assert lists(ours) == reference.layer_counts_mask(w, counts, votes)


@pytest.mark.parametrize("rules", ["paper", "released"])
def test_feddsts_layers_keep_their_counts(tiny, mini, rules):
    exp = tiny("feddst", rounds=6, reconfigure_every=2, rules=rules, sparsity_target=0.6, clients=4)
    visited = list(states(exp, mini))
    counts = [[int(v.sum()) for v in state.m.values()] for _, state, _ in visited]
    assert all(c == counts[0] for c in counts)
    regrown = [row["regrown"] for _, _, row in visited[1:]]
    if rules == "paper":
        assert [v > 0 for v in regrown] == [False, True] * 3
    assert sum(regrown) > 0


def test_feddst_without_alpha_keeps_its_random_mask(tiny, mini):
    exp = tiny("feddst", rounds=4, reconfigure_every=2, adjust_alpha=0.0, sparsity_target=0.6)
    for _, _, row in states(exp, mini):
        assert not row or (row["regrown"], row["dropped"]) == (0, 0)


def test_feddst_averages_a_weight_over_those_who_hold_it(tiny, mini):
    federation = assemble(tiny("feddst", sparsity_target=0.6, reconfigure_every=1), mini)
    state = federation.start()
    size = federation.clients.layout.size
    w, mask = torch.zeros(size), torch.ones(size)
    w[0], mask[0] = 0.25 * 8.0, 0.25  # a client with a quarter of the samples holds it, at 8
    w[1], mask[1] = 0.0, 0.0  # nobody holds it
    w[2] = 5.0  # all hold it
    new, _, _ = federation.method.next(Average({"w": w, "mask": mask}, [0]), state)
    assert new[:3].tolist() == [8.0, 0.0, 5.0]


def test_feddst_uploads_nothing_that_it_dropped_and_starts_what_is_new_at_zero(tiny, mini):
    federation = assemble(tiny("feddst", sparsity_target=0.6, reconfigure_every=1), mini)
    state, layout = federation.start(), federation.clients.layout
    before = layout.flat_mask(state.m, like=state.w).bool()
    upload = federation.train_client(state, 0).values
    held = upload["mask"].bool()
    new = held & ~before
    assert int(new.sum()) > 0
    assert not upload["w"][~held].any()
    assert not upload["w"][new].any()
    # Half of a layer's active weights go, by what they are after training, whether or not they come back.
    conv = layout.layers[1]
    active, nonzero = int(before[conv].sum()), int((upload["w"][conv] != 0).sum())
    assert nonzero == active - math.ceil(0.5 * active)
    still = trained(assemble(tiny("feddst", sparsity_target=0.6, reconfigure_every=9), mini), state, 0)
    ranked = still[conv][before[conv]].abs().sort().values
    assert upload["w"][conv][upload["w"][conv] != 0].abs().min() == ranked[math.ceil(0.5 * active)]


def test_feddst_through_the_average_leaves_a_weight_with_one_holder_as_it_is(tiny, mini):
    federation = assemble(tiny("feddst", sparsity_target=0.6, reconfigure_every=1), mini)
    size = federation.clients.layout.size
    masks_held = [torch.ones(size), torch.ones(size), torch.ones(size)]
    masks_held[1][5] = masks_held[2][5] = 0
    models_sent = [torch.rand(size) * m for m in masks_held]
    mean = aggregate([{"w": w, "mask": m} for w, m in zip(models_sent, masks_held, strict=True)], [1, 1, 1])
    new, _, _ = federation.method.next(Average(mean, [0]), federation.start())
    assert new[5].item() == pytest.approx(models_sent[0][5].item(), rel=1e-6)
    plain = aggregate([{"w": w} for w in models_sent], [1, 1, 1])["w"]
    others = torch.arange(size) != 5
    torch.testing.assert_close(new[others], plain[others])  # held by all: the plain mean


def test_the_released_feddst_keeps_its_clients_on_their_own_masks(tiny, mini):
    exp = tiny("feddst", rules="released", sparsity_target=0.6, reconfigure_every=2, rounds=4, clients=6)
    visited = list(states(exp, mini))
    federation, start, end = visited[0][0], visited[0][1], visited[-1][1]
    readjusted = {n for t in (1, 3) for n in federation.select(t)}
    for n in range(6):
        changed = masks.changes(start.m, federation.method.client_mask(end, n)) != (0, 0)
        assert changed == (n in readjusted)
    assert {n for n, own in end.own.items() if "mask" in own} == readjusted
