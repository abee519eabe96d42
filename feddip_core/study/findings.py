"""What we found that the paper does not say: README's three bullets, made from the records."""

from pathlib import Path

import pandas as pd

from ..experiment import Experiment
from .reproduction import returns
from .tables import BITS, find
from .verdicts import bullets
from .wanted import SEEDS

SAME = ["test_accuracy", "test_loss", "train_loss", "sparsity", "regrown"]  # what a sparse uplink must not change


def findings(folder: str | Path) -> str:
    """Weights that return, bytes that buy nothing, and the theorem."""
    theorem = (
        "**Theorem 1 needs a repair.** As printed, the bound loses a factor $L$ and is false. "
        "[A parabola](notebooks/21_proof_check.ipynb) is the counterexample, and a repaired bound is proved beside it."
    )
    return bullets([_returning(returns(folder)), _uplink(folder), theorem])


def _returning(table: pd.DataFrame) -> str:
    own = table.loc[["the paper's rules"]] if "the paper's rules" in table.index else table.iloc[:0]
    if own.empty:
        return "**Pruned weights hardly return.** No record of FedDIP is there to show it."
    return (
        "**Pruned weights hardly return.** Error feedback lets a pruned weight come back. "
        f"In {_seeds(len(own))} of 1,000 rounds none does after round {own['last round'].max()}."
    )


def _uplink(folder: str | Path) -> str:
    """How much of the traffic is upload, and what is left of it if pruned weights travel only where they are read."""
    dense = [Experiment.preset("paper", seed=s) for s in SEEDS["paper"]]
    both = {"dense": dense, "sparse": [exp.replace(sparse_uplink=True) for exp in dense]}
    rounds = find(both, folder)[0]
    sent = rounds.groupby(["label", "seed"])[BITS].sum() / 8e6
    if "dense" not in sent.index:
        return "**The dense upload buys nothing.** No record of FedDIP is there to show it."
    total = sent.loc["dense"].mean()
    said = (
        f"**The dense upload buys nothing.** It is {100 * total['uplink_bits'] / total.sum():.0f} % of FedDIP's "
        f"{total.sum():,.0f} MB. `sparse_uplink=True` sends pruned weights only in rounds whose server reads them."
    )
    if "sparse" not in sent.index:
        return f"{said} Tests show the same model on small runs; a full-scale record is still missing."
    paired = sent.loc["sparse"].index.intersection(sent.loc["dense"].index)
    by_run = rounds.set_index(["label", "seed", "round"])[SAME]
    gap = (by_run.loc["sparse"].loc[paired] - by_run.loc["dense"].loc[paired]).abs().max().max()
    equal = "Every accuracy, loss and mask is the same" if gap == 0 else f"Metrics differ by at most {gap:.1g}"
    less = sent.loc["sparse"].loc[paired].sum(axis=1).mean()
    return f"{said} {equal}, for {less:,.0f} MB ({_seeds(len(paired))})."


def _seeds(n: int) -> str:
    return f"{n} run{'s' * (n != 1)}"
