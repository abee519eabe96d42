import copy
import gc
import hashlib
import itertools
import subprocess
import sys
import threading
import time

import pytest
import reference
import torch

from feddip_core import Experiment, data, masks, run
from feddip_core.federation import Federation, aggregate
from feddip_core.streams import global_stream, stream


@pytest.fixture(scope="module")
def mini():
    return data.load("fashion_mini")


def same(a, b):
    """Two runs with the same bits in weights, masks and metrics, but for the time they took."""
    return (
        all(torch.equal(a.weights[k], b.weights[k]) for k in a.weights)
        and all(torch.equal(a.mask[k], b.mask[k]) for k in a.mask)
        and all(torch.equal(a.statistics[k], b.statistics[k]) for k in a.statistics)
        and a.metrics.drop(columns="seconds").equals(b.metrics.drop(columns="seconds"))
    )


def states(exp, dataset):
    """The states of a run, one after the other."""
    federation = Federation(exp, dataset)
    state = federation.start()
    yield federation, state, None
    for _ in range(exp.rounds):
        state, row = federation.round(state)
        yield federation, state, row


@pytest.mark.parametrize("method", ["feddip", "feddp"])
@pytest.mark.parametrize(("model", "width"), [("lenet5", 0.25), ("resnet18", 0.02)])
def test_algorithm_1_transcribed_naively_agrees(tiny, mini, double_precision, method, model, width):
    settings = dict(lambda_max=0.05) if method == "feddip" else {}
    exp = tiny(method, model=model, width=width, clients=400, rounds=8, batch_size=8, lambda_steps=4, **settings)
    fast = list(states(exp, mini))
    federation, start, _ = fast[0]
    names = list(federation.layout.prunable)
    net, mask, history = reference.feddip(
        copy.deepcopy(Federation(exp, mini).net), start.m, names, federation.select,
        lambda t, n: data.batches(mini, federation.parts[n], 8, 1, stream(exp.seed, "batches", t, n)),
        lambda n: len(federation.parts[n]),
        T=8, R=2, s_0=0.5, s_p=0.9, lambda_max=exp.lambda_max, Q=4, eta_0=0.1, decay=0.998, weight_decay=5e-4,
    )  # fmt: skip
    end = fast[-1][1]
    for (_, state, _), expected in zip(fast[1:], history, strict=True):
        assert all(torch.equal(state.m[k], expected[k]) for k in names)
    total = sum(v.numel() for v in mask.values())
    assert sum(int(v.sum()) for v in mask.values()) == total - round(0.9 * total)
    ours = federation.layout.views(end.w) | federation.statistics.views(end.statistics)
    theirs = dict(net.named_parameters()) | dict(net.named_buffers())
    for k, v in ours.items():
        torch.testing.assert_close(v, theirs[k].detach(), rtol=1e-9, atol=1e-10)


