"""FedDIP on losses with known constants: quadratic and logistic clients, a test bed for Section V.

Everything is in double precision and batched: many repetitions of a run go side by side, so their mean can stand for an
expectation. Clients are drawn as in the paper's theory, K times with probability ρ_n.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd
import torch
from torch import Tensor

from .bounds import Constants


@dataclass(frozen=True)
class Bed:
    """N clients; loss(n, w) and gradient(n, w) take clients n of shape (…) and a point for each, w of shape (…, d)."""

    loss: Callable[[Tensor, Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    rho: Tensor  # ρ_n
    sigma2: Tensor  # σ_n², variance of the noise added to a client's gradient
    L: float  # the smallest one for which each f_n is L-smooth
    f_star: float  # the minimum of f, or a bound below it
    d: int  # of ω
    gamma: float = float("inf")  # the supremum of γ(ω), if it is finite
    mu: float = float("inf")  # f is μ-Lipschitz; a quadratic is not

    @property
    def noise(self) -> float:
        """Σ ρ_n σ_n²."""
        return float(self.rho @ self.sigma2)

    def at(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """f, ∇f and Σ ρ_n ‖∇f_n‖² at common points w of shape (…, d)."""
        n, everywhere = torch.arange(len(self.rho)), w.unsqueeze(-2).expand(*w.shape[:-1], len(self.rho), -1)
        n = n.expand(everywhere.shape[:-1])
        g = self.gradient(n, everywhere)
        return self.loss(n, everywhere) @ self.rho, self.rho @ g, g.square().sum(-1) @ self.rho


def quadratic(A: Tensor, a: Tensor, sigma: float = 0.0) -> Bed:
    """f_n = ½ (ω − a_n)ᵀ A_n (ω − a_n); L = max λ_max(A_n), and where all a_n agree γ is at most a known eigenvalue."""
    N = len(A)
    rho, H = torch.full((N,), 1 / N, dtype=A.dtype), A.mean(0)

    def gradient(n, w):
        return (A[n] @ (w - a[n]).unsqueeze(-1)).squeeze(-1)

    def loss(n, w):
        return 0.5 * ((w - a[n]) * gradient(n, w)).sum(-1)

    lowest = torch.linalg.solve(H, (A @ a.unsqueeze(-1)).mean(0)).squeeze(-1)
    f_star = float(loss(torch.arange(N), lowest.expand(N, -1)) @ rho)
    bound = float("inf")
    if (a == a[0]).all():  # γ = Σρ‖A_n x‖² / ‖H x‖² for x = ω − a, largest along an eigenvector of H⁻¹ (Σρ A_n²) H⁻¹
        inverse = torch.linalg.inv(H)
        bound = float(torch.linalg.eigvalsh(inverse @ (A @ A).mean(0) @ inverse)[-1])
    L = float(torch.linalg.eigvalsh(A)[:, -1].max())
    return Bed(loss, gradient, rho, torch.full_like(rho, sigma**2), L, f_star, A.shape[-1], bound)


def logistic(x: Tensor, y: Tensor, sigma: float = 0.0) -> Bed:
    """f_n = mean_i log(1 + exp(−y_i xᵢᵀω)); L = max_n λ_max(XᵀX) / 4D, reached at ω = 0, and μ ≤ mean ‖xᵢ‖."""
    N, D = y.shape
    signed = x * y.unsqueeze(-1)
    rho = torch.full((N,), 1 / N, dtype=x.dtype)

    def margin(n, w):
        return (signed[n] @ w.unsqueeze(-1)).squeeze(-1)

    def loss(n, w):
        return torch.nn.functional.softplus(-margin(n, w)).mean(-1)

    def gradient(n, w):
        return -(torch.sigmoid(-margin(n, w)).unsqueeze(-1) * signed[n]).mean(-2)

    L = float(torch.linalg.eigvalsh(x.transpose(1, 2) @ x)[:, -1].max()) / (4 * D)
    mu = float(x.norm(dim=-1).mean())
    return Bed(loss, gradient, rho, torch.full_like(rho, sigma**2), L, 0.0, x.shape[-1], mu=mu)


def random_quadratic(generator: torch.Generator, N: int = 4, d: int = 6, sigma: float = 0.0) -> Bed:
    """Clients of random curvature around one random minimum, so that γ is bounded."""
    B = torch.randn(N, d, d, generator=generator, dtype=torch.float64)
    A = B @ B.transpose(1, 2) / d + 0.1 * torch.eye(d, dtype=torch.float64)
    return quadratic(A, torch.randn(d, generator=generator, dtype=torch.float64).expand(N, -1), sigma)


def random_logistic(generator: torch.Generator, N: int = 4, d: int = 6, D: int = 30) -> Bed:
    """Clients that see different regions and label them by different noisy rules."""
    x = torch.randn(N, D, d, generator=generator, dtype=torch.float64)
    x = x + torch.randn(N, 1, d, generator=generator, dtype=torch.float64)
    rule = torch.randn(d, generator=generator, dtype=torch.float64)
    return logistic(x, torch.sign(x @ rule + torch.randn(N, D, generator=generator, dtype=torch.float64)))


def largest(w: Tensor, keep: int) -> Tensor:
    """The mask of the `keep` largest |ω| of each row."""
    return torch.zeros_like(w).scatter(-1, w.abs().topk(keep, dim=-1).indices, 1.0)


def feddip(
    bed: Bed, w: Tensor, eta: Callable[[int, Tensor], Tensor | float], rounds: int, K: int, E: int, keep: int,
    R: int = 1, generator: torch.Generator | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Algorithm 1 from w, of shape (repetitions, d): a row per round, each entry a mean over the repetitions.

    `eta(t, gamma)` is the step size of round t = 1, 2, … at a model with that γ. Noise is Gaussian, K clients are drawn
    with replacement; without a generator there is no noise and all clients take part.
    """
    m, rows = largest(w, keep), []
    w, (repetitions, d) = m * w, w.shape
    for t in range(1, rounds + 1):
        f, g, squares = bed.at(w)
        step = torch.as_tensor(eta(t, squares / g.square().sum(-1)), dtype=w.dtype).expand(repetitions)
        n = torch.arange(len(bed.rho)).expand(repetitions, -1)
        if generator:
            n = torch.multinomial(bed.rho, repetitions * K, True, generator=generator).view(repetitions, K)
        local = w.unsqueeze(1).expand(*n.shape, d)
        for _ in range(E):
            v = bed.gradient(n, m.unsqueeze(1) * local)
            if generator:
                scale = (bed.sigma2[n] / d).sqrt().unsqueeze(-1)
                v = v + scale * torch.randn(v.shape, generator=generator, dtype=v.dtype)
            local = local - step.view(-1, 1, 1) * v
        mean = local.mean(1)
        m = largest(mean, keep) if t % R == 0 else m
        rows.append({
            "round": t, "eta": step.mean(), "f": f.mean(), "gradient2": g.square().sum(-1).mean(),
            "gamma": (squares / g.square().sum(-1)).max(), "pruned_norm": (mean - m * mean).norm(dim=-1).mean(),
            "weighted": (step * g.square().sum(-1)).mean(), "reach": mean.norm(dim=-1).max(),
        })  # fmt: skip
        w = m * mean
    return pd.DataFrame(rows).astype(float)


def with_path(c: Constants, bed: Bed, table: pd.DataFrame) -> Constants:
    """The constants with the gap of a run and, on the ball of radius r that holds it, μ = ‖∇f(0)‖ + L r."""
    mu = float(bed.at(torch.zeros(bed.d, dtype=torch.float64))[1].norm()) + bed.L * table["reach"].max()
    return replace(c, gap=table["f"].iloc[0] - bed.f_star, mu=mu)
