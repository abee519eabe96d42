"""What Theorem 1's constants are measured to be, against closed forms and independent computations."""

import math
import multiprocessing
import os
import signal
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from helpers import same
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call

from feddip_core import Experiment, Method, masks, run
from feddip_core.engine import sources
from feddip_core.engine.assembly import assemble
from feddip_core.engine.records import folder_of
from feddip_core.methods import FedDIP
from feddip_core.server import Federation
from feddip_core.study import bounds, convex, theory


@pytest.fixture(scope="module")
def few(mini, tmp_path_factory):
    """A file of 600 training images: observing all of them takes no time."""
    path = tmp_path_factory.mktemp("data") / "few.npz"
    train, test = slice(600), slice(100)
    np.savez(
        path,
        x_train=mini.x_train[train],
        y_train=mini.y_train[train],
        x_test=mini.x_test[test],
        y_test=mini.y_test[test],
    )
    return str(path)


@pytest.fixture
def small(tiny, few):
    return lambda **settings: tiny(**(dict(dataset=few, model="lenet5", clients=10) | settings))


@pytest.fixture
def observed_round(small, few):
    """A federation after one round, its state, and what the round left beside it."""
    federation = assemble(small(clients=4), sources.load(few))
    return federation, *federation.round(federation.start())


@pytest.fixture
def model(observed_round):
    """Its clients, its state, and the model ω′."""
    federation, state, _ = observed_round
    return federation.clients, state, federation.clients.layout.prune(state.w, state.m)


def exact(clients, n, w, lam):
    """f_n and its gradient by autograd, all of a client's data in one batch."""
    u, part, layout = w.detach().requires_grad_(), clients.parts[n], clients.layout
    x, y = clients.data.normalise(clients.data.x_train[part]), clients.data.y_train[part]
    f = F.cross_entropy(functional_call(clients.net, layout.views(u), (x,)), y)
    f = f + lam * sum(v.norm() for k, v in layout.views(u).items() if k in layout.prunable)
    return f, torch.autograd.grad(f, u, create_graph=True)[0], u


@pytest.mark.parametrize("gradient", ["native", "eager"])
def test_slope_is_the_weighted_gradient_of_all_clients(small, few, gradient):
    federation = assemble(small(gradient=gradient, partition="dirichlet(0.5)"), sources.load(few))
    state, _ = federation.round(federation.start())
    clients = federation.clients
    w = clients.layout.prune(state.w, state.m)
    found, f = theory.slope(clients, w, 1, 0.01, state.statistics), theory.loss(clients, w, 1, 0.01, state.statistics)
    sizes = torch.tensor([len(part) for part in clients.parts], dtype=torch.float64)
    rho, own = sizes / sizes.sum(), [exact(clients, n, w, 0.01) for n in range(10)]
    each = torch.stack([g.detach().double() for _, g, _ in own])
    g, squares = rho @ each, float(rho @ each.square().sum(1))
    assert found.f == pytest.approx(sum(float(r) * f.item() for r, (f, *_) in zip(rho, own, strict=True)), rel=1e-5)
    assert f == pytest.approx(found.f, rel=1e-6)
    assert torch.allclose(found.g, g, atol=1e-5)
    assert found.squares == pytest.approx(squares, rel=1e-4)
    assert found.gamma == pytest.approx(squares / float(g @ g), rel=1e-4)
    assert found.gamma > 1


def test_noise_is_the_distance_of_batches_from_their_client(model):
    clients, state, w = model
    gradient = clients.gradient()
    own = [gradient(w, x, y)[1].double() for x, y in clients.batches(3, 1, "theory")]
    sizes = [len(y) for _, y in clients.batches(3, 1, "theory")]
    mean = sum(g * n for g, n in zip(own, sizes, strict=True)) / sum(sizes)
    expected = sum(float((g - mean).square().sum()) for g in own) / len(own)
    assert len(own) > 3
    assert theory.client_slope(clients, w, 3, 1, 0.0, state.statistics).noise == pytest.approx(expected, rel=1e-9)


def test_power_iteration_finds_no_less_than_the_largest_eigenvalue_of_a_networks_hessian(model):
    clients, state, w = model
    start = torch.randn(len(w), generator=torch.Generator().manual_seed(0))
    found = theory.smoothness(
        theory.hessian_vector(lambda u: theory.client_slope(clients, u, 3, 1, 0.01, state.statistics).g, w), start
    )
    _, g, u = exact(clients, 3, w, 0.01)
    v = start
    for _ in range(15):  # differentiating twice, which does not see the kinks of ReLU
        v = torch.autograd.grad(g @ (v / v.norm()), u, retain_graph=True)[0]
    assert found > 0.95 * float(v.norm()) > 0


