"""SNIP: one mask before training."""

import pytest
import reference
import torch
from helpers import lists, one_round, states, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from small_nets import small_nets

from feddip_core import client, masks
from feddip_core.engine.assembly import assemble


def test_snips_score_is_the_derivative_by_the_connection(tiny, mini, double_precision):
    federation = assemble(tiny("snip", width=0.2, clients_per_round=1), mini)
    w = federation.clients.first_weights
    score = federation.method.score(w, federation.ask)
    (n,) = federation.select(0)
    x, y = next(federation.clients.batches(n, 0, "snip"))
    for i in (3, 40, 200, 500):

        def loss(c, i=i, x=x, y=y):
            u = w.clone()
            u[i] *= c
            return client.eager_gradient(federation.clients.forward, {})(u, x, y)[0].item()

        finite = (loss(1 + 1e-4) - loss(1 - 1e-4)) / 2e-4
        assert score[i].item() == pytest.approx(finite, rel=1e-5, abs=1e-10)


def test_snips_mask_never_changes_and_holds_the_target_from_the_start(tiny, mini):
    first = None
    for _, state, row in states(tiny("snip", rounds=4), mini):
        first = state.m if first is None else first
        assert state.m is first
        if row:
            assert (row["regrown"], row["dropped"]) == (0, 0)
    n_w = sum(v.numel() for v in first.values())
    assert masks.kept(first) == n_w - round(0.9 * n_w)


@settings(deadline=None, max_examples=60)
@given(small_nets(), st.floats(0, 1))
def test_snips_rule_is_the_naive_one(net, s):
    w, g, _ = net
    total = sum(len(v) for v in w)
    ours = masks.magnitude_mask({k: tensors(w)[k] * v for k, v in tensors(g).items()}, s)
    assert lists(ours) == reference.snip_mask(w, g, total - round(s * total))


def test_the_released_snip_scores_other_weights_and_is_a_function_of_its_state(tiny, mini):
    exp = tiny("snip", rules="released", rounds=2)
    federation = assemble(exp, mini)
    start = federation.start()
    assert start.m is None
    w, paper = start.w, assemble(tiny("snip", rounds=2), mini)
    assert not torch.allclose(paper.method.score(w, paper.ask), federation.method.score(w, federation.ask))
    state, row = one_round(federation, start)
    kept = masks.kept(state.m)
    n, n_w = federation.clients.layout.size, sum(v.numel() for v in state.m.values())
    # The first model goes out dense with its mask beside it; the old code counted no bit for that mask.
    assert (row["downlink_bits"], row["uplink_bits"]) == (2 * (32 * n + n_w), 2 * 32 * (n - n_w + kept))
    other = assemble(exp, mini)
    assert torch.equal(federation.round(state)[0].w, other.round(state)[0].w)


def test_the_released_snip_by_hand(tiny, mini):
    """61,470 prunable weights and 236 biases; 6,147 weights stay."""
    exp = tiny("snip", rules="released", width=1.0, rounds=2, clients=6, clients_per_round=6)
    _, first, second = (row for _, _, row in states(exp, mini))
    assert first["downlink_bits"] == 6 * (32 * 61_706 + 61_470)  # dense, with the mask
    assert first["uplink_bits"] == second["uplink_bits"] == 6 * 32 * (6_147 + 236)
    # In round 2 the server's own mask is new to all; with the first one still counted as another, it is sent again.
    assert second["downlink_bits"] == 6 * (32 * (6_147 + 236) + 61_470)
