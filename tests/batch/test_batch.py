import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
from filelock import FileLock

from feddip_core import Experiment, run
from feddip_core.batch import command, estimate, jobs
from feddip_core.engine import records
from feddip_core.engine.sources import MINI
from feddip_core.methods import PruneFL

SHORT = ["--set", "rounds=2", "local_epochs=1"]
TESTS = Path(__file__).parent.parent
LIMIT = 1200  # seconds, for a process that hangs; a busy machine may take long


def experiment(method="feddip", **settings):
    return Experiment.preset("smoke", method=method, **(dict(rounds=2, local_epochs=1) | settings))


def start(*words):
    command = [sys.executable, "-m", "feddip_core.batch", *map(str, words)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
        # A shell that put the tests into the background would have them, and so this process, ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def test_every_combination_once():
    options = command.parser().parse_args(["--methods", "all", "--seeds", "0", "1", "--partitions", "iid", "shards"])
    experiments = command.chosen(options)
    assert len(experiments) == 4 * 18
    assert [(e.method, e.partition, e.seed) for e in experiments[:2]] == [("fedavg", "iid", 0), ("fedprox", "iid", 0)]
    # FedAvg has no mask, so that it is the same run under both rules.
    options = command.parser().parse_args(["--methods", "fedavg", "feddp", "--rules", "paper", "released"])
    assert [(e.method, e.rules) for e in command.chosen(options)] == [
        ("fedavg", "released"), ("feddp", "paper"), ("feddp", "released")
    ]  # fmt: skip


def test_the_runs_of_a_result_notebook():
    options = command.parser().parse_args(["--results", "non_iid", "extreme_sparsity", "--preset", "paper", "--dataset",
                                         "fashion_mnist", "--seeds", "0", "1"])  # fmt: skip
    found = [(e.method, e.partition, getattr(e, "sparsity_target", 0.0), e.seed) for e in command.chosen(options)]
    assert found[:6] == [
        ("fedavg", "pathological", 0.0, 0), ("fedprox", "pathological", 0.0, 0),
        ("feddip_prox", "pathological", 0.9, 0), ("feddip", "iid", 0.9, 0),
        ("feddip", "iid", 0.95, 0), ("feddip", "iid", 0.99, 0),
    ]  # fmt: skip
    assert [seed for *_, seed in found] == [0] * 6 + [1] * 6
    options.set = ["device=cuda", "channels_last=true"]
    assert {(e.device, e.channels_last) for e in command.chosen(options)} == {("cuda", True)}


def test_settings_from_the_command_line():
    given = ["learning_rate=1e-3", "rounds=7", "regrowth=dense_memory", "width=0.5", "stacked=true"]
    assert dict(map(command._setting, given)) == dict(
        learning_rate=0.001, rounds=7, regrowth="dense_memory", width=0.5, stacked=True
    )  # fmt: skip


def test_data_of_your_own(tmp_path):
    path = tmp_path / "own.npz"
    path.write_bytes(MINI.read_bytes())
    options = command.parser().parse_args(["--dataset", str(path), "--set", "model=lenet5", "rounds=1"])
    job = jobs.Job(command.chosen(options)[0], "smoke", tmp_path)
    assert job.settings == dict(model="lenet5", rounds=1)
    own = Experiment.preset("smoke", dataset=str(path), method="feddip", **job.settings)
    assert own.run_id == job.exp.run_id


@pytest.mark.parametrize(
    "words, message",
    [
        (["--results", "fig9"], "result: 'fig9' is not allowed; it must be one of accuracy"),
        (["--methods", "sgd"], "method: 'sgd' is not allowed; it must be one of fedavg"),
        (["--set", "rouns=3"], "set: 'rouns' is not allowed; feddip has aggregation, batch_norm"),
        (["--set", "rounds=many"], "rounds: 'many' is not allowed; it must be a whole number of at least 1"),
        (["--methods", "snip", "--set", "lambda_max=1"], "set: 'lambda_max' is not allowed; snip has"),
        (["--methods", "nowhere:Mine"], "method: 'nowhere:Mine' is not allowed; it cannot be imported"),
        (["--set", "model"], "set: 'model' is not allowed; it must be name=value"),
        (["--set", "width=["], "set: 'width=[' is not allowed; its value cannot be read"),
        (["--results", "accuracy", "--set", "rounds=3"], "set: 'rounds' is not allowed with --results; it must be one"),
        (["--results", "accuracy", "--seeds", "7"], "seeds: [7] is not allowed; the results have (0, 1)"),
        (["--jobs", "0"], "'0' is not allowed; it must be a whole number of at least 1"),
        (["--preset", "tiny"], "invalid choice: 'tiny'"),
        (["--dataset", "none.npz", "--set", "model=lenet5"], "none.npz' is not allowed; there is no such file"),
    ],
)
def test_options_that_make_no_sense_stop_it_before_any_work(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main([*words, "--out", str(tmp_path)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_job_tells_the_notebook_no_more_than_it_must_know(tmp_path):
    exp = experiment(seed=3, partition="shards", rules="released", regrowth="paper")
    job = jobs.Job(exp, "smoke", tmp_path)
    assert job.settings == dict(rounds=2, local_epochs=1, regrowth="paper")
    assert str(job) == (
        f"{exp.run_id} FedDIP shards released rounds=2 local_epochs=1 regrowth=paper, seed 3"
    )  # fmt: skip


def test_a_dry_run_lists_what_is_left_and_runs_nothing(tmp_path, capsys):
    run(experiment("snip"), out=tmp_path / "runs")
    run(experiment(), out=tmp_path / "runs", until=1)
    words = ["--methods", "snip", "feddip", "fedavg", *SHORT, "--out", str(tmp_path), "--dry-run"]
    assert command.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" rounds ")[0].split()[-1] for line in lines[:3]] == ["2/2", "1/2", "0/2"]
    assert lines[0].endswith(" 0.0 min") and lines[3].startswith("3 runs, about 0.0 hours")
    assert len(records.record_folders(tmp_path / "runs")) == 2


def test_a_dry_run_says_what_would_fail(tmp_path, capsys):
    bad, good = experiment("snip"), experiment("fedavg")
    place = tmp_path / "runs" / records.folder_name(bad)
    place.parent.mkdir(parents=True)
    place.write_text("in the way of the record's folder", "utf-8")
    words = ["--methods", "snip", "fedavg", *SHORT, "--out", str(tmp_path), "--dry-run"]
    assert command.main(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"would fail: {bad.run_id} SNIP") and f"{place} is in the way" in said.err
    assert good.run_id in said.out and bad.run_id not in said.out and "1 runs, about" in said.out
    assert command.main([*words, "--set", "clients=99999"]) == 2
    assert capsys.readouterr().err.count("ValueError: clients: 99999 is not allowed; 6000 training") == 2


def test_a_failure_before_the_notebook_is_told_in_papermills_words(tmp_path):
    said = io.BytesIO()
    job = jobs.Job(experiment(), "smoke", tmp_path, reason="papermill ended with 1", said=said)
    assert job.last_words() == ["papermill ended with 1"]
    said.write(b"Traceback\n  one\n\n  two\n\x1b[31mNoSuchKernel: python3\x1b[0m\n")
    assert job.last_words(2) == ["  two", "NoSuchKernel: python3"]


def test_the_estimate_comes_from_records_or_from_a_few_steps(tmp_path):
    """On a clock that shows a second more at every look: four steps take one, and so does a batch of the test."""
    exp = experiment()
    with mock.patch.object(estimate, "time", mock.Mock(perf_counter=itertools.count().__next__)):
        measured = estimate.seconds_per_round(exp, tmp_path)
    assert measured == 3 * 19 * 0.25 + 1000 / 500  # ten clients have 600 images each, in 19 batches; 500 are tested
    metrics = run(exp, out=tmp_path / "runs").metrics
    assert estimate.seconds_per_round(exp.replace(seed=5), tmp_path) == pytest.approx(metrics["seconds"].median())


@pytest.mark.slow
def test_a_failed_run_is_reported_and_the_others_are_unharmed(tmp_path, capsys):
    tmp_path = tmp_path / "{seed} and {braces"  # to Papermill a template
    bad, good = experiment("feddip"), experiment("fedavg")
    place = tmp_path / "runs" / records.folder_name(bad)
    place.parent.mkdir(parents=True)
    place.write_text("in the way of the record's folder", "utf-8")
    words = ["--methods", "feddip", "fedavg", *SHORT, "--jobs", "2", "--out", str(tmp_path)]
    assert command.main(words) == 1
    error = capsys.readouterr().err
    assert f"failed: {bad.run_id} FedDIP" in error
    assert f"  FileExistsError: [Errno 17] File exists: '{place}'\n  see" in error  # the last line of several
    assert len(error.splitlines()) > 5
    assert f"see {tmp_path}/notebooks/feddip-seed0-{bad.run_id}.ipynb" in error
    assert (tmp_path / "notebooks" / f"feddip-seed0-{bad.run_id}.ipynb").exists()
    assert records.progress(good, tmp_path / "runs") == (2, True)

    place.unlink()
    stamp = (records.folder_of(good, tmp_path / "runs") / "provenance.json").read_bytes()
    assert command.main(words) == 0
    assert "1 done before, 1 done now" in capsys.readouterr().out
    assert (records.folder_of(good, tmp_path / "runs") / "provenance.json").read_bytes() == stamp


@pytest.mark.slow
def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path, capsys):
    exp = experiment()
    folder = records.folder_of(exp, tmp_path / "runs")
    folder.mkdir(parents=True)
    with FileLock(folder / ".lock"):
        with pytest.raises(records.RecordInUse, match="another process is working on this run"):
            run(exp, out=tmp_path / "runs")
        assert command.main([*SHORT, "--out", str(tmp_path)]) == 3
    assert f"left to another process: {exp.run_id}" in capsys.readouterr().err
    assert run(exp, out=tmp_path / "runs").provenance["rounds_done"] == 2


def test_the_notebook_of_the_process_that_has_the_run_is_no_failure_of_this_one(tmp_path):
    """Both write to one notebook: the error of the one that came too late may be gone when it is looked for."""
    exp = experiment(rounds=2)
    folder = records.folder_of(exp, tmp_path / "runs")
    folder.mkdir(parents=True)
    states = {}
    for held in (True, False):
        job = jobs.Job(exp, "smoke", tmp_path, state="running", process=subprocess.Popen(["false"]))
        job.process.wait()
        with FileLock(folder / ".lock") if held else nullcontext():
            job.look()
        states[held] = job.state
    assert states == {True: "elsewhere", False: "failed"}
    assert not records.taken(experiment(rounds=3), tmp_path / "runs")


@pytest.fixture
def waits(tmp_path, monkeypatch):
    """A file; as long as it is there, the third round of `own_methods:Waits` does not end."""
    file, path = tmp_path / "wait", [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("FEDDIP_WAITS", str(file))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    file.touch()
    return file


WAITS = ["--methods", "own_methods:Waits", "--set", "rounds=4", "local_epochs=1"]


@pytest.mark.slow
def test_two_batches_never_take_the_same_run(tmp_path, waits):
    both = [start(*WAITS, "--out", tmp_path) for _ in range(2)]
    while all(process.poll() is None for process in both):  # one has the run and waits, the other finds it taken
        time.sleep(0.05)
    waits.unlink()
    said = [process.communicate(timeout=LIMIT)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 3], said
    assert sum(text.count("done: ") for text in said) == 1, said
    exp = experiment("own_methods:Waits", rounds=4)
    kept = json.loads((records.folder_of(exp, tmp_path / "runs") / "provenance.json").read_text("utf-8"))
    assert kept["rounds_done"] == 4 and "resumed" not in kept


@pytest.mark.slow
def test_ctrl_c_stops_it_cleanly_and_the_same_command_resumes(tmp_path, waits):
    exp, words = experiment("own_methods:Waits", rounds=4), [*WAITS, "--out", tmp_path]
    process = start(*words)
    while not records.progress(exp, tmp_path / "runs")[0] and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    said = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 130, said
    assert "1 runs are not done; the same command resumes them" in said and "Traceback" not in said
    done, whole = records.progress(exp, tmp_path / "runs")
    assert 0 < done < 3 and not whole
    assert not records.taken(exp, tmp_path / "runs")  # nobody is left
    waits.unlink()
    process = start(*words)
    said = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 0, said
    kept = json.loads((records.folder_of(exp, tmp_path / "runs") / "provenance.json").read_text("utf-8"))
    assert kept["rounds_done"] == 4 and kept["resumed"][0]["after_round"] == done


def test_a_module_in_the_working_folder_is_found_by_the_kernel(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: started.append(env["PYTHONPATH"]))
    monkeypatch.setenv("PYTHONPATH", "given")
    monkeypatch.chdir(tmp_path)
    jobs.Job(experiment(), "smoke", tmp_path).start()
    assert started == [os.pathsep.join([str(jobs.PACKAGE.parent), "given", str(tmp_path)])]


def test_a_plan_of_prunefl_does_not_search_its_first_mask(monkeypatch):
    monkeypatch.setattr(PruneFL, "find_mask", lambda *_, **__: pytest.fail("it was searched"))
    assert estimate._measured(experiment("prunefl"), "", steps=1) > 0


def test_the_commands_for_a_gpu_are_understood():
    """Those of the first notebook: the paper's CIFAR columns, each run once, on CUDA."""
    page = (TESTS.parent / "notebooks" / "00_start_here.ipynb").read_text("utf-8")
    lines = re.findall(r"python -m feddip_core\.batch (.*?)\\n", page)
    assert [re.search(r"--dataset (\w+)", line)[1] for line in lines] == ["cifar10", "cifar100"]
    for line in lines:
        exps = command.chosen(command.parser().parse_args(line.split()))
        assert len(exps) == 12 and {exp.device for exp in exps} == {"cuda"}
        assert not any(exp.differences_from_paper().keys() - {"sparsity_target"} for exp in exps)
