"""The unit of the released code, which the paper prints as "MB"."""

import pytest

from feddip_core.methods.released.billing import MEBI, released_mebibits
from feddip_core.schedules import sparsity_at


@pytest.mark.parametrize(
    ("n", "s_0", "s_p", "share", "budget", "within"),
    [
        (61_706, 0.5, 0.9, 0.600, 4e3, 315),
        (23_272_266, 0.5, 0.9, 0.600, 1.8e6, 382),
        (11_220_132, 0.05, 0.8, 0.694, 2e6, 817),
    ],
)
def test_the_released_unit_gives_the_papers_totals(n, s_0, s_p, share, budget, within):
    dense = 2 * 5 * released_mebibits(0, n)
    down = [5 * released_mebibits(sparsity_at(t, 1000, s_0, s_p), n) for t in range(1000)]
    cost = [dense / 2 + d for d in down]
    assert sum(cost) / (1000 * dense) == pytest.approx(share, abs=5e-4)
    total, rounds = 0.0, 0
    while total + cost[rounds] <= budget:
        total += cost[rounds]
        rounds += 1
    assert rounds == within


def test_fedavg_in_the_released_unit():
    assert MEBI == 2**20
    per_round = [10 * released_mebibits(0, n) for n in (61_706, 23_272_266, 11_220_132)]
    assert [round(v, 2) for v in per_round] == [18.83, 7102.13, 3424.11]
    assert [int(b / v) for b, v in zip((4e3, 1.8e6, 2e6), per_round, strict=True)] == [212, 253, 584]
