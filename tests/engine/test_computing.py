"""Threads, precision and determinism: set for a run, and put back after it."""

import os
from contextlib import ExitStack

import pytest
import torch
from helpers import same

from feddip_core import Experiment, load_model, run
from feddip_core.engine import run as running
from feddip_core.engine.computing import check_device, computing, numerics
from feddip_core.engine.records import folder_of


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
    finally:
        torch.use_deterministic_algorithms(False)


def test_on_a_cpu_nothing_is_set_for_a_gpu():
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    threads = torch.get_num_threads()
    with computing(Experiment(threads=2)):
        assert deterministic() == (False, False)
        assert torch.get_num_threads() == 2
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert torch.get_num_threads() == threads


def test_what_the_caller_has_set_neither_changes_a_run_nor_is_changed_by_it(tiny, tmp_path):
    exp = tiny(rounds=2, gradient="eager", clients=60)
    plain = run(exp)
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.float32)
        stack.callback(torch.use_deterministic_algorithms, False)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False, allow_tf32=None))
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.device("meta"))
        before = around()
        other = run(exp, out=tmp_path, until=1)
        other = run(exp, out=tmp_path)
        net = load_model(folder_of(exp, tmp_path))
        assert around() == before == (torch.float64, (True, False), False, True, True, False, "meta")
    assert same(other, plain)
    assert torch.equal(net.fc1.weight, plain.weights["fc1.weight"]) and net.fc1.weight.requires_grad


def around():
    """What of torch's state a caller may have set."""
    return (
        torch.get_default_dtype(), deterministic(), torch.backends.mkldnn.enabled, torch.is_autocast_enabled("cpu"),
        torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.empty(0).device.type,
    )  # fmt: skip


def test_a_run_is_resumed_with_the_numerics_that_it_began_with(tiny, tmp_path, monkeypatch):
    exp = tiny("fedavg", rounds=2)
    run(exp, out=tmp_path, until=1)
    monkeypatch.setattr(running, "numerics", lambda: numerics() | {"mkldnn": "off"})
    with pytest.raises(
        ValueError, match=r"mkldnn: .* was started with True, but here it is off; resume it where it was"
    ):
        run(exp, out=tmp_path)


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
