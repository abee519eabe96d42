"""FedDIP, FedDP, DPF and FedDIP+Prox; where the released code differs from the paper's text."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers import one_round, same, states, trained

from feddip_core import Experiment, data, masks, run
from feddip_core.engine import measure
from feddip_core.engine.assembly import assemble
from feddip_core.layout import Layout
from feddip_core.methods import method_of
from feddip_core.methods.feddip import FedDP
from feddip_core.methods.released.feddip import lambda_in_twenty
from feddip_core.schedules import sparsity_at
from feddip_core.state import Average, State, aggregate
from feddip_core.streams import stream


@pytest.mark.parametrize("rules", ["paper", "released"])
def test_reductions_are_bitwise(tiny, rules):
    fedavg = run(tiny("fedavg"))
    dense = run(tiny("feddip", rules=rules, sparsity_initial=0, sparsity_target=0, lambda_max=0))
    assert same(fedavg, dense)
    assert same(run(tiny("feddp", rules=rules)), run(tiny("feddip", rules=rules, lambda_max=0)))
    dpf = run(tiny("dpf", rules=rules))
    assert same(dpf, run(tiny("feddip", rules=rules, sparsity_initial=0, lambda_max=0)))
    assert dpf.metrics.sparsity.iloc[-1] > 0.8
    assert not same(fedavg, dpf)


def test_the_released_times_and_masks(tiny, mini):
    exp = tiny(rules="released", rounds=5, reconfigure_every=2)
    runs = list(states(exp, mini))
    federation, start, _ = runs[0]
    assert start.m is None  # the first model goes out dense
    own = [federation.method.client_mask(start, n) for n in (0, 1)]
    assert masks.sparsity_of(own[0]) == pytest.approx(0.5, abs=1e-3)
    assert masks.changes(*own) != (0, 0)
    n_w = sum(v.numel() for v in own[0].values())
    sparsities = [row["sparsity"] for _, _, row in runs[1:]]
    # s_0, s_2 and s_4 at the end of rounds 1, 3 and 5
    at = [0.5, 0.5, 0.9 - 0.4 * 0.6**3, 0.9 - 0.4 * 0.6**3, 0.9 - 0.4 * 0.2**3]
    assert sparsities == pytest.approx([round(s * n_w) / n_w for s in at], abs=1e-12)
    assert runs[1][2]["downlink_bits"] == 2 * 32 * federation.clients.layout.size


def huge_gradient_at_a_pruned_weight(exp, dataset):
    """One round in which the clients push one pruned weight far out; whether the next mask keeps it."""
    federation = assemble(exp, dataset)
    state, _ = federation.round(federation.start())
    k = "fc1.weight"
    position = tuple(torch.nonzero(~state.m[k])[0].tolist())
    honest = federation.train_client

    def pushed(state, n):
        upload = honest(state, n)
        federation.clients.layout.views(upload.values["w"])[k][position] += 100.0
        return upload

    federation.train_client = pushed
    after, row = one_round(federation, state)
    value = federation.clients.layout.views(after.w)[k][position]
    return bool(after.m[k][position]), float(value), row


def test_a_pruned_weight_with_a_huge_gradient_returns_in_the_papers_order_only(tiny, mini):
    returned, value, row = huge_gradient_at_a_pruned_weight(tiny(), mini)
    assert returned
    assert value > 99
    assert row["regrown"] >= 1
    returned, value, row = huge_gradient_at_a_pruned_weight(tiny(regrowth="released"), mini)
    assert not returned
    assert value == 0
    assert row["regrown"] == 0


def test_in_the_released_order_masks_are_nested_and_feedback_is_inert(tiny, mini):
    exp = tiny(rules="released")
    visited = [(state, row) for _, state, row in states(exp, mini)][1:]
    assert sum(row["regrown"] for _, row in visited) == 0
    for (a, _), (b, _) in itertools.pairwise(visited):
        assert masks.changes(a.m, b.m)[0] == 0
    federation = assemble(exp, mini)
    honest = federation.train_client

    def without_feedback(state, n):
        upload = honest(state, n)
        return upload.plus(w=federation.clients.layout.prune(upload.values["w"], state.m))

    federation.train_client = without_feedback
    state = federation.start()
    for _ in range(exp.rounds):
        state, _ = federation.round(state)
    assert torch.equal(state.w, visited[-1][0].w)


@pytest.mark.parametrize(
    "settings",
    [dict(reconfigure_at="released"), dict(sparsity_initial=0.9, sparsity_target=0.9)],
    ids=["early", "flat"],
)
def test_in_the_released_order_nothing_returns_even_if_the_first_mask_has_a_zero_too_many(tiny, mini, settings):
    """ERK rounds down layer by layer, so its mask has a few zeros more than the sparsity asks for."""
    for _, _, row in states(tiny(width=1.0, regrowth="released", rounds=3, **settings), mini):
        assert not row or row["regrown"] == 0


def test_each_switch_acts_alone(tiny, mini):
    rows = [row for _, _, row in states(tiny(lambda_schedule="released"), mini)][1:]
    assert {row["lambda_"] for row in rows} == {5e-4 + 5e-4 * 18 / 19}  # fewer rounds than steps: always the last one
    *_, row = states(tiny(initial_mask="released", rounds=1, sparsity_initial=0.3), mini)
    assert row[2]["sparsity"] == pytest.approx(0.3, abs=1e-4)  # a mask at s_0 after the first round, out of turn
    dense, masked = (assemble(tiny(initial_mask="released", sparsity_initial=s), mini) for s in (0.0, 0.5))
    assert torch.equal(dense.start().w, masked.start().w)
    assert not torch.equal(*(trained(f, f.start(), 0) for f in (dense, masked)))


def test_a_dense_memory_is_centralised_dpf(tiny, hardly_tested, double_precision):
    """One client that holds everything: error feedback without end, the mask renewed every two epochs."""
    exp = tiny(
        "dpf", regrowth="dense_memory", clients=1, clients_per_round=1, rounds=4, batch_size=100, weight_decay=0.01,
        gradient="eager", width=0.25,
    )  # fmt: skip
    mini = dataclasses.replace(hardly_tested, x_train=hardly_tested.x_train[:500], y_train=hardly_tested.y_train[:500])
    visited = list(states(exp, mini))
    federation = visited[0][0]
    w = federation.start().w.clone()
    net, layout, m = federation.clients.net.train(), federation.clients.layout, None
    for t in range(4):
        for x, y in data.batches(mini, federation.clients.parts[0], 100, 1, stream(exp.seed, "batches", t, 0)):
            u = {k: v.clone().requires_grad_() for k, v in layout.views(layout.prune(w, m)).items()}
            loss = torch.nn.functional.cross_entropy(torch.func.functional_call(net, u, (x,)), y)
            g = layout.flat(dict(zip(u, torch.autograd.grad(loss, list(u.values())), strict=True)))
            w = w - 0.1 * 0.998**t * (g + 0.01 * w)
        if (t + 1) % 2 == 0:
            m = masks.magnitude_mask(layout.weights(w), 0.9 - 0.9 * (1 - (t + 1) / 4) ** 3)
    ours = visited[-1][1]
    assert all(torch.equal(ours.m[k], m[k]) for k in m)
    torch.testing.assert_close(ours.w, w, rtol=1e-9, atol=1e-10)  # also where it is pruned


@pytest.mark.parametrize(
    ("t", "lambda_max", "lam"),
    [(49, 1e-3, 0), (50, 1e-3, 5e-4), (100, 1e-3, 5.263158e-4), (500, 1e-3, 7.368421e-4), (950, 1e-3, 9.736842e-4),
     (999, 1e-3, 9.736842e-4), (100, 5e-3, 7.368421e-4), (999, 5e-3, 4.763158e-3)],
)  # fmt: skip
def test_lambda_of_the_released_code(t, lambda_max, lam):
    assert lambda_in_twenty(t, T=1000, lambda_max=lambda_max) == pytest.approx(lam, rel=1e-6)


def test_lambda_of_the_released_code_at_its_edges():
    assert lambda_in_twenty(0, T=10, lambda_max=1e-3) == pytest.approx(9.736842e-4, rel=1e-6)  # fewer rounds than steps
    assert lambda_in_twenty(999, T=1000, lambda_max=0.0) == 0.0
    assert lambda_in_twenty(29, T=30, lambda_max=1e-3) == pytest.approx(9.736842e-4, rel=1e-6)  # 30 // 20 is 1: capped


def test_reconfiguration_times_of_the_released_code(tiny, mini):
    method = assemble(tiny(reconfigure_at="released", reconfigure_every=5, rounds=1000), mini).method
    assert [method.tau(t) for t in range(7)] == [0, None, None, None, None, 5, None]
    assert method.tau(995) == 995
    paper = assemble(tiny(reconfigure_every=5, rounds=1000), mini).method
    assert [paper.tau(t) for t in range(10)] == [None] * 4 + [5] + [None] * 4 + [10]


def test_a_switch_changes_no_name_and_no_colour(tiny, mini):
    plain, switched = (assemble(tiny("feddip", rules=r), mini).method for r in ("paper", "released"))
    assert type(plain) is not type(switched)
    looks = [(m.name, m.label, m.colour, m.line) for m in (plain, switched)]
    assert looks[0] == looks[1] == ("feddip", "FedDIP", "#D55E00", "-")


def test_feddip_prox_without_mu_is_feddip(tiny):
    assert same(run(tiny("feddip_prox", prox_mu=0)), run(tiny("feddip")))
    assert not same(run(tiny("feddip_prox", prox_mu=0.1)), run(tiny("feddip")))


def test_feddip_proxs_anchor_pulls_no_masked_weight(tiny, mini):
    for regrowth in ("paper", "dense_memory"):
        federation = assemble(tiny("feddip_prox", regrowth=regrowth, prox_mu=1.0), mini)
        state, layout = federation.start(), federation.clients.layout
        start = layout.prune(state.w, state.m)
        g, moved = torch.zeros_like(start), start + layout.flat_mask(state.m, like=start)
        federation.method.terms(0, start)[0](g, moved)
        masked = layout.flat_mask(state.m, like=start) == 0
        assert not g[masked].any()
        assert g[~masked].allclose(torch.tensor(1.0))


def test_feddip_proxs_anchor_is_the_pruned_model_even_with_a_dense_memory(tiny, mini):
    federation = assemble(tiny("feddip_prox", regrowth="dense_memory", prox_mu=1.0), mini)
    seen = []
    honest = federation.method.terms
    federation.method.terms = lambda t, start: seen.append(start.clone()) or honest(t, start)
    state = federation.start()
    federation.train_client(state, 0)
    assert torch.equal(seen[0], federation.clients.layout.prune(state.w, state.m))
    assert not torch.equal(seen[0], state.w)


def test_a_dense_memory_travels_down(tiny, mini):
    """By hand: 61,706 numbers, and a mask of 61,470 bits when it is new. The old code counted the kept weights."""
    exp = tiny("feddip", regrowth="dense_memory", width=1.0, rounds=3, clients=4, clients_per_round=4)
    rows = [row for _, _, row in states(exp, mini)][1:]
    dense, mask = 32 * 61_706, 61_470
    assert [row["downlink_bits"] for row in rows] == [4 * (dense + mask), 4 * dense, 4 * (dense + mask)]
    assert rows[0]["downlink_bits"] == 8_144_248
    assert {row["uplink_bits"] for row in rows} == {4 * dense}


def test_a_run_counts_in_both_units(tiny, mini):
    rows = [row for _, _, row in states(tiny("feddip", rounds=3), mini)][1:]
    n = assemble(tiny(), mini).clients.layout.size
    for t, row in enumerate(rows):
        s = sparsity_at(t, T=3, s_0=0.5, s_p=0.9)
        assert row["downlink_mebibits_released"] == pytest.approx(2 * 32 * (1 - s) * n / 2**20)
        assert row["uplink_mebibits_released"] <= 2 * 32 * n / 2**20
    fedavg = [row for _, _, row in states(tiny("fedavg", rounds=1), mini)][1]
    assert fedavg["uplink_mebibits_released"] == pytest.approx(2 * 32 * n / 2**20, rel=1e-3)


# A sparse uplink

NORMS = dict(model="resnet18", width=0.02, rounds=3, clients=400)


@pytest.mark.parametrize("settings", [
    dict(), dict(rules="released", momentum=0.9), dict(initial_mask="released"), dict(reconfigure_at="released"),
    dict(method="feddip_prox", regrowth="released", prox_mu=0.1), dict(method="dpf"),
    NORMS, NORMS | dict(rules="released"),
], ids=["paper", "released", "first mask", "early", "prox", "dpf", "norms", "norms, released"])  # fmt: skip
def test_with_a_sparse_uplink_the_model_is_the_same_after_every_round(tiny, mini, settings):
    exp, saved = tiny(**settings), 0
    both = (states(exp.replace(sparse_uplink=sparse), mini) for sparse in (False, True))
    for (_, a, dense), (_, b, sparse) in zip(*both, strict=True):
        assert torch.equal(a.w, b.w) and torch.equal(a.statistics, b.statistics) and a.mask_version == b.mask_version
        assert a.m == b.m if a.m is None else masks.changes(a.m, b.m) == (0, 0)
        if dense:
            same_columns = dense.keys() - {"delta", "uplink_bits", "uplink_mebibits_released", "seconds"}
            assert {k: dense[k] for k in same_columns} == {k: sparse[k] for k in same_columns}
            saved += dense["uplink_bits"] - sparse["uplink_bits"]
            whole = dense["uplink_bits"] == sparse["uplink_bits"]
            assert sparse["delta"] == dense["delta"] if whole else sparse["delta"] != sparse["delta"]
    assert saved > 0


def test_when_pruned_weights_travel_back(tiny, mini):
    """The paper's order reads them when it chooses a mask, the released one never, a dense memory always."""

    def dense(**settings):
        rows = [row for _, _, row in states(tiny(rounds=5, sparse_uplink=True, **settings), mini)][1:]
        whole = 2 * 32 * assemble(tiny(), mini).clients.layout.size
        return [row["round"] for row in rows if row["uplink_bits"] == whole]

    assert dense() == [2, 4]
    assert dense(regrowth="released") == []
    assert dense(rules="released") == [1]  # no mask of the server's yet
    assert dense(initial_mask="released") == [1, 2, 4]
    assert dense(regrowth="dense_memory") == [1, 2, 3, 4, 5]


