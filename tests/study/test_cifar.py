"""The section on CIFAR of *Reproduction*: what it says of the records that are there, and of those that are not."""

import re

import pandas as pd
import pytest

from feddip_core import Experiment
from feddip_core.engine import records
from feddip_core.study import cifar, results
from feddip_core.study.wanted import TABLE_III, of_cifar

T, EVERY = 1000, 10


def record(folder, method, low_until=0, end=0.8, regrown=(), loss=1.0, **settings):
    """A record of a narrow CIFAR-10 run: at guessing up to a round, then at `end`; weights return in some rounds."""
    exp = Experiment.preset("narrow", "cifar10", method, **settings)
    sizes, s = results.layers(exp)["size"], getattr(exp, "sparsity_target", 0.0)
    zeros = [int(s * size) for size in sizes]
    zeros[-1] += round(s * sizes.sum()) - sum(zeros)
    fixed = dict.fromkeys((*results.BITS, *results.RELEASED_MEBIBITS, "dropped", "delta", "seconds"), 1.0)
    fixed |= dict(train_loss=loss, sparsity=s, layer_zeros=" ".join(map(str, zeros)))
    rows = [
        fixed | dict(round=i, regrown=regrown.count(i), test_loss=1.0, test_accuracy=0.1 if i <= low_until else end)
        for i in range(1, exp.rounds + 1)
    ]
    for row in rows:
        if row["round"] % EVERY and row["round"] <= exp.rounds - 5:
            row |= dict(test_accuracy=float("nan"), test_loss=float("nan"))
    made = records.Record(exp, {"x_train": "0"}, folder)
    with made.alone():
        made.save(rows)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Eight of the seventeen runs, with made-up accuracies."""
    folder = tmp_path_factory.mktemp("runs")
    record(folder, "fedavg", low_until=37)
    record(folder, "feddip", low_until=100, end=0.78, regrown=(5, 5, 45))
    record(folder, "feddip", end=0.79, rules="released")
    record(folder, "fedgmp", end=0.81)
    record(folder, "snip", end=0.785)
    record(folder, "fedavg", low_until=T, end=0.1, partition="pathological")
    record(folder, "fedavg", end=0.25, loss=0.31, partition="pathological", local_epochs=25, rounds=200)
    record(folder, "feddip_prox", low_until=500, end=0.45, partition="pathological")
    return cifar.Cifar(folder, "cifar10")


def test_the_runs_are_those_of_the_result_notebooks_and_a_few_more():
    wanted = results.wanted("cifar", "narrow", "cifar10")
    ids = {exp.run_id for exps in wanted.values() for exp in exps}
    assert len(ids) == len(wanted) == 17 and {exp.seed for exps in wanted.values() for exp in exps} == {0}
    for result in ("accuracy", "non_iid", "layer_sparsity", "extreme_sparsity"):
        assert {e.run_id for exps in results.wanted(result, "narrow", "cifar10").values() for e in exps} <= ids
    assert list(of_cifar("cifar100")) == ["fedavg", "feddip", "fedgmp"]
    assert "cifar" not in results.RESULTS  # or `--results all` would ask for it


def test_the_table_has_every_run_and_says_how_it_is_reduced(few):
    caption, lines = few.shown().split("\n\n")
    assert "reduced: width = 0.125 instead of 1; tested every 10 rounds" in caption
    rows = {cells[1].strip(): [c.strip() for c in cells[2:-1]] for cells in (x.split("|") for x in lines.splitlines())}
    assert len(rows) == 2 + 17
    assert rows["FedAvg"] == ["80.00", "80.00", "1", "40", "0.00", "0", "85.07 ± 0.13"]
    assert rows["FedDIP"] == ["78.00", "78.00", "1", "110", "0.90", "3", "85.14 ± 0.22"]
    assert rows["FedDIP by the released rules"][:4] == ["79.00", "79.00", "1", "10"]
    assert rows["FedAvg on the pathological split"] == ["10.00", "10.00", "1", "never", "0.00", "0", "61.59 ± 0.73"]
    longer = rows["FedAvg on the pathological split in 200 rounds of 25 epochs"]
    assert longer == ["25.00", "25.00", "1", "10", "0.00", "0", "–"]
    assert rows["FedDIP at 0.99"] == ["–", "–", "0", "–", "–", "–", "–"]


def test_the_order_of_the_methods(few):
    said = few.order()
    # In the paper FedDIP 85.14, FedAvg 85.07, SNIP 80.10: FedAvg and SNIP have overtaken FedDIP.
    assert "1 of 3 pairs stand in the paper's order (n = 1, so no verdict)." in said
    assert "In the opposite order: FedAvg over FedDIP +2.00; SNIP over FedDIP +0.50." in said
    assert said.endswith("Not run yet: FedDP, PruneFL, PruneTrain.")


def test_each_question_is_answered_or_says_what_is_missing(few):
    text = few.answers()
    assert text.startswith("*alexnet on cifar10") and text.count("\n- ") == 6
    mask, penalty, returned, gradual, plateau = (
        few.first_mask(), few.penalty(), few.returns(), few.gradual(), few.plateau()
    )  # fmt: skip
    assert all(part in text for part in (mask, penalty, returned, gradual, plateau))
    assert "FedDIP by the released rules against FedDIP: +1.00 points with one seed. One seed gives no verdict." in mask
    assert "LeNet-5 on Fashion-MNIST, at full size: not run yet." in mask and "Not run yet: DPF, FedDP." in mask
    assert "Not run yet: FedDP." in penalty
    assert "FedDIP, seed 0: 3 return, the last in round 45 of 1,000." in returned
    assert "FedDIP+Prox on the pathological split, seed 0: 0 return. Not run yet: FedDIP at 0.99." in returned
    assert (
        "FedDIP against FedGMP: -3.00 points" in gradual and "Not run yet: FedDIP at 0.99, FedGMP at 0.99." in gradual
    )
    assert "FedAvg does not stay above 20 %: last five 10.0 %, highest five 10.0 % (n = 1)." in plateau
    assert "FedDIP+Prox stays above 20 % from round 510 on: last five 45.0 %" in plateau
    assert "one round's steps its mean loss is 1.00, above it." in plateau
    assert "it is 0.31, below it, and the model ends at 25.0 %." in plateau
    assert plateau.endswith("Not run yet: FedProx on the pathological split.")


def test_a_run_that_misses_its_target_is_found(few, tmp_path):
    assert few.off_target().empty
    wrong = cifar.Cifar(tmp_path, "cifar10")
    wrong.rounds = few.rounds.assign(layer_zeros="1 0 0 0 0 0 0 0")
    assert set(wrong.off_target().index.get_level_values("label")) == set(few.rounds["label"])


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_without_a_record_everything_is_missing(dataset, tmp_path):
    nothing = cifar.Cifar(tmp_path, dataset)
    assert nothing.table()["n"].eq(0).all() and nothing.off_target().empty
    lines = nothing.answers().splitlines()[2:]
    assert all("Not run yet: " in line for line in lines) and not re.search(r"nan|None", nothing.answers())


def test_the_records_of_this_checkout_are_told_without_a_fault():
    for dataset in ("cifar10", "cifar100"):
        own = cifar.Cifar(records.OWN_RECORDS, dataset)
        assert own.answers() and own.off_target().empty
        assert own.table()["n"].sum() == (own.states["state"] == "finished").sum()
    assert set(TABLE_III) <= set(of_cifar("cifar10"))


def test_a_table_of_accuracy_at_a_budget_reads_tested_rounds(few):
    rounds = few.rounds[few.rounds["label"] == "fedavg"]
    stop = results.at_budget(rounds, 2 * 57, results.BITS)
    assert stop["round"].tolist() == [50] and stop["test_accuracy"].tolist() == pytest.approx([80])
    assert pd.isna(few.rounds["test_accuracy"]).any()


def test_readme_has_a_row_for_a_data_set_with_a_record(few, tmp_path):
    row = "| AlexNet on CIFAR-10; reduced: width = 0.125 instead of 1 | 80.00 | 78.00 | 81.00 | 1 |"
    assert cifar.headline(few.folder).splitlines()[2:] == [row]
    assert len(cifar.headline(tmp_path).splitlines()) == 2
