"""PruneTrain: a penalty on every channel; those that fall below a threshold go."""

import itertools
import math

import own_networks
import pytest
import reference
import torch
from helpers import lists, same, states, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from feddip_core import Experiment, masks, models, run
from feddip_core.communication import Payload
from feddip_core.engine.assembly import assemble
from feddip_core.layout import Layout
from feddip_core.methods.prunetrain import Channels, Structure, add_channel_penalty_, channel_mask, channel_norms
from feddip_core.schedules import sparsity_at
from feddip_core.server import Federation


def structure_of(net):
    return Structure.of(net, models.prunable(net))


def own(name, **settings):
    """An experiment with a network of one's own."""
    hooks = dict(dataset="own_networks:samples", model=f"own_networks:{name}", partition="given")
    defaults = dict(clients=4, clients_per_round=2, rounds=2, local_epochs=1, batch_size=20, learning_rate=0.1)
    return Experiment(method="prunetrain", **(hooks | defaults | settings))


def test_prunetrain_without_penalty_and_threshold_is_fedavg(tiny):
    assert same(run(tiny("prunetrain", lambda_max=0, prunetrain_threshold=0)), run(tiny("fedavg")))


def test_prunetrains_norm_of_one_group_is_the_plain_norm():
    v = torch.tensor([[3.0, 4.0]])
    assert channel_norms(v, 0).item() == 5.0
    assert channel_norms(v, 1).flatten().tolist() == [3.0, 4.0]
    assert channel_norms(torch.ones(2, 3, 4, 4), 0).flatten().tolist() == pytest.approx([math.sqrt(48)] * 2)
    assert channel_norms(torch.ones(2, 3, 4, 4), 1).flatten().tolist() == pytest.approx([math.sqrt(32)] * 3)


def test_prunetrains_penalty_is_autograds():
    net = models.build("lenet5", 10, width=0.2)
    layout = Layout.of(net)
    u = layout.flat(dict(net.named_parameters())).requires_grad_()
    weights = list(layout.weights(u).values())
    outputs = sum(channel_norms(v, 0, 1e-8).sum() for v in weights[:-1])
    inputs = sum(channel_norms(v, 1, 1e-8).sum() for v in weights[1:])
    (expected,) = torch.autograd.grad(0.3 * (outputs + inputs), u)
    g = torch.zeros_like(u)
    add_channel_penalty_(g, u.detach(), layout, structure_of(net), lam=0.3)
    torch.testing.assert_close(g, expected)


CHAIN = Structure(("a",), ("c",), ())  # a reads the input, c writes the output


def test_prunetrain_strikes_out_channels_by_hand():
    w = {
        "a": torch.tensor([[1.0], [1e-5]]),
        "b": torch.tensor([[1.0, 1e-5], [1.0, -1e-5], [1e-6, 0.0]]),
        "c": torch.ones(2, 3),
    }
    m = channel_mask(w, {k: torch.ones_like(v, dtype=torch.bool) for k, v in w.items()}, 1e-4, CHAIN)
    assert m["a"].tolist() == [[True], [False]]
    assert m["b"].tolist() == [[True, False], [True, False], [False, False]]
    assert m["c"].all()


def test_prunetrain_spares_a_residual_channel_that_one_layer_still_writes():
    w = {
        "a": torch.tensor([[1.0], [0.0], [0.0]]),
        "b": torch.tensor([[0.0] * 3, [1.0] * 3, [0.0] * 3]),
        "c": torch.ones(1, 3),
    }
    ones = {k: torch.ones_like(v, dtype=torch.bool) for k, v in w.items()}
    joined = Structure(("a",), ("c",), (("a", "b"),))
    alone, together = channel_mask(w, ones, 1e-4, CHAIN), channel_mask(w, ones, 1e-4, joined)
    assert alone["a"].flatten().tolist() == [True, False, False]
    assert together["a"].flatten().tolist() == [True, True, False]
    assert together["b"][:, 0].tolist() == [True, True, False]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_prunetrains_rule_is_the_naive_one(a, b, c, seed):
    rng = torch.Generator().manual_seed(seed)
    shapes = {"a": (b, a), "b": (c, b), "c": (2, c)}
    w = {k: (torch.rand(s, generator=rng) < 0.4).float() * torch.randn(s, generator=rng) for k, s in shapes.items()}
    ones = {k: torch.ones(s, dtype=torch.bool) for k, s in shapes.items()}
    assert lists(channel_mask(w, ones, 0.3, CHAIN)) == reference.channel_mask([v.tolist() for v in w.values()], 0.3)