def test_the_agreement_would_miss_no_forgotten_penalty(tiny, mini):
    """The two methods compared above really end in different places."""
    a, b = run(tiny("feddip", lambda_max=0.05)), run(tiny("feddp"))
    assert not torch.allclose(a.weights["fc1.weight"], b.weights["fc1.weight"], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("rules", ["paper", "authors"])
def test_reductions_are_bitwise(tiny, rules):
    fedavg = run(tiny("fedavg"))
    dense = run(tiny("feddip", rules=rules, sparsity_initial=0, sparsity_target=0, lambda_max=0))
    assert same(fedavg, dense)
    assert same(run(tiny("feddp", rules=rules)), run(tiny("feddip", rules=rules, lambda_max=0)))
    dpf = run(tiny("dpf", rules=rules))
    assert same(dpf, run(tiny("feddip", rules=rules, sparsity_initial=0, lambda_max=0)))
    assert dpf.metrics.sparsity.iloc[-1] > 0.8
    assert not same(fedavg, dpf)


def test_masks_change_at_reconfigurations_only_and_count_exactly(tiny, mini):
    exp = tiny(rounds=9, reconfigure_every=3)
    before = None
    for federation, state, row in states(exp, mini):
        n_w = sum(v.numel() for v in state.m.values())
        if row and row["round"] % 3 == 0:
            s = 0.9 + (0.5 - 0.9) * (1 - row["round"] / 9) ** 3
            assert n_w - masks.kept(state.m) == round(s * n_w)
            assert row["dropped"] > 0
        elif row:
            assert state.m is before
            assert (row["regrown"], row["dropped"]) == (0, 0)
        assert not any(v[~state.m[k]].any() for k, v in federation.layout.weights(state.w).items())
        before = state.m
    assert row["sparsity"] == pytest.approx(0.9, abs=1e-4)


def test_the_authors_times_and_masks(tiny, mini):
    exp = tiny(rules="authors", rounds=5, reconfigure_every=2)
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
    assert runs[1][2]["downlink_bits"] == 2 * 32 * federation.layout.size


def huge_gradient_at_a_pruned_weight(exp, dataset):
    """One round in which the clients push one pruned weight far out; whether the next mask keeps it."""
    federation = Federation(exp, dataset)
    state, _ = federation.round(federation.start())
    k = "fc1.weight"
    position = tuple(torch.nonzero(~state.m[k])[0].tolist())
    honest = federation.train_client

    def pushed(state, n):
        upload = honest(state, n)
        federation.layout.views(upload["w"])[k][position] += 100.0
        return upload

    federation.train_client = pushed
    after, row = federation.round(state)
    value = federation.layout.views(after.w)[k][position]
    return bool(after.m[k][position]), float(value), row


def test_a_pruned_weight_with_a_huge_gradient_returns_in_the_papers_order_only(tiny, mini):
    returned, value, row = huge_gradient_at_a_pruned_weight(tiny(), mini)
    assert returned
    assert value > 99
    assert row["regrown"] >= 1
    returned, value, row = huge_gradient_at_a_pruned_weight(tiny(regrowth="authors"), mini)
    assert not returned
    assert value == 0
    assert row["regrown"] == 0


def test_in_the_authors_order_masks_are_nested_and_feedback_is_inert(tiny, mini):
    exp = tiny(rules="authors")
    visited = [(state, row) for _, state, row in states(exp, mini)][1:]
    assert sum(row["regrown"] for _, row in visited) == 0
    for (a, _), (b, _) in itertools.pairwise(visited):
        assert masks.changes(a.m, b.m)[0] == 0
    federation = Federation(exp, mini)
    honest = federation.train_client

    def without_feedback(state, n):
        upload = honest(state, n)
        return upload | {"w": federation.pruned(upload["w"], state.m)}

    federation.train_client = without_feedback
    state = federation.start()
    for _ in range(exp.rounds):
        state, _ = federation.round(state)
    assert torch.equal(state.w, visited[-1][0].w)


@pytest.mark.parametrize(
    "settings", [dict(reconfigure_at="authors"), dict(sparsity_initial=0.9, sparsity_target=0.9)], ids=["early", "flat"]
)
def test_in_the_authors_order_nothing_returns_even_if_the_first_mask_has_a_zero_too_many(tiny, mini, settings):
    """ERK rounds down layer by layer, so its mask has a few zeros more than the sparsity asks for."""
    for _, _, row in states(tiny(width=1.0, regrowth="authors", rounds=3, **settings), mini):
        assert not row or row["regrown"] == 0


def test_each_switch_acts_alone(tiny, mini):
    rows = [row for _, _, row in states(tiny(lambda_schedule="authors20"), mini)][1:]
    assert {row["lambda_"] for row in rows} == {5e-4 + 5e-4 * 18 / 19}  # fewer rounds than steps: always the last one
    *_, row = states(tiny(initial_mask="authors", rounds=1, sparsity_initial=0.3), mini)
    assert row[2]["sparsity"] == pytest.approx(0.3, abs=1e-4)  # a mask at s_0 after the first round, out of turn
    dense, masked = (Federation(tiny(initial_mask="authors", sparsity_initial=s), mini) for s in (0.0, 0.5))
    assert torch.equal(dense.start().w, masked.start().w)
    assert not torch.equal(*(f.train_client(f.start(), 0)["w"] for f in (dense, masked)))


def test_delta_is_that_of_the_average_before_pruning(tiny, mini):
    exp = tiny(rounds=2)
    visited = list(states(exp, mini))
    federation, state = visited[1][:2]
    uploads = [federation.train_client(state, n)["w"].double() for n in federation.select(1)]
    w = sum(uploads) / 2
    lost = w * (1 - federation.layout.flat_mask(visited[2][1].m, like=w))
    assert visited[2][2]["delta"] == pytest.approx(float(lost.square().sum() / w.square().sum()), rel=1e-5)
    assert visited[2][2]["delta"] > 1e-3


def test_what_run_hands_to_the_data(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(data, "load", lambda *a: asked.append(a) or (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        run(tiny(normalisation="authors"), data_dir="here")
    assert asked == [("fashion_mini", "here", "authors")]


def test_a_device_that_is_not_there_is_refused_before_data_are_read(tiny, monkeypatch):
    monkeypatch.setattr(data, "load", lambda *a: pytest.fail("data were read"))
    with pytest.raises(ValueError, match=r"device: 'cuda:99' is not allowed; this machine has cpu"):
        run(tiny(device="cuda:99"))


def test_a_dense_memory_is_centralised_dpf(tiny, mini):
    """One client that holds everything: error feedback without end, the mask renewed every two epochs."""
    exp = tiny(
        "dpf",
        regrowth="dense_memory",
        clients=1,
        clients_per_round=1,
        rounds=4,
        batch_size=500,
        weight_decay=0.01,
        gradient="eager",
    )
    federation = Federation(exp, mini)
    w = federation.start().w.clone()
    net, m = federation.net.train(), None
    for t in range(4):
        for x, y in data.batches(mini, federation.parts[0], 500, 1, stream(exp.seed, "batches", t, 0)):
            u = {
                k: v.clone().requires_grad_() for k, v in masks.apply_mask(federation.layout.views(w), m or {}).items()
            }
            loss = torch.nn.functional.cross_entropy(torch.func.functional_call(net, u, (x,)), y)
            g = federation.layout.flat(dict(zip(u, torch.autograd.grad(loss, list(u.values())), strict=True)))
            w = w - 0.1 * 0.998**t * (g + 0.01 * w)
        if (t + 1) % 2 == 0:
            m = masks.magnitude_mask(federation.layout.weights(w), 0.9 - 0.9 * (1 - (t + 1) / 4) ** 3)
    ours = run(exp)
    assert all(torch.equal(ours.mask[k], m[k]) for k in m)
    for k, v in masks.apply_mask(federation.layout.views(w), m).items():
        torch.testing.assert_close(ours.weights[k], v, rtol=1e-4, atol=1e-6)


def test_same_seed_same_bits(tiny):
    exp = tiny()
    first = run(exp)
    torch.manual_seed(99)  # what happens to the global generators must not matter
    torch.rand(7)
    assert same(first, run(exp))
    assert not same(first, run(exp.replace(seed=1)))


def test_a_run_leaves_the_global_generator_and_threads_alone(tiny):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    torch.set_num_threads(2)
    try:
        run(tiny(rounds=1, model="alexnet", width=0.05))
        assert torch.equal(torch.rand(3), expected)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("model", ["lenet5", "alexnet", "resnet18"])
def test_same_seed_same_bits_in_another_process(model):
    settings = dict(rounds=2, width=0.05, clients=60, clients_per_round=2, local_epochs=1, model=model)
    code = f"""
import hashlib
import itertools
from feddip_core import Experiment, run
r = run(Experiment.preset("smoke", **{settings!r}))
print(hashlib.sha256(b"".join(v.numpy().tobytes() for v in [*r.weights.values(), *r.mask.values()])).hexdigest())
print(r.metrics.drop(columns="seconds").to_csv())"""
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    r = run(Experiment.preset("smoke", **settings))
    tensors = [*r.weights.values(), *r.mask.values()]
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in tensors)).hexdigest()
    assert other.split() == [digest, *r.metrics.drop(columns="seconds").to_csv().split()]


def test_one_full_batch_of_everyone_is_a_step_of_gradient_descent(tiny, mini):
    exp = tiny("fedavg", clients=4, clients_per_round=4, batch_size=6000, rounds=1, weight_decay=0)
    federation = Federation(exp, mini)
    start = federation.start()
    after, _ = federation.round(start)
    loss = torch.nn.functional.cross_entropy(federation.net.train()(mini.normalise(mini.x_train)), mini.y_train)
    loss.backward()
    g = torch.cat([p.grad.flatten() for p in federation.net.parameters()])
    torch.testing.assert_close(after.w, start.w - 0.1 * g, rtol=1e-4, atol=1e-6)


def test_aggregation_by_hand():
    a, b = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([5.0, -2.0])}
    assert aggregate([a, b], [300, 100])["w"].tolist() == [2.0, 1.0]
    assert torch.equal(aggregate([a, b], [300, 100])["w"], aggregate([b, a], [100, 300])["w"])


def test_equal_clients_average_to_themselves():
    w = {"w": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    assert torch.equal(aggregate([w] * 7, [13, 1, 5, 99, 3, 17, 1200])["w"], w["w"])


def test_aggregation_weighs_by_the_selected_clients_samples(tiny, mini):
    exp = tiny("fedavg", partition="dirichlet(0.3)", rounds=1)
    federation = Federation(exp, mini)
    start = federation.start()
    chosen = federation.select(0)
    sizes = [len(federation.parts[n]) for n in chosen]
    assert sizes[0] != sizes[1]
    uploads = [federation.train_client(start, n)["w"].double() for n in chosen]
    expected = (uploads[0] * sizes[0] + uploads[1] * sizes[1]) / sum(sizes)
    torch.testing.assert_close(federation.round(start)[0].w.double(), expected, rtol=1e-6, atol=1e-8)


def test_selection_is_uniform_without_replacement(tiny, mini):
    federation = Federation(tiny(clients=10, clients_per_round=4), mini)
    drawn = [federation.select(t) for t in range(500)]
    assert all(len(set(d)) == 4 for d in drawn)
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=10)
    assert counts.min() > 150
    assert counts.max() < 250


def test_bits_are_counted_exactly(tiny, mini):
    exp = tiny(width=1.0, rounds=3, clients=20, clients_per_round=20)
    rows = [row for _, _, row in states(exp, mini)][1:]
    n, n_w, biases = 61_706, 61_470, 236
    kept_first = 150 + 1259 + 20459 + 8026 + 840
    # The first download carries the mask, the second does not, the third carries a new one.
    assert rows[0]["downlink_bits"] == 20 * (32 * (kept_first + biases) + n_w)
    assert rows[1]["downlink_bits"] == 20 * 32 * (kept_first + biases)
    kept_second = n_w - round((0.9 - 0.4 * (1 - 2 / 3) ** 3) * n_w)
    assert rows[2]["downlink_bits"] == 20 * (32 * (kept_second + biases) + n_w)
    assert {row["uplink_bits"] for row in rows} == {20 * 32 * n}


def test_a_client_that_missed_a_round_is_sent_the_mask(tiny, mini):
    exp = tiny(rounds=4, reconfigure_every=10, clients=3, clients_per_round=1)
    visited = list(states(exp, mini))
    federation = visited[0][0]
    chosen = [federation.select(t)[0] for t in range(4)]
    first_time = [n not in chosen[:t] for t, n in enumerate(chosen)]
    assert not all(first_time)
    bits = [row["downlink_bits"] for _, _, row in visited[1:]]
    assert [b > min(bits) for b in bits] == first_time


def test_batch_norm_statistics_are_averaged_and_sent(tiny, mini):
    exp = tiny(model="resnet18", width=0.04, rounds=1, clients=100)
    federation = Federation(exp, mini)
    start = federation.start()
    after, row = federation.round(start)
    uploads = [federation.train_client(start, n)["statistics"] for n in federation.select(0)]
    torch.testing.assert_close(after.statistics, (uploads[0] + uploads[1]) / 2)
    assert not torch.equal(after.statistics, start.statistics)
    assert row["uplink_bits"] == 2 * 32 * (federation.layout.size + federation.statistics.size)


@pytest.mark.parametrize("partition", ["pathological", "shards", "dirichlet(0.1)"])
def test_every_partition_trains(tiny, partition):
    assert run(tiny(partition=partition, rounds=2)).metrics.train_loss.notna().all()


def test_the_network_of_a_run_is_the_one_that_was_measured(tiny, mini):
    for model, width in (("lenet5", 0.5), ("resnet18", 0.04)):
        r = run(tiny(model=model, width=width, rounds=2, clients=100))
        with torch.no_grad():
            correct = (r.network(mini.normalise(mini.x_test)).argmax(1) == mini.y_test).double().mean()
        assert float(correct) == pytest.approx(r.metrics.test_accuracy.iloc[-1], abs=0.0021)
        assert 0 <= r.metrics.test_accuracy.min() <= r.metrics.test_accuracy.max() <= 1


def test_metrics_have_their_columns(tiny):
    metrics = run(tiny(rounds=2)).metrics
    assert list(metrics.columns) == [
        "round", "test_accuracy", "test_loss", "train_loss", "sparsity", "delta", "lambda_", "learning_rate",
        "downlink_bits", "uplink_bits", "downlink_mebibits_authors", "uplink_mebibits_authors",
        "layer_zeros", "regrown", "dropped", "seconds",
    ]  # fmt: skip
    assert metrics["round"].tolist() == [1, 2]


def test_memory_does_not_grow_with_the_clients(tiny, mini, monkeypatch):
    def most_models_alive(clients, per_round):
        gc.collect()  # what is left of the federation before
        federation = Federation(tiny(clients=clients, clients_per_round=per_round), mini)
        size, honest, most = federation.layout.size, federation.train_client, 0

        def counted(state, n):
            nonlocal most
            upload = honest(state, n)
            most = max(most, sum(type(o) is torch.Tensor and o.numel() == size for o in gc.get_objects()))
            return upload

        federation.train_client = counted
        federation.round(federation.start())
        return most

    few, many, all_of_them = most_models_alive(10, 2), most_models_alive(400, 2), most_models_alive(60, 12)
    assert few >= 2
    assert few == many == all_of_them


@pytest.mark.parametrize("method", ["feddip", "snip"])
def test_a_model_that_diverged_is_pruned_all_the_same(tiny, method):
    diverged = run(tiny(method, learning_rate=1e6, rounds=4))
    assert diverged.diverged and not torch.isfinite(diverged.weights["fc1.weight"]).all()
    assert all((diverged.weights[k][~m] == 0).all() for k, m in diverged.mask.items())


def test_threads_do_not_draw_from_each_others_stream():
    """As when a plan is made while a network with dropout trains."""
    cpu, entered, other = torch.device("cpu"), threading.Event(), []

    def draw():
        with global_stream(cpu, 0, "one"):
            entered.set()
            time.sleep(0.05)  # in which the other would seed the generator anew
            other.append(torch.rand(1))

    with global_stream(cpu, 0, "one"):
        alone = torch.rand(1)
    thread = threading.Thread(target=draw)
    thread.start()
    entered.wait()
    with global_stream(cpu, 0, "two"):
        torch.rand(1)
    thread.join()
    assert other == [alone]
