"""SparsyFed: steps in θ, clients that prune, the union of their masks."""

import copy

import pytest
import reference
import torch
from helpers import one_round, same_model, states

from feddip_core import Experiment, client, data, masks, run
from feddip_core.communication import Payload
from feddip_core.engine.assembly import assemble
from feddip_core.layout import Layout
from feddip_core.methods.sparsyfed import Within, power, root, slope, step_in_theta_
from feddip_core.streams import stream

THETA = torch.tensor([0.25, -0.09, 0.0])


def test_weights_and_slopes_by_hand():
    u = power(THETA, 2)
    assert u.tolist() == pytest.approx([0.0625, -0.0081, 0])
    assert slope(THETA, 2).tolist() == pytest.approx([0.5, 0.18, 0])  # times g_u = 1
    assert root(u, 2).tolist() == pytest.approx(THETA.tolist())
    assert slope(THETA, 1.25)[2] == 0 and power(THETA, 1.25)[2] == 0


@pytest.mark.parametrize("beta", [1.25, 2])
def test_a_step_is_one_in_theta(beta):
    """A bias, the last number, is trained as it is."""
    layout = Layout({"a": torch.Size([3]), "bias": torch.Size([1])}, ("a",))
    w = torch.cat([power(THETA, beta), torch.tensor([0.3])])

    def term(g, u):
        step_in_theta_(g, u, layout, beta, eta=0.1, decay=0.01)

    client.error_feedback_step_(w, None, lambda u, x, y: (u.sum(), torch.ones(4)), None, None, 0.1, 0.01, terms=[term])
    ends = THETA - 0.1 * (slope(THETA, beta) + 0.01 * THETA)
    assert w[:3].tolist() == pytest.approx(power(ends, beta).tolist(), rel=1e-5)
    assert w[2] == 0 and w[3].item() == pytest.approx(0.3 - 0.1 * 1.003)


def test_with_exponent_one_and_no_sparsity_it_is_fedavg(tiny):
    assert same_model(run(tiny("sparsyfed", power=1, sparsity_target=0)), run(tiny("fedavg")))


def test_the_algorithm_transcribed_naively_agrees(tiny, hardly_tested, double_precision):
    exp = tiny("sparsyfed", rounds=3, width=0.1, clients=400, batch_size=8, sparsity_target=0.6, learning_rate=0.3)
    fast = list(states(exp, hardly_tested))
    federation = fast[0][0]
    names = list(federation.clients.layout.prunable)
    net, history = reference.sparsyfed(
        copy.deepcopy(assemble(exp, hardly_tested).clients.net), names, federation.select,
        lambda t, n: data.batches(hardly_tested, federation.clients.parts[n], 8, 1, stream(exp.seed, "batches", t, n)),
        lambda n: len(federation.clients.parts[n]),
        T=3, s_p=0.6, beta=1.25, eta_0=0.3, decay=0.998, weight_decay=5e-4,
    )  # fmt: skip
    for (_, state, _), expected in zip(fast[1:], history, strict=True):
        assert all(torch.equal(state.m[k], expected[k]) for k in names)
    ours = federation.clients.layout.views(fast[-1][1].w)
    for k, v in net.named_parameters():
        torch.testing.assert_close(ours[k], v.detach(), rtol=1e-8, atol=1e-10)


def test_supports_only_shrink_and_are_denser_than_a_clients(tiny, mini):
    (_, start, _), *visited = states(tiny("sparsyfed", clients_per_round=4, rounds=4, sparsity_target=0.7), mini)
    assert start.m is None and sum(row["regrown"] for *_, row in visited) == 0
    sparsities = [row["sparsity"] for *_, row in visited]
    assert sparsities == sorted(sparsities) and 0 < sparsities[0] < 0.7


def test_what_it_sends(tiny, mini):
    """The union goes down with its mask; a client sends its share, and which of the weights it was sent they are."""
    federation = assemble(tiny("sparsyfed", clients=4, clients_per_round=4), mini)
    layout, start = federation.clients.layout, federation.start()
    n, n_w = layout.size, layout.prunable_size
    own = 32 * (n - n_w + n_w - round(0.9 * n_w)) + n_w
    first, row = one_round(federation, start)
    assert (row["downlink_bits"], row["uplink_bits"]) == (4 * 32 * n, 4 * own)
    _, row = one_round(federation, first)
    kept = masks.kept(first.m)
    assert n_w - round(0.9 * n_w) < kept < n_w
    assert (row["downlink_bits"], row["uplink_bits"]) == (4 * (32 * (n - n_w + kept) + n_w), 4 * (own - n_w + kept))
    upload = federation.train_client(first, 0).values
    assert int(layout.flat_mask(layout.mask_of(upload["mask"]), upload["w"]).sum()) == n - round(0.9 * n_w)


def test_a_mask_that_costs_more_than_it_saves_does_not_travel(tiny, mini):
    rows = [row for *_, row in states(tiny("sparsyfed", rounds=2, sparsity_target=0.01), mini)][1:]
    assert [row["sparsity"] for row in rows] == [0, 0]


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_a_mask_within_another_comes_back_from_its_bits(share):
    layout = Layout({"a": torch.Size([5, 4]), "bias": torch.Size([2]), "b": torch.Size([30])}, ("a", "b"))
    numbers = torch.Generator().manual_seed(1)
    outer = {k: torch.rand(layout.shapes[k], generator=numbers) < share for k in ("a", "b")}
    inner = {k: v & (torch.rand(v.shape, generator=numbers) < 0.5) for k, v in outer.items()}
    payload, flat = Payload({"mask": Within(outer)}), layout.flat_mask(inner, like=torch.empty(52))
    arrays = payload.pack(layout, {"mask": flat}, None)
    assert payload.bits(layout) == masks.kept(outer) and len(arrays["mask"]) == -(-masks.kept(outer) // 8)
    assert torch.equal(payload.unpack(layout, arrays, None)["mask"], flat)


def test_momentum_and_robust_averages_are_refused(mini):
    with pytest.raises(ValueError, match=r"^momentum: 0.9 is not allowed; SparsyFed's steps are defined without it$"):
        Experiment(method="sparsyfed", momentum=0.9)
    with pytest.raises(ValueError, match="aggregation: 'median' is not allowed; the clients of sparsyfed upload"):
        assemble(Experiment.preset("smoke", method="sparsyfed", aggregation="median"), mini)
