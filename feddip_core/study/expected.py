"""Compare the toy records of `make reproduce` with the expected ones: python -m feddip_core.study.expected FOLDER

`toy_records.csv` beside this file has one line per record: how it ended when it was last made. --renew writes this file
again. Other processors may give other last digits, and so other accuracies.
"""

import sys
from pathlib import Path

import pandas as pd

from ..engine import records

EXPECTED = Path(__file__).parent / "toy_records.csv"
COLUMNS = ["run", "last_five", "sparsity", "megabytes_down", "megabytes_up"]


def made(folder: str | Path) -> pd.DataFrame:
    """How each record below the folder ended."""
    lines = [records.summary(path) for path in records.record_folders(folder)]
    return pd.DataFrame(lines, columns=COLUMNS).sort_values("run", ignore_index=True)


def verdict(made: pd.DataFrame, expected: pd.DataFrame) -> str:
    """One line: how many records are there, how many are equal, and by how much the others differ."""
    both = expected.merge(made, on="run", suffixes=("", "_made"))
    cost = ["sparsity", "megabytes_down", "megabytes_up"]
    same_cost = all(both[f"{k}_made"].tolist() == both[k].tolist() for k in cost)
    off = (both["last_five_made"] - both["last_five"]).abs()
    extra = len(made) - len(both)
    parts = [
        f"{len(both)} of {len(expected)} expected toy records are there" + (f", and {extra} more" if extra else "")
    ]
    parts.append("sparsities and megabytes as expected" if same_cost else "sparsities or megabytes NOT as expected")
    largest = 0.0 if off.empty else 100 * off.max()
    parts.append(f"{(off == 0).sum()} accuracies equal to the last digit, largest difference {largest:.2f} points")
    return "; ".join(parts) + "."


def main(folder: str, renew: str = "") -> None:
    """Compare, or with --renew write what is expected from now on."""
    if renew:
        records.write(EXPECTED, made(folder).to_csv(index=False, lineterminator="\n"))
    print(verdict(made(folder), pd.read_csv(EXPECTED)))


if __name__ == "__main__":
    main(*sys.argv[1:])
