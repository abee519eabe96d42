"""What Theorem 1's constants are measured to be, against closed forms and independent computations."""

import math

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from test_federation import same
from torch.func import functional_call

from feddip_core import data, run, theory
from feddip_core.federation import Federation


@pytest.fixture(scope="module")
def mini():
    return data.load("fashion_mini")


@pytest.fixture
def site(tiny, mini):
    """A federation after one round, its state, and the model ω′."""
    site = Federation(tiny(clients=20), mini)
    state, _ = site.round(site.start())
    return site, state, site.pruned(state.w, state.m)


def exact(site, n, w, lam):
    """f_n and its gradient by autograd, all of a client's data in one batch."""
    u = w.detach().requires_grad_()
    x, y = site.data.normalise(site.data.x_train[site.parts[n]]), site.data.y_train[site.parts[n]]
    f = F.cross_entropy(functional_call(site.net, site.layout.views(u), (x,)), y)
    f = f + lam * sum(v.norm() for k, v in site.layout.views(u).items() if k in site.layout.prunable)
    return f, torch.autograd.grad(f, u, create_graph=True)[0], u


@pytest.mark.parametrize("gradient", ["native", "eager"])
def test_slope_is_the_weighted_gradient_of_all_clients(tiny, mini, gradient):
    site = Federation(tiny(clients=20, gradient=gradient, partition="dirichlet(0.5)"), mini)
    state, _ = site.round(site.start())
    w = site.pruned(state.w, state.m)
    found, f = theory.slope(site, w, 1, 0.01, state.statistics), theory.loss(site, w, 1, 0.01, state.statistics)
    sizes = torch.tensor([len(part) for part in site.parts], dtype=torch.float64)
    rho, own = sizes / sizes.sum(), [exact(site, n, w, 0.01) for n in range(20)]
    each = torch.stack([g.detach().double() for _, g, _ in own])
    g, squares = rho @ each, float(rho @ each.square().sum(1))
    assert found.f == pytest.approx(sum(float(r) * f.item() for r, (f, *_) in zip(rho, own, strict=True)), rel=1e-5)
    assert f == pytest.approx(found.f, rel=1e-6)
    assert torch.allclose(found.g, g, atol=1e-5)
    assert found.squares == pytest.approx(squares, rel=1e-4)
    assert found.gamma == pytest.approx(squares / float(g @ g), rel=1e-4)
    assert found.gamma > 1


def test_noise_is_the_distance_of_batches_from_their_client(site):
    site, state, w = site
    gradient = site.gradient()
    own = [gradient(w, x, y)[1].double() for x, y in site.batches(3, 1, "theory")]
    sizes = [len(y) for _, y in site.batches(3, 1, "theory")]
    mean = sum(g * n for g, n in zip(own, sizes, strict=True)) / sum(sizes)
    expected = sum(float((g - mean).square().sum()) for g in own) / len(own)
    assert len(own) > 3
    assert theory.client_slope(site, w, 3, 1, 0.0, state.statistics).noise == pytest.approx(expected, rel=1e-9)


def test_power_iteration_finds_no_less_than_the_largest_eigenvalue_of_a_networks_hessian(site):
    site, state, w = site
    start = torch.randn(len(w), generator=torch.Generator().manual_seed(0))
    found = theory.smoothness(
        theory.hessian_vector(lambda u: theory.client_slope(site, u, 3, 1, 0.01, state.statistics).g, w), start
    )
    _, g, u = exact(site, 3, w, 0.01)
    v = start
    for _ in range(15):  # differentiating twice, which does not see the kinks of ReLU
        v = torch.autograd.grad(g @ (v / v.norm()), u, retain_graph=True)[0]
    assert found > 0.95 * float(v.norm()) > 0


def test_a_row_says_what_pruning_took(site):
    site, state, w = site
    row = theory.pruning_row(site, state)
    lost = (site.aggregate - w).double().norm()
    assert lost > 0
    assert row["pruned_norm"] == pytest.approx(float(lost), rel=1e-6)
    assert row["delta"] == pytest.approx(float(lost / site.aggregate.double().norm()) ** 2, rel=1e-6)


