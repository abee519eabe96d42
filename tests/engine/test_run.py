import subprocess
import sys

import pytest
import torch
from helpers import same

from feddip_core import run
from feddip_core.engine import run as running
from feddip_core.engine import sources


def test_what_run_hands_to_the_data(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(sources, "load", lambda *a: asked.append(a) or (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        run(tiny(normalisation="released"), data_dir="here")
    assert asked == [("fashion_mini", "here", "released")]


def test_a_device_that_is_not_there_is_refused_before_data_are_read(tiny, monkeypatch):
    monkeypatch.setattr(sources, "load", lambda *a: pytest.fail("data were read"))
    with pytest.raises(ValueError, match=r"device: 'cuda:99' is not allowed; this machine has cpu"):
        run(tiny(device="cuda:99"))


def test_same_seed_same_bits(tiny):
    exp = tiny()
    first = run(exp)
    torch.manual_seed(99)  # what happens to the global generators must not matter
    torch.rand(7)
    assert same(first, run(exp))
    assert not same(first, run(exp.replace(seed=1)))


def test_a_run_leaves_the_global_generator_and_threads_alone(tiny):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    torch.set_num_threads(2)
    try:
        run(tiny(rounds=1, model="alexnet", width=0.05))
        assert torch.equal(torch.rand(3), expected)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


BITS = """
import hashlib
from feddip_core import Experiment, run
def bits(model):
    settings = dict(rounds=2, width=0.05, clients=60, clients_per_round=2, local_epochs=1, model=model)
    r = run(Experiment.preset("smoke", **settings))
    tensors = b"".join(v.numpy().tobytes() for v in [*r.weights.values(), *r.mask.values()])
    return model, r.experiment.run_id, hashlib.sha256(tensors).hexdigest(), r.metrics.drop(columns="seconds").to_csv()
for model in ("lenet5", "alexnet", "resnet18"):
    print(*bits(model))
"""


@pytest.mark.slow
def test_same_seed_same_bits_in_another_process(capsys):
    other = subprocess.run([sys.executable, "-c", BITS], capture_output=True, encoding="utf-8", check=True).stdout
    exec(BITS, {})
    assert other == capsys.readouterr().out and other.count("resnet18") == 1


@pytest.mark.parametrize("partition", ["pathological", "shards", "dirichlet(0.1)"])
def test_every_partition_trains(tiny, partition):
    assert run(tiny(partition=partition, rounds=2)).metrics.train_loss.notna().all()


def test_the_network_of_a_run_is_the_one_that_was_measured(tiny, mini):
    for model, width in (("lenet5", 0.5), ("resnet18", 0.04)):
        r = run(tiny(model=model, width=width, rounds=2, clients=100))
        with torch.no_grad():
            correct = (r.network(mini.normalise(mini.x_test)).argmax(1) == mini.y_test).double().mean()
        assert float(correct) == pytest.approx(r.metrics.test_accuracy.iloc[-1], abs=0.0021)
        assert 0 <= r.metrics.test_accuracy.min() <= r.metrics.test_accuracy.max() <= 1


def test_metrics_have_their_columns(tiny):
    metrics = run(tiny(rounds=2)).metrics
    assert list(metrics.columns) == [
        "round", "test_accuracy", "test_loss", "train_loss", "sparsity", "delta", "lambda_", "learning_rate",
        "downlink_bits", "uplink_bits", "downlink_mebibits_released", "uplink_mebibits_released",
        "layer_zeros", "regrown", "dropped", "seconds",
    ]  # fmt: skip
    assert metrics["round"].tolist() == [1, 2]


@pytest.mark.parametrize("method", ["feddip", "snip"])
def test_a_model_that_diverged_is_pruned_all_the_same(tiny, method):
    diverged = run(tiny(method, learning_rate=1e6, rounds=4))
    assert diverged.diverged and not torch.isfinite(diverged.weights["fc1.weight"]).all()
    assert all((diverged.weights[k][~m] == 0).all() for k, m in diverged.mask.items())


def test_an_observer_sees_the_federation_the_state_and_the_round(tiny):
    seen = []
    result = run(tiny(rounds=2), observe=lambda *what: seen.append(what))
    assert [state.t for _, state, _ in seen] == [1, 2]
    federation, state, done = seen[-1]
    layout = federation.clients.layout
    assert all(torch.equal(v, result.weights[k]) for k, v in layout.views(state.w).items())
    assert torch.equal(layout.prune(done.w, state.m), state.w) and not torch.equal(done.w, state.w)
    assert done.average.clients == federation.select(1)


def test_a_callback_sees_every_round_once_also_if_the_run_resumes(tiny, tmp_path):
    exp, seen = tiny("fedavg", rounds=3), []

    def note(row):
        if len(seen) == 2:
            raise ConnectionError("nobody listens")
        seen.append(row.pop("round"))  # what it does to its row is its own affair

    with pytest.raises(ConnectionError):
        run(exp, out=tmp_path, on_round=note)
    result = run(exp, out=tmp_path, on_round=lambda row: seen.append(row["round"]))
    assert seen == [1, 2, 3]
    assert result.provenance["resumed"][0]["after_round"] == 2 and result.metrics["round"].tolist() == [1, 2, 3]


def test_a_watcher_is_shown_every_round_of_a_run_that_shows_its_progress(tiny, monkeypatch):
    shown = []
    monkeypatch.delenv("TQDM_DISABLE")
    monkeypatch.setattr(running, "tqdm", Bar)
    monkeypatch.setattr(running, "WATCHERS", [])
    running.watched_by(lambda exp: lambda rows, whole: shown.append((exp.seed, len(rows), whole)))
    running.watched_by(lambda exp: None)  # has nothing to show for this run
    run(tiny(rounds=2, seed=4))
    assert shown == [(4, 1, False), (4, 2, False), (4, 2, True)]
    run(tiny(rounds=2), progress=False)
    assert len(shown) == 3


class Bar:
    """tqdm's bar, as a terminal shows it."""

    def __init__(self, disable, **_):
        self.disable = bool(disable)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def update(self, *_):
        pass

    def set_postfix(self, **_):
        pass


@pytest.mark.slow
def test_importing_the_package_loads_no_plots_no_flower_and_no_torchvision():
    heavy = ("matplotlib", "flwr", "ray", "torchvision", "IPython", "ipywidgets", "jupyterlab", "sympy")
    look = f"print(feddip_core._curves(None), [m for m in {heavy!r} if m in sys.modules])"  # no curves: no notebook
    code = f"import sys, feddip_core; {look}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == "None []\n"