def test_a_sparse_uplink_and_a_limit_on_whole_updates_do_not_go_together():
    with pytest.raises(ValueError, match="sparse_uplink: True is not allowed; clip_norm needs the pruned weights "):
        Experiment(method="dpf", sparse_uplink=True, clip_norm=1.0)


def test_a_dense_memory_has_no_sparse_uplink(tiny):
    exp = tiny(regrowth="dense_memory", rounds=3)
    assert same(run(exp), run(exp.replace(sparse_uplink=True)))


@pytest.mark.parametrize(("settings", "share"), [
    (dict(), 0.602), (dict(sparse_uplink=True), 0.284), (dict(rules="released", sparse_uplink=True), 0.205),
    (dict(method="fedgmp"), 0.240),
])  # fmt: skip
def test_the_share_of_fedavgs_weights_that_travel(mini, settings, share):
    """At the paper's scale, both ways, masks apart."""
    fed = assemble(Experiment.preset("paper", **settings).replace(dataset="fashion_mini"), mini)
    plan, first = measure.plan(fed), fed.start(sketch=True).kept
    zeros = [0.0 if first is None else 1 - first / 61_470, *plan["sparsity"][:-1]]
    down = sum(5 * 32 * (61_706 - round(s * 61_470)) for s in zeros)
    assert (down + plan["uplink_bits"].sum()) / (2 * 1000 * 5 * 32 * 61_706) == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize(("regrowth", "sparse", "w", "delta"), [
    ("released", False, [0, 3, 0, 0], 0.82), ("released", True, [0, 3, 0, 0], 0.3076923),
    ("paper", False, [0, 0, 6, 0], 0.28), ("paper", True, [0, 0, 6, 0], 0.28),
    ("paper", "always", [0, 3, 0, 0], 0.3076923),
])  # fmt: skip
def test_a_sparse_uplink_by_hand(monkeypatch, regrowth, sparse, w, delta):
    """Two clients, four weights of which the mask keeps two, and one is to be left.

    A sparse upload in a round that chooses a mask in the paper's order would give another model.
    """
    if sparse == "always":
        monkeypatch.setattr(FedDP, "reads_pruned", lambda self, t: False)
    settings = dict(rounds=1, reconfigure_every=1, sparsity_initial=0.5, sparsity_target=0.75)
    exp = Experiment(method="feddp", regrowth=regrowth, sparse_uplink=bool(sparse), **settings)
    layout = Layout({"k": torch.Size([4])}, ("k",))
    method = method_of(exp, SimpleNamespace(layout=layout))
    m = {"k": torch.tensor([True, True, False, False])}
    state = State(0, torch.zeros(4), m, torch.empty(0), client_mask_versions=(0, 0))
    uploads = []
    for n, values in enumerate(([1.0, 2.0, 5.0, -6.0], [3.0, 4.0, 7.0, 8.0])):
        sent = method.upload(state, n)
        tensors = {"w": torch.tensor(values), "statistics": torch.empty(0)}
        uploads.append(sent.unpack(layout, sent.pack(layout, tensors, sent.kept and m), sent.kept and m))
    mean = aggregate(uploads, [1, 1])
    average, new, _ = method.next(Average(mean, [0, 1]), state)
    assert method.remembered(average, new).tolist() == w
    assert masks.pruning_error(layout.views(average), new) == pytest.approx(delta)
