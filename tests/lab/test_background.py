import subprocess
import sys
import threading

import pytest

from feddip_core import METHODS, Experiment, Method, load_runs, run
from feddip_core.client import Clients
from feddip_core.engine.records import folder_of
from feddip_core.lab.background import Trained, Training, describe
from feddip_core.server import Federation


def trained(exp, watch=lambda training: None):
    training = Training(exp, watch)
    training.thread.start()
    training.thread.join()
    return training


def test_a_run_in_the_background_is_the_same_run_to_the_bit(tiny, tmp_path):
    exp = tiny(rounds=3)
    seen = []
    ours = trained(exp, lambda training: seen.append((len(training.rows), training.over))).trained("x")
    expected = run(exp, out=tmp_path / "run")
    assert ours.metrics.drop(columns="seconds").equals(expected.metrics.drop(columns="seconds"))
    assert seen == [(0, False), (1, False), (2, False), (3, False), (3, True)]
    assert len(ours.masks) == 4
    assert all((ours.masks[-1][k] == m).all() for k, m in expected.mask.items())

    ours.save(tmp_path / "ours")
    a, b = (load_runs(tmp_path / name).drop(columns="seconds") for name in ("ours", "run"))
    assert a.equals(b)
    opened = Trained.open(folder_of(exp, tmp_path / "ours"))
    assert opened.metrics.columns.tolist() == ours.metrics.columns.tolist()
    assert opened.metrics["test_accuracy"].tolist() == ours.metrics["test_accuracy"].tolist()
    assert (opened.exp, opened.masks) == (exp, [])
    assert opened.provenance["started"] == ours.provenance["started"]


def test_stop_ends_it_before_the_next_client(tiny, monkeypatch):
    turns = []
    once = Federation.train_client
    monkeypatch.setattr(Federation, "train_client", lambda *a: (turns.append(1), once(*a))[1])

    def stop_after_two(training):
        if len(training.rows) == 2:
            training.stopping.set()

    training = trained(tiny(rounds=50, clients_per_round=4), stop_after_two)
    assert (len(training.rows), len(training.masks), training.over, training.error) == (2, 3, True, None)
    assert len(turns) == 2 * 4 + 1  # and that one was refused


def test_stop_in_the_middle_of_a_round_and_of_a_long_beginning(tiny, monkeypatch):
    calls, once = [], Clients.train_

    def third_call_is_stopped(self, *args, **how):
        calls.append(1)
        if len(calls) == 3:
            self.stop.set()
        return once(self, *args, **how)

    monkeypatch.setattr(Clients, "train_", third_call_is_stopped)
    assert len(trained(tiny(rounds=50, clients_per_round=8)).rows) == 0
    assert len(calls) == 3
    calls.clear()
    training = trained(tiny("prunefl", rounds=50))  # its beginning takes hundreds of passes
    assert (len(training.rows), training.masks, training.over, len(calls)) == (0, [], True, 3)


def test_a_failure_is_kept_for_whoever_waits(tiny, monkeypatch):
    def broken(*_):
        raise MemoryError("too large")

    monkeypatch.setattr(Federation, "round", broken)
    monkeypatch.setattr(threading, "excepthook", lambda args: pytest.fail(f"a traceback would be shown: {args}"))
    training = trained(tiny())
    assert training.over and isinstance(training.error, MemoryError)


def test_a_shorter_run_does_not_replace_a_longer_record(tiny, tmp_path):
    exp = tiny(rounds=3)
    whole = trained(exp).trained("whole")
    part = Trained("part", exp, whole.metrics.head(2), whole.masks[:3], whole.provenance)
    part.save(tmp_path)
    assert len(load_runs(tmp_path)) == 2
    whole.save(tmp_path)
    part.save(tmp_path)
    assert len(load_runs(tmp_path)) == 3


def test_a_stacked_run_is_stopped_too(tiny):
    training = trained(tiny(rounds=50, stacked=True), lambda training: training.stopping.set())
    assert (len(training.rows), training.over, training.error) == (0, True, None)


def test_data_that_clients_bring_are_trained_on():
    hospitals = dict(dataset="feddip_core.lab.hospitals:samples", model="feddip_core.lab.hospitals:network")
    exp = Experiment(**hospitals, partition="given", clients=4, clients_per_round=2, rounds=2, local_epochs=1)
    ours, expected = trained(exp).trained("x").metrics, run(exp).metrics
    assert ours.drop(columns="seconds").equals(expected.drop(columns="seconds"))


def test_a_record_without_its_method_is_shown_but_not_saved_again(tiny, tmp_path):
    class Mine(Method):
        pass

    exp = tiny(Mine, rounds=1)
    run(exp, tmp_path)
    folder = folder_of(exp, tmp_path)
    assert Trained.open(folder).exp == exp
    METHODS.pop(exp.method)  # as in the session of somebody else
    opened = Trained.open(folder)
    assert opened.name.endswith("Mine, iid, T 1, seed 0")
    assert (opened.exp, opened.rounds, len(opened.metrics)) == (None, 1, 1)
    with pytest.raises(ValueError, match="Mine' is not available here; the run stays in the record it came from"):
        opened.save(tmp_path / "again")


def test_a_record_of_a_method_that_was_changed_since_is_not_its_experiment(tiny, tmp_path):
    class Mine(Method):
        pass

    exp = tiny(Mine, rounds=1)
    run(exp, tmp_path)

    class Changed(Mine):
        def lam(self, t):
            return 1.0

    METHODS[exp.method] = Changed
    assert Trained.open(folder_of(exp, tmp_path)).exp is None


def test_a_name_says_what_is_most_likely_to_be_compared(tiny):
    assert describe(tiny(seed=3).to_dict()) == "FedDIP, s_p 0.9, iid, T 6, seed 3"
    assert describe(tiny("fedavg", partition="shards").to_dict()) == "FedAvg, shards, T 6, seed 0"
    assert describe(tiny("snip", rules="released").to_dict()) == "SNIP, released, s_p 0.9, iid, T 6, seed 0"


@pytest.mark.slow
def test_a_method_with_questions_is_the_same_run_in_every_process(tmp_path, monkeypatch):
    """Its forms have no text of their own, and stand elsewhere in memory each time."""
    source = "from feddip_core import Method\nfrom feddip_core.communication import DENSE\n\n\n"
    source += 'class Mine(Method):\n    questions = {"score": {"g": DENSE}}\n'
    (tmp_path / "yours.py").write_text(source, "utf-8")
    code = "from feddip_core import Experiment; print(Experiment.preset('smoke', method='yours:Mine').run_id)"
    other = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert other.stdout.split() == [Experiment.preset("smoke", method="yours:Mine").run_id]
    sys.modules.pop("yours")
