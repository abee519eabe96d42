"""`make gpu-check` works as far as a CPU can tell, and does not call a fault fine."""

from contextlib import contextmanager

import gpu_check
import pytest
import torch
import torch.nn.functional as F
from torch import cuda

NARROW = dict(width=0.05)


def test_without_cuda_it_says_so_and_checks_what_it_can(monkeypatch, capsys):
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    assert gpu_check.main(["--datasets", "fashion_mnist"]) == 0
    first, line = capsys.readouterr().out.splitlines()
    assert first.startswith("No CUDA device here") and line.startswith("ok   lenet5    no step waits for the host")


def test_a_step_that_waits_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    monkeypatch.setattr("feddip_core.methods.feddip.add_group_penalty_", lambda g, u, **how: float(u.norm()))
    assert gpu_check.main(["--datasets", "fashion_mnist"]) == 1
    assert "FAIL lenet5    a step waits for the host" in capsys.readouterr().out


@pytest.mark.parametrize("dataset", ["fashion_mnist", "cifar10", pytest.param("cifar100", marks=pytest.mark.slow)])
def test_other_kernels_stay_within_the_tolerances_and_another_computation_does_not(dataset, monkeypatch):
    computing = gpu_check.computing

    @contextmanager
    def without_onednn(exp):
        with computing(exp), torch.backends.mkldnn.flags(enabled=not exp.channels_last, allow_tf32=None):
            yield

    monkeypatch.setattr(gpu_check, "computing", without_onednn)
    data = gpu_check.images(dataset, gpu_check.SAMPLES, gpu_check.TESTED)
    here = gpu_check.experiment(dataset, **gpu_check.SMALL | NARROW)
    far = gpu_check.compared(here, here.replace(channels_last=True), data)
    assert all(far[what] <= most for what, most in gpu_check.TOLERANCES.items())
    far = gpu_check.compared(here, here.replace(weight_decay=0.05), data)
    assert far["weights"] > gpu_check.TOLERANCES["weights"]


def test_runs_are_compared_bit_by_bit():
    exp = gpu_check.experiment("fashion_mnist", **gpu_check.SMALL | NARROW)
    assert gpu_check.repeats(exp, gpu_check.images("fashion_mnist", 600, 10))


def test_the_stand_in_for_dropout_drops_as_many_and_is_put_back():
    before, x = F.dropout, torch.ones(1000)
    with gpu_check.dropout_drawn_on_the_cpu():
        torch.manual_seed(0)
        dropped = F.dropout(x, 0.5, True)
        assert set(dropped.tolist()) == {0.0, 2.0} and 400 < int((dropped == 0).sum()) < 600
        assert F.dropout(x, 0.5, False) is x
    assert F.dropout is before
