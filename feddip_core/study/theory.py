"""Theorem 1, measured: its constants on a real run (Section V). What its bound makes of them is in `bounds`.

f_n is Eq. 8 over all of a client's data at a fixed λ, and f = Σ ρ_n f_n over all N clients. δ_t, γ and σ² are exact at
the model in question. L, μ and G are lower estimates: they are suprema over all models, of which a run sees only some.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .. import masks
from ..client import Clients, add_group_penalty_, group_penalty
from ..engine import records
from ..experiment import Experiment, is_hook
from ..method import METHODS
from ..methods.fedavg import FedAvg
from ..methods.feddip import FedDP
from ..schedules import learning_rate_at
from ..server import Federation, Round
from ..state import State
from ..streams import global_stream, stream

NAME = "theory.csv"
KINDS = (FedAvg, FedDP)  # whose objective, and that of what is made from them, is Eq. 8
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


def client_slope(clients: Clients, w: Tensor, n: int, t: int, lam: float, statistics: Tensor) -> Slope:
    """f_n, ∇f_n, and σ_n² = mean_B ‖g_B − ∇f_n‖² over the batches of one epoch; one gradient for each sample."""
    # An epoch's shuffled batches are each a uniform draw without replacement: σ_n² is unbiased for the run's own noise.
    gradient, seen, steps, f, squares = clients.gradient(statistics.clone()), 0, 0, 0.0, 0.0
    g, plain = torch.zeros_like(w, dtype=torch.float64), torch.zeros_like(w, dtype=torch.float64)
    with global_stream(clients.device, clients.exp.seed, "theory", t, n):
        for x, y in clients.batches(n, t, "theory"):
            loss, own = gradient(w, x, y)
            own = own.double()
            f, squares = f + len(y) * float(loss), squares + float(own.square().sum())
            g.add_(own, alpha=len(y))
            plain.add_(own)
            seen, steps = seen + len(y), steps + 1
    g /= seen
    noise = squares / steps - 2 * float(plain @ g) / steps + float(g @ g)
    add_group_penalty_(g, w.double(), clients.layout.layers, lam)
    f = f / seen + lam * float(group_penalty(w.double(), clients.layout.layers))
    return Slope(f, g, float(g @ g), max(noise, 0.0))


def slope(clients: Clients, w: Tensor, t: int, lam: float, statistics: Tensor) -> Slope:
    """∇f = Σ ρ_n ∇f_n with ρ_n = D_n / Σ D_j over all N clients; exact, one gradient for each training sample."""
    total, mean = sum(map(len, clients.parts)), torch.zeros_like(w, dtype=torch.float64)
    f = squares = noise = 0.0
    for n, part in enumerate(clients.parts):
        rho_n, own = len(part) / total, client_slope(clients, w, n, t, lam, statistics)
        f, squares, noise = f + rho_n * own.f, squares + rho_n * own.squares, noise + rho_n * own.noise
        mean.add_(own.g, alpha=rho_n)
    return Slope(f, mean, squares, noise)


@torch.no_grad()
def loss(clients: Clients, w: Tensor, t: int, lam: float, statistics: Tensor) -> float:
    """f = Σ ρ_n f_n alone; exact, a forward pass over all training samples."""
    tensors, total, seen = clients.layout.views(w) | clients.buffers(statistics.clone()), 0.0, 0
    logits_of = _training_mode(clients.net, tensors)
    if clients.kernel:
        logits_of = partial(clients.kernel.logits, w, training=True)
    for n in range(clients.exp.clients):
        with global_stream(clients.device, clients.exp.seed, "theory", t, n):
            for x, y in clients.batches(n, t, "theory"):
                total, seen = total + float(F.cross_entropy(logits_of(x), y, reduction="sum")), seen + len(y)
    return total / seen + lam * float(group_penalty(w.double(), clients.layout.layers))


def _training_mode(net: nn.Module, tensors: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    """x -> logits of the network with these parameters, in training mode, as its gradients are taken."""
    return lambda x: functional_call(net.train(), tensors, (x,))


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


def pruning_row(clients: Clients, state: State, average: Tensor) -> dict:
    """δ = ‖ω̄ − ω̄′‖² / ‖ω̄‖² of the last round's average, exact, ‖ω̄‖ and √δ ‖ω̄‖; a pass over the weights."""
    delta = masks.pruning_error(clients.layout.views(average), state.m or {})
    norm = float(average.double().norm())
    return {"delta": delta, "norm": norm, "pruned_norm": delta**0.5 * norm}


