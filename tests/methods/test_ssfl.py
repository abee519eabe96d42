"""SSFL: one mask before training, from all clients."""

from types import SimpleNamespace

import pytest
import reference
import torch
import torch.nn.functional as F
from helpers import lists, model_and_mask_bits, states

from feddip_core import masks, run
from feddip_core.engine.assembly import assemble
from feddip_core.layout import Layout
from feddip_core.methods.ssfl import SSFL

W = torch.tensor([1.0, -2.0, 0.5, 1.0])
G = [torch.tensor([0.1, 0.1, -0.4, 0.0]), torch.tensor([-0.1, 0.2, 0.0, 0.3]), None]


def scores(samples):
    """The scores of W, for clients with so many samples."""
    method = object.__new__(SSFL)
    method.exp, method.layout = SimpleNamespace(clients=3, clients_per_round=2), Layout({"a": torch.Size([4])}, ("a",))
    parts = [range(n) for n in samples]
    method.clients = SimpleNamespace(parts=parts, batch_gradient=lambda w, n, t, purpose: G[n])
    return method.score(W, lambda chosen, question, w: {n: getattr(method, question)(n, w) for n in chosen})


def test_scores_by_hand():
    """Client 2 has no samples, and is not asked for a gradient."""
    q = scores((30, 10, 0)) / 40
    assert q.tolist() == pytest.approx([0.1, 0.25, 0.15, 0.075])
    assert lists(masks.magnitude_mask({"a": q}, 0.5)) == [[False, True, True, False]]
    uniform = scores((20, 20, 0)) / 40  # a signed mean would lose the first weight: 0, 0.3, 0.1, 0.15
    assert uniform.tolist() == pytest.approx([0.1, 0.3, 0.1, 0.15])
    assert lists(masks.magnitude_mask({"a": uniform}, 0.5)) == [[False, True, False, True]]
    for sizes, kept in (((30, 10), [1, 2]), ((20, 20), [1, 3])):
        (ours,) = reference.ssfl_mask([W.tolist()], [[g.tolist()] for g in G[:2]], sizes, 2)
        assert [i for i, on in enumerate(ours) if on] == kept


def test_the_mask_is_that_of_the_transcription(tiny, mini, double_precision):
    exp = tiny("ssfl", width=0.1, clients=30, partition="dirichlet(0.5)", sparsity_target=0.7)
    federation = assemble(exp, mini)
    clients, net = federation.clients, federation.clients.net.train()
    weights = [dict(net.named_parameters())[k].flatten().tolist() for k in clients.layout.prunable]
    gradients, sizes = [], [len(part) for part in clients.parts]
    for n in range(30):
        net.zero_grad()
        x, y = next(clients.batches(n, 0, "ssfl"))
        F.cross_entropy(net(x), y).backward()
        gradients.append([dict(net.named_parameters())[k].grad.flatten().tolist() for k in clients.layout.prunable])
    n_w = clients.layout.prunable_size
    m = federation.start().m
    assert [v.flatten().tolist() for v in m.values()] == reference.ssfl_mask(
        weights, gradients, sizes, n_w - round(0.7 * n_w)
    )


def test_its_mask_never_changes_and_what_it_sends(tiny, mini):
    """All ten clients are sent the dense model once, and answer with a score per prunable weight."""
    exp = tiny("ssfl", rounds=2, clients=10, clients_per_round=10)
    (federation, start, _), *visited = states(exp, mini)
    payload, n_w = model_and_mask_bits(federation, start)
    assert masks.kept(start.m) == n_w - round(0.9 * n_w) and all(state.m is start.m for _, state, _ in visited)
    dense = 32 * federation.clients.layout.size
    assert [row["downlink_bits"] for *_, row in visited] == [10 * (payload + n_w + dense), 10 * payload]
    assert [row["uplink_bits"] for *_, row in visited] == [10 * (payload + 32 * n_w), 10 * payload]


def test_without_sparsity_nobody_is_asked(tiny):
    bits = ["downlink_bits", "uplink_bits"]
    dense, fedavg = (run(tiny(m, rounds=1, **s)) for m, s in (("ssfl", dict(sparsity_target=0)), ("fedavg", {})))
    assert dense.metrics[bits].equals(fedavg.metrics[bits])
