import multiprocessing
import os
import signal
import subprocess
import tempfile

import psutil
import pytest
import torch
from helpers import same, trained

from feddip_core import run
from feddip_core.engine import workers
from feddip_core.engine.assembly import assemble


@pytest.mark.slow
# FedDST's clients have masks of their own, PruneFL's keep something from round to round, ResNet-18 has statistics.
@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    dict(method="prunefl"), dict(method="feddst", rules="released", clients=4), dict(model="resnet18", width=0.05),
    dict(method="feddst", model="resnet18", width=0.05, batch_norm="local"),
], ids=lambda s: "-".join(map(str, s.values())))  # fmt: skip
def test_any_number_of_workers_gives_the_same_bits(tiny, settings):
    exp = tiny(**({"rounds": 3, "clients": 60, "reconfigure_every": 2} | settings))
    assert same(run(exp), run(exp, workers=2))


@pytest.mark.slow
def test_a_run_killed_with_its_workers_leaves_nothing_behind_and_resumes_with_one(tiny, tmp_path):
    exp, read = tiny(rounds=4, clients=60), os.pipe()
    process = multiprocessing.get_context("fork").Process(target=killed, args=(exp, tmp_path, read[1]))
    process.start()
    os.close(read[1])
    with os.fdopen(read[0], "rb") as said:
        said.read()  # until the last worker, which has it as its stderr, is gone too
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list((tmp_path / "temporary").iterdir()) == []
    assert same(run(exp, out=tmp_path / "runs"), run(exp))


def killed(exp, folder, pipe):
    """A run with two workers that kills itself after its second round, when both have trained."""
    os.dup2(pipe, 2)
    os.close(pipe)
    (folder / "temporary").mkdir()
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "temporary")

    def last(row):
        if row["round"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    run(exp, out=folder / "runs", workers=2, on_round=last)


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_its_client_trained_again(tiny, mini, monkeypatch):
    """One before it is asked, the other when it has been."""
    # At full width its answer is larger than a pipe holds: one that has been asked cannot end before it is read.
    federation = assemble(tiny(clients=60, width=1.0), mini)
    state = federation.start()
    assert state.w.nbytes > 2 * 65_536
    expected = [trained(federation, state, n) for n in (3, 4, 5, 6)]
    receive = workers._receive
    with workers.Workers(federation, 2) as pool:
        first, second = pool.processes

        def kill(pipe):
            if pipe is second.stdout:
                os.kill(second.pid, signal.SIGKILL)
            return receive(pipe)

        os.kill(first.pid, signal.SIGKILL)
        monkeypatch.setattr(workers, "_receive", kill)
        uploads = list(pool.train(state, [3, 4, 5, 6]))
        assert all(torch.equal(upload.values["w"], w) for upload, w in zip(uploads, expected, strict=True))
        assert not {first, second} & set(pool.processes)
        assert first.returncode == second.returncode == -signal.SIGKILL
        processes = list(pool.processes)
    assert all(process.returncode is not None for process in processes)


def test_one_that_always_dies_is_no_accident(tiny, mini, monkeypatch):
    federation = assemble(tiny(clients=60), mini)
    started = []
    with workers.Workers(federation, 1) as pool:

        def stillborn():
            started.append(subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            return started[-1]

        monkeypatch.setattr(pool, "_start", stillborn)
        pool.processes[0].kill()
        with pytest.raises(RuntimeError, match="client 7: its worker died 3 times in a row"):
            list(pool.train(federation.start(), [7]))


@pytest.mark.slow
def test_an_error_in_a_worker_is_told_and_not_tried_again(tiny, mini):
    federation = assemble(tiny(clients=60), mini)
    with workers.Workers(federation, 1) as pool, pytest.raises(RuntimeError, match=r"client 999 failed .* IndexError"):
        list(pool.train(federation.start(), [999]))


@pytest.mark.slow
def test_the_data_are_mapped_not_copied_and_have_no_name_to_be_left_behind(tiny, mini, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    federation = assemble(tiny(clients=60), mini)
    with workers.Workers(federation, 1) as pool:
        assert list(tmp_path.iterdir()) == []  # before the first round: whoever is killed now or later leaves nothing
        list(pool.train(federation.start(), [0]))
        size, file = os.fstat(pool.data.fileno()).st_size, os.readlink(f"/proc/self/fd/{pool.data.fileno()}")
        maps = psutil.Process(pool.processes[0].pid).memory_maps(grouped=False)
        mapped = [m for m in maps if m.path and file.startswith(m.path)]
        assert size > mini.x_train.numel() and [("s" in m.perms, m.size >= size) for m in mapped] == [(True, True)]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given, settings", [(0, {}), (True, {}), (1.5, {}), (2, dict(threads=2))])
def test_a_number_that_makes_no_sense_is_refused(tiny, given, settings):
    with pytest.raises(ValueError, match=f"workers: {given} is not allowed"):
        run(tiny(**settings), workers=given)
