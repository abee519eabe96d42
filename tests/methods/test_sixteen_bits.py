"""Weights at sixteen bits: rounded where they travel, counted, checked on arrival."""

import pytest
import torch
from helpers import one_round, trained

from feddip_core import Experiment, run
from feddip_core.communication import DENSE, KEPT, Payload
from feddip_core.engine.assembly import assemble
from feddip_core.layout import Layout
from feddip_core.methods.sixteen_bits import Half

LAYOUT = Layout({"a": torch.Size([2, 2]), "bias": torch.Size([1]), "b": torch.Size([3])}, ("a", "b"))
MASK = {"a": torch.tensor([[True, False], [True, True]]), "b": torch.tensor([False, False, True])}
W = torch.tensor([0.1, 5.0, -0.3, 2.0, 0.1, 1e-9, 7.0, 65504.0])
AS_HALF = [0.0999755859375, 5.0, -0.300048828125, 2.0, 0.1, 0.0, 7.0, 65504.0]  # but for the bias, at the fifth place


@pytest.mark.parametrize(("form", "m", "words", "arrives"), [
    (DENSE, None, 7 + 2, AS_HALF), (KEPT, None, 7 + 2, AS_HALF),
    (KEPT, MASK, 4 + 2, [0.0999755859375, 0.0, -0.300048828125, 2.0, 0.1, 0.0, 0.0, 65504.0]),
], ids=["dense", "all kept", "kept"])  # fmt: skip
def test_what_arrives_by_hand(form, m, words, arrives):
    payload = Payload({"w": Half(form)}, None if m is None else 4)
    assert payload.bits(LAYOUT) == 16 * words
    sent = payload.pack(LAYOUT, {"w": W}, m)
    assert (sent["w"].dtype, sent["w"].shape) == (torch.int16, (words,))
    assert payload.unpack(LAYOUT, sent, m)["w"].tolist() == torch.tensor(arrives).tolist()


def test_an_array_of_another_form_is_refused():
    with pytest.raises(ValueError, match=r"w is torch.float32 of shape \(8,\); it must be torch.int16 of shape \(9,\)"):
        Payload({"w": Half(DENSE)}).unpack(LAYOUT, {"w": W}, None)


def test_a_run_rounds_what_travels_and_nothing_else(tiny, mini):
    """By hand: LeNet-5 has 61,470 weights and 236 biases."""
    federation = assemble(tiny("fedgmp", width=1.0, value_bits=16, reconfigure_every=1, prune_end=2), mini)
    start = federation.start()
    first, row = one_round(federation, start)
    assert row["downlink_bits"] == row["uplink_bits"] == 2 * (16 * 61_470 + 32 * 236)
    second, row = one_round(federation, first)
    kept = 61_470 - round(0.9 * (1 - 0.5**3) * 61_470)
    assert row["uplink_bits"] == 2 * (16 * kept + 32 * 236) == row["downlink_bits"] - 2 * 61_470
    layout, sent = federation.clients.layout, trained(federation, first, 0)
    for w in (start.w, sent, second.w):
        assert all(torch.equal(v, v.half().float()) for v in layout.weights(w).values())
        bias = layout.views(w)["fc1.bias"]
        assert not torch.equal(bias, bias.half().float())


def test_rounding_changes_the_run_and_its_id(tiny):
    exp = tiny("fedavg", rounds=1)
    half = exp.replace(value_bits=16)
    assert exp.run_id == exp.replace(value_bits=32).run_id != half.run_id
    a, b = run(exp), run(half)
    assert not torch.equal(a.weights["fc1.weight"], b.weights["fc1.weight"])
    torch.testing.assert_close(a.weights["fc1.weight"], b.weights["fc1.weight"], rtol=1e-2, atol=1e-3)


def test_a_weight_that_is_too_large_for_sixteen_bits_is_named(tiny, mini):
    method = assemble(tiny("fedavg", value_bits=16), mini).method
    w = torch.zeros(method.layout.size)
    w[0] = -70_000.0
    message = r"value_bits: 16 is not allowed here; client 3 has a weight of 70000, but the largest float16 is 65504"
    with pytest.raises(ValueError, match=message):
        method.rounded(w, "client 3")
    w[0] = torch.nan  # a run that diverges is recorded as such
    assert method.rounded(w, "client 3").isnan().sum() == 1
    assert Experiment(method="fedavg", value_bits=16).differences_from_paper() == {"value_bits": 32}
