"""Beyond the paper: the runs from which our own settings are chosen, with a seed that is never reported.

Seed 0 was looked at while the methods were made, and seeds 1 to 3 are reported, so the choice is made with seed 10.
"""

from typing import Any

SEED = 10
SLOW_DECAY = dict(learning_rate_decay=0.9995)  # Table II's 0.998 leaves an eighth of the step size at the end
SWAPS = dict(method="feddip_swap", mask_score="lamp", prune_end=500, **SLOW_DECAY)
GRADUAL = dict(method="fedgmp", mask_score="lamp", **SLOW_DECAY)


def choices(dataset: str = "fashion_mnist") -> dict[str, dict[str, Any]]:
    """At most 24 runs: at 99 % one change of the first at a time, at 90 and 95 % the best guesses."""
    at_99 = SWAPS | dict(sparsity_target=0.99)
    ends = {end: GRADUAL | dict(sparsity_target=0.9, prune_end=end) for end in (600, 800)}
    return {
        "99 %": at_99,
        "99 %, decay 0.999": at_99 | dict(learning_rate_decay=0.999),
        "99 %, no decay": at_99 | dict(learning_rate_decay=1.0),
        "99 %, pruned by round 300": at_99 | dict(prune_end=300),
        "99 %, half of the weights swapped": at_99 | dict(adjust_alpha=0.5),
        "99 %, swaps every 10 rounds": at_99 | dict(swap_every=10),
        "99 %, swaps until round 950": at_99 | dict(adjust_until=950),
        "99 %, a mask every 20 rounds": at_99 | dict(reconfigure_every=20),
        "99 %, no swaps": GRADUAL | dict(sparsity_target=0.99, prune_end=500),
        "99 %, by magnitude": at_99 | dict(mask_score="magnitude"),
        "99 %, Table II's decay": at_99 | dict(learning_rate_decay=0.998),
        "99 %, twice the step size": at_99 | dict(learning_rate=0.02),
        "90 %, pruned by round 600": ends[600],
        "90 %, pruned by round 800": ends[800],
        "90 %, pruned by round 800, decay 0.999": ends[800] | dict(learning_rate_decay=0.999),
        "90 %, pruned by round 800, by magnitude": ends[800] | dict(mask_score="magnitude"),
        "90 %, swaps": SWAPS | dict(sparsity_target=0.9, prune_end=600),
        "95 %, swaps": SWAPS | dict(sparsity_target=0.95),
        "95 %, no swaps": GRADUAL | dict(sparsity_target=0.95, prune_end=600),
        "95 %, no swaps, decay 0.999": GRADUAL | dict(sparsity_target=0.95, prune_end=600, learning_rate_decay=0.999),
        "FedAvg, decay 0.9995": dict(method="fedavg", **SLOW_DECAY),
        "FedAvg, decay 0.999": dict(method="fedavg", learning_rate_decay=0.999),
    }