@pytest.mark.parametrize(("model", "width", "threshold"), [("lenet5", 0.5, 0.02), ("resnet18", 0.04, 0.15)])
def test_prunetrains_removed_channels_stay_zero(tiny, mini, model, width, threshold):
    settings = dict(model=model, width=width, lambda_max=0.1, prunetrain_threshold=threshold)
    exp = tiny("prunetrain", rounds=4, clients=60, **settings)
    gone, removed = None, 0
    for federation, state, row in states(exp, mini):
        now = federation.full_mask(state.m)
        if gone is not None:
            assert all(not (now[k] & ~gone[k]).any() for k in now)
            assert not any(v[~now[k]].any() for k, v in federation.clients.layout.weights(state.w).items())
        gone, removed = now, row["sparsity"] if row else 0
    assert removed > 0.01


def test_the_released_prunetrain_controls_the_sparsity_of_its_inner_layers(tiny, mini):
    exp = tiny("prunetrain", rules="released", rounds=4)
    assert exp.lambda_max == 0.01
    visited = list(states(exp, mini))
    federation, layout = visited[0][0], visited[0][0].clients.layout
    sizes = [shape.numel() for shape in layout.prunable_shapes.values()]
    for (_, before, _), (_, state, row) in itertools.pairwise(visited):
        zeros = round(sparsity_at(row["round"] - 1, T=4, s_0=0.5, s_p=0.9) * sum(sizes[1:-1]))
        assert [int((~v).sum()) for v in state.m.values()][::4] == [0, 0]
        assert sum(int((~v).sum()) for v in state.m.values()) == zeros
        upload = trained(federation, before, 0)
        assert int((upload == 0).sum()) >= zeros  # the client prunes too, after dense steps
        assert row["uplink_bits"] == 2 * (32 * (layout.size - zeros) + sum(sizes))
    g = torch.zeros_like(state.w)
    federation.method.terms(0, state.w)[0](g, torch.ones_like(state.w))
    assert [bool(g[z].any()) for z in layout.layers] == [False, True, True, True, False]
    assert federation.method.client_mask(state, 0) is None


def test_the_released_prunetrain_needs_three_layers_and_traces_nothing():
    with pytest.raises(
        ValueError, match=r"rules: 'released' is not allowed; .* needs at least three, and own_networks:two_layers"
    ):
        assemble(own("two_layers", rules="released"))
    assert len(run(own("DataDependent", rules="released", rounds=1)).metrics) == 1


def test_prunetrain_sends_its_channels_both_ways(tiny, mini):
    exp = tiny("prunetrain", lambda_max=0.1, prunetrain_threshold=0.02, rounds=4, clients=4, clients_per_round=4)
    visited = list(states(exp, mini))
    # outputs of all layers but the last, inputs of all but the first
    channels = (3 + 8 + 60 + 42) + (3 + 200 + 60 + 42)
    version = None
    for (federation, state, _), (_, _, row) in itertools.pairwise(visited):
        pruned = sum(int((~v).sum()) for v in federation.full_mask(state.m).values())
        payload = 32 * (federation.clients.layout.size - pruned)
        new = state.m is not None and state.mask_version != version
        assert (row["downlink_bits"], row["uplink_bits"]) == (4 * (payload + channels * new), 4 * payload)
        version = state.mask_version
    assert pruned > 0


# How a network hangs together


def test_the_papers_networks_are_traced():
    for name, first, last in (
        ("lenet5", "conv1", "fc3"), ("alexnet", "conv1", "fc3"), ("resnet18", "conv1", "linear"),
    ):  # fmt: skip
        found = structure_of(models.build(name, 10, width=0.1))
        assert (found.first, found.last) == ((f"{first}.weight",), (f"{last}.weight",))
        if name != "resnet18":
            assert found.streams == ()


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_streams_of_resnet_are_its_four_stages(norm):
    stages = [[f"layer{i}.0.conv2.weight", f"layer{i}.1.conv2.weight"] for i in (1, 2, 3, 4)]
    expected = (("conv1.weight", *stages[0]), *map(tuple, stages[1:]))
    assert structure_of(models.build("resnet18", 10, width=0.1, norm=norm)).streams == expected


def test_a_residual_network_of_ones_own_is_traced():
    found = structure_of(own_networks.Residual())
    assert (found.first, found.last) == (("a.weight",), ("out.weight",))
    assert found.streams == (("a.weight", "b.weight", "c.weight"), ("d.weight", "e.weight"))


def test_sums_and_products_that_are_methods_of_a_tensor_are_seen():
    found = structure_of(own_networks.Methods())
    assert found.streams == (("a.weight", "b.weight"), ("c.weight", "d.weight"))


def test_what_counts_is_the_forward_pass_not_the_order_of_registration():
    found = structure_of(own_networks.OutOfOrder())
    assert (found.first, found.last, found.streams) == (("into.weight",), ("out.weight",), ())


def test_several_layers_may_read_the_input_and_write_the_output():
    found = structure_of(own_networks.TwoEnds())
    assert (found.first, found.last) == (("left.weight", "right.weight"), ("one.weight", "two.weight"))
    assert found.streams == ()


def test_a_layer_that_is_exempt_has_no_say_in_its_stream():
    net = own_networks.Residual()
    net.exempt = ("c", "e")
    assert structure_of(net).streams == (("a.weight", "b.weight"),)


