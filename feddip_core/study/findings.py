"""What we found that the paper does not say: README's three bullets, made from the records."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ..experiment import Experiment
from .reproduction import returns
from .tables import BITS, find
from .verdicts import bullets
from .wanted import SEEDS

# What a sparse uplink must not change: every column but δ, the uplink's and the seconds.
SAME = [
    "test_accuracy", "test_loss", "train_loss", "sparsity", "lambda_", "learning_rate", "downlink_bits",
    "downlink_mebibits_released", "regrown", "dropped",
]  # fmt: skip


def findings(folder: str | Path) -> str:
    """Weights that return, bytes that buy nothing, and the theorem."""
    theorem = (
        "**Theorem 1 needs a repair.** As printed, the bound loses a factor $L$ and is false. "
        "[A parabola](notebooks/21_proof_check.ipynb) is the counterexample, and a repaired bound is proved beside it."
    )
    seen = {"LeNet-5": returns(folder), "a narrow AlexNet": returns(folder, "cifar10", "narrow")}
    return bullets([_returning(seen), _uplink(folder), theorem])


def _returning(seen: dict[str, pd.DataFrame]) -> str:
    """After which of the 1,000 rounds no pruned weight returns, per network."""
    own = {
        network: table[table.index.get_level_values("rules") == "the paper's rules"] for network, table in seen.items()
    }
    said = [f"round {t['last round'].max()} ({_seeds(len(t))} of {network})" for network, t in own.items() if len(t)]
    if not said:
        return "**Pruned weights hardly return.** No record of FedDIP is there to show it."
    return (
        "**Pruned weights hardly return.** Error feedback lets a pruned weight come back. "
        f"Of 1,000 rounds, the last that brings one back is {', or '.join(said)}."
    )


@dataclass(frozen=True)
class Uplinks:
    """FedDIP's bytes with a dense and with a sparse uplink, and how far the models are apart."""

    seeds: tuple[int, ...]  # that are wanted
    dense: pd.Series | None  # MB down and up, mean over the runs; None without a run
    sparse: float  # MB both ways
    pairs: int  # seeds with both runs
    gap: float  # the largest difference of any metric in any round


def uplinks(folder: str | Path, seeds: tuple[int, ...] = SEEDS["paper"], **changes: Any) -> Uplinks:
    """Both uplinks, from the records of the paper's experiment, perhaps with changes."""
    dense = [Experiment.preset("paper", seed=s, **changes) for s in seeds]
    rounds = find({"dense": dense, "sparse": [exp.replace(sparse_uplink=True) for exp in dense]}, folder)[0]
    sent = rounds.groupby(["label", "seed"])[BITS].sum() / 8e6
    if "dense" not in sent.index:
        return Uplinks(seeds, None, float("nan"), 0, float("nan"))
    total = sent.loc["dense"].mean()
    if "sparse" not in sent.index:
        return Uplinks(seeds, total, float("nan"), 0, float("nan"))
    paired = sent.loc["sparse"].index.intersection(sent.loc["dense"].index)
    rounds = rounds.set_index(["label", "seed", "round"])
    by_run = rounds[SAME].join(rounds["layer_zeros"].str.split(expand=True).astype(float))
    gap = (by_run.loc["sparse"].loc[paired] - by_run.loc["dense"].loc[paired]).abs().max().max()
    return Uplinks(seeds, total, sent.loc["sparse"].loc[paired].sum(axis=1).mean(), len(paired), gap)


def _uplink(folder: str | Path) -> str:
    """How much of the traffic is upload, and what is left of it if pruned weights travel only where they are read."""
    found = uplinks(folder)
    if found.dense is None:
        return "**The dense upload buys nothing.** No record of FedDIP is there to show it."
    total = found.dense
    said = (
        f"**The dense upload buys nothing.** It is {100 * total['uplink_bits'] / total.sum():.0f} % of FedDIP's "
        f"{total.sum():,.0f} MB. `sparse_uplink=True` sends pruned weights only in rounds whose server reads them."
    )
    if not found.pairs:
        return f"{said} Tests show the same model on small runs; a full-scale record is still missing."
    differs = f"Metrics differ by at most {found.gap:.1g}" if found.gap else "Every accuracy, loss and mask is the same"
    return f"{said} {differs}, for {found.sparse:,.0f} MB ({_seeds(found.pairs)})."


def _seeds(n: int) -> str:
    return f"{n} run{'s' * (n != 1)}"