@pytest.mark.parametrize("settings", [{}, dict(regrowth="dense_memory"), dict(gradient="eager", method="fedavg")])
def test_a_run_with_observation_is_bit_identical_to_one_without(tiny, tmp_path, settings):
    exp = tiny(**(dict(rounds=4) | settings))
    observer = theory.Observer(exp, tmp_path, every=2)
    assert same(run(exp, out=tmp_path, observe=observer), run(exp))
    table = pd.read_csv(tmp_path / exp.run_id / "theory.csv")
    assert table["round"].tolist() == [0, 1, 2, 3, 4]
    assert table["gradient"].notna().tolist() == [True, False, True, False, True]
    metrics = pd.read_csv(tmp_path / exp.run_id / "metrics.csv")
    assert table["delta"].tolist()[1:] == pytest.approx(metrics["delta"].tolist())


def test_an_observed_run_that_was_stopped_goes_on_and_sees_the_same(tiny, tmp_path, monkeypatch):
    exp = tiny(rounds=4)
    whole = theory.Observer(exp, every=2)
    run(exp, observe=whole)
    run(exp, out=tmp_path, until=3, observe=theory.Observer(exp, tmp_path, every=2))
    rounds, round_of = [], Federation.round
    monkeypatch.setattr(Federation, "round", lambda self, s, *a: rounds.append(s.t) or round_of(self, s, *a))
    again = theory.Observer(exp, tmp_path, every=2)
    assert again.seen == 3
    run(exp, out=tmp_path, observe=again)
    assert rounds == [3]
    compared = [c for c in whole.table if c != "observation_seconds"]
    pd.testing.assert_frame_equal(again.table[compared], whole.table[compared], rtol=1e-7)


def test_what_the_checkpoint_does_not_know_yet_is_seen_again(tiny, tmp_path):
    exp = tiny(rounds=3)
    observer = theory.Observer(exp, tmp_path, every=2)
    run(exp, out=tmp_path, until=2, observe=observer)
    ahead = observer.table.to_csv(index=False) + "3,0.5,0.5,0.5\n"  # of a round after which the process was killed
    (tmp_path / exp.run_id / "theory.csv").write_text(ahead)
    again = theory.Observer(exp, tmp_path, every=2)
    run(exp, out=tmp_path, observe=again)
    assert again.table["round"].tolist() == [0, 1, 2, 3]
    assert again.table["delta"].iloc[3] != 0.5


@pytest.mark.parametrize("content", ["", "round,delta\n0,\n2,0.1\n", "not a table\x00", "round,gradient\n0,\n1,\n"])
def test_a_file_that_does_not_fit_is_not_gone_on_with(tiny, tmp_path, content):
    exp = tiny(rounds=2)
    run(exp, out=tmp_path, until=1)
    (tmp_path / exp.run_id / "theory.csv").write_text(content)
    observer = theory.Observer(exp, tmp_path, every=1)
    assert observer.seen == 0
    run(exp, out=tmp_path, observe=observer)
    assert observer.table["round"].tolist() == [0, 1, 2]
    assert observer.table["gradient"].notna().all()


def test_observers_say_what_they_cannot_do(tiny):
    with pytest.raises(ValueError, match="method: 'snip' is not allowed; Theorem 1 is about fedavg, "):
        theory.Observer(tiny("snip"))
    for every in (0, 2.0, True):
        with pytest.raises(ValueError, match=r"every: \S+ is not allowed; it must be a whole number of at least 1"):
            theory.Observer(tiny(), every=every)


def test_secants_by_hand():
    a, b = torch.tensor([3.0, 4.0]), torch.zeros(2)
    assert theory.secant(torch.tensor([6.0, 8.0]), torch.zeros(2), a, b) == 2
    assert theory.steepness(1.0, 11.0, a, b) == 2
    assert math.isnan(theory.secant(a, a, a, a))
    assert math.isnan(theory.steepness(0.0, 0.0, a, a))
