"""Theorem 1, measured: its constants on a real run, and both of its sides (Section V).

f_n is Eq. 8 over all of a client's data at a fixed λ, and f = Σ ρ_n f_n over all N clients. δ_t, γ and σ² are what
they say they are at the model in question; L, μ and G are suprema over all models, of which a run sees only some: they
are lower estimates, and so a right side that is made of them is no more than an indication.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from . import masks
from .experiment import Experiment
from .local import add_group_penalty_, group_penalty
from .records import load_run, write
from .schedules import learning_rate_at
from .streams import global_stream, stream

NAME = "theory.csv"
METHODS = ("fedavg", "fedprox", "feddp", "dpf", "feddip", "feddip_prox")  # whose objective is Eq. 8
POWER_ITERATIONS = 10


@dataclass(frozen=True)
class Slope:
    """f and ∇f at one model, and how far clients and batches are from agreeing on it."""

    f: float
    g: Tensor  # ∇f = Σ ρ_n ∇f_n
    squares: float  # Σ ρ_n ‖∇f_n‖²
    noise: float  # Σ ρ_n σ_n²

    @property
    def gamma(self) -> float:
        return gamma(self.squares, self.g)


def gamma(squares: float, g: Tensor) -> float:
    """γ = Σ ρ_n ‖∇f_n‖² / ‖Σ ρ_n ∇f_n‖² (Definition 2), at least 1; exact at one model, unbounded near a minimum."""
    return squares / float(g.double().square().sum())


def client_slope(site, w: Tensor, n: int, t: int, lam: float, statistics: Tensor) -> Slope:
    """f_n, ∇f_n, and σ_n² = mean_B ‖g_B − ∇f_n‖² over the batches of one epoch; one gradient for each sample."""
    # An epoch's shuffled batches are each a uniform draw without replacement: σ_n² is unbiased for the run's own noise.
    gradient, seen, steps, f, squares = site.gradient(statistics.clone()), 0, 0, 0.0, 0.0
    g, plain = torch.zeros_like(w, dtype=torch.float64), torch.zeros_like(w, dtype=torch.float64)
    with global_stream(site.device, site.exp.seed, "theory", t, n):
        for x, y in site.batches(n, t, "theory"):
            loss, own = gradient(w, x, y)
            own = own.double()
            f, squares = f + len(y) * float(loss), squares + float(own.square().sum())
            g.add_(own, alpha=len(y))
            plain.add_(own)
            seen, steps = seen + len(y), steps + 1
    g /= seen
    noise = squares / steps - 2 * float(plain @ g) / steps + float(g @ g)
    add_group_penalty_(g, w.double(), site.layout.layers, lam)
    f = f / seen + lam * float(group_penalty(w.double(), site.layout.layers))
    return Slope(f, g, float(g @ g), max(noise, 0.0))


def slope(site, w: Tensor, t: int, lam: float, statistics: Tensor) -> Slope:
    """∇f = Σ ρ_n ∇f_n with ρ_n = D_n / Σ D_j over all N clients; exact, one gradient for each training sample."""
    total, mean = sum(map(len, site.parts)), torch.zeros_like(w, dtype=torch.float64)
    f = squares = noise = 0.0
    for n, part in enumerate(site.parts):
        rho_n, own = len(part) / total, client_slope(site, w, n, t, lam, statistics)
        f, squares, noise = f + rho_n * own.f, squares + rho_n * own.squares, noise + rho_n * own.noise
        mean.add_(own.g, alpha=rho_n)
    return Slope(f, mean, squares, noise)


@torch.no_grad()
def loss(site, w: Tensor, t: int, lam: float, statistics: Tensor) -> float:
    """f = Σ ρ_n f_n alone; exact, a forward pass over all training samples."""
    buffers, total, seen = site.statistics.views(statistics.clone()), 0.0, 0
    tensors = {**site.layout.views(w), **buffers}
    for n in range(site.exp.clients):
        with global_stream(site.device, site.exp.seed, "theory", t, n):
            for x, y in site.batches(n, t, "theory"):
                logits = site.kernel.logits(w, x) if site.kernel else functional_call(site.net.train(), tensors, (x,))
                total, seen = total + float(F.cross_entropy(logits, y, reduction="sum")), seen + len(y)
    return total / seen + lam * float(group_penalty(w.double(), site.layout.layers))


def hessian_vector(gradient: Callable[[Tensor], Tensor], w: Tensor, h: float = 1e-2) -> Callable[[Tensor], Tensor]:
    """v ↦ ∇²f(ω) v ≈ (∇f(ω + hv) − ∇f(ω − hv)) / 2h; two gradients, where differentiating twice costs forty."""
    # For a unit v it is also a secant, whose norm never exceeds L, however bent f is between the points. Where f has
    # kinks, as with ReLU, it feels the jumps of ∇f within h, which differentiating twice does not.
    return lambda v: (gradient((w + h * v).to(w)) - gradient((w - h * v).to(w))) / (2 * h)


def smoothness(product: Callable[[Tensor], Tensor], start: Tensor, iterations: int = POWER_ITERATIONS) -> float:
    """L ≥ max ‖∇²f(ω) v‖ over the unit v of a power iteration, v ← ∇²f v / ‖∇²f v‖; a lower estimate."""
    v, largest = start / start.norm(), 0.0
    for _ in range(iterations):
        v = product(v)
        size = float(v.norm())
        if size == 0:
            break
        v, largest = v / size, max(largest, size)
    return largest


def secant(g_a: Tensor, g_b: Tensor, a: Tensor, b: Tensor) -> float:
    """L ≥ ‖∇f(a) − ∇f(b)‖ / ‖a − b‖; a lower estimate along one line, for two gradients."""
    distance = float((a.double() - b.double()).norm())
    return float((g_a - g_b).double().norm()) / distance if distance else float("nan")


def steepness(f_a: float, f_b: float, a: Tensor, b: Tensor) -> float:
    """μ ≥ |f(a) − f(b)| / ‖a − b‖; a lower estimate, for two losses."""
    distance = float((a.double() - b.double()).norm())
    return abs(f_a - f_b) / distance if distance else float("nan")


def pruning_row(site, state) -> dict:
    """δ = ‖ω̄ − ω̄′‖² / ‖ω̄‖² of the last round's average, exact, ‖ω̄‖ and √δ ‖ω̄‖; a pass over the weights."""
    w = site.aggregate
    delta = masks.pruning_error(site.layout.views(w), state.m or {})
    norm = float(w.double().norm())
    return {"delta": delta, "norm": norm, "pruned_norm": delta**0.5 * norm}


