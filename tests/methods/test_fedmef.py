"""FedMef: what is squeezed, and at which rate."""

import functools

import pytest
import reference
import torch
from helpers import agrees_with, same, states

from feddip_core import Experiment, client, run
from feddip_core.engine.assembly import assemble
from feddip_core.methods.fedmef import Extrusion, extrusion_rate

U, LOW = torch.tensor([0.5, -0.02, 0.01]), torch.tensor([0.0, 1.0, 1.0])


def test_what_is_added_by_hand():
    g = torch.zeros(3)
    Extrusion(LOW, 0.1, 10, None)(g, U)
    assert g.tolist() == pytest.approx([0, -0.004, 0.002])


def test_the_rate_by_hand():
    at = {b: extrusion_rate(1e9, b, 10, eta_0=1.0) for b in (0, 5, 9)}  # so large a norm leaves p
    assert at == pytest.approx({0: 1, 5: 0.6666667, 9: 0.1818182})
    assert extrusion_rate(1.0, 5, 10, eta_0=0.1) == pytest.approx(0.0308078, abs=1e-7)
    assert extrusion_rate(0.0, 0, 10, eta_0=0.1) == 0


def step(term, eta):
    """A step of client 0 on ½‖u − 1‖² with this term and a weight decay of 0.01."""
    w = U.clone()
    client.error_feedback_step_(w, None, lambda u, x, y: (u.sum(), u - 1), None, None, eta, 0.01, terms=[term])
    return w.tolist()


def test_a_step_has_the_larger_rate():
    norm = 5e-4**0.5
    beta = extrusion_rate(norm, 0, 4, eta_0=10.0)
    assert 0.1 < beta < 0.2
    plain = [u - beta * (u - 1 + 0.01 * u + 0.2 * u * low) for u, low in zip(U.tolist(), LOW.tolist(), strict=True)]
    assert step(Extrusion(LOW, 0.1, 4, (10.0, 0.01, 0.01)), 0.01) == pytest.approx(plain, rel=1e-5)
    slow = [u - 0.5 * (u - 1 + 0.01 * u + 0.2 * u * low) for u, low in zip(U.tolist(), LOW.tolist(), strict=True)]
    assert step(Extrusion(LOW, 0.1, 4, (10.0, 0.5, 0.01)), 0.5) == pytest.approx(slow, rel=1e-5)  # β is smaller


def test_the_algorithm_transcribed_naively_agrees(tiny, hardly_tested, double_precision):
    own = dict(adjust_alpha=0.8, adjust_until=6, reconfigure_every=2, extrusion=0.5, learning_rate_decay=0.5)
    exp = tiny("fedmef", rounds=4, width=0.1, clients=400, batch_size=4, sparsity_target=0.6, **own)
    local = functools.partial(reference.fedmef_update, eta_0=exp.learning_rate, strength=0.5)
    agrees_with(exp, hardly_tested, reference.fedtiny_mask, local=local)


def test_without_extrusion_it_is_fedtiny(tiny):
    own = dict(adjust_alpha=0.5, reconfigure_every=2, rounds=4)
    assert same(run(tiny("fedmef", extrusion=0, extrusion_rate=False, **own)), run(tiny("fedtiny", **own)))


def test_it_squeezes_what_goes_and_sends_what_fedtiny_sends(tiny, mini):
    own = dict(adjust_alpha=0.5, reconfigure_every=2, adjust_until=5, rounds=4, local_epochs=2)
    plain, squeezed = (
        list(states(tiny(m, **own, **extra), mini)) for m, extra in (("fedtiny", {}), ("fedmef", dict(extrusion=1.0)))
    )
    bits = ["downlink_bits", "uplink_bits"]
    assert [[row[k] for k in bits] for *_, row in plain[1:]] == [[row[k] for k in bits] for *_, row in squeezed[1:]]
    start = plain[1][1]  # both have the same first round; the second one ends with a swap
    assert torch.equal(start.w, squeezed[1][1].w)
    (term,) = squeezed[0][0].ready(start, 0)[3]
    ends = [(assemble(tiny(m, **own, **extra), mini).train_client(start, 0).values["w"] * term.low).norm()
            for m, extra in (("fedtiny", {}), ("fedmef", dict(extrusion=1.0)))]  # fmt: skip
    assert ends[1] < 0.9 * ends[0]
    assert squeezed[0][0].ready(squeezed[0][1], 0)[3] == []  # the first round does not


def test_its_defaults():
    exp = Experiment(method="fedmef")
    assert (exp.reconfigure_every, exp.adjust_alpha, exp.adjust_until) == (10, 0.4, 600)
    assert (exp.extrusion, exp.extrusion_rate) == (1e-4, True)
