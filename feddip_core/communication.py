"""What a round costs in bits: counted exactly, and as the authors' code counts it.

A weight takes 32 bits. Of a pruned model only the kept weights travel, and their positions as a mask of
one bit for each prunable weight, to those clients that do not hold that mask already.
"""

from .masks import Mask, kept

BITS_PER_WEIGHT = 32
MEBI = 2**20


def payload_bits(m: Mask | None, parameters: int, statistics: int = 0) -> int:
    """32 · (kept weights + parameters that are never pruned + batch-norm statistics); m = None is a dense model."""
    pruned = 0 if m is None else mask_bits(m) - kept(m)
    return BITS_PER_WEIGHT * (parameters - pruned + statistics)


def mask_bits(m: Mask | None) -> int:
    """n_w: one bit for each prunable weight; a dense model needs no mask."""
    return 0 if m is None else sum(v.numel() for v in m.values())


def authors_mebibits(zero_fraction: float, parameters: int) -> float:
    """32 (1 − s) n / 2²⁰: one model in the unit of the authors' code, which the paper prints as "MB".

    Zeros count as free even among parameters that are never pruned, and positions cost nothing.
    """
    return BITS_PER_WEIGHT * (1 - zero_fraction) * parameters / MEBI
