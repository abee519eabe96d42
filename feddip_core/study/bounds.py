"""Theorem 1 in numbers: its right side as printed, with its algebra corrected, and repaired; and both sides of a run.

The constants come from a run (`theory`) or are known (`convex`). On a run L, μ and G are lower estimates: they are
suprema over all models, of which a run sees only some. So a right side made from them is only an indication.
"""

import math
from dataclasses import dataclass

import pandas as pd

from ..experiment import Experiment
from ..schedules import learning_rate_at


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
    E: int  # local steps per round: the proof takes one batch per step, so E_l cannot count epochs

    @classmethod
    def of(cls, table: pd.DataFrame, exp: Experiment, f_star: float = 0.0) -> "Constants":
        """The largest values that the run has shown: lower estimates, except the gap, which f* = 0 overestimates."""
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

    `growth` is Σ (λ_{t+1} − λ_t) Σ_z ‖ω_z‖, by which a growing penalty raises f during the run.
    """
    etas = [float(eta) for eta in etas]
    scale = (2 if c.E == 1 else 4) / (c.E * sum(etas))
    chi = chi_rounds(c) * c.E * sum(eta**2 for eta in etas)
    parts = {"initial gap": c.gap, "pruning": c.mu * pruned, "χ": chi, "growth of λ": growth}
    return {name: scale * part for name, part in parts.items()}


def sides(table: pd.DataFrame, exp: Experiment) -> pd.DataFrame:
    """Both sides of Theorem 1 after each evaluated round: a row per round, columns (form, term).

    The left sides are means over the rounds evaluated so far, the pruning sums over all rounds so far.
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
