"""Threads, precision and determinism: set for a run, and put back after it."""

import os

import pytest
import torch

from feddip_core import Experiment
from feddip_core.engine.computing import check_device, computing, numerics


def deterministic():
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_on_a_gpu_algorithms_are_deterministic_where_they_can_be(device):
    """A run names an operation that has no such kernel instead of stopping."""
    assert deterministic() == (False, False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    with computing(Experiment(device=device)):
        assert deterministic() == (True, True)
        assert numerics()["deterministic_algorithms"] is True
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert deterministic() == (False, False)


def test_what_the_user_chose_for_cublas_stays():
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    with computing(Experiment(device="cuda")):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("before", [(True, False), (True, True), (False, False)])
def test_what_was_set_before_is_put_back_also_after_an_error(before):
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        with pytest.raises(InterruptedError), computing(Experiment(device="cuda")):
            assert deterministic() == (True, True)
            raise InterruptedError
        assert deterministic() == before
        with computing(Experiment()):
            assert deterministic() == before  # on a CPU the user's choice is left alone
    finally:
        torch.use_deterministic_algorithms(False)


def test_on_a_cpu_nothing_is_changed_but_threads():
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    threads = torch.get_num_threads()
    with computing(Experiment(threads=2)):
        assert deterministic() == (False, False)
        assert torch.get_num_threads() == 2
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert torch.get_num_threads() == threads


def test_convolutions_may_not_choose_by_timing():
    with computing(Experiment()):
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
        assert not torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "highest"
    with computing(Experiment(tf32=True)):
        assert torch.backends.cudnn.allow_tf32 and torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize(
    ("there", "good", "bad"), [(0, ["cpu"], ["cuda", "cuda:0"]), (2, ["cpu", "cuda", "cuda:1"], ["cuda:2"])]
)
def test_a_device_must_be_on_this_machine(there, good, bad, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    for device in good:
        check_device(Experiment(device=device))
    for device in bad:
        with pytest.raises(ValueError, match=f"device: {device!r} is not allowed; this machine has cpu"):
            check_device(Experiment(device=device))
