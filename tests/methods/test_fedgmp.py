"""FedGMP and FedDIP-Swap: schedules, LAMP's scores, masks, swaps, what is sent."""

import copy
import itertools
import math

import pytest
import reference
import torch
from helpers import lists, same, same_model, states, tensors

from feddip_core import Experiment, data, masks, run
from feddip_core.engine.assembly import assemble
from feddip_core.methods.feddip_swap import swapped
from feddip_core.methods.fedgmp import lamp_scores
from feddip_core.streams import stream


def pruned(w, m):
    return {k: v * m[k] for k, v in w.items()}


@pytest.mark.parametrize(("settings", "expected"), [
    (dict(rounds=1000, sparsity_target=0.9),
     {0: 0, 5: 0.0223130208, 150: 0.5203125, 300: 0.7875, 595: 0.8999994792, 600: 0.9, 605: 0.9, 1000: 0.9}),
    (dict(rounds=20, prune_begin=4, prune_end=12, sparsity_target=0.8), {3: 0, 4: 0, 5: 0.2640625, 8: 0.7, 10: 0.7875}),
], ids=["from the start to 0.6 T", "in between"])  # fmt: skip
def test_the_sparsity_by_hand(tiny, mini, settings, expected):
    method = assemble(tiny("fedgmp", **settings), mini).method
    assert {t: method.sparsity(t) for t in expected} == pytest.approx(expected, abs=1e-10)
    assert method.sparsity(settings["rounds"]) == settings["sparsity_target"]  # exactly


def test_where_pruning_begins_and_ends():
    exp = Experiment(method="fedgmp")
    assert (exp.prune_begin, exp.prune_end, exp.reconfigure_every, exp.mask_score) == (0, 600, 5, "magnitude")
    assert exp.replace(rounds=50).prune_end == 30 and Experiment(method="fedgmp", rounds=1).prune_end == 1
    assert exp.run_id == exp.replace(prune_end=600).run_id != exp.replace(prune_end=500).run_id
    with pytest.raises(ValueError, match=r"^prune_begin: 600 is not allowed; it must be less than prune_end, 600$"):
        exp.replace(prune_begin=600)
    with pytest.raises(ValueError, match=r"^prune_end: 1001 is not allowed; it must be at most rounds, 1000$"):
        exp.replace(prune_end=1001)


A, B = [1.0, -2.0, 3.0], [0.1, -0.1, 0.4]


def test_lamp_by_hand():
    scores = lists(lamp_scores(tensors([A, B])))
    assert scores[0] == pytest.approx([1 / 14, 4 / 13, 1])
    assert scores[1] == pytest.approx([0.0555556, 0.0588235, 1], abs=1e-7)
    kept = [masks.magnitude_mask(w, 0.5) for w in (tensors(scores), tensors([A, B]))]
    assert lists(kept[0]) == [[False, True, True], [False, False, True]]
    assert lists(kept[1]) == [[True] * 3, [False] * 3]


def test_lamp_at_its_edges():
    """A layer of zeros scores 0; of a sum that float32 would lose, the suffix keeps every digit."""
    scores = lists(lamp_scores(tensors([[0.0, 0.0], [1e4, 1e-4, 0.0]])))
    assert scores[0] == [0, 0]
    assert scores[1] == pytest.approx([1, 1e-16, 0], rel=1e-6)
    assert lists(lamp_scores({"k": torch.tensor([[2.0], [2.0]])})) == [[[0.5], [1.0]]]  # among equals the first goes


def test_scores_and_masks_are_those_of_the_transcription():
    numbers = torch.Generator().manual_seed(0)
    w = tensors([torch.randn(n, generator=numbers).mul(2).round().tolist() for n in (7, 12, 5)])  # many equal ones
    m = masks.magnitude_mask(w, 0.25)
    for lamp, s in itertools.product((False, True), (0.3, 0.6, 0.9)):
        live = pruned(w, m)
        ours = masks.magnitude_mask(lamp_scores(live) if lamp else live, s, within=m)
        assert lists(ours) == reference.gradual_mask(lists(w), lists(m), 24 - round(s * 24), lamp)


SWAP = dict(method="feddip_swap", reconfigure_every=1, swap_every=2, adjust_until=5, adjust_alpha=0.8)


