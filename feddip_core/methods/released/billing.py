"""A round's cost as the released code counts it: mebibits without positions, which the paper prints as "MB"."""

from ...communication import BITS_PER_WEIGHT
from ...masks import sparsity_of
from ...method import Method
from ...state import Average, State
from ..feddip import FedDP
from ..prunefl import PruneFL

MEBI = 2**20


def released_mebibits(zero_fraction: float, parameters: int) -> float:
    """32 (1 − s) n / 2²⁰ for one model. Zeros are free, even among parameters that are never pruned."""
    return BITS_PER_WEIGHT * (1 - zero_fraction) * parameters / MEBI


def billed(method: Method, state: State, average: Average) -> tuple[float, float]:
    """Mebibits down and up for the round that starts from this state."""
    n = method.layout.size
    s = method.sparsity(state.t) if isinstance(method, FedDP) else _sparsity(method, state)
    extra = [bits / MEBI for bits in _extra(method, state, s)]
    down = len(average.clients) * released_mebibits(s, n) + extra[0]
    return down, sum(released_mebibits(zeros, n) for zeros in average.zeros) + extra[1]


def _sparsity(method: Method, state: State) -> float:
    return sparsity_of(method.layout.full_mask(state.m, state.w.device))


def _extra(method: Method, state: State, s: float) -> tuple[float, float]:
    """PruneFL's extras: per new mask 4 bits per kept weight and a dense g²; before round 1 for all N clients."""
    if not isinstance(method, PruneFL):
        return 0.0, 0.0
    n, exp = method.layout.size, method.exp
    K, density = exp.clients_per_round, 1 - s
    model, mask = BITS_PER_WEIGHT * density * n, 4 * density * n
    first = exp.clients * (model + mask) if state.t == 0 else 0
    again = method.tau(state.t) is not None
    return first + again * K * mask, again * K * BITS_PER_WEIGHT * n
