"""Verdicts by hand, and every sentence that compares held to them: a changed record changes the sentence."""

import ast
import math
import re
import shutil
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from matplotlib import pyplot

from feddip_core.engine.records import OWN_RECORDS, folder_of
from feddip_core.experiment import Experiment
from feddip_core.method import METHODS
from feddip_core.study import findings, readme, reproduction, results, verdicts

ROOT = Path(__file__).parent.parent.parent


def judged(*differences):
    return verdicts.judged(pd.Series(differences, dtype=float))


@pytest.mark.parametrize(
    "differences, low, high, verdict",
    [
        ((1, 2, 3), -0.484, 4.484, "cannot be told apart"),  # 2 ± 4.3027 / √3
        ((1.5, 2, 2.5), 0.758, 3.242, "above"),
        ((-1.5, -2, -2.5), -3.242, -0.758, "below"),
        ((1, 2), -4.853, 7.853, "cannot be told apart"),  # 1.5 ± 12.706 · 0.5
        ((2, 2, 2), 2, 2, "above"),
        ((0, 0, 0), 0, 0, "cannot be told apart"),
    ],
)
def test_a_paired_interval_by_hand(differences, low, high, verdict):
    row = judged(*differences)
    assert (row["low"], row["high"]) == pytest.approx((low, high), abs=5e-4)
    assert (row["verdict"], row["n"], row["df"]) == (verdict, len(differences), len(differences) - 1)


def test_one_seed_is_no_verdict_and_a_seed_without_partner_does_not_count():
    assert judged(2, math.nan)[["n", "verdict"]].tolist() == [1, "one seed"]
    assert judged(math.nan)[["n", "verdict"]].tolist() == [0, "no run"]
    values = pd.DataFrame({0: [3.0, 1.0], 1: [2.0, math.nan]}, index=["a", "b"])
    row = verdicts.pairs(values, pd.Series({"a": 1.0, "b": 2.0})).loc[("b", "a")]
    assert row[["mean", "n", "verdict"]].tolist() == [-2, 1, "one seed"]


def test_the_words_are_those_of_the_verdict():
    said = {row["verdict"]: verdicts.sentence("A", "B", row) for row in (
        judged(1.5, 2, 2.5), judged(-1.5, -2, -2.5), judged(1, 2, 3), judged(2), judged())}  # fmt: skip
    assert said == {
        "above": "A ends above B: +2.00 [+0.76, +3.24] points (n = 3, 2 degrees of freedom).",
        "below": "A ends below B: -2.00 [-3.24, -0.76] points (n = 3, 2 degrees of freedom).",
        "cannot be told apart": "A and B cannot be told apart: "
        "+2.00 [-0.48, +4.48] points (n = 3, 2 degrees of freedom).",
        "one seed": "A against B: +2.00 points with one seed. One seed gives no verdict.",
        "no run": "A against B: no seed has both runs yet.",
    }


@pytest.mark.parametrize(
    "method, ours, released, status",
    [
        ("feddip", (-0.3, 0.1, 0.2), (5, 5, 6), "reproduced"),
        ("feddip", (-1.0, -1.1, -1.2), (-0.3, 0.1, 0.2), "only by the released code"),
        ("feddip", (-1.0, -1.1, -1.2), (2.0, 2.1, 2.2), "not reproduced"),
        ("feddip", (-1.0, -1.1, -1.2), (0.1,), "undecided"),
        ("snip", (-1.0, -1.1, -1.2), (), "not reproduced"),  # the released code has no version that is run
        ("snip", (0.1,), (), "undecided"),
        ("snip", (-1.0, 1.0), (), "undecided"),  # ± 12.7 points has everything inside
    ],
)
def test_when_a_number_counts_as_reproduced(method, ours, released, status):
    assert reproduction.status(method, judged(*ours), judged(*released)) == status


def test_a_figure_shows_the_seeds_that_all_its_runs_have():
    rounds = pd.DataFrame({"label": ["a", "a", "b"], "seed": [0, 1, 0]})
    more = pd.DataFrame({"label": ["c", "c"], "seed": [1, 0]})
    assert results.same_seeds(rounds, more) == [0]
    assert results.same_seeds(more) == [0, 1] and results.same_seeds(rounds.iloc[:0]) == []
    assert results.of_seeds(rounds, [0])["label"].tolist() == ["a", "b"]
    wanted = results.wanted("accuracy", "paper", "fashion_mnist")
    assert [results.drawn(wanted, seeds) for seeds in ([0, 1], [0], [])] == [
        "seeds 0, 1", "seed 0", "no seed that all runs share",
    ]  # fmt: skip