@pytest.mark.parametrize(("settings", "swap_at"), [
    (dict(method="fedgmp"), {}), (dict(method="fedgmp", mask_score="lamp", prune_begin=1, prune_end=4), {}),
    (SWAP, {2: 0.5236068, 4: 0.0763932}), (SWAP | dict(mask_score="lamp", prune_end=4), {2: 0.5236068, 4: 0.0763932}),
], ids=["plain", "lamp", "swaps", "swaps, lamp"])  # fmt: skip
def test_the_algorithm_transcribed_naively_agrees(tiny, hardly_tested, double_precision, settings, swap_at):
    exp = tiny(width=0.1, clients=400, batch_size=8, **settings)
    fast = list(states(exp, hardly_tested))
    federation = fast[0][0]
    names = list(federation.clients.layout.prunable)
    net, history = reference.fedgmp(
        copy.deepcopy(assemble(exp, hardly_tested).clients.net), names, federation.select,
        lambda t, n: data.batches(hardly_tested, federation.clients.parts[n], 8, 1, stream(exp.seed, "batches", t, n)),
        lambda n: len(federation.clients.parts[n]),
        T=6, R=exp.reconfigure_every, b=exp.prune_begin, e=4, s_p=0.9, lamp=exp.mask_score == "lamp", swap_at=swap_at,
        eta_0=0.1, decay=0.998, weight_decay=5e-4,
    )  # fmt: skip
    for (_, state, _), expected in zip(fast[1:], history, strict=True):
        m = federation.full_mask(state.m)
        assert all(torch.equal(m[k], expected[k]) for k in names)
    ours = federation.clients.layout.views(fast[-1][1].w)
    for k, v in net.named_parameters():
        torch.testing.assert_close(ours[k], v.detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("score", ["magnitude", "lamp"])
def test_masks_are_nested_exact_and_constant_from_the_end_on(tiny, mini, score):
    exp = tiny("fedgmp", rounds=10, prune_begin=2, prune_end=7, sparsity_target=0.95, mask_score=score)
    visited = list(states(exp, mini))
    rows, n_w = [row for _, _, row in visited[1:]], visited[0][0].clients.layout.prunable_size
    assert [state.m is None for _, state, _ in visited] == [True] * 4 + [False] * 7
    at = {4: 0.95 * (1 - 0.6**3), 6: 0.95 * (1 - 0.2**3), 8: 0.95, 10: 0.95}
    assert [round(row["sparsity"] * n_w) for row in rows] == [0] * 3 + [
        round(at[t // 2 * 2] * n_w) for t in range(4, 11)
    ]
    assert sum(row["regrown"] for row in rows) == 0
    assert [row["round"] for row in rows if row["dropped"]] == [4, 6, 8]
    layers = [[int(z) for z in row["layer_zeros"].split()] for row in rows]
    sizes = [v.numel() for v in visited[-1][1].m.values()]
    assert score == "magnitude" or all(z < size for z, size in zip(layers[-1], sizes, strict=True))


def test_without_sparsity_it_is_fedavg(tiny):
    assert same_model(run(tiny("fedgmp", sparsity_target=0)), run(tiny("fedavg")))


def test_what_it_sends(tiny, mini):
    """Dense models first; then the kept weights both ways, and a new mask to those who do not hold it."""
    exp = tiny("fedgmp", clients=4, clients_per_round=4)
    (federation, *_), *visited = states(exp, mini)
    layout, rows = federation.clients.layout, [row for *_, row in visited]
    n_w, n = layout.prunable_size, layout.size
    kept = [n_w, n_w] + [n_w - round(s * n_w) for s in (0.9 * (1 - 0.5**3), 0.9)]  # after rounds 0, 1, 2, 4
    models = [4 * 32 * (n - n_w + kept[i]) for i in (0, 1, 2, 2, 3, 3)]
    assert [row["uplink_bits"] for row in rows] == models
    assert [row["downlink_bits"] for row in rows] == [m + 4 * n_w * (t in (2, 4)) for t, m in enumerate(models)]


# Swaps


def test_a_swap_by_hand():
    w = tensors([[0.9, -0.1, 0.5, 0.05], [0.02, -0.03, 0.01, 0.0]])
    m = {"layer0": torch.ones(4, dtype=torch.bool), "layer1": torch.zeros(4, dtype=torch.bool)}
    alive = pruned(w, m)
    new = swapped(alive, w, m, keep=4, fraction=0.5)
    assert lists(new) == [[True, False, True, False], [True, True, False, False]]
    assert lists(pruned(alive, new)) == lists(tensors([[0.9, 0.0, 0.5, 0.0], [0.0] * 4]))
    # With keep = 2 more of the old ones go; and never do more come back than were pruned.
    assert lists(swapped(alive, w, m, keep=2, fraction=0.5)) == [
        [True, False, False, False],
        [False, True, False, False],
    ]
    assert lists(swapped(alive, w, {k: ~v for k, v in m.items()} | {"layer0": w["layer0"] > 0}, 5, 1.0))[0][1]


def test_the_share_that_is_swapped_by_hand(tiny, mini):
    settings = dict(rounds=500, reconfigure_every=5, swap_every=10, adjust_alpha=0.4, adjust_until=300)
    method = assemble(tiny("feddip_swap", **settings), mini).method
    at = {9: 0.3989044, 10: 0, 149: 0.2, 289: 0.0010956, 299: 0, 449: 0}
    assert {t: method.fraction(t) for t in at} == pytest.approx(at, abs=1e-7)
    exp = Experiment(method="feddip_swap")
    assert (exp.swap_every, exp.adjust_alpha, exp.adjust_until, exp.prune_end) == (20, 0.3, 800, 600)
    with pytest.raises(
        ValueError, match=r"^swap_every: 12 is not allowed; it must be a multiple of reconfigure_every, 5$"
    ):
        exp.replace(swap_every=12)


def test_a_share_of_less_than_one_weight_uploads_no_pruned_ones(tiny, mini):
    exp = tiny("feddip_swap", rounds=1000, sparsity_target=0.99, reconfigure_every=5, swap_every=20)
    federation = assemble(exp, mini)
    method, state = federation.method, federation.start()
    keep = method.layout.prunable_size - round(0.99 * method.layout.prunable_size)
    state = state.replace(m=masks.magnitude_mask(method.layout.weights(state.w), 0.99))
    for tau in range(600, 800, 20):
        share = 0.15 * (1 + math.cos(math.pi * tau / 800))
        assert method.feeds_back(state.replace(t=tau - 1)) == (share * keep >= 1)
    assert 0 < method.fraction(779) * keep < 1 and method.upload(state.replace(t=779), 0).kept == keep


def test_without_a_share_it_is_fedgmp(tiny):
    assert same(run(tiny("feddip_swap", adjust_alpha=0, mask_score="lamp")), run(tiny("fedgmp", mask_score="lamp")))


def test_swaps_keep_the_schedules_count_and_upload_densely_in_their_rounds_alone(tiny, mini):
    exp = tiny("feddip_swap", rounds=8, clients=4, clients_per_round=4, adjust_until=7, prune_end=4, adjust_alpha=0.6)
    (federation, *_), *visited = states(exp.replace(swap_every=2), mini)
    layout, rows = federation.clients.layout, [row for *_, row in visited]
    n_w, n = layout.prunable_size, layout.size
    kept = [n_w] * 2 + [n_w - round(0.7875 * n_w)] * 2 + [n_w - round(0.9 * n_w)] * 4
    assert [round((1 - row["sparsity"]) * n_w) for row in rows] == kept[1:] + kept[-1:]
    # After round 2 nothing is pruned yet that could return; from round 7 on there are no swaps.
    shares = {4: 0.3 * (1 - 0.2225209), 6: 0.3 * (1 - 0.9009689)}
    assert {row["round"]: row["regrown"] for row in rows if row["regrown"]} == {
        tau: int(a * kept[-1]) for tau, a in shares.items()
    }
    ups = [4 * 32 * (n if tau in shares else n - n_w + kept[tau - 1]) for tau in range(1, 9)]
    assert [row["uplink_bits"] for row in rows] == ups
    old, new, later = (visited[tau - 1][1] for tau in (3, 4, 5))
    back = torch.cat([(new.m[k] & ~old.m[k]).flatten() for k in new.m])
    at = [torch.cat([v.flatten() for v in layout.weights(state.w).values()])[back] for state in (new, later)]
    assert not at[0].any() and (at[1] != 0).double().mean() > 0.5  # they start from zero, and then move
