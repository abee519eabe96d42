import copy
import gc
import threading

import pytest
import reference
import torch
from helpers import one_round, states, trained

from feddip_core import data, masks, run, streams
from feddip_core.engine.assembly import assemble
from feddip_core.engine.checkpoints import tensors_of
from feddip_core.server import Federation
from feddip_core.state import aggregate
from feddip_core.streams import global_stream, stream


@pytest.mark.parametrize("method", ["feddip", "feddp"])
@pytest.mark.parametrize(("model", "width", "T"), [("lenet5", 0.25, 8), ("resnet18", 0.02, 4)])
def test_algorithm_1_transcribed_naively_agrees(tiny, hardly_tested, double_precision, method, model, width, T):
    settings = dict(lambda_max=0.05, lambda_steps=4) if method == "feddip" else {}
    exp = tiny(method, model=model, width=width, clients=400, rounds=T, batch_size=8, **settings)
    fast = list(states(exp, hardly_tested))
    federation, start, _ = fast[0]
    names = list(federation.clients.layout.prunable)
    net, mask, history = reference.feddip(
        copy.deepcopy(assemble(exp, hardly_tested).clients.net), start.m, names, federation.select,
        lambda t, n: data.batches(hardly_tested, federation.clients.parts[n], 8, 1, stream(exp.seed, "batches", t, n)),
        lambda n: len(federation.clients.parts[n]),
        T=T, R=2, s_0=0.5, s_p=0.9, lambda_max=settings.get("lambda_max", 0.0), Q=4,
        eta_0=0.1, decay=0.998, weight_decay=5e-4,
    )  # fmt: skip
    end = fast[-1][1]
    for (_, state, _), expected in zip(fast[1:], history, strict=True):
        assert all(torch.equal(state.m[k], expected[k]) for k in names)
    total = sum(v.numel() for v in mask.values())
    assert sum(int(v.sum()) for v in mask.values()) == total - round(0.9 * total)
    ours = federation.clients.layout.views(end.w) | federation.clients.layout.statistics.views(end.statistics)
    theirs = dict(net.named_parameters()) | dict(net.named_buffers())
    for k, v in ours.items():
        torch.testing.assert_close(v, theirs[k].detach(), rtol=1e-9, atol=1e-10)


def test_the_agreement_would_miss_no_forgotten_penalty(tiny, mini):
    """The two methods compared above really end in different places."""
    a, b = run(tiny("feddip", lambda_max=0.05)), run(tiny("feddp"))
    assert not torch.allclose(a.weights["fc1.weight"], b.weights["fc1.weight"], rtol=1e-2, atol=1e-3)


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
        assert not any(v[~state.m[k]].any() for k, v in federation.clients.layout.weights(state.w).items())
        before = state.m
    assert row["sparsity"] == pytest.approx(0.9, abs=1e-4)


def test_delta_is_that_of_the_average_before_pruning(tiny, mini):
    exp = tiny(rounds=2)
    visited = list(states(exp, mini))
    federation, state = visited[1][:2]
    uploads = [trained(federation, state, n).double() for n in federation.select(1)]
    w = sum(uploads) / 2
    lost = w * (1 - federation.clients.layout.flat_mask(visited[2][1].m, like=w))
    assert visited[2][2]["delta"] == pytest.approx(float(lost.square().sum() / w.square().sum()), rel=1e-5)
    assert visited[2][2]["delta"] > 1e-3


@pytest.mark.slow
def test_one_full_batch_of_everyone_is_a_step_of_gradient_descent(tiny, mini):
    exp = tiny("fedavg", clients=4, clients_per_round=4, batch_size=6000, rounds=1, weight_decay=0)
    federation = assemble(exp, mini)
    start = federation.start()
    after, _ = federation.round(start)
    loss = torch.nn.functional.cross_entropy(federation.clients.net.train()(mini.normalise(mini.x_train)), mini.y_train)
    loss.backward()
    g = torch.cat([p.grad.flatten() for p in federation.clients.net.parameters()])
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
    federation = assemble(exp, mini)
    start = federation.start()
    chosen = federation.select(0)
    sizes = [len(federation.clients.parts[n]) for n in chosen]
    assert sizes[0] != sizes[1]
    uploads = [trained(federation, start, n).double() for n in chosen]
    expected = (uploads[0] * sizes[0] + uploads[1] * sizes[1]) / sum(sizes)
    torch.testing.assert_close(federation.round(start)[0].w.double(), expected, rtol=1e-6, atol=1e-8)