def outputs_of(name):
    (path,) = (ROOT / "notebooks").glob(f"[0-9][0-9]_{name}.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    found = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return "\n".join(data["text/markdown"] for data in found if "text/markdown" in data)


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """The records of the repository, but for one of FedDIP's, which is ten points better."""
    runs = tmp_path_factory.mktemp("outputs") / "runs"
    shutil.copytree(OWN_RECORDS, runs)
    metrics = folder_of(Experiment.preset("paper"), runs) / "metrics.csv"
    table = pd.read_csv(metrics)
    table["test_accuracy"] += 0.1
    table.to_csv(metrics, index=False)
    return runs


def test_a_changed_record_changes_what_readme_and_reproduction_say(changed):
    text = (ROOT / "README.md").read_text("utf-8")
    assert readme.renewed(text) == text
    assert readme.renewed(text, changed) != text
    said = {
        runs: results.compare(results.compared(runs), "Table III", "feddip", "feddp") for runs in (OWN_RECORDS, changed)
    }
    assert said[OWN_RECORDS] in outputs_of("reproduction") and said[changed] not in outputs_of("reproduction")


def said_by(name, runs):
    """What a notebook's cells say in words, made from these records."""
    (path,) = (ROOT / "notebooks").glob(f"[0-9][0-9]_{name}.ipynb")
    space, said = {}, []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            *before, last = ast.parse(cell.source).body
            exec(ast.unparse(before), space)
            if ast.unparse(last).startswith("Markdown("):
                said.append(eval(ast.unparse(last), space).data)
            else:
                exec(ast.unparse(last), space)
                space |= {"runs": str(runs)} if "runs" in space else {}
    pyplot.close("all")
    return "\n".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reproduction", "accuracy", "communication", "non_iid", "extreme_sparsity"])
def test_every_sentence_of_a_result_follows_from_the_records(name, changed):
    assert said_by(name, OWN_RECORDS) == outputs_of(name)
    assert (said_by(name, changed) == outputs_of(name)) == (name == "non_iid"), (
        "the changed run is FedDIP's, on IID data"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reproduction", "paper_vs_code"])
def test_a_result_goes_on_without_any_record(name, tmp_path):
    assert "There is no record of FedDIP" in said_by(name, tmp_path)
    assert "No record of FedDIP is there to show it." in findings.findings(tmp_path)


def test_what_readme_promises_of_a_sparse_uplink_is_in_the_records():
    """README's first lines say it in words: the same network for less than half the bytes."""
    both = findings.uplinks(OWN_RECORDS)
    assert both.pairs and both.gap == 0 and both.sparse < both.dense.sum() / 2
    assert "the same network for [less than half the bytes]" in (ROOT / "README.md").read_text("utf-8")


def test_what_did_not_reproduce_is_named():
    """A number outside the interval, and runs that ended at guessing."""
    seeds = {"seed 0": [80.0, 10.0], "seed 1": [80.1, 10.0], "seed 2": [80.2, 70.0]}
    rows = pd.MultiIndex.from_tuples([("Table III", "snip"), ("Table III", "prunetrain")])
    table = pd.DataFrame({"paper": [86.0, 84.0], "paper_std": [0.1, 0.1], **seeds}, index=rows)
    assert results.misses(table) == [
        "Not reproduced: SNIP in Table III.",
        "PruneTrain: 2 of 3 runs by the paper's rules end at guessing.",
    ]


WORDS = r"above|below|better|worse|ahead|behind|more accurate|less accurate|leads?|outperforms?|beats?|level with"


def comparisons(text):
    """Sentences that name a method and compare, outside of what is generated."""
    text = re.sub(r"(?s)<!-- (\w+) -->.*?<!-- end of \1 -->", "", text)
    names = "|".join(re.escape(method.label) for method in METHODS.values() if method.label)
    sentences = re.split(r"(?<=[.:])\s+|\n", text)
    return [s for s in sentences if re.search(rf"\b({names})\b", s) and re.search(rf"\b({WORDS})\b", s)]


def test_no_sentence_that_compares_is_written_by_hand():
    assert comparisons("FedDIP ends above FedDP.") and not comparisons(
        "<!-- a -->\nFedDIP above FedDP\n<!-- end of a -->"
    )
    text = (ROOT / "README.md").read_text("utf-8")
    assert comparisons(text) == []
    cells = nbformat.read(ROOT / "notebooks" / "10_reproduction.ipynb", as_version=4).cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert comparisons(prose) == []
