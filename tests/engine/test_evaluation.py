"""`evaluate_every`: which rounds are tested, that training does not notice, and that a gap is no divergence."""

import math

import pandas as pd
import pytest
from helpers import same, same_model

from feddip_core import Experiment, run
from feddip_core.engine import measure, records
from feddip_core.flower import belief
from feddip_core.lab import pictures
from feddip_core.lab.background import Trained
from feddip_core.study import figures, tables

MEASURED = ["test_accuracy", "test_loss"]


@pytest.fixture(scope="module")
def often_and_seldom(tmp_path_factory):
    """The same training, tested in every round, and in every fourth and the last five of twelve."""
    small = dict(width=0.5, clients=40, clients_per_round=2, local_epochs=1, learning_rate=0.1, rounds=12)
    exp, out = Experiment.preset("smoke", **small), tmp_path_factory.mktemp("runs")
    return run(exp, out=out), run(exp.replace(evaluate_every=4), out=out)


def test_a_model_does_not_depend_on_when_it_is_tested(often_and_seldom):
    often, seldom = often_and_seldom
    assert same_model(often, seldom)
    columns = [k for k in often.metrics if k not in ("seconds", *MEASURED)]
    assert often.metrics[columns].equals(seldom.metrics[columns])


def test_every_fourth_round_and_the_last_five_are_tested(often_and_seldom):
    often, seldom = (r.metrics.set_index("round")[MEASURED] for r in often_and_seldom)
    known = seldom.dropna()
    assert known.index.tolist() == [4, 8, 9, 10, 11, 12] and seldom.isna().all(axis=1).sum() == 6
    assert known.equals(often.loc[known.index])


def test_a_round_without_a_test_is_no_diverged_one(often_and_seldom):
    _, seldom = often_and_seldom
    assert seldom.diverged is None and figures.diverged_at(seldom.metrics) is None
    rows = seldom.metrics.to_dict("records")
    assert not any(map(records.diverged, rows))
    assert records.diverged(rows[0] | dict(train_loss=math.nan))
    assert records.diverged(rows[-1] | dict(test_loss=math.nan)) and records.diverged(rows[-1] | dict(test_loss=1e999))


def test_a_run_diverges_in_the_same_round_and_its_last_row_is_whole(tiny):
    often, seldom = (run(tiny(learning_rate=1e6, evaluate_every=k)) for k in (1, 6))
    assert often.diverged == seldom.diverged
    assert seldom.metrics[MEASURED].iloc[-1].equals(often.metrics[MEASURED].iloc[-1])


def test_a_loss_that_is_not_finite_is_seen_between_two_tests(tiny, monkeypatch):
    evaluate = measure.evaluate

    def broken(federation, state, images=slice(None)):
        accuracy, loss = evaluate(federation, state, images)
        return accuracy, math.inf if state.t == 3 else loss

    monkeypatch.setattr(measure, "evaluate", broken)
    result = run(tiny(rounds=20, evaluate_every=10))
    assert result.diverged == 3 and not math.isnan(result.metrics["test_accuracy"].iloc[-1])
    assert belief.TRIED == measure.TRIED  # on Flower an upload is tried on as many images


def test_a_run_resumes_across_rounds_without_a_test(tiny, tmp_path):
    exp = tiny(rounds=10, evaluate_every=5)
    run(exp, out=tmp_path, until=3)
    assert pd.isna(records.load_runs(tmp_path)["test_accuracy"]).all()
    assert same(run(exp, out=tmp_path), run(exp))
    folder = records.folder_of(exp, tmp_path)
    for name in ("checkpoint.safetensors", "model.safetensors"):
        (folder / name).unlink()
    assert same(run(exp, out=tmp_path), run(exp))  # repeated, and checked against the record


def test_a_record_says_what_its_last_and_its_best_five_are(often_and_seldom):
    _, seldom = often_and_seldom
    known = seldom.metrics["test_accuracy"].dropna()
    rounds = seldom.metrics.assign(label="feddip", seed=0)
    line = tables.of_runs(rounds).loc[("feddip", 0)] / 100
    assert line["last five"] == pytest.approx(seldom.metrics["test_accuracy"].tail(5).mean())
    assert line["highest five"] == pytest.approx(known.nlargest(5).mean())


def test_at_a_budget_the_last_tested_round_before_it_counts():
    rounds = pd.DataFrame({"round": [1, 2, 3], "test_accuracy": [0.5, math.nan, 0.7], "bits": 10, "seed": 0})
    stop = tables.at_budget(rounds.assign(label="feddip"), 20, ["bits"]).iloc[0]
    assert stop.tolist() == [1, 50]


def test_curves_connect_the_tested_rounds_and_words_name_the_last(often_and_seldom):
    often, seldom = (r.metrics.head(11) for r in often_and_seldom)
    gaps = seldom.head(7)  # rounds 5 to 7 are not tested
    for name, own in (("often", often), ("seldom", gaps)):
        curve = figures.by_label(own.assign(label=name), "test_accuracy", smooth=3)[name]
        assert curve.index.tolist() == (list(range(1, 12)) if name == "often" else [4])
    known = gaps["test_accuracy"].dropna().iloc[-1]
    assert records.last_accuracy(gaps.to_dict("records")) == known
    assert math.isnan(records.last_accuracy(gaps.head(3).to_dict("records")))
    trained = Trained("one", often_and_seldom[1].experiment, gaps, [], {})
    assert f"one: {known:.3f}" in pictures.compared([trained])


def test_figures_take_runs_with_gaps(often_and_seldom):
    seldom = often_and_seldom[1]
    runs = {"feddip": seldom.metrics}
    for figure in (figures.quickstart(runs, 2), figures.side_by_side(runs)):
        drawn = figure.axes[0].lines[0]
        assert drawn.get_xdata().tolist() == [4, 8, 9, 10, 11, 12]
    rounds = seldom.metrics.assign(label="feddip", seed=0)
    figure = figures.against_cost(rounds, rounds["round"] * 1.0, rounds["round"] * 1.0, 5.0, {"feddip": 50.0})
    assert figure.axes[0].lines[0].get_xdata().tolist() == [4, 8, 9, 10, 11, 12]