def test_the_penalty_follows_the_forward_pass():
    """The old code took the first registered layer for the first: here that is the last one."""
    net = own_networks.OutOfOrder()
    layout = Layout.of(net)
    u = layout.flat(dict(net.named_parameters())).requires_grad_()
    w = layout.weights(u)
    outputs = sum(channel_norms(w[k], 0, 1e-8).sum() for k in ("into.weight", "middle.weight"))
    inputs = sum(channel_norms(w[k], 1, 1e-8).sum() for k in ("middle.weight", "out.weight"))
    (expected,) = torch.autograd.grad(outputs + inputs, u)
    g = torch.zeros_like(u)
    add_channel_penalty_(g, u.detach(), layout, structure_of(net), lam=1.0)
    torch.testing.assert_close(g, expected)


@pytest.mark.parametrize("name", ["Residual", "OutOfOrder", "TwoEnds", "Methods"])
def test_a_network_of_ones_own_trains_two_rounds(name):
    result = run(own(name, lambda_max=0.05, prunetrain_threshold=0.15))
    assert len(result.metrics) == 2 and result.metrics["test_loss"].notna().all()
    assert result.metrics["sparsity"].iloc[-1] > 0
    for group in structure_of(result.network).streams:  # a channel stays in all layers of a stream, or in none
        rows = {tuple(result.mask[k].flatten(1).any(1).tolist()) for k in group if result.mask[k].any()}
        assert len(rows) <= 1


def test_control_flow_that_depends_on_data_is_refused_before_training(monkeypatch):
    exp = own("DataDependent")
    monkeypatch.setattr(Federation, "train_client", lambda *_: pytest.fail("a client was trained"))
    with pytest.raises(ValueError, match=r"method: 'prunetrain' is not allowed; .* DataDependent .* cannot be traced"):
        run(exp)
    monkeypatch.undo()
    assert len(run(exp.replace(method="fedavg")).metrics) == 2  # other methods need not know


def test_layers_of_different_widths_in_one_sum_are_refused_before_training():
    with pytest.raises(
        ValueError, match=r"method: 'prunetrain' is not allowed; the layers a.weight, b.weight meet in one"
    ):
        assemble(own("Uneven"))


# The mask as channels


NETWORKS = {
    "lenet5": lambda: models.build("lenet5", 10, width=0.5),
    "resnet18": lambda: models.build("resnet18", 10, width=0.04),
    "residual": own_networks.Residual,
    "out of order": own_networks.OutOfOrder,
    "two ends": own_networks.TwoEnds,
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_a_mask_of_channels_comes_back_from_its_bits(name, share):
    """Whatever channels have gone, in one round after the other."""
    torch.manual_seed(0)
    net = NETWORKS[name]()
    layout, structure = Layout.of(net), structure_of(net)
    m = layout.full_mask(None)
    for _ in range(2):  # some outputs, then some inputs
        w = {k: torch.ones(shape) for k, shape in layout.prunable_shapes.items()}
        for v in w.values():
            v[torch.rand(len(v)) < share] = 0
            v[:, torch.rand(v.shape[1]) < share] = 0
        m = channel_mask(w, m, 0.5, structure)
    flat, payload = layout.flat_mask(m, like=torch.empty(layout.size)), Payload({"mask": Channels(structure)})
    arrays = payload.pack(layout, {"mask": flat}, None)
    assert torch.equal(payload.unpack(layout, arrays, None)["mask"], flat)
    assert len(arrays["mask"]) == -(-payload.bits(layout) // 8)


def test_channels_are_counted_by_hand():
    def bits(net):
        return Payload({"mask": Channels(structure_of(net))}).bits(Layout.of(net))

    assert bits(models.build("lenet5", 10)) == (6 + 16 + 120 + 84) + (6 + 400 + 120 + 84)
    # outputs of into and middle, inputs of middle and out, whatever the order of registration
    assert bits(own_networks.OutOfOrder()) == (7 + 5) + (7 + 5)
    assert bits(own_networks.TwoEnds()) == (5 + 4) + (9 + 9)
    assert bits(nn.Sequential(nn.Linear(4, 3))) == 0  # one layer: nothing can go


def test_wrong_bits_are_refused_by_the_name_of_their_part():
    net = own_networks.OutOfOrder()
    payload, layout = Payload({"mask": Channels(structure_of(net))}), Layout.of(net)
    for wrong in (torch.zeros(3), torch.zeros(4, dtype=torch.uint8)):
        with pytest.raises(
            ValueError, match=r"^mask is torch\.\w+ of shape \(\d,\); it must be torch.uint8 of shape \(3,\)"
        ):
            payload.unpack(layout, {"mask": wrong}, None)


def test_a_plan_of_prunetrain_is_at_most_what_a_dense_model_takes(tiny, mini):
    federation = assemble(tiny("prunetrain"), mini)
    assert masks.sparsity_of(federation.full_mask(federation.start(sketch=True).m)) == 0