def test_a_row_says_what_pruning_took(observed_round, model):
    federation, state, done = observed_round
    row = theory.pruning_row(federation.clients, state, done.w)
    lost = (done.w - model[2]).double().norm()
    assert lost > 0
    assert row["pruned_norm"] == pytest.approx(float(lost), rel=1e-6)
    assert row["delta"] == pytest.approx(float(lost / done.w.double().norm()) ** 2, rel=1e-6)


@pytest.mark.parametrize("settings", [{}, dict(regrowth="dense_memory"), dict(gradient="eager")])
def test_a_run_with_observation_is_bit_identical_to_one_without(small, tmp_path, settings):
    exp = small(**(dict(rounds=3) | settings))
    observer = theory.Observer(exp, tmp_path, every=2)
    assert same(run(exp, out=tmp_path, observe=observer), run(exp))
    table = pd.read_csv(folder_of(exp, tmp_path) / "theory.csv")
    assert table["round"].tolist() == [0, 1, 2, 3]
    assert table["gradient"].notna().tolist() == [True, False, True, True]
    metrics = pd.read_csv(folder_of(exp, tmp_path) / "metrics.csv")
    assert table["delta"].tolist()[1:] == pytest.approx(metrics["delta"].tolist())


def test_an_observed_run_that_was_stopped_resumes_and_sees_the_same(small, tmp_path, monkeypatch):
    exp = small(rounds=4)
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


def test_what_the_checkpoint_does_not_know_yet_is_seen_again(small, tmp_path):
    exp = small(rounds=3)
    observer = theory.Observer(exp, tmp_path, every=2)
    run(exp, out=tmp_path, until=2, observe=observer)
    ahead = observer.table.to_csv(index=False) + "3,0.5,0.5,0.5\n"  # of a round after which the process was killed
    (folder_of(exp, tmp_path) / "theory.csv").write_text(ahead, "utf-8")
    again = theory.Observer(exp, tmp_path, every=2)
    run(exp, out=tmp_path, observe=again)
    assert again.table["round"].tolist() == [0, 1, 2, 3]
    assert again.table["delta"].iloc[3] != 0.5


@pytest.mark.parametrize("content", ["", "round,delta\n0,\n2,0.1\n", "not a table\x00", "round,gradient\n0,\n1,\n"])
def test_a_file_that_does_not_fit_is_not_resumed(small, tmp_path, content):
    exp = small(rounds=2)
    folder_of(exp, tmp_path).mkdir(parents=True)
    (folder_of(exp, tmp_path) / "theory.csv").write_text(content, "utf-8")
    assert theory.Observer(exp, tmp_path, every=1).seen == 0


def test_a_run_that_went_on_unobserved_is_observed_from_its_beginning(small, tmp_path):
    exp = small(rounds=2)
    run(exp, out=tmp_path)
    observer = theory.Observer(exp, tmp_path, every=2)
    run(exp, out=tmp_path, observe=observer)
    table = theory.load(exp, tmp_path)
    assert table["round"].tolist() == [0, 1, 2]
    assert table["test_accuracy"].notna().tolist() == [False, True, True]
    assert table["gamma"].notna().tolist() == [True, False, True]
    assert theory.load(small(rounds=3), tmp_path).empty


class Mine(FedDIP):
    """A method of one's own that keeps the objective."""


class Other(Method):
    """One that is not known to."""


def test_observers_say_what_they_cannot_do(tiny):
    with pytest.raises(ValueError, match="method: 'snip' is not allowed; Theorem 1 is about fedavg, "):
        theory.Observer(tiny("snip"))
    with pytest.raises(ValueError, match=r"is about fedavg, fedprox, feddp, dpf, feddip, feddip_prox$"):
        theory.Observer(tiny(Other))
    assert theory.Observer(tiny(Mine)).seen == 0
    with pytest.raises(ValueError, match="sparse_uplink: True is not allowed; δ_t needs "):
        theory.Observer(tiny(sparse_uplink=True))
    for every in (0, 2.0, True):
        with pytest.raises(ValueError, match=r"every: \S+ is not allowed; it must be a whole number of at least 1"):
            theory.Observer(tiny(), every=every)


