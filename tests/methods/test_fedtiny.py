"""FedTiny: the share that is swapped, the rule, what is sent."""

import itertools

import pytest
import reference
import torch
from helpers import agrees_with, lists, model_and_mask_bits, same_model, states, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from small_nets import small_nets

from feddip_core import Experiment, run
from feddip_core.communication import Payload
from feddip_core.engine.assembly import assemble
from feddip_core.layout import Layout
from feddip_core.methods.entries import Entries
from feddip_core.methods.fedtiny import swapped_layers, top_inactive

W = [0.9, -0.1, 0.5, 0.05, 0.0, 0.0, 0.0, 0.0]
ACTIVE = [True] * 4 + [False] * 4
G = [[0.0, 0.8, 0.0, 0.1, 0.3, -0.6, 0.2, 0.0], [0.0, 0.6, 0.0, 0.1, 0.1, 0.5, -0.45, 0.2]]


def test_the_share_that_is_swapped_by_hand(tiny, mini):
    method = assemble(
        tiny("fedtiny", rounds=500, reconfigure_every=10, adjust_alpha=0.4, adjust_until=300), mini
    ).method
    at = {9: 0.3989044, 149: 0.2, 289: 0.0010956, 299: 0, 449: 0}  # at the last one the cosine would give 0.2 again
    assert {t: method.fraction(t) for t in at} == pytest.approx(at, abs=1e-7)
    exp = Experiment(method="fedtiny")
    assert (exp.reconfigure_every, exp.adjust_alpha, exp.adjust_until) == (10, 0.2, 600)


def sent(g, m, k):
    """What a client that has this gradient sends."""
    return {name: v * top_inactive(v, m[name], k) for name, v in g.items()}


def test_a_swap_by_hand():
    w, m = tensors([W]), tensors([ACTIVE])
    means = sum(sent(tensors([g]), m, 2)["layer0"] for g in G) / 2
    assert means.tolist() == pytest.approx([0, 0, 0, 0, 0.15, -0.05, -0.225, 0])
    assert swapped_layers(w, {"layer0": means}, m, {"layer0": 2})["layer0"].nonzero().flatten().tolist() == [0, 2, 4, 6]
    dense = swapped_layers(w, {"layer0": torch.tensor(G).mean(0)}, m, {"layer0": 2}, dropped_too=True)["layer0"]
    assert dense.nonzero().flatten().tolist() == [0, 1, 2, 4]
    assert (w["layer0"] * dense)[1].item() == pytest.approx(-0.1)  # it returns with its value
    for dense, kept in ((False, [0, 2, 4, 6]), (True, [0, 1, 2, 4])):
        (new,) = reference.fedtiny_mask(0.5, None, [[g] for g in G], [W], [0.5, 0.5], [ACTIVE], dense)
        assert [i for i, on in enumerate(new) if on] == kept


@settings(deadline=None, max_examples=60)
@given(small_nets(), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.booleans())
def test_the_rule_is_the_naive_one_and_keeps_every_layers_count(net, share, dense):
    w, g, m = net
    on = {k: v.bool() for k, v in tensors(m).items()}
    swaps = {k: min(int(share * int(v.sum())), int((~v).sum())) for k, v in on.items()}
    both = [tensors(g), {k: v.flip(0) for k, v in tensors(g).items()}]
    given = both if dense else [{k: v * top_inactive(v, on[k], swaps[k]) for k, v in one.items()} for one in both]
    mean = {k: 0.25 * given[0][k] + 0.75 * given[1][k] for k in on}
    ours = swapped_layers(tensors(w), mean, on, swaps, dense)
    assert lists(ours) == reference.fedtiny_mask(share, None, [lists(one) for one in both], w, [0.25, 0.75], m, dense)
    assert [int(v.sum()) for v in ours.values()] == [sum(v) for v in m]


@pytest.mark.parametrize("gradients", ["top", "dense"])
def test_the_algorithm_transcribed_naively_agrees(tiny, hardly_tested, double_precision, gradients):
    own = dict(adjust_alpha=0.8, adjust_until=6, reconfigure_every=2, adjust_gradients=gradients)
    exp = tiny("fedtiny", rounds=4, width=0.1, clients=400, batch_size=8, sparsity_target=0.6, **own)
    agrees_with(exp, hardly_tested, lambda *args: reference.fedtiny_mask(*args, dense=gradients == "dense"))


