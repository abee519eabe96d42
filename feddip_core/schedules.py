"""What changes from round to round: sparsity s_t, penalty λ_t, learning rate η_t (Section IV).

t counts rounds from 0 to T − 1, as in Eq. 9; τ = t + 1 is the round of Algorithm 1, from 1 to T.
"""


def sparsity_at(t: float, T: int, s_0: float, s_p: float) -> float:
    """s_t = s_p + (s_0 − s_p)(1 − t/T)³  (Eq. 11)."""
    return s_p + (s_0 - s_p) * (1 - t / T) ** 3


def lambda_at(t: int, T: int, lambda_max: float, Q: int) -> float:
    """λ_t = λ_max · i/Q on the i-th of Q equal stretches of the run, i = 0 … Q − 1  (Eq. 9)."""
    # Whole numbers: with t / T in floating point a stretch would begin a round late now and then.
    return lambda_max * min(t * Q // T, Q - 1) / Q


def learning_rate_at(t: int, eta_0: float, decay: float) -> float:
    """η_t = η_0 · decay^t, constant within a round."""
    # Differs from the paper: it names an initial rate only; the released code decays it by 0.998 per round.
    return eta_0 * decay**t


def reconfiguration_time(t: int, R: int) -> int | None:
    """The τ whose s_τ the mask chosen after round t must have, or None if that round keeps its mask."""
    return t + 1 if (t + 1) % R == 0 else None