def constants_row(site, state) -> dict:
    """All that Theorem 1 asks of one model ω̄′: a gradient and a loss for each sample, twenty for one client's."""
    began, exp, t = perf_counter(), site.exp, state.t
    w, lam = site.pruned(state.w, state.m), site.method.lam(state.t)
    here = slope(site, w, t, lam, state.statistics)
    kept = site.pruned(here.g, state.m)
    row = {
        "lambda_": lam,
        "learning_rate": learning_rate_at(t, eta_0=exp.learning_rate, decay=exp.learning_rate_decay),
        "local_steps": exp.local_epochs * max(-(-len(part) // exp.batch_size) for part in site.parts),
        "loss": here.f,
        "penalty": float(group_penalty(w.double(), site.layout.layers)),
        "gradient": float(here.g.norm()),
        "gradient_kept": float(kept.norm()),
        "gamma": here.gamma,
        "noise": here.noise,
    }
    n = (t * 7) % exp.clients  # Theorem 1 needs each f_n to be L-smooth, so that any client can speak for L
    row |= _curvature(site, w, n, t, lam, state.statistics)
    if site.aggregate is not None:
        row["loss_dense"] = loss(site, site.aggregate, t, lam, state.statistics)
        row["steepness"] = steepness(row["loss_dense"], here.f, site.aggregate, w)
    return row | {"observation_seconds": perf_counter() - began}


def _curvature(site, w: Tensor, n: int, t: int, lam: float, statistics: Tensor) -> dict:
    """L of one client, around ω̄′ in every direction and along the way that pruning has gone."""

    def gradient(u):
        return client_slope(site, u, n, t, lam, statistics).g

    random = torch.randn(len(w), generator=stream(site.exp.seed, "power iteration", t)).to(w)
    row = {"client": n, "smoothness": smoothness(hessian_vector(gradient, w), random)}
    if site.aggregate is not None:
        row["secant"] = secant(gradient(site.aggregate), gradient(w), site.aggregate, w)
    return row


class Observer:
    """`run(exp, out, observe=Observer(exp, out))`: a row a round in `out/<run_id>/theory.csv`, and in `table`.

    δ_t and its norms stand in every row, the constants in every `every`-th, in the first and in the last; with
    every=None there are none. The run's bits are those of a run without it. Killed and called again, it goes on from
    the run's checkpoint.
    """

    # With R = 5, every 25th round would only see models that have just lost weights; 24 shares no factor with it.
    def __init__(self, exp: Experiment, out: str | Path | None = None, every: int | None = 24):
        if exp.method not in METHODS:
            raise ValueError(f"method: {exp.method!r} is not allowed; Theorem 1 is about {', '.join(METHODS)}")
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"every: {every!r} is not allowed; it must be a whole number of at least 1, or None")
        self.exp, self.every = exp, every
        self.path = Path(out) / exp.run_id / NAME if out else None
        self.rows = self._earlier()

    @property
    def seen(self) -> int:
        """The last round that it knows, and with it all before."""
        return len(self.rows) - 1 if self.rows else 0

    @property
    def table(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)

    def __call__(self, site, state) -> None:
        if state.t == 1:
            self.rows = [self._row(site, site.start(), first=True)]
        del self.rows[state.t :]  # of an earlier life that went further than its checkpoint
        self.rows.append(self._row(site, state))
        if self.path:
            write(self.path, self.table.to_csv(index=False, lineterminator="\n", float_format="%.9g"))

    def _row(self, site, state, first: bool = False) -> dict:
        aggregate = site.aggregate
        try:
            site.aggregate = None if first else aggregate
            pruning = {} if first else pruning_row(site, state)
            return {"round": state.t} | pruning | (constants_row(site, state) if self._evaluated(state.t) else {})
        finally:
            site.aggregate = aggregate

    def _evaluated(self, t: int) -> bool:
        return self.every is not None and (t % self.every == 0 or t == self.exp.rounds)

    def _earlier(self) -> list[dict]:
        """The rows of an earlier life, if they are what this one would have seen."""
        try:
            table = pd.read_csv(self.path)
            known = table["gradient"].notna() if "gradient" in table else pd.Series(False, index=table.index)
            good = table["round"].tolist() == list(range(len(table))) and known.tolist() == [
                self._evaluated(t) for t in range(len(table))
            ]
        except (OSError, ValueError, TypeError, KeyError):
            return []
        return table.to_dict("records") if good else []


def variants(preset: str, dataset: str) -> dict[str, dict[str, Experiment]]:
    """The runs of convergence.ipynb: for each of its questions FedDIP itself, and FedDIP with one setting changed."""
    base = Experiment.preset(preset, dataset, **(dict(width=0.5) if preset == "smoke" else {}))
    R = 4 * base.reconfigure_every
    changes = {
        "regrowth": {"authors' order": dict(regrowth="authors"), "dense memory": dict(regrowth="dense_memory")},
        "split": {"Dirichlet(0.5)": dict(partition="dirichlet(0.5)"), "pathological": dict(partition="pathological")},
        "pruning": {
            "R = 1": dict(reconfigure_every=1), f"R = {R}": dict(reconfigure_every=R),
            "s_p = 0.8": dict(sparsity_target=0.8), "s_0 = 0": dict(sparsity_initial=0.0),
        },
    }  # fmt: skip
    return {
        group: {"FedDIP": base} | {label: base.replace(**own) for label, own in labels.items()}
        for group, labels in changes.items()
    }


def load(exp: Experiment, folder: str | Path) -> pd.DataFrame:
    """The rounds of a run so far, its metrics beside what an observer saw; empty if there is no record of it.

    Without an observer there is δ_t, but neither its norms nor the constants.
    """
    record = Path(folder) / exp.run_id
    if not (record / "provenance.json").exists():
        return pd.DataFrame()
    metrics = load_run(record)[["round", "test_accuracy", "sparsity", "delta", "regrown", "dropped"]]
    if not (record / NAME).exists():
        return metrics
    seen = pd.read_csv(record / NAME).drop(columns="delta")
    # Of a run under way the metrics are saved less often.
    return seen[seen["round"] <= len(metrics)].merge(metrics, on="round", how="left")


def unobserved(tables: Mapping[str, pd.DataFrame], column: str) -> str:
    """Which of these runs have no such column, to stand above a figure that would show it; empty if none."""
    labels = [label for label, table in tables.items() if column not in table]
    return f"not observed: {', '.join(labels)}" if labels else ""


@dataclass(frozen=True)
class Constants:
    """What the right side of Theorem 1 is made of."""

    L: float
    mu: float
    gamma: float
    noise: float  # Σ ρ_n σ_n²
    G: float
    gap: float  # f(ω_1) − f*
    K: int
    E: int  # local steps in a round: the proof takes a batch in each, so that E_l cannot count epochs

    @classmethod
    def of(cls, table: pd.DataFrame, exp: Experiment, f_star: float = 0.0) -> "Constants":
        """The largest that the run has shown: lower estimates, but for the gap, which f* = 0 makes an upper one."""
        most = table.max(numeric_only=True)
        return cls(
            L=max(most["smoothness"], most["secant"]), mu=max(most["gradient"], most["steepness"]),
            gamma=most["gamma"], noise=most["noise"], G=most["gradient"], gap=table["loss"].iloc[0] - f_star,
            K=exp.clients_per_round, E=int(most["local_steps"]),
        )  # fmt: skip


def chi_printed(c: Constants) -> float:
    """χ = ((γ − 1) L² + L) / 2K · Σρσ² + (γ − 1) γ E² L² G² / 2, as Theorem 1 has it."""
    return ((c.gamma - 1) * c.L**2 + c.L) / (2 * c.K) * c.noise + (c.gamma - 1) * c.gamma * (c.E * c.L * c.G) ** 2 / 2


def chi_local(c: Constants) -> float:
    """χ′ = L/2K · Σρσ² + L E (Σρσ² + (γ − 1) E G²): with the noise that drives clients apart; γ along their paths."""
    return c.L * c.noise / (2 * c.K) + c.L * c.E * (c.noise + (c.gamma - 1) * c.E * c.G**2)


def chi_rounds(c: Constants) -> float:
    """χ″ = L (1/K + 1/12) Σρσ², a round as one step, for η ≤ 1/(9γEL); with E = 1, L/2K · Σρσ² for η ≤ 1/(γL)."""
    return c.L * c.noise * (1 / (2 * c.K) if c.E == 1 else 1 / c.K + 1 / 12)


def longest_step(c: Constants) -> float:
    """The η up to which the repaired theorem holds: 1/(γL) with one local step, 1/(9γEL) with more."""
    return 1 / (c.gamma * c.L) if c.E == 1 else 1 / (9 * c.gamma * c.E * c.L)


def printed_terms(c: Constants, pruned: float) -> dict[str, float]:
    """2L (f(ω_1) − f*) + 2Lμ Σ√δ‖ω̄‖ + π²χ/3L², the right side of Theorem 1 as printed; η_t = 1/tL."""
    return _terms(c, pruned, math.pi**2 * chi_printed(c) / (3 * c.L**2))


def corrected_terms(c: Constants, pruned: float, chi: float | None = None) -> dict[str, float]:
    """2L (f(ω_1) − f*) + 2Lμ Σ√δ‖ω̄‖ + π²χ/3L: the same with the L that the last step of the proof drops."""
    return _terms(c, pruned, math.pi**2 * (chi_printed(c) if chi is None else chi) / (3 * c.L))


def _terms(c: Constants, pruned: float, chi: float) -> dict[str, float]:
    return {"initial gap": 2 * c.L * c.gap, "pruning": 2 * c.L * c.mu * pruned, "χ": chi}


def repaired_terms(c: Constants, pruned: float, etas, growth: float = 0.0) -> dict[str, float]:
    """c_E [f(ω_1) − f* + μ Σ√δ‖ω̄‖ + χ″ E Ση²] / (E Ση), c_1 = 2 and else 4: bounds Ση‖∇f‖² / Ση.

    `growth` is Σ (λ_{t+1} − λ_t) Σ_z ‖ω_z‖, by which a penalty that grows lifts f on the way.
    """
    etas = [float(eta) for eta in etas]
    scale = (2 if c.E == 1 else 4) / (c.E * sum(etas))
    chi = chi_rounds(c) * c.E * sum(eta**2 for eta in etas)
    parts = {"initial gap": c.gap, "pruning": c.mu * pruned, "χ": chi, "growth of λ": growth}
    return {name: scale * part for name, part in parts.items()}


def sides(table: pd.DataFrame, exp: Experiment) -> pd.DataFrame:
    """Both sides of Theorem 1 after each evaluated round: a row a round, columns (form, term).

    The left sides are means over the evaluated rounds until then, the pruning sums over all rounds.
    """
    c, rows, seen = Constants.of(table, exp), {}, table[table["gradient"].notna()]
    for t in seen["round"].iloc[1:]:
        before = seen[seen["round"] < t]  # ω_1 … ω_T stand before the rounds 1 … T
        pruned = table["pruned_norm"][(table["round"] >= 1) & (table["round"] <= t)].sum()
        etas = [learning_rate_at(i, exp.learning_rate, exp.learning_rate_decay) for i in range(int(t))]
        growth = (seen["lambda_"].diff() * seen["penalty"])[seen["round"] <= t].sum()
        forms = {
            "as printed": printed_terms(c, pruned),
            "algebra corrected": corrected_terms(c, pruned),
            "χ repaired": corrected_terms(c, pruned, chi_local(c)),
            "a round as a step": repaired_terms(c, pruned, etas, growth),
        }
        row = {(form, term): value for form, terms in forms.items() for term, value in terms.items()}
        row |= {(form, "right side"): sum(terms.values()) for form, terms in forms.items()}
        squares, weights = before["gradient"] ** 2, before["learning_rate"]
        row["left side", "mean"] = squares.mean()
        row["left side", "η-weighted"] = (squares * weights).sum() / weights.sum()
        rows[int(t)] = row | {("left side", "μ²"): c.mu**2}
    return pd.DataFrame(rows).T.rename_axis("round")
