"""What each method changes, against hand-made examples, its own limits, and naive transcriptions of its mask rule."""

import itertools
import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_federation import same, states

from feddip_core import Experiment, communication, data, local, masks, models, run
from feddip_core.federation import Federation, aggregate
from feddip_core.methods import METHODS
from feddip_core.schedules import regrowth_fraction_at, sparsity_at

SPARSE = ("prunefl", "snip", "prunetrain", "feddst")


@pytest.fixture(scope="module")
def mini():
    return data.load("fashion_mini")


def tensors(lists):
    return {f"layer{i}": torch.tensor(v) for i, v in enumerate(lists)}


def lists(mask):
    return [v.tolist() for v in mask.values()]


@st.composite
def small_nets(draw):
    """Three layers with weights, gradients and a mask, ties among them."""
    number = st.integers(-4, 4).map(float)
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    w, g = ([draw(st.lists(number, min_size=n, max_size=n)) for n in sizes] for _ in range(2))
    m = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in sizes]
    return w, g, m


# FedProx


def test_fedprox_without_mu_is_fedavg(tiny):
    assert same(run(tiny("fedprox", prox_mu=0)), run(tiny("fedavg")))
    assert not same(run(tiny("fedprox", prox_mu=0.1)), run(tiny("fedavg")))


def test_feddip_prox_without_mu_is_feddip(tiny):
    assert same(run(tiny("feddip_prox", prox_mu=0)), run(tiny("feddip")))
    assert not same(run(tiny("feddip_prox", prox_mu=0.1)), run(tiny("feddip")))


def test_fedprox_ends_between_its_anchor_and_the_optimum():
    # f = ½‖w − a‖² with a = 4, held at w_g = 1 by μ = 0.5: (4 + 0.5 · 1) / 1.5 = 3
    w, anchor = torch.tensor([1.0]), torch.tensor([1.0])

    def quadratic(u, x, y):
        return (u - 4).square().sum() / 2, u - 4

    def term(g, u):
        local.add_proximal_(g, u, anchor, mu=0.5)

    local.train_(w, None, quadratic, [(None, torch.zeros(1))] * 200, eta=0.1, terms=[term])
    assert w.item() == pytest.approx(3.0, abs=1e-5)


def test_fedproxs_first_step_does_not_depend_on_mu_and_its_drift_does(tiny, mini):
    def drift(mu, batch_size, **settings):
        federation = Federation(tiny("fedprox", prox_mu=mu, batch_size=batch_size, **settings), mini)
        start = federation.start()
        return federation.train_client(start, 0)["w"] - start.w

    one_step = [drift(mu, 1000) for mu in (0.0, 10.0)]  # one batch holds all of a client's samples
    assert torch.equal(*one_step)
    norms = [drift(mu, 8, local_epochs=10).norm() for mu in (0.0, 0.1, 1.0)]
    assert norms == sorted(norms, reverse=True)
    assert norms[-1] < 0.5 * norms[0]


def test_feddip_proxs_anchor_pulls_no_masked_weight(tiny, mini):
    for regrowth in ("paper", "dense_memory"):
        federation = Federation(tiny("feddip_prox", regrowth=regrowth, prox_mu=1.0), mini)
        state = federation.start()
        start = federation.pruned(state.w, state.m)
        g, moved = torch.zeros_like(start), start + federation.layout.flat_mask(state.m, like=start)
        federation.method.terms(0, start)[0](g, moved)
        masked = federation.layout.flat_mask(state.m, like=start) == 0
        assert not g[masked].any()
        assert g[~masked].allclose(torch.tensor(1.0))


# SNIP


