"""What several test modules share."""

import copy

import reference
import torch

from feddip_core import data
from feddip_core.engine import measure
from feddip_core.engine.assembly import assemble
from feddip_core.streams import stream


def same(a, b):
    """Two runs with the same bits in weights, masks and metrics, but for the time they took."""
    return (
        same_model(a, b)
        and all(torch.equal(a.mask[k], b.mask[k]) for k in a.mask)
        and all(torch.equal(a.statistics[k], b.statistics[k]) for k in a.statistics)
        and a.metrics.drop(columns="seconds").equals(b.metrics.drop(columns="seconds"))
    )


def same_model(a, b):
    """Two runs whose weights have the same bits."""
    return all(torch.equal(a.weights[k], b.weights[k]) for k in a.weights)


def states(exp, dataset):
    """The states of a run, one after the other: (federation, state, row of metrics or None)."""
    federation = assemble(exp, dataset)
    state = federation.start()
    yield federation, state, None
    for _ in range(exp.rounds):
        before = state
        state, row = one_round(federation, before)
        yield federation, state, row


def one_round(federation, state):
    """The next state, and the row of metrics of the round that led to it."""
    after, done = federation.round(state)
    return after, measure.row(federation, state, after, done, 0.0)


def on_meta(federation, t):
    """Move everything that training needs to the meta device, and return a state there in round t, with a mask."""
    meta, clients, state = torch.device("meta"), federation.clients, federation.start()
    clients.device, clients.net = meta, clients.net.to(meta)
    clients.data, clients.parts = clients.data.to(meta), [p.to(meta) for p in clients.parts]
    clients.norms = clients.norms.to(meta)
    clients.counters = {k: v.to(meta) for k, v in clients.counters.items()}
    m = {k: torch.ones(s, dtype=torch.bool, device=meta) for k, s in clients.layout.prunable_shapes.items()}
    own = {n: {k: v.to(meta) for k, v in kept.items()} for n, kept in state.own.items()}
    return state.replace(t=t, w=state.w.to(meta), statistics=state.statistics.to(meta), m=m, own=own)


def trained(federation, state, n):
    """The weights that client n uploads."""
    return federation.train_client(state, n).values["w"]


def model_and_mask_bits(federation, state):
    """What the kept weights of a state take, and what its mask takes."""
    layout = federation.clients.layout
    kept = sum(int(keep.sum()) for keep in state.m.values())
    return 32 * (layout.size - layout.prunable_size + kept), layout.prunable_size


def tensors(lists):
    """Layers of a made-up network, from lists of numbers."""
    return {f"layer{i}": torch.tensor(v) for i, v in enumerate(lists)}


def lists(mask):
    """A mask as lists."""
    return [v.tolist() for v in mask.values()]


def agrees_with(exp, dataset, rule, **options):
    """Every mask and the last weights are those of the transcription with this rule."""
    fast = list(states(exp, dataset))
    federation, start = fast[0][:2]
    names, parts = list(federation.clients.layout.prunable), federation.clients.parts

    def batches(purpose):
        return lambda t, n: data.batches(dataset, parts[n], exp.batch_size, 1, stream(exp.seed, purpose, t, n))

    net, history = reference.adjusting(
        copy.deepcopy(assemble(exp, dataset).clients.net), start.m, names, federation.select, batches("batches"),
        lambda t, n: next(batches("adjust")(t, n)), lambda n: len(parts[n]), rule, T=exp.rounds,
        R=exp.reconfigure_every, until=exp.adjust_until, alpha=exp.adjust_alpha, eta_0=exp.learning_rate,
        decay=exp.learning_rate_decay, weight_decay=exp.weight_decay, **options,
    )  # fmt: skip
    for (_, state, _), expected in zip(fast[1:], history, strict=True):
        assert all(torch.equal(state.m[k], expected[k]) for k in names)
    assert sum(row["regrown"] for *_, row in fast[1:]) > 0
    ours = federation.clients.layout.views(fast[-1][1].w)
    for k, v in net.named_parameters():
        torch.testing.assert_close(ours[k], v.detach(), rtol=1e-9, atol=1e-10)
