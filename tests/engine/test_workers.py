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
def test_a_run_begun_with_one_resumes_with_two(tiny, tmp_path):
    exp = tiny(rounds=4, clients=60)
    run(exp, out=tmp_path, until=2)
    assert same(run(exp), run(exp, out=tmp_path, workers=2))


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