def test_snips_score_is_the_derivative_by_the_connection(tiny, mini):
    torch.set_default_dtype(torch.float64)
    try:
        federation = Federation(tiny("snip", width=0.2, clients_per_round=1), mini)
        w = federation.layout.flat(dict(federation.net.named_parameters()))
        score = federation.method._score(w)
        (n,) = federation.select(0)
        x, y = next(federation.batches(n, 0, "snip"))
        for i in (3, 40, 200, 500):

            def loss(c, i=i, x=x, y=y):
                u = w.clone()
                u[i] *= c
                return local.eager_gradient(federation.forward, {})(u, x, y)[0].item()

            finite = (loss(1 + 1e-4) - loss(1 - 1e-4)) / 2e-4
            assert score[i].item() == pytest.approx(finite, rel=1e-5, abs=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


def test_snips_mask_never_changes_and_holds_the_target_from_the_start(tiny, mini):
    first = None
    for _, state, row in states(tiny("snip", rounds=4), mini):
        first = state.m if first is None else first
        assert state.m is first
        if row:
            assert (row["regrown"], row["dropped"]) == (0, 0)
    n_w = sum(v.numel() for v in first.values())
    assert masks.kept(first) == n_w - round(0.9 * n_w)


@pytest.mark.parametrize("method", ["snip", "prunefl", "feddst"])
@pytest.mark.parametrize("variant", ["original", "authors"])
def test_without_sparsity_a_pruning_baseline_is_fedavg(tiny, method, variant):
    assert same_model(run(tiny(method, variant=variant, sparsity_initial=0, sparsity_target=0)), run(tiny("fedavg")))


def same_model(a, b):
    return all(torch.equal(a.weights[k], b.weights[k]) for k in a.weights)


@settings(deadline=None, max_examples=60)
@given(small_nets(), st.floats(0, 1))
def test_snips_rule_is_the_naive_one(net, s):
    w, g, _ = net
    total = sum(len(v) for v in w)
    ours = masks.magnitude_mask({k: tensors(w)[k] * v for k, v in tensors(g).items()}, s)
    assert lists(ours) == reference.snip_mask(w, g, total - round(s * total))


# FedDST


@pytest.mark.parametrize(("t", "a"), [(0, 0.5), (19, 0.49955477), (250, 0.4267767), (500, 0.25), (999, 1.23e-6)])
def test_feddst_replaces_ever_less(t, a):
    assert regrowth_fraction_at(t, T=1000, alpha=0.5) == pytest.approx(a, rel=1e-3, abs=1e-8)


def test_feddst_drops_and_regrows_by_hand():
    w = {"a": torch.tensor([5.0, -1.0, 2.0, 0.0, 0.0, 0.0])}
    g = {"a": torch.tensor([9.0, 0.5, 9.0, 0.1, -3.0, 0.2])}
    m = {"a": torch.tensor([True, True, True, False, False, False])}
    # ⌈0.3 · 3⌉ = 1: the −1 goes; the largest gradient of what is not active is −3
    stays, new = masks.drop_and_regrow(w, g, m, 0.3)
    assert stays["a"].tolist() == [True, False, True, False, False, False]
    assert new["a"].tolist() == [True, False, True, False, True, False]
    # Dropped and brought back at once: new, so that it starts from zero, but not among those that stay.
    stays, new = masks.drop_and_regrow(w, {"a": torch.tensor([0.0, 8.0, 0.0, 1.0, 1.0, 1.0])}, m, 0.3)
    assert (stays["a"][1].item(), new["a"][1].item()) == (False, True)


@settings(deadline=None, max_examples=60)
@given(small_nets(), st.sampled_from([0.0, 0.25, 0.3, 0.5, 0.9]))
def test_feddsts_rule_is_the_naive_one_and_keeps_every_layers_count(net, fraction):
    w, g, m = net
    _, ours = masks.drop_and_regrow(tensors(w), tensors(g), tensors(m), fraction)
    assert lists(ours) == reference.feddst_mask(w, g, m, fraction)
    assert [int(v.sum()) for v in ours.values()] == [sum(v) for v in m]


@pytest.mark.parametrize("variant", ["original", "authors"])
def test_feddsts_layers_keep_their_counts(tiny, mini, variant):
    exp = tiny("feddst", rounds=6, reconfigure_every=2, variant=variant, sparsity_target=0.6, clients=4)
    visited = list(states(exp, mini))
    counts = [[int(v.sum()) for v in state.m.values()] for _, state, _ in visited]
    assert all(c == counts[0] for c in counts)
    regrown = [row["regrown"] for _, _, row in visited[1:]]
    if variant == "original":
        assert [v > 0 for v in regrown] == [False, True] * 3
    assert sum(regrown) > 0


def test_feddst_without_alpha_keeps_its_random_mask(tiny, mini):
    exp = tiny("feddst", rounds=4, reconfigure_every=2, feddst_alpha=0.0, sparsity_target=0.6)
    for _, _, row in states(exp, mini):
        assert not row or (row["regrown"], row["dropped"]) == (0, 0)


def test_feddst_averages_a_weight_over_those_who_hold_it(tiny, mini):
    federation = Federation(tiny("feddst", sparsity_target=0.6, reconfigure_every=1), mini)
    state = federation.start()
    size = federation.layout.size
    w, mask = torch.zeros(size), torch.ones(size)
    w[0], mask[0] = 0.25 * 8.0, 0.25  # a client with a quarter of the samples holds it, at 8
    w[1], mask[1] = 0.0, 0.0  # nobody holds it
    w[2] = 5.0  # all hold it
    new, _, _ = federation.method.reconfigure({"w": w, "mask": mask}, state, [0], {})
    assert new[:3].tolist() == [8.0, 0.0, 5.0]


# PruneFL


def test_prunefls_keep_set_and_greedy_fill_by_hand():
    w = {"a": torch.tensor([9.0, 8.0, 1.0, 0.0]), "b": torch.tensor([0.1, 0.2, 0.0, 0.0])}
    value = {"a": torch.tensor([0.0, 0.0, 5.0, 1.0]), "b": torch.tensor([2.0, 0.0, 7.0, 0.0])}
    m = {"a": torch.tensor([True, True, True, False]), "b": torch.tensor([True, True, False, False])}
    # Of three and two active weights a half may go, one of each layer: 9, 8 and 0.2 are safe. Two more places: 7 and 5.
    mask = masks.prunefl_mask(w, value, m, keep=5, drop=0.5)
    assert lists(mask) == [[True, True, True, False], [False, True, True, False]]
    # With room for two only, the smallest of the safe goes.
    assert lists(masks.prunefl_mask(w, value, m, keep=2, drop=0.5)) == [[True, True, False, False], [False] * 4]


def test_prunefl_changes_nothing_when_nothing_may_go():
    w, value = {"a": torch.tensor([1.0, 2.0, 0.0])}, {"a": torch.tensor([0.0, 0.0, 99.0])}
    m = {"a": torch.tensor([True, True, False])}
    assert masks.prunefl_mask(w, value, m, keep=2, drop=0.0)["a"].tolist() == [True, True, False]


def test_prunefl_at_equal_times_takes_the_largest_gradients():
    w = {"a": torch.zeros(4)}
    value, m = {"a": torch.tensor([3.0, 1.0, 4.0, 2.0])}, {"a": torch.tensor([True, True, False, False])}
    assert masks.prunefl_mask(w, value, m, keep=2, drop=1.0)["a"].tolist() == [True, False, True, False]


@settings(deadline=None, max_examples=60)
@given(small_nets(), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.data())
def test_prunefls_rule_is_the_naive_one(net, drop, draw):
    w, g, m = net
    keep = draw.draw(st.integers(1, sum(len(v) for v in w)))
    value = [[v * v for v in layer] for layer in g]
    ours = masks.prunefl_mask(tensors(w), tensors(value), tensors(m), keep, drop)
    assert lists(ours) == reference.prunefl_mask(w, value, m, keep, drop)
    assert masks.kept(ours) == keep


def test_prunefl_follows_the_schedule_with_inactive_weights_at_zero(tiny, mini):
    exp = tiny("prunefl", rounds=4, reconfigure_every=2, sparsity_initial=0.5)
    for federation, state, row in states(exp, mini):
        n_w = sum(v.numel() for v in state.m.values())
        tau = row["round"] // 2 * 2 if row else 0
        s = sparsity_at(tau, T=4, s_0=0.5, s_p=0.9)
        assert masks.kept(state.m) == n_w - round(s * n_w)
        assert not any(v[~state.m[k]].any() for k, v in federation.layout.weights(state.w).items())
        upload = federation.train_client(state, 0)
        assert not any(v[~state.m[k]].any() for k, v in federation.layout.weights(upload["w"]).items())


def test_prunefl_sums_gradients_over_steps_rounds_and_clients(tiny, mini):
    federation = Federation(tiny("prunefl", rounds=4, reconfigure_every=3), mini)
    state = federation.start()
    sums = 0
    for _ in range(2):
        chosen = federation.select(state.t)
        sums = sums + sum(federation.train_client(state, n)["g2"] for n in chosen) / len(chosen)
        state, _ = federation.round(state)
    torch.testing.assert_close(state.memory["g2"], sums)
    assert state.memory["since"].sum() == len({n for t in range(2) for n in federation.select(t)})


def test_a_weight_costs_the_time_of_its_layer():
    net = models.build("lenet5", 10)
    uses = models.uses(net, torch.zeros(1, 1, 28, 28))
    assert uses == dict(zip(models.prunable(net), (784, 100, 1, 1, 1), strict=True))


# PruneTrain


def test_prunetrain_without_penalty_and_threshold_is_fedavg(tiny):
    assert same(run(tiny("prunetrain", lambda_max=0, prunetrain_threshold=0)), run(tiny("fedavg")))


def test_prunetrains_norm_of_one_group_is_the_plain_norm():
    v = torch.tensor([[3.0, 4.0]])
    assert local.channel_norms(v, 0).item() == 5.0
    assert local.channel_norms(v, 1).flatten().tolist() == [3.0, 4.0]
    assert local.channel_norms(torch.ones(2, 3, 4, 4), 0).flatten().tolist() == pytest.approx([math.sqrt(48)] * 2)
    assert local.channel_norms(torch.ones(2, 3, 4, 4), 1).flatten().tolist() == pytest.approx([math.sqrt(32)] * 3)


def test_prunetrains_penalty_is_autograds():
    net = models.build("lenet5", 10, width=0.2)
    layout = models.Layout.of(net)
    u = layout.flat(dict(net.named_parameters())).requires_grad_()
    weights = list(layout.weights(u).values())
    outputs = sum(local.channel_norms(v, 0, 1e-8).sum() for v in weights[:-1])
    inputs = sum(local.channel_norms(v, 1, 1e-8).sum() for v in weights[1:])
    (expected,) = torch.autograd.grad(0.3 * (outputs + inputs), u)
    g = torch.zeros_like(u)
    local.add_channel_penalty_(g, u.detach(), layout, lam=0.3)
    torch.testing.assert_close(g, expected)


def test_prunetrain_strikes_out_channels_by_hand():
    w = {
        "a": torch.tensor([[1.0], [1e-5]]),
        "b": torch.tensor([[1.0, 1e-5], [1.0, -1e-5], [1e-6, 0.0]]),
        "c": torch.ones(2, 3),
    }
    m = masks.channel_mask(w, {k: torch.ones_like(v, dtype=torch.bool) for k, v in w.items()}, threshold=1e-4)
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
    alone, together = masks.channel_mask(w, ones, 1e-4), masks.channel_mask(w, ones, 1e-4, [["a", "b"]])
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
    assert lists(masks.channel_mask(w, ones, 0.3)) == reference.channel_mask([v.tolist() for v in w.values()], 0.3)


@settings(deadline=None, max_examples=60)
@given(small_nets(), st.data())
def test_the_layer_rule_is_the_naive_one(net, draw):
    w, _, _ = net
    counts = [draw.draw(st.integers(0, len(v))) for v in w]
    votes = [draw.draw(st.lists(st.integers(0, 2).map(float), min_size=len(v), max_size=len(v))) for v in w]
    ours = masks.layer_mask(tensors(w), dict(zip(tensors(w), counts, strict=True)), tensors(votes))
    assert lists(ours) == reference.layer_counts_mask(w, counts, votes)


@pytest.mark.parametrize(("model", "width", "threshold"), [("lenet5", 0.5, 0.02), ("resnet18", 0.04, 0.15)])
def test_prunetrains_removed_channels_stay_zero(tiny, mini, model, width, threshold):
    settings = dict(model=model, width=width, lambda_max=0.1, prunetrain_threshold=threshold)
    exp = tiny("prunetrain", rounds=4, clients=60, **settings)
    gone, removed = None, 0
    for federation, state, row in states(exp, mini):
        now = federation.full_mask(state.m)
        if gone is not None:
            assert all(not (now[k] & ~gone[k]).any() for k in now)
            assert not any(v[~now[k]].any() for k, v in federation.layout.weights(state.w).items())
        gone, removed = now, row["sparsity"] if row else 0
    assert removed > 0.01


def test_the_authors_prunetrain_controls_the_sparsity_of_its_inner_layers(tiny, mini):
    exp = tiny("prunetrain", variant="authors", rounds=4)
    assert exp.lambda_max == 0.01
    visited = list(states(exp, mini))
    federation = visited[0][0]
    sizes = [shape.numel() for shape in federation.layout.prunable_shapes.values()]
    for (_, before, _), (_, state, row) in itertools.pairwise(visited):
        zeros = round(sparsity_at(row["round"] - 1, T=4, s_0=0.5, s_p=0.9) * sum(sizes[1:-1]))
        assert [int((~v).sum()) for v in state.m.values()][::4] == [0, 0]
        assert sum(int((~v).sum()) for v in state.m.values()) == zeros
        upload = federation.train_client(before, 0)["w"]
        assert int((upload == 0).sum()) >= zeros  # the client prunes too, after dense steps
        assert row["uplink_bits"] == 2 * (32 * (federation.layout.size - zeros) + sum(sizes))
    g = torch.zeros_like(state.w)
    federation.method.terms(0, state.w)[0](g, torch.ones_like(state.w))
    assert [bool(g[z].any()) for z in federation.layout.layers] == [False, True, True, True, False]
    assert federation.method.client_mask(state, 0) is None


# What a client uploads


def test_feddst_uploads_nothing_that_it_dropped_and_starts_what_is_new_at_zero(tiny, mini):
    federation = Federation(tiny("feddst", sparsity_target=0.6, reconfigure_every=1), mini)
    state = federation.start()
    before = federation.layout.flat_mask(state.m, like=state.w).bool()
    upload = federation.train_client(state, 0)
    held = upload["mask"].bool()
    new = held & ~before
    assert int(new.sum()) > 0
    assert not upload["w"][~held].any()
    assert not upload["w"][new].any()
    # Half of a layer's active weights go, by what they are after training, whether or not they come back.
    conv = federation.layout.layers[1]
    active, nonzero = int(before[conv].sum()), int((upload["w"][conv] != 0).sum())
    assert nonzero == active - math.ceil(0.5 * active)
    trained = Federation(tiny("feddst", sparsity_target=0.6, reconfigure_every=9), mini).train_client(state, 0)["w"]
    ranked = trained[conv][before[conv]].abs().sort().values
    assert upload["w"][conv][upload["w"][conv] != 0].abs().min() == ranked[math.ceil(0.5 * active)]


def test_feddst_through_the_average_leaves_a_weight_with_one_holder_as_it_is(tiny, mini):
    federation = Federation(tiny("feddst", sparsity_target=0.6, reconfigure_every=1), mini)
    size = federation.layout.size
    masks_held = [torch.ones(size), torch.ones(size), torch.ones(size)]
    masks_held[1][5] = masks_held[2][5] = 0
    models_sent = [torch.rand(size) * m for m in masks_held]
    mean = aggregate([{"w": w, "mask": m} for w, m in zip(models_sent, masks_held, strict=True)], [1, 1, 1])
    new, _, _ = federation.method.reconfigure(mean, federation.start(), [0], {})
    assert new[5].item() == pytest.approx(models_sent[0][5].item(), rel=1e-6)
    plain = aggregate([{"w": w} for w in models_sent], [1, 1, 1])["w"]
    others = torch.arange(size) != 5
    torch.testing.assert_close(new[others], plain[others])  # held by all: the plain mean


def test_the_authors_feddst_keeps_its_clients_on_their_own_masks(tiny, mini):
    exp = tiny("feddst", variant="authors", sparsity_target=0.6, reconfigure_every=2, rounds=4, clients=6)
    visited = list(states(exp, mini))
    federation, start, end = visited[0][0], visited[0][1], visited[-1][1]
    readjusted = {n for t in (1, 3) for n in federation.select(t)}
    for n in range(6):
        changed = masks.changes(start.m, federation.method.client_mask(end, n)) != (0, 0)
        assert changed == (n in readjusted)


def test_prunefl_weighs_the_time_and_spares_the_largest(tiny, mini):
    federation = Federation(tiny("prunefl"), mini)
    w, m = federation.layout.flat(dict(federation.net.named_parameters())), federation.full_mask(None)
    g2 = torch.ones_like(w)
    kept = federation.method._mask(w, g2, m, keep=2000, r=0)
    assert masks.kept({k: v for k, v in kept.items() if k.startswith("conv")}) < sum(
        v.numel() for k, v in m.items() if k.startswith("conv")
    )
    federation.uses = dict.fromkeys(federation.uses, 0)
    federation.uses["fc1.weight"] = 10**9  # now this layer takes for ever, and gets no more than its keep-set
    n = m["fc1.weight"].numel()
    kept = federation.method._mask(w, g2, m, keep=sum(v.numel() for v in m.values()) - int(0.3 * n), r=0)
    assert int(kept["fc1.weight"].sum()) == n - int(0.3 * n)
    late = federation.method._mask(w, g2, m, keep=sum(v.numel() for v in m.values()) - int(0.15 * n), r=10_000)
    assert int(late["fc1.weight"].sum()) == n - int(0.15 * n)  # after 10,000 rounds half as much may go


def test_prunefl_in_the_authors_code_can_begin_dense(tiny, mini):
    site = Federation(tiny("prunefl", variant="authors", sparsity_initial=0.0), mini)
    assert all(keep.all() for keep in site.full_mask(site.start().m).values())


def test_prunefls_g2_is_of_the_last_batch_in_the_authors_code(tiny, mini):
    original, authors = (Federation(tiny("prunefl", variant=v), mini) for v in ("original", "authors"))
    state = original.start()
    assert original.train_client(state, 0)["g2"].sum() > 2 * authors.train_client(state, 0)["g2"].sum()


@pytest.mark.parametrize("model", ["alexnet", "resnet18"])
@pytest.mark.parametrize("variant", ["original", "authors"])
def test_prunefls_start_is_its_own(tiny, mini, model, variant):
    """It draws from no global generator, and leaves nothing behind in the network."""
    federation = Federation(tiny("prunefl", model=model, width=0.03, variant=variant, clients=200), mini)
    federation.method.PASSES = 2
    torch.manual_seed(1)
    first = federation.start()
    torch.manual_seed(2)
    second = federation.start()
    assert torch.equal(first.w, second.w)
    assert torch.equal(first.statistics, second.statistics)


def test_the_authors_snip_scores_other_weights_and_is_a_function_of_its_state(tiny, mini):
    exp = tiny("snip", variant="authors", rounds=2)
    federation = Federation(exp, mini)
    start = federation.start()
    assert start.m is None
    w = start.w
    assert not torch.allclose(federation.method._score(w), federation.method._authors_score(w))
    state, row = federation.round(start)
    kept = masks.kept(state.m)
    n, n_w = federation.layout.size, sum(v.numel() for v in state.m.values())
    assert (row["downlink_bits"], row["uplink_bits"]) == (2 * 32 * n, 2 * 32 * (n - n_w + kept))
    other = Federation(exp, mini)
    assert torch.equal(federation.round(state)[0].w, other.round(state)[0].w)


def test_feddip_proxs_anchor_is_the_pruned_model_even_with_a_dense_memory(tiny, mini):
    federation = Federation(tiny("feddip_prox", regrowth="dense_memory", prox_mu=1.0), mini)
    seen = []
    honest = federation.method.terms
    federation.method.terms = lambda t, start: seen.append(start.clone()) or honest(t, start)
    state = federation.start()
    federation.train_client(state, 0)
    assert torch.equal(seen[0], federation.pruned(state.w, state.m))
    assert not torch.equal(seen[0], state.w)


# What all of them share


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_the_pathological_partition_and_repeats_itself(tiny, method):
    exp = tiny(method, partition="pathological", rounds=3, reconfigure_every=2)
    first = run(exp)
    assert same(first, run(exp))
    assert first.diverged is None
    assert first.metrics.test_loss.notna().all()


@pytest.mark.parametrize("method", SPARSE)
def test_every_baselines_variant_trains(tiny, method):
    exp = tiny(method, variant="authors", rounds=3, reconfigure_every=2)
    assert same(run(exp), run(exp))
    original = tiny(method, rounds=3, reconfigure_every=2)
    assert not same_model(run(exp), run(original))


@pytest.mark.parametrize("method", ["fedavg", "feddip", "feddip_prox"])
def test_only_the_four_baselines_have_a_variant(method):
    with pytest.raises(ValueError, match=r"variant: 'authors' is not allowed; only prunefl, snip, prunetrain, feddst"):
        Experiment(method=method, variant="authors")


def test_baselines_have_the_papers_settings():
    paper = {m: Experiment.preset("paper", method=m) for m in METHODS}
    assert {m: e.reconfigure_every for m, e in paper.items() if e.reconfigure_every != 5} == {
        "prunefl": 20, "feddst": 20, "prunetrain": 1
    }  # fmt: skip
    assert (paper["feddst"].feddst_alpha, paper["prunetrain"].prunetrain_threshold) == (0.5, 1e-4)
    assert (paper["snip"].sparsity_initial, paper["snip"].sparsity_target) == (0.9, 0.9)
    assert Experiment.preset("paper", dataset="cifar10", method="snip").sparsity_target == 0.8
    assert all(not e.differences_from_paper() for e in paper.values())


# Communication


@pytest.mark.parametrize(
    ("n", "s_0", "s_p", "share", "budget", "within"),
    [
        (61_706, 0.5, 0.9, 0.600, 4e3, 315),
        (23_272_266, 0.5, 0.9, 0.600, 1.8e6, 382),
        (11_220_132, 0.05, 0.8, 0.694, 2e6, 817),
    ],
)
def test_the_authors_unit_gives_the_papers_totals(n, s_0, s_p, share, budget, within):
    dense = 2 * 5 * communication.authors_mebibits(0, n)
    down = [5 * communication.authors_mebibits(sparsity_at(t, 1000, s_0, s_p), n) for t in range(1000)]
    cost = [dense / 2 + d for d in down]
    assert sum(cost) / (1000 * dense) == pytest.approx(share, abs=5e-4)
    total, rounds = 0.0, 0
    while total + cost[rounds] <= budget:
        total += cost[rounds]
        rounds += 1
    assert rounds == within


def test_fedavg_in_the_authors_unit():
    per_round = [10 * communication.authors_mebibits(0, n) for n in (61_706, 23_272_266, 11_220_132)]
    assert [round(v, 2) for v in per_round] == [18.83, 7102.13, 3424.11]
    assert [int(b / v) for b, v in zip((4e3, 1.8e6, 2e6), per_round, strict=True)] == [212, 253, 584]


def test_a_run_counts_in_both_units(tiny, mini):
    rows = [row for _, _, row in states(tiny("feddip", rounds=3), mini)][1:]
    n = Federation(tiny(), mini).layout.size
    for t, row in enumerate(rows):
        s = sparsity_at(t, T=3, s_0=0.5, s_p=0.9)
        assert row["downlink_mebibits_authors"] == pytest.approx(2 * 32 * (1 - s) * n / 2**20)
        assert row["uplink_mebibits_authors"] <= 2 * 32 * n / 2**20
    fedavg = [row for _, _, row in states(tiny("fedavg", rounds=1), mini)][1]
    assert fedavg["uplink_mebibits_authors"] == pytest.approx(2 * 32 * n / 2**20, rel=1e-3)


def model_and_mask_bits(federation, state):
    n, n_w = federation.layout.size, sum(v.numel() for v in state.m.values())
    payload = 32 * (n - n_w + masks.kept(state.m))
    return payload, n_w


@pytest.mark.parametrize("method", ["snip", "feddst", "prunefl"])
def test_a_sparse_method_sends_sparse_models_both_ways(tiny, mini, method):
    exp = tiny(method, rounds=4, reconfigure_every=2, clients=6, clients_per_round=6)
    visited = list(states(exp, mini))
    for (federation, state, _), (_, _, row) in itertools.pairwise(visited):
        payload, n_w = model_and_mask_bits(federation, state)
        last_of_two = row["round"] % 2 == 0
        new_mask = state.t == 0 or (method != "snip" and state.t == 2)
        down = 6 * payload + (6 * n_w if new_mask else 0)
        if method == "prunefl" and state.t == 0:
            down += 6 * payload  # to all N before the first round, mask included; the six have it already
        up = 6 * payload
        up += {"snip": 0, "feddst": 6 * n_w, "prunefl": 6 * 32 * n_w}[method] if last_of_two else 0
        assert (row["downlink_bits"], row["uplink_bits"]) == (down, up)


def test_prunetrain_sends_its_channels_both_ways(tiny, mini):
    exp = tiny("prunetrain", lambda_max=0.1, prunetrain_threshold=0.02, rounds=4, clients=4, clients_per_round=4)
    visited = list(states(exp, mini))
    channels = (3 + 8 + 60 + 42) + (
        3 + 200 + 60 + 42
    )  # outputs of all layers but the last, inputs of all but the first
    version = None
    for (federation, state, _), (_, _, row) in itertools.pairwise(visited):
        pruned = sum(int((~v).sum()) for v in federation.full_mask(state.m).values())
        payload = 32 * (federation.layout.size - pruned)
        new = state.m is not None and state.mask_version != version
        assert (row["downlink_bits"], row["uplink_bits"]) == (4 * (payload + channels * new), 4 * payload)
        version = state.mask_version
    assert pruned > 0


def test_prunefl_bills_a_client_once_for_the_mask_and_once_for_what_it_saw(tiny, mini):
    exp = tiny("prunefl", rounds=4, reconfigure_every=4, clients=8, clients_per_round=2)
    visited = list(states(exp, mini))
    federation, start = visited[0][:2]
    payload, n_w = model_and_mask_bits(federation, start)
    down, up = ([row[f"{way}link_bits"] for _, _, row in visited[1:]] for way in ("down", "up"))
    assert down == [2 * payload + 8 * (payload + n_w), *[2 * payload] * 3]
    took_part = len({n for t in range(4) for n in federation.select(t)})
    assert took_part > 2
    assert up == [2 * payload] * 3 + [2 * payload + took_part * 32 * n_w]
    visited = list(states(exp.replace(variant="authors"), mini))
    payload, n_w = model_and_mask_bits(federation, visited[-2][1])
    assert visited[-1][2]["uplink_bits"] == 2 * payload + 2 * 32 * n_w  # which tells of this round alone


def test_prunefl_in_the_authors_unit_pays_for_masks_and_gradients(tiny, mini):
    exp = tiny("prunefl", rounds=2, reconfigure_every=2, clients=8, clients_per_round=2)
    _, first, second = (row for _, _, row in states(exp, mini))
    federation = Federation(exp, mini)
    n, s = federation.layout.size, masks.sparsity_of(federation.start().m)
    model, mask = 32 * (1 - s) * n / 2**20, 4 * (1 - s) * n / 2**20
    assert first["downlink_mebibits_authors"] == pytest.approx(2 * model + 8 * (model + mask), rel=1e-6)
    assert second["downlink_mebibits_authors"] == pytest.approx(2 * (model + mask), rel=1e-6)
    assert second["uplink_mebibits_authors"] > 2 * 32 * n / 2**20  # the dense g² alone


def test_fedprox_costs_what_fedavg_costs(tiny):
    bits = ["downlink_bits", "uplink_bits"]
    assert run(tiny("fedprox", rounds=2)).metrics[bits].equals(run(tiny("fedavg", rounds=2)).metrics[bits])


# Divergence


@pytest.mark.parametrize("method", ["fedavg", "feddip", "prunefl", "feddst", "prunetrain"])
def test_divergence_ends_a_run_and_is_recorded(tiny, tmp_path, method):
    exp = tiny(method, learning_rate=1e4, rounds=6, reconfigure_every=1)
    result = run(exp, out=tmp_path)
    assert result.diverged == len(result.metrics) < 6
    assert not math.isfinite(result.metrics.test_loss.iloc[-1] + result.metrics.train_loss.iloc[-1])
    assert result.provenance["diverged"] == result.diverged
