"""Who loses: each client's accuracy under the final model of a non-IID run.

python -m feddip_core.study.per_client [RUNS [DATASET]] measures every record that has a model, and leaves `clients.csv`
beside it.
"""

import sys
from pathlib import Path

import pandas as pd

from ..engine import final, records
from ..engine.measure import mean_and_worst_tenth
from .tables import named, shown
from .wanted import Wanted

FILE = "clients.csv"


def measure(
    folder: str | Path = records.OWN_RECORDS, dataset: str = "*", data_dir: str | Path | None = None
) -> list[Path]:
    """Write `clients.csv` beside each non-IID record that has a model but no such file; return these records."""
    made = []
    for record in records.record_folders(folder):
        if record.parent.match(dataset) and (record / final.NAME).exists() and not (record / FILE).exists():
            if records.experiment_of(record).partition in ("iid", "given"):
                continue
            accuracies = final.tested_per_client(record, data_dir)
            records.write(record / FILE, accuracies.to_csv(lineterminator="\n"))
            made.append(record)
    return made


def measured(wanted: Wanted, folder: str | Path) -> str:
    """How many of the runs have been measured, and which have not."""
    lacks = {
        label: [exp.seed for exp in exps if not (records.folder_of(exp, folder) / FILE).exists()]
        for label, exps in wanted.items()
    }
    total, gone = sum(map(len, wanted.values())), sum(map(len, lacks.values()))
    lines = [f"{total - gone} of {total} runs are measured per client."]
    return "\n".join(lines + [f"  {label}: not {named(seeds)}" for label, seeds in lacks.items() if seeds])


def per_client(wanted: Wanted, folder: str | Path) -> pd.DataFrame:
    """In percent: the mean client, and the mean over the worst tenth of the clients.

    Over the seeds that all labels have measured, if there are any; else over each label's own.
    """
    files = {k: {e.seed: records.folder_of(e, folder) / FILE for e in own} for k, own in wanted.items()}
    there = {k: {seed for seed, file in own.items() if file.exists()} for k, own in files.items()}
    common, rows = set.intersection(*there.values()), {}
    for label, own in files.items():
        seeds = sorted(common or there[label])
        found = [mean_and_worst_tenth(pd.read_csv(own[s], index_col="client")["test_accuracy"]) for s in seeds]
        both = 100 * pd.DataFrame(found, columns=["mean client", "worst tenth"], dtype=float)
        said = {"n": len(both), "seeds": ", ".join(map(str, seeds)) or "–"}
        rows[label] = {k: shown(both[k].mean(), both[k].std()) for k in both} | said
    return pd.DataFrame(rows).T


if __name__ == "__main__":
    for done in measure(*sys.argv[1:]):
        print(done)
