import threading

import pytest

from feddip_core import background, load_runs, run
from feddip_core.background import Trained, Training


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
    opened = Trained.open(tmp_path / "ours" / exp.run_id)
    assert opened.metrics.columns.tolist() == ours.metrics.columns.tolist()
    assert opened.metrics["test_accuracy"].tolist() == ours.metrics["test_accuracy"].tolist()
    assert (opened.exp, opened.masks) == (exp, [])
    assert opened.provenance["started"] == ours.provenance["started"]


def test_stop_ends_it_before_the_next_client(tiny, monkeypatch):
    turns = []
    once = background.Federation.train_client
    monkeypatch.setattr(background.Federation, "train_client", lambda *a: (turns.append(1), once(*a))[1])

    def stop_after_two(training):
        if len(training.rows) == 2:
            training.stopping.set()

    training = trained(tiny(rounds=50, clients_per_round=4), stop_after_two)
    assert (len(training.rows), len(training.masks), training.over, training.error) == (2, 3, True, None)
    assert len(turns) == 2 * 4 + 1  # and that one was refused


def test_stop_in_the_middle_of_a_round_and_of_a_long_beginning(tiny, monkeypatch):
    calls, once = [], background.Federation.train_

    def third_call_is_stopped(self, *args, **how):
        calls.append(1)
        if len(calls) == 3:
            self.stop.set()
        return once(self, *args, **how)

    monkeypatch.setattr(background.Federation, "train_", third_call_is_stopped)
    assert len(trained(tiny(rounds=50, clients_per_round=8)).rows) == 0
    assert len(calls) == 3
    calls.clear()
    training = trained(tiny("prunefl", rounds=50))  # its beginning takes hundreds of passes
    assert (len(training.rows), training.masks, training.over, len(calls)) == (0, [], True, 3)


def test_a_failure_is_kept_for_whoever_waits(tiny, monkeypatch):
    def broken(*_):
        raise MemoryError("too large")

    monkeypatch.setattr(background.Stoppable, "round", broken)
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