def test_secants_by_hand():
    a, b = torch.tensor([3.0, 4.0]), torch.zeros(2)
    assert theory.secant(torch.tensor([6.0, 8.0]), torch.zeros(2), a, b) == 2
    assert theory.steepness(1.0, 11.0, a, b) == 2
    assert math.isnan(theory.secant(a, a, a, a))
    assert math.isnan(theory.steepness(0.0, 0.0, a, a))


C = bounds.Constants(L=2.0, mu=3.0, gamma=1.5, noise=4.0, G=0.5, gap=10.0, K=5, E=4)


def test_the_bounds_by_hand():
    assert bounds.chi_printed(C) == pytest.approx(1.6 + 6.0)  # (0.5·4 + 2)/10 · 4 and 0.5·1.5·16·4·0.25/2
    assert bounds.chi_local(C) == pytest.approx(0.8 + 8 * (4 + 0.5))
    assert bounds.chi_rounds(C) == pytest.approx(8 * (0.2 + 1 / 12))
    assert bounds.longest_step(C) == pytest.approx(1 / 108)
    assert bounds.printed_terms(C, pruned=0.25) == pytest.approx({"initial gap": 40, "pruning": 3, "χ": 6.25075}, 1e-5)
    assert bounds.corrected_terms(C, pruned=0.25)["χ"] == pytest.approx(12.50150, rel=1e-5)
    repaired = bounds.repaired_terms(C, pruned=0.25, etas=[0.5, 0.25], growth=0.125)
    assert sum(repaired.values()) == pytest.approx(4 * (10 + 0.75 + 8 * (17 / 60) * 4 * 0.3125 + 0.125) / 3)


def test_sides_are_summed_over_the_right_rounds(tiny):
    exp = tiny(learning_rate=0.5, learning_rate_decay=0.5)
    table = pd.DataFrame({
        "round": [0, 1, 2], "gradient": [1.0, None, 3.0], "pruned_norm": [None, 0.5, 0.25], "smoothness": [2, None, 1],
        "secant": [None, None, 1.0], "steepness": [None, None, 0.5], "gamma": [1.5, None, 1.0], "noise": [1, None, 4],
        "loss": [10.0, None, 1.0], "local_steps": [4, None, 4], "lambda_": [0.0, None, 0.5], "penalty": [1, None, 2],
        "learning_rate": [0.5, None, 0.125],
    })  # fmt: skip
    row = bounds.sides(table, exp).loc[2]
    assert row["left side", "mean"] == 1  # of ω_1 alone: ω_3 stands after the second round
    assert row["left side", "μ²"] == 9
    assert row["as printed", "initial gap"] == 40
    assert row["as printed", "pruning"] == pytest.approx(2 * 2 * 3 * 0.75)
    assert row["a round as a step", "initial gap"] == pytest.approx(4 * 10 / (4 * 0.75))
    assert row["a round as a step", "growth of λ"] == pytest.approx(4 * 1 / (4 * 0.75))
    assert row["as printed", "right side"] == pytest.approx(row["as printed"].drop("right side").sum())


numbers = st.floats(-1e3, 1e3).map(lambda x: round(x, 6))
seeds = st.integers(0, 2**31)


@given(st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=12))
def test_delta_is_a_fraction_and_masking_never_lengthens(entries):
    w, m = torch.tensor([x for x, _ in entries], dtype=torch.float64), torch.tensor([keep for _, keep in entries])
    assert 0 <= masks.pruning_error({"w": w}, {"w": m}) <= 1
    assert (w * m).norm() <= w.norm()  # Lemma 1


@settings(max_examples=50, deadline=None)
@given(seeds)
def test_lemma_2_and_gamma_on_random_logistic_clients(seed):
    generator = torch.Generator().manual_seed(seed)
    bed = convex.random_logistic(generator)
    w = 3 * torch.randn(6, generator=generator, dtype=torch.float64)
    pruned = convex.largest(w, keep=3) * w
    (f, g, squares), (f_pruned, *_) = bed.at(w), bed.at(pruned)
    assert float(f_pruned - f) <= bed.mu * float((w - pruned).norm()) + 1e-12
    assert theory.gamma(float(squares), g) >= 1 - 1e-12
    assert theory.steepness(float(f), float(f_pruned), w, pruned) <= bed.mu
    assert float(g.norm()) <= bed.mu