def test_selection_is_uniform_without_replacement(tiny, mini):
    federation = assemble(tiny(clients=10, clients_per_round=4), mini)
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
    federation = assemble(exp, mini)
    start = federation.start()
    after, row = one_round(federation, start)
    uploads = [federation.train_client(start, n).values["statistics"] for n in federation.select(0)]
    torch.testing.assert_close(after.statistics, (uploads[0] + uploads[1]) / 2)
    assert not torch.equal(after.statistics, start.statistics)
    assert row["uplink_bits"] == 2 * 32 * (federation.clients.layout.size + federation.clients.layout.statistics.size)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_clients(tiny, mini, monkeypatch):
    def most_models_alive(clients, per_round):
        gc.collect()  # what is left of the federation before
        federation = assemble(tiny(clients=clients, clients_per_round=per_round), mini)
        size, honest, most = federation.clients.layout.size, federation.train_client, 0

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


def test_threads_do_not_draw_from_each_others_stream(monkeypatch):
    """As when a plan is made while a network with dropout trains."""
    cpu, entered, knocked, other = torch.device("cpu"), threading.Event(), threading.Event(), []

    class Door:
        def __enter__(self):
            knocked.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    lock = threading.RLock()
    monkeypatch.setattr(streams, "GLOBAL", Door())

    def draw():
        with global_stream(cpu, 0, "one"):
            knocked.clear()
            entered.set()
            knocked.wait()  # without a lock, until the other has seeded the generator anew
            other.append(torch.rand(1))

    with global_stream(cpu, 0, "one"):
        alone = torch.rand(1)
    thread = threading.Thread(target=draw)
    thread.start()
    entered.wait()
    with global_stream(cpu, 0, "two"):
        torch.rand(1)
        knocked.set()
    thread.join()
    assert other == [alone]


def test_a_round_leaves_its_state_alone_and_says_what_it_averaged(tiny, mini):
    federation = assemble(tiny(rounds=2), mini)
    first, _ = federation.round(federation.start())
    before = {k: v.clone() for k, v in tensors_of(first).items()}
    after, done = federation.round(first)
    assert all(torch.equal(v, tensors_of(first)[k]) for k, v in before.items())
    assert done.average.clients == federation.select(1)
    assert torch.equal(done.w, done.average.mean["w"])
    assert torch.equal(after.w, federation.clients.layout.prune(done.w, after.m))  # round 2 reconfigures, and prunes
    assert not torch.equal(after.w, done.w)


def test_only_a_methods_own_questions_can_be_asked(tiny, mini):
    federation = assemble(tiny("snip"), mini)
    w = federation.clients.first_weights
    assert sorted(federation.ask(None, "sensitivity", w=w)) == federation.select(0)
    assert list(federation.ask([7], "sensitivity", w=w)) == [7]
    with pytest.raises(ValueError, match="question: 'finish' is not allowed; snip has sensitivity"):
        federation.ask([0], "finish", w=w)
    with pytest.raises(ValueError, match="question: 'sensitivity' is not allowed; fedavg has none"):
        assemble(tiny("fedavg"), mini).ask([0], "sensitivity", w=w)


def test_a_subclass_may_train_its_clients_elsewhere(tiny, mini):
    """With one client that does not answer, the average is that of the others, and only they hold the mask."""

    class Faulty(Federation):
        def collect(self, state, chosen):
            return super().collect(state, chosen[1:])

    exp = tiny(clients=4, clients_per_round=3, rounds=1)
    federation = assemble(exp, mini, Faulty)
    start = federation.start()
    after, done = federation.round(start)
    absent, *others = federation.select(0)
    assert done.average.clients == others
    expected = aggregate([federation.train_client(start, n).values for n in others], [1, 1])["w"]
    assert torch.equal(done.w, expected)
    assert [n for n in range(4) if after.client_mask_versions[n] == 0] == others and after.client_mask_versions[
        absent
    ] == -1
