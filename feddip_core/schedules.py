"""What changes from round to round: sparsity s_t, penalty λ_t, learning rate η_t (Section IV).

t counts rounds from 0 to T − 1, as in Eq. 9; τ = t + 1 is the round of Algorithm 1, from 1 to T.
"""

import math


def sparsity_at(t, T, s_0, s_p):
    """s_t = s_p + (s_0 − s_p)(1 − t/T)³  (Eq. 11)."""
    return s_p + (s_0 - s_p) * (1 - t / T) ** 3


def lambda_at(t, T, lambda_max, Q):
    """λ_t = λ_max · i/Q on the i-th of Q equal stretches of the run, i = 0 … Q − 1  (Eq. 9)."""
    # Whole numbers: with t / T in floating point a stretch would begin a round late now and then.
    return lambda_max * min(t * Q // T, Q - 1) / Q


def lambda_at_authors(t, T, lambda_max):
    """λ_t of the authors' code: 0 at first, then from 5e-4 towards λ_max, in 20 steps whatever Q is."""
    if lambda_max == 0:
        return 0.0
    step = min(t // (T // 20), 19) if T >= 20 else 19
    return 5e-4 + (lambda_max - 5e-4) * (step - 1) / 19 if step else 0.0


def regrowth_fraction_at(t, T, alpha):
    """a_t = α/2 · (1 + cos(πt/T)), the share of a layer's weights that FedDST replaces."""
    return alpha / 2 * (1 + math.cos(math.pi * t / T))


def learning_rate_at(t, eta_0, decay):
    """η_t = η_0 · decay^t, constant within a round."""
    # Differs from the paper: it names an initial rate only; its authors' code decays it by 0.998 a round.
    return eta_0 * decay**t


def reconfiguration_time(t, R, rule="paper"):
    """The τ whose s_τ the mask chosen after round t must have, or None if that round keeps its mask."""
    if rule == "authors":
        return t if t % R == 0 else None
    return t + 1 if (t + 1) % R == 0 else None