def test_the_constants_of_two_quadratics_by_hand():
    bed = convex.quadratic(torch.tensor([[[1.0]], [[3.0]]]).double(), torch.zeros(2, 1).double(), sigma=2.0)
    assert (bed.L, bed.f_star, bed.noise) == (3, 0, 4)
    assert bed.gamma == pytest.approx(1.25)  # (1 + 9)/2 over 2²
    f, g, squares = bed.at(torch.tensor([2.0]).double())
    assert (float(f), float(g), float(squares)) == (4, 4, 20)
    apart = convex.quadratic(torch.ones(2, 1, 1).double(), torch.tensor([[1.0], [-1.0]]).double())
    assert apart.f_star == 0.5
    assert apart.gamma == math.inf
    shifted = convex.quadratic(torch.full((1, 1, 1), 3.0).double(), torch.full((1, 1), 2.0).double())
    c = convex.with_path(C, shifted, pd.DataFrame({"f": [7.0, 5.0], "reach": [1.0, 4.0]}))
    assert (c.mu, c.gap, c.K) == (6 + 3 * 4, 7, 5)


def test_the_estimators_recover_the_constants_of_the_bed():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        bed = convex.random_logistic(generator)
        start, zero = torch.randn(6, generator=generator, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
        gradients = [partial(bed.gradient, torch.tensor(n)) for n in range(4)]
        found = [theory.smoothness(theory.hessian_vector(g, zero), start, iterations=40) for g in gradients]
        assert max(found) == pytest.approx(bed.L, rel=1e-3)
        a, b = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
        g_a, g_b = (bed.gradient(torch.arange(4), w) for w in (a, b))
        assert all(theory.secant(g_a[n], g_b[n], a[n], b[n]) <= bed.L for n in range(4))


def test_the_gamma_of_quadratics_is_a_supremum_that_is_reached():
    generator = torch.Generator().manual_seed(1)
    bed = convex.random_quadratic(generator)
    _, g, squares = bed.at(100 * torch.randn(20_000, 6, generator=generator, dtype=torch.float64))
    ratios = squares / g.square().sum(-1)
    assert 0.8 * bed.gamma < float(ratios.max()) <= bed.gamma * (1 + 1e-4)


def bound_and_truth(bed, generator, E, eta=None):
    """The two sides of the repaired theorem on one random instance, means over 48 repetitions of 8 rounds."""
    keep, K, R = (int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((1, 7), (1, 5), (1, 4)))
    w = 3 * torch.randn(1, 6, generator=generator, dtype=torch.float64)
    c = bounds.Constants(bed.L, 0, bed.gamma, bed.noise, 0, 0, K, E)
    eta = eta or bounds.longest_step(c)
    table = convex.feddip(bed, w.expand(48, -1), lambda t, _: eta, 8, K, E, keep, R, generator)
    terms = bounds.repaired_terms(convex.with_path(c, bed, table), table["pruned_norm"].sum(), [eta] * 8)
    return table["gradient2"].mean(), sum(terms.values())


@pytest.mark.parametrize("E", [1, 3])
def test_the_repaired_bound_holds_on_every_random_quadratic(E):
    generator = torch.Generator().manual_seed(E)
    for _ in range(100):
        bed = convex.random_quadratic(generator, sigma=3 * float(torch.rand(1, generator=generator)))
        left, right = bound_and_truth(bed, generator, E)
        assert 0 < left <= right


def test_the_repaired_bound_holds_on_every_random_logistic_path():
    # Without noise and with all clients it must hold for the path itself, with η_t of the γ that is met there.
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        bed = convex.random_logistic(generator)
        w = 3 * torch.randn(1, 6, generator=generator, dtype=torch.float64)
        table = convex.feddip(bed, w, lambda t, gamma, bed=bed: 1 / (27 * gamma * bed.L), 10, 4, 3, 3)
        c = bounds.Constants(bed.L, bed.mu, 1, 0, 0, table["f"][0], 4, 3)
        right = sum(bounds.repaired_terms(c, table["pruned_norm"].sum(), table["eta"]).values())
        assert 0 < table["weighted"].sum() / table["eta"].sum() <= right


def test_without_its_step_size_the_repaired_bound_is_broken():
    # So the tests above are able to fail.
    generator = torch.Generator().manual_seed(0)
    bed = convex.quadratic(torch.eye(6).double().expand(2, -1, -1), torch.zeros(2, 6).double())
    left, right = bound_and_truth(bed, generator, E=3, eta=2.5 / bed.L)
    assert left > right


def test_theorem_1_as_printed_fails_and_corrected_holds():
    """f = ½·10·ω² from its minimum, one client, noise σ = 1: Σ‖∇f‖²/2 = ½ after two rounds, printed: π²/60."""
    bed = convex.quadratic(torch.tensor([[[10.0]]]).double(), torch.zeros(1, 1).double(), sigma=1.0)
    start, generator = torch.zeros(40_000, 1).double(), torch.Generator().manual_seed(0)
    left = convex.feddip(bed, start, lambda t, _: 1 / (10 * t), 2, 1, 1, 1, generator=generator)["gradient2"].mean()
    c = bounds.Constants(L=10, mu=0, gamma=1, noise=1, G=0, gap=0, K=1, E=1)
    assert left == pytest.approx(0.5, rel=0.03)
    assert sum(bounds.printed_terms(c, 0).values()) == pytest.approx(0.164493, rel=1e-5)
    assert sum(bounds.corrected_terms(c, 0).values()) == pytest.approx(1.644934, rel=1e-5)


def test_lemma_3_10_fails_for_equal_clients_with_noise():
    """γ = 1 makes its right side 0, but after k steps from ω = 1 clients are apart by η²σ²(1 − 1/K) Σ (1 − η)^2j."""
    bed = convex.quadratic(torch.ones(1, 1, 1).double(), torch.zeros(1, 1).double(), sigma=1.0)
    w, generator = torch.ones(20_000, 4, 1).double(), torch.Generator().manual_seed(0)
    for _ in range(3):
        noise = torch.randn(w.shape, generator=generator, dtype=w.dtype)
        w = w - 0.5 * (bed.gradient(torch.zeros(w.shape[:-1], dtype=torch.long), w) + noise)
    apart = float((w - w.mean(1, keepdim=True)).square().mean())
    assert apart == pytest.approx(0.25 * 0.75 * (1 + 1 / 4 + 1 / 16), rel=0.03)


def test_the_first_step_of_the_proof_fails_where_gamma_exceeds_1():
    """(thrm1_2) at t = 1: f_n = ½·0.1·(ω ∓ 1)², ω = 1, K = E = 1, no noise: 0.05 on the left, 0.01 on the right."""
    L, w, a = 0.1, 1.0, torch.tensor([1.0, -1.0]).double()
    bed = convex.quadratic(torch.full((2, 1, 1), L).double(), a.view(2, 1))
    f, g, squares = bed.at(torch.tensor([w]).double())
    moved = torch.tensor([w]).double() - bed.gradient(torch.arange(2), torch.full((2, 1), w).double()) / L
    f_next = bed.at(moved)[0].mean()  # either client with probability ½
    c = bounds.Constants(L, 0, theory.gamma(float(squares), g), 0, float(g.norm()), 0, 1, 1)
    assert c.gamma == pytest.approx(2)
    assert float(g.square().sum()) / (2 * L) == pytest.approx(0.05)
    assert float(f - f_next) + bounds.chi_printed(c) / L**2 == pytest.approx(0.01)


class Killed(theory.Observer):
    """Its process dies once it has seen four rounds."""

    def __call__(self, *args):
        super().__call__(*args)
        if self.seen == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def observed(exp, out):
    torch.set_num_threads(1)
    run(exp, out=out, observe=Killed(exp, out, every=2), progress=False)


@pytest.mark.slow
def test_a_killed_run_loses_no_observation(small, tmp_path):
    exp = small(rounds=6)
    process = multiprocessing.get_context("spawn").Process(target=observed, args=(exp, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    again, whole = theory.Observer(exp, tmp_path, every=2), theory.Observer(exp, every=2)
    assert again.seen == 4
    result = run(exp, out=tmp_path, observe=again)
    assert same(result, run(exp, observe=whole))
    assert result.provenance["resumed"][0]["after_round"] > 0
    compared = [c for c in whole.table if c != "observation_seconds"]
    pd.testing.assert_frame_equal(again.table[compared], whole.table[compared], rtol=1e-7)


def test_the_runs_of_the_notebook_differ_in_one_setting_each():
    groups = theory.variants("paper", "fashion_mnist")
    assert {own["FedDIP"].run_id for own in groups.values()} == {Experiment.preset("paper").run_id}
    assert groups["pruning"]["R = 20"].reconfigure_every == 20
    ids = [exp.run_id for own in groups.values() for label, exp in own.items() if label != "FedDIP"]
    assert len(set(ids)) == len(ids) == 8


def test_runs_that_nobody_observed_are_named():
    seen, plain = pd.DataFrame({"round": [1], "gamma": [1.0]}), pd.DataFrame({"round": [1]})
    assert theory.unobserved({"FedDIP": seen}, "gamma") == ""
    runs = {"FedDIP": seen, "R = 1": plain, "s_0 = 0": pd.DataFrame()}
    assert theory.unobserved(runs, "gamma") == "not observed: R = 1, s_0 = 0"
