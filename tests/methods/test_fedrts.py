"""FedRTS: beliefs, votes, drawn masks, what is sent."""

from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from helpers import agrees_with, model_and_mask_bits, states

from feddip_core import Experiment
from feddip_core.engine.assembly import assemble
from feddip_core.layout import Layout
from feddip_core.methods.fedrts import FedRTS
from feddip_core.state import Average, State, aggregate
from feddip_core.streams import stream_seed

MEANS = dict(kept=[2.25, 11, 9.75, 8.5], gone=[9.75, 1, 2.25, 3.5])


def by_hand(every=1, **settings):
    """One layer of four weights of which three are active; a = 0.5, so that k = 1 and κ = 2."""
    method = object.__new__(FedRTS)
    own = dict(adjust_alpha=1.0, adjust_until=2, reconfigure_every=every, vote_share=0.5, vote_strength=10.0)
    method.exp = SimpleNamespace(value_bits=32, seed=0, **(own | settings))
    method.layout = Layout({"a": torch.Size([4])}, ("a",))
    method.drawn = lambda memory, m, t: FedRTS.drawn(method, memory, m, t)
    m = {"a": torch.tensor([True, True, True, False])}
    ones = torch.ones(4, dtype=torch.float64)
    return method, State(0, torch.zeros(4), m, torch.zeros(0), memory={"kept": ones, "gone": ones})


def after(method, state):
    """What the server makes of two clients that hold a quarter and three quarters of the samples."""
    uploads = [torch.tensor([0.5, 0.3, 0.1, 0.0]), torch.tensor([0.1, 0.4, 0.6, 0.0])]
    top = torch.tensor([0.0, 0.0, 0.0, 1.0])  # both vote for the inactive weight
    sent = [{"w": w, "vote": method.vote(w, state), "top": top} for w in uploads]
    return method.next(Average(aggregate(sent, [1, 3]), [0, 1]), state)


def test_votes_and_beliefs_by_hand(monkeypatch):
    method, state = by_hand()
    monkeypatch.setattr(np.random, "default_rng", lambda seed: SimpleNamespace(beta=lambda a, b: a / (a + b)))
    _, m, memory = after(method, state)
    assert all(memory[k].tolist() == pytest.approx(MEANS[k]) for k in MEANS)
    assert m["a"].tolist() == [False, True, True, True]  # by the means 0.1875, 0.9166667, 0.8125, 0.7083333
    _, m, memory = after(*by_hand(every=2))  # no adjustment: the inactive weight is not judged
    assert all(memory[k].tolist() == pytest.approx([*MEANS[k][:3], 1]) for k in MEANS)
    assert m is state.m or m["a"].tolist() == state.m["a"].tolist()
    _, _, memory = after(*by_hand(vote_share=0.3))
    assert memory["kept"][0].item() == pytest.approx(1 + 10 * 0.175)  # swapped, as its code has it: 0.075


def test_from_the_end_on_nothing_is_voted_or_kept():
    method, state = by_hand()
    assert method.next(Average({"w": state.w}, [0]), state.replace(t=1)) == (state.w, state.m, {})
    assert "vote" not in method.upload(state.replace(t=1), 0).parts


def test_its_defaults():
    exp = Experiment(method="fedrts")
    found = exp.reconfigure_every, exp.adjust_alpha, exp.adjust_until, exp.vote_share, exp.vote_strength
    assert found == (10, 0.4, 600, 0.5, 10)


def test_the_algorithm_transcribed_naively_agrees(tiny, hardly_tested, double_precision):
    own = dict(adjust_alpha=0.8, adjust_until=5, reconfigure_every=2, vote_share=0.2, vote_strength=2.0)
    exp = tiny("fedrts", rounds=4, width=0.1, clients=400, batch_size=8, sparsity_target=0.6, **own)
    sizes = [v.numel() for v in assemble(exp, hardly_tested).start().m.values()]

    def draw(t, kept, gone):
        numbers = np.random.default_rng(stream_seed(exp.seed, "fedrts", t))
        flat = numbers.beta(*(np.concatenate([np.array(v) for v in side]) for side in (kept, gone)))
        return [part.tolist() for part in np.split(flat, np.cumsum(sizes)[:-1])]

    agrees_with(exp, hardly_tested, reference.FedRTS([[0] * n for n in sizes], 0.2, 2.0, draw))


def test_one_clients_vote_is_the_servers(tiny, mini):
    beliefs = []
    for gamma in (0.1, 0.9):
        exp = tiny("fedrts", clients_per_round=1, rounds=1, adjust_until=6, vote_share=gamma)
        *_, (_, state, _) = states(exp, mini)
        beliefs.append(state.memory["kept"])
    assert torch.allclose(*beliefs) and beliefs[0].unique().tolist() == [1, 11]


def test_what_it_sends(tiny, mini):
    """Votes cost nothing; positions come up when a mask is drawn, which goes down in the next round."""
    own = dict(adjust_alpha=0.4, adjust_until=5, reconfigure_every=2, clients=4, clients_per_round=4)
    (federation, start, _), *visited = states(tiny("fedrts", **own), mini)
    payload, n_w = model_and_mask_bits(federation, start)
    counts = [int(v.sum()) for v in start.m.values()]
    ups = [4 * payload] * 6
    for tau, share in {2: 0.2 * (1 + 0.3090170), 4: 0.2 * (1 - 0.8090170)}.items():
        k = sum(min(int(share * c), v.numel() - c) for c, v in zip(counts, start.m.values(), strict=True))
        ups[tau - 1] += 4 * min(n_w, 14 * k)
    assert [row["uplink_bits"] for *_, row in visited] == ups
    downs = [row["downlink_bits"] - 4 * payload for *_, row in visited]
    assert downs == [4 * n_w * (t in (0, 2, 4)) for t in range(6)]
    assert all([int(v.sum()) for v in state.m.values()] == counts for _, state, _ in visited)
    assert all(set(state.memory) == ({"kept", "gone"} if state.t < 5 else set()) for _, state, _ in visited)


def test_without_a_share_masks_are_drawn_all_the_same(tiny, mini):
    exp = tiny("fedrts", adjust_alpha=0.0, reconfigure_every=1, rounds=1, adjust_until=3)
    *_, (federation, before, _), (_, _, row) = states(exp, mini)
    assert row["regrown"] > 0
    payload, _ = model_and_mask_bits(federation, before)
    assert row["uplink_bits"] == 2 * payload  # no layer has a position to send
