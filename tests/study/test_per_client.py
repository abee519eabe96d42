"""Each client's accuracy, beside the record and in a table."""

import pandas as pd
import pytest

from feddip_core import run
from feddip_core.engine import final
from feddip_core.engine.records import folder_of
from feddip_core.study.per_client import FILE, measure, measured, per_client


def test_each_non_iid_record_is_measured_once(tiny, tmp_path):
    settings = dict(rounds=1, clients=20)
    exps = [tiny("fedavg", partition=p, **settings) for p in ("pathological", "iid")]
    for exp in exps:
        run(exp, out=tmp_path)
    uneven, even = (folder_of(exp, tmp_path) for exp in exps)
    assert measure(tmp_path, "cifar10") == []  # whose images may not be on this machine
    assert measure(tmp_path) == [uneven] and measure(tmp_path) == [] and not (even / FILE).exists()
    kept = pd.read_csv(uneven / FILE, index_col="client")["test_accuracy"]
    assert kept.tolist() == pytest.approx(final.tested_per_client(uneven).tolist())
    worst = 100 * kept.nsmallest(2).mean()
    row = per_client({"fedavg": [exps[0]], "none": [exps[1]]}, tmp_path)
    assert row.loc["fedavg"].tolist() == [f"{100 * kept.mean():.2f}", f"{worst:.2f}", 1, "0"]
    assert row.loc["none"].tolist() == ["–", "–", 0, "–"]
    assert measured({"fedavg": [exps[0]], "none": [exps[1]]}, tmp_path) == (
        "1 of 2 runs are measured per client.\n  none: not seed 0"
    )


def test_methods_are_compared_over_the_seeds_that_all_have(tiny, tmp_path):
    settings = dict(rounds=1, clients=20, partition="pathological")
    dense, sparse = ([tiny(method, seed=s, **settings) for s in (0, 1)] for method in ("fedavg", "feddip"))
    for exp in (*dense, sparse[1]):
        run(exp, out=tmp_path)
    measure(tmp_path)
    assert per_client({"fedavg": dense, "feddip": sparse}, tmp_path)["seeds"].tolist() == ["1", "1"]
    assert per_client({"fedavg": dense[:1], "feddip": sparse}, tmp_path)["seeds"].tolist() == ["0", "1"]