def constants_row(federation: Federation, state: State, average: Tensor | None = None) -> dict:
    """All that Theorem 1 needs of one model ω̄′: one gradient and loss per sample, and twenty for one client's samples.

    `average` is ω̄, from which ω̄′ was pruned; before the first round there is none.
    """
    began, exp, clients, t = perf_counter(), federation.exp, federation.clients, state.t
    layout, lam = clients.layout, federation.method.lam(state.t)
    w = layout.prune(state.w, state.m)
    here = slope(clients, w, t, lam, state.statistics)
    row = {
        "lambda_": lam,
        "learning_rate": learning_rate_at(t, eta_0=exp.learning_rate, decay=exp.learning_rate_decay),
        "local_steps": exp.local_epochs * max(-(-len(part) // exp.batch_size) for part in clients.parts),
        "loss": here.f,
        "penalty": float(group_penalty(w.double(), layout.layers)),
        "gradient": float(here.g.norm()),
        "gradient_kept": float(layout.prune(here.g, state.m).norm()),
        "gamma": here.gamma,
        "noise": here.noise,
    }
    n = (t * 7) % exp.clients  # Theorem 1 needs each f_n to be L-smooth: any client gives a lower estimate of L
    row |= _curvature(clients, w, average, n, t, lam, state.statistics)
    if average is not None:
        row["loss_dense"] = loss(clients, average, t, lam, state.statistics)
        row["steepness"] = steepness(row["loss_dense"], here.f, average, w)
    return row | {"observation_seconds": perf_counter() - began}


def _curvature(
    clients: Clients, w: Tensor, average: Tensor | None, n: int, t: int, lam: float, statistics: Tensor
) -> dict:
    """One client's L, around ω̄′ in every direction and along the step that pruning took."""

    def gradient(u):
        return client_slope(clients, u, n, t, lam, statistics).g

    random = torch.randn(len(w), generator=stream(clients.exp.seed, "power iteration", t)).to(w)
    row = {"client": n, "smoothness": smoothness(hessian_vector(gradient, w), random)}
    if average is not None:
        row["secant"] = secant(gradient(average), gradient(w), average, w)
    return row


class Observer:
    """`run(exp, out, observe=Observer(exp, out))`: a row per round in theory.csv beside the record, and in `table`.

    Every row has δ_t and its norms. The first, the last and every `every`-th row also have the constants; with
    every=None none has. The run's bits are those of a run without an observer. Killed and called again, it resumes
    from the run's checkpoint.
    """

    # With R = 5, every 25th round would only see models that have just lost weights; 24 shares no factor with it.
    def __init__(self, exp: Experiment, out: str | Path | None = None, every: int | None = 24):
        if not issubclass(exp.method_class, KINDS):
            known = ", ".join(k for k, cls in METHODS.items() if issubclass(cls, KINDS) and not is_hook(k))
            raise ValueError(f"method: {exp.method!r} is not allowed; Theorem 1 is about {known}")
        if getattr(exp, "sparse_uplink", False):
            raise ValueError("sparse_uplink: True is not allowed; δ_t needs what pruned weights have become")
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"every: {every!r} is not allowed; it must be a whole number of at least 1, or None")
        self.exp, self.every = exp, every
        self.path = records.folder_of(exp, out) / NAME if out else None
        self.rows = self._earlier()

    @property
    def seen(self) -> int:
        """The last round that it knows, and with it all before."""
        return len(self.rows) - 1 if self.rows else 0

    @property
    def table(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)

    def __call__(self, federation: Federation, state: State, round: Round) -> None:
        if state.t == 1:
            self.rows = [self._row(federation, federation.start())]
        del self.rows[state.t :]  # from an earlier process that went further than its checkpoint
        self.rows.append(self._row(federation, state, round.w))
        if self.path:
            records.write(self.path, self.table.to_csv(index=False, lineterminator="\n", float_format="%.9g"))

    def _row(self, federation: Federation, state: State, average: Tensor | None = None) -> dict:
        pruning = {} if average is None else pruning_row(federation.clients, state, average)
        constants = constants_row(federation, state, average) if self._evaluated(state.t) else {}
        return {"round": state.t} | pruning | constants

    def _evaluated(self, t: int) -> bool:
        return self.every is not None and (t % self.every == 0 or t == self.exp.rounds)

    def _earlier(self) -> list[dict]:
        """The rows of an earlier process, if they are what this one would have seen."""
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
    """The runs of 20_convergence.ipynb: for each question FedDIP itself, and FedDIP with one setting changed."""
    base = Experiment.preset(preset, dataset, **(dict(width=0.5) if preset == "smoke" else {}))
    R = 4 * base.reconfigure_every
    changes = {
        "regrowth": {"released order": dict(regrowth="released"), "dense memory": dict(regrowth="dense_memory")},
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
    record = records.folder_of(exp, folder)
    if not (record / "provenance.json").exists():
        return pd.DataFrame()
    metrics = records.load_run(record)[["round", "test_accuracy", "sparsity", "delta", "regrown", "dropped"]]
    if not (record / NAME).exists():
        return metrics
    seen = pd.read_csv(record / NAME).drop(columns="delta")
    # While a run is under way, its metrics are saved less often.
    return seen[seen["round"] <= len(metrics)].merge(metrics, on="round", how="left")


def unobserved(tables: Mapping[str, pd.DataFrame], column: str) -> str:
    """Which of these runs lack this column, as a note above the figure that shows it; empty if none does."""
    labels = [label for label, table in tables.items() if column not in table]
    return f"not observed: {', '.join(labels)}" if labels else ""