def test_without_a_share_it_is_feddst(tiny):
    both = [run(tiny(m, adjust_alpha=0, reconfigure_every=2, rounds=4)) for m in ("fedtiny", "feddst")]
    assert same_model(*both)


@pytest.mark.parametrize("gradients", ["top", "dense"])
def test_what_it_sends(tiny, mini, gradients):
    """Kept weights both ways; when the mask is adjusted, gradients come up; then the new mask goes down."""
    own = dict(adjust_alpha=0.4, adjust_until=5, reconfigure_every=2, adjust_gradients=gradients)
    (federation, start, _), *visited = states(tiny("fedtiny", clients=4, clients_per_round=4, **own), mini)
    payload, n_w = model_and_mask_bits(federation, start)
    assert n_w == 15_615  # 14 bits per position
    rows, expected, counts = [row for *_, row in visited], [], [int(v.sum()) for v in start.m.values()]
    for tau, share in {2: 0.2 * (1 + 0.3090170), 4: 0.2 * (1 - 0.8090170)}.items():
        k = sum(min(int(share * c), v.numel() - c) for c, v in zip(counts, start.m.values(), strict=True))
        bits = 32 * n_w if gradients == "dense" else 32 * k + min(n_w, 14 * k)
        expected.append(4 * (payload + bits))
        assert rows[tau - 1]["uplink_bits"] == expected[-1] and 0 < rows[tau - 1]["regrown"] <= k
    assert [rows[i]["uplink_bits"] for i in (0, 2, 4, 5)] == [4 * payload] * 4
    assert [row["downlink_bits"] - 4 * payload for row in rows] == [4 * n_w * (t in (0, 2, 4)) for t in range(6)]
    for (_, old, _), (_, new, _) in itertools.pairwise(visited):
        assert [int(v.sum()) for v in new.m.values()] == counts
        grown = torch.cat([(new.m[k] & ~old.m[k]).flatten() for k in new.m])
        w = torch.cat([v.flatten() for v in federation.clients.layout.weights(new.w).values()])
        assert gradients == "dense" or not w[grown].any()  # what is new starts from zero


# What clients send of a few weights

LAYOUT = Layout({"a": torch.Size([5, 4]), "bias": torch.Size([2]), "b": torch.Size([30])}, ("a", "b"))


@pytest.mark.parametrize(("number", "values", "bits"), [
    (1, True, 32 + 6), (3, True, 96 + 18), (8, True, 8 * 32 + 48), (9, True, 9 * 32 + 50), (50, True, 50 * 32 + 50),
    (1, False, 6), (8, False, 48), (9, False, 50), (0, True, 0), (0, False, 0),
])  # fmt: skip
def test_entries_are_counted_and_come_back(number, values, bits):
    """50 prunable weights: six bits per position, or a map of 50 bits if that is shorter."""
    payload, numbers = Payload({"g": Entries(number, values)}), torch.Generator().manual_seed(number)
    assert payload.bits(LAYOUT) == bits
    v = torch.zeros(LAYOUT.size)
    places = torch.cat([torch.arange(20), torch.arange(22, 52)])[torch.randperm(50, generator=numbers)[:number]]
    v[places] = torch.randn(number, generator=numbers) if values else 1.0
    arrays = payload.pack(LAYOUT, {"g": v}, None)
    assert sum(len(array) for array in arrays.values()) == -(-bits // 8)
    assert torch.equal(payload.unpack(LAYOUT, arrays, None)["g"], v)


@pytest.mark.parametrize(("number", "array"), [(2, [255, 255]), (2, [0, 0]), (9, [255] * 7)])
def test_impossible_positions_are_refused(number, array):
    """Beyond the last weight; the same one twice; more than was said."""
    with pytest.raises(ValueError, match=rf"it must have {number} different ones below 50"):
        Payload({"g": Entries(number, False)}).unpack(LAYOUT, {"g": torch.tensor(array, dtype=torch.uint8)}, None)
