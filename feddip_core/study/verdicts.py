"""Is it a difference? Paired t intervals over seeds, and the words that they allow.

Runs with the same seed share first weights, split, selected clients and batches. So methods are compared seed by seed:
the mean of the differences ± t s/√n, with n − 1 degrees of freedom. If 0 is inside the interval, the two cannot be told
apart. One seed gives no interval and no verdict.
"""

from collections.abc import Iterable, Sequence

import pandas as pd
from scipy import stats

LEVEL = 0.95
ABOVE, BELOW, EVEN, ONE, NONE = "above", "below", "cannot be told apart", "one seed", "no run"


def judged(differences: Sequence[float] | pd.Series) -> pd.Series:
    """Mean, both ends of its interval, n, degrees of freedom and verdict. Seeds without a difference do not count."""
    own = pd.Series(differences, dtype=float).dropna()
    n, mean = len(own), own.mean()
    half = stats.t.ppf((1 + LEVEL) / 2, n - 1) * stats.sem(own) if n > 1 else float("nan")
    low, high = mean - half, mean + half
    verdict = {0: NONE, 1: ONE}.get(n, ABOVE if low > 0 else BELOW if high < 0 else EVEN)
    return pd.Series(dict(mean=mean, low=low, high=high, n=n, df=max(n - 1, 0), verdict=verdict), dtype=object)


def pairs(values: pd.DataFrame, order: pd.Series) -> pd.DataFrame:
    """Every pair (a, b) with a above b in `order`: a − b, judged over the seeds of `values` (one row per method)."""
    found = {
        (a, b): judged(values.loc[a] - values.loc[b])
        for a in order.index for b in order.index if order[a] > order[b]
    }  # fmt: skip
    return pd.DataFrame(found).T


def range_of(row: pd.Series) -> str:
    """+0.30 [-0.20, +0.80]; without an interval the mean alone."""
    if not row["n"]:
        return "–"
    return f"{row['mean']:+.2f}" + (f" [{row['low']:+.2f}, {row['high']:+.2f}]" if row["n"] > 1 else "")


def counted(row: pd.Series) -> str:
    """What a verdict rests on."""
    return f"n = {row['n']}, {row['df']} degree{'s' * (row['df'] != 1)} of freedom" if row["n"] > 1 else "n = 1"


def sentence(a: str, b: str, row: pd.Series, what: str = "points") -> str:
    """How a compares with b, in the words of the verdict."""
    gap = f"{range_of(row)} {what} ({counted(row)})"
    return {
        ABOVE: f"{a} ends above {b}: {gap}.",
        BELOW: f"{a} ends below {b}: {gap}.",
        EVEN: f"{a} and {b} cannot be told apart: {gap}.",
        ONE: f"{a} against {b}: {range_of(row)} {what} with one seed. One seed gives no verdict.",
        NONE: f"{a} against {b}: no seed has both runs yet.",
    }[row["verdict"]]


def bullets(lines: Iterable[str], note: str = "") -> str:
    """A list in Markdown, under a note if there is one; an empty list says so."""
    listed = "\n".join(f"- {line}" for line in lines) or "- None."
    return f"*{note}*\n\n{listed}" if note else listed
