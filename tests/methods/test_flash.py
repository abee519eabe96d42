"""FLASH: densities that a few clients find, a random mask that has them."""

import copy

import reference
import torch
from helpers import model_and_mask_bits, states, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from feddip_core import masks, run
from feddip_core.engine.assembly import assemble
from feddip_core.methods.flash import apportioned, regrown
from feddip_core.streams import stream


def test_the_server_scales_densities_by_hand():
    """Layers of 100 and 900 weights; two clients found densities of (0.2, 0.09) and (0.4, 0.01)."""
    mean = [(20 + 40) / 2, (81 + 9) / 2]
    assert apportioned(50, mean, [100, 900]) == [20, 30]
    assert apportioned(500, mean, [100, 900]) == [100, 400]  # the first layer is full


def test_a_layer_grows_in_proportion_to_its_mean_weight_by_hand():
    """Active (10, 30), p = 0.2, mean magnitudes (0.3, 0.1): 2 + 6 go, 6 + 2 come."""
    on = {"a": torch.arange(50) < 10, "b": torch.arange(100) < 30}
    w = {"a": 0.3 * on["a"], "b": -0.1 * on["b"]}
    draws = {k: torch.linspace(0, 1, v.numel()) for k, v in on.items()}
    new, stays = regrown(w, on, 0.2, draws)
    assert [int(v.sum()) for v in stays.values()] == [8, 24] and [int(v.sum()) for v in new.values()] == [14, 26]
    assert new["a"].nonzero().flatten().tolist() == [*range(2, 10), *range(44, 50)]  # ties drop the first


def test_layers_without_weights_and_without_room():
    new, _ = regrown(tensors([[0.0] * 4, [1.0, 2.0, 3.0, 0.0]]), tensors([[False] * 4, [True] * 3 + [False]]), 0.5,
                     tensors([[0.1, 0.4, 0.2, 0.3], [0.5] * 4]))  # fmt: skip
    # Two of the second layer go; it takes back ⌊0.99 · 3⌋ = 2, its mean being the only one.
    assert [int(v.sum()) for v in new.values()] == [0, 3]
    assert apportioned(3, [0.0, 1.0], [5, 2]) == [1, 2]  # where only a layer of weight 0 has room
    assert apportioned(4, [0.0, 0.0], [3, 3]) == [2, 2]
    assert apportioned(9, [1.0, 1.0], [3, 3]) == [3, 3]  # there is no more room


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 40)), min_size=1, max_size=5), st.integers(0, 60))
def test_parts_are_the_naive_ones(layers, total):
    weights, most = [w for w, _ in layers], [high for _, high in layers]
    total = min(total, sum(most))
    ours = apportioned(total, weights, most)
    assert ours == reference.flash_shares(total, weights, most)
    assert sum(ours) == total and all(0 <= n <= high for n, high in zip(ours, most, strict=True))


def test_what_a_client_finds_is_what_the_transcription_finds(tiny, mini, double_precision):
    exp = tiny(
        "flash", width=0.1, clients=300, batch_size=8, sparsity_target=0.6, discover_epochs=4, discover_share=0.01
    )
    federation = assemble(exp, mini)
    clients, method = federation.clients, federation.method
    names, (n, *_), found = list(clients.layout.prunable), method.discoverers(), {}
    first, ask = copy.deepcopy(clients.net), federation.ask

    def asked(chosen, question, **arrays):
        found.update(ask(chosen, question, **arrays))
        return found

    _, m, _ = method.start(clients.first_weights, asked)

    def draws(epoch):
        numbers = stream(exp.seed, "flash regrow", epoch, n)
        return [torch.rand(clients.layout.shapes[k], generator=numbers).flatten().tolist() for k in names]

    mask = method.uniform_mask()
    reference.prune_(first, mask)
    counts = reference.flash_counts(
        first, mask, names, lambda epoch: list(clients.batches(n, epoch, "flash")), draws, epochs=4, drop=0.25,
        eta=0.1, weight_decay=5e-4,
    )  # fmt: skip
    assert found[n]["counts"].tolist() == counts != [int(v.sum()) for v in mask.values()]
    assert sum(counts) == masks.kept(mask) and len(found) == 3
    means = [sum(float(answer["counts"][z]) for answer in found.values()) / 3 for z in range(len(names))]
    keep, sizes = (
        clients.layout.prunable_size - round(0.6 * clients.layout.prunable_size),
        [v.numel() for v in m.values()],
    )
    assert [int(v.sum()) for v in m.values()] == reference.flash_shares(keep, means, sizes)


def test_its_mask_never_changes_and_what_it_sends(tiny, mini):
    """Three of thirty clients get a model of uniform density with its mask, and answer with five numbers."""
    exp = tiny("flash", rounds=2, clients=30, clients_per_round=30)
    (federation, start, _), *visited = states(exp, mini)
    layout = federation.clients.layout
    payload, n_w = model_and_mask_bits(federation, start)
    assert masks.kept(start.m) == n_w - round(0.9 * n_w) and all(state.m is start.m for _, state, _ in visited)
    uniform = sum(int(0.1 * n + 1e-6) for n in (75, 600, 12_000, 2_520, 420))
    stage = 3 * (32 * (layout.size - n_w + uniform) + n_w), 3 * 32 * 5
    assert n_w == 15_615 and federation.method.bits_before() == stage
    assert [row["downlink_bits"] for *_, row in visited] == [30 * (payload + n_w) + stage[0], 30 * payload]
    assert [row["uplink_bits"] for *_, row in visited] == [30 * payload + stage[1], 30 * payload]
    first = federation.clients.first_weights  # nothing of the first stage's training is kept
    assert torch.equal(start.w, layout.prune(first, start.m))


def test_without_sparsity_nobody_is_asked(tiny):
    bits = ["downlink_bits", "uplink_bits"]
    dense, fedavg = (run(tiny(m, rounds=1, **s)) for m, s in (("flash", dict(sparsity_target=0)), ("fedavg", {})))
    assert dense.metrics[bits].equals(fedavg.metrics[bits])
