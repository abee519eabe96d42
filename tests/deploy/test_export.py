"""A finished run as files: every one of them gives PyTorch's logits, and the card says what they are."""

import copy
import json
import re
import subprocess
import sys

import numpy as np
import onnxruntime
import own_networks
import pytest
import torch
from forms import CASES, case, recorded

from feddip_core import Experiment, deploy, run
from feddip_core.deploy import file, source
from feddip_core.deploy.graph import Samples, Unsupported, graph_of
from feddip_core.deploy.onnx_file import onnx_bytes
from feddip_core.engine.records import folder_of
from feddip_core.export.command import main

FILES = ["README.md", "loader.py", "model.c", "model.js", "model.onnx", "model.safetensors"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of LeNet-5 that keeps a tenth, with its record."""
    out = tmp_path_factory.mktemp("runs")
    settings = dict(sparsity_initial=0.9, sparsity_target=0.9, rounds=1, clients=60, clients_per_round=1)
    exp = Experiment.preset("smoke", width=1.0, local_epochs=1, **settings)
    return run(exp, out=out), folder_of(exp, out)


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory):
    return finished[0].export(tmp_path_factory.mktemp("exported") / "model")


def printed_loader(card):
    """The loader as the card prints it, executed."""
    names = {}
    exec(re.findall(r"```python\n(.*?)```", card.read_text("utf-8"), re.DOTALL)[0], names)
    return names


def test_the_printed_loader_needs_nothing_of_ours_and_gives_the_runs_logits(finished, exported, mini):
    text = (exported / "loader.py").read_text("utf-8")
    assert len([line for line in text.splitlines() if line]) <= 30
    assert {line.split()[1].split(".")[0] for line in text.splitlines() if "import" in line} == {
        "json", "torch", "safetensors"
    }  # fmt: skip
    loader = printed_loader(exported / "README.md")
    about, tensors = loader["load"](exported / "model.safetensors")
    net = copy.deepcopy(finished[0].network)
    rounded = {k: v.half().float() if v.ndim > 1 else v for k, v in net.state_dict().items()}
    assert tensors.keys() == rounded.keys() and all(torch.equal(tensors[k], v) for k, v in rounded.items())
    net.load_state_dict(rounded)
    x = mini.x_test[:50]
    with torch.no_grad():
        assert torch.equal(loader["classify"](about, tensors, x), net(mini.normalise(x)))
    assert about["classes"][9] == "Ankle boot" and about["run_id"] == finished[0].experiment.run_id
    assert about["test_accuracy"] == finished[0].metrics["test_accuracy"].iloc[-1]


def test_a_record_and_its_run_are_the_same_files(finished, exported, tmp_path, capsys):
    assert main([str(finished[1]), str(tmp_path / "model")]) == 0
    assert sorted(p.name for p in exported.iterdir()) == FILES
    for name in FILES:
        assert (tmp_path / "model" / name).read_bytes() == (exported / name).read_bytes(), name
    assert "model.safetensors" in capsys.readouterr().out


def test_an_export_without_a_model_says_what_is_missing(tmp_path, capsys, tiny):
    with pytest.raises(SystemExit):
        main([str(tmp_path), str(tmp_path / "model")])
    assert "config.json" in capsys.readouterr().err and not (tmp_path / "model").exists()
    with pytest.raises(ValueError, match="has not reached its last round"):
        run(tiny(rounds=2), until=1).export(tmp_path / "model")


def test_the_card_says_what_the_model_is(finished, exported):
    text = (exported / "README.md").read_text("utf-8")
    metrics = finished[0].metrics.iloc[-1]
    assert f"test accuracy: {metrics['test_accuracy']:.4f}" in text and "license: mit" in text
    assert "its size does not fall with sparsity" in text
    kept = {k: int(finished[0].weights[k].half().count_nonzero()) for k in finished[0].mask}
    assert f"{sum(kept.values()):,} of its 61,470 layer weights are kept" in text and 6100 < sum(kept.values()) <= 6147
    for k, v in finished[0].mask.items():
        assert (
            f"| {k.removesuffix('.weight')} | {' × '.join(map(str, v.shape))} | {kept[k]:,} of {v.numel():,} |" in text
        )
    for path in exported.iterdir():
        assert path.name == "README.md" or path.name in text


# A tenth and a hundredth of 61,470 weights, and 236 biases: a trained network, and a random one with even layers.
@pytest.mark.parametrize(("sparsity", "most"), [(0.9, 20_000), (0.99, 3_000)])
def test_lenet_5_is_small(sparsity, most, monkeypatch):
    monkeypatch.setitem(CASES, "lenet5", (*CASES["lenet5"][:2], sparsity))
    for graph in (recorded(sparsity), case("lenet5")[0]):
        assert sum(part.nbytes for part in file.pack(graph, 16)[1].values()) <= most


@pytest.mark.parametrize("name", CASES)
def test_a_file_and_onnx_give_pytorchs_logits(name, tmp_path):
    graph, x = case(name)
    for bits in (16, 32):
        (tmp_path / "model.safetensors").write_bytes(file.to_bytes(graph, bits, note="mine"))
        about, again = deploy.load(tmp_path / "model.safetensors")
        assert about["note"] == "mine" and again.steps == graph.steps and again.samples == graph.samples
        assert torch.equal(again(x), graph.rounded(bits)(x))
    session = onnxruntime.InferenceSession(onnx_bytes(graph), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"samples": x.float().numpy()})
    assert np.abs(logits - graph(x).numpy()).max() < 1e-4


def test_an_own_network_with_own_data_is_exported(tiny, tmp_path):
    own = dict(dataset="own_networks:samples", model="own_networks:Residual", partition="given")
    result = run(tiny(rounds=1, clients=4, width=1.0, **own))
    done = source.finished(result)
    assert done.graph.samples == Samples((1, 8, 8)) and done.classes == ["0", "1", "2"]
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(done.graph(x), result.network(x))


@pytest.mark.parametrize(("name", "words"), [
    ("Methods", "Methods: the operation 'sigmoid' is not supported; there are conv2d"),
    ("TwoEnds", "TwoEnds: the operation 'cat' is not supported"),
    ("Uneven", "Uneven: add is supported for two values of one shape"),
    ("ChangedInPlace", "the list of operations does not give the network's logits"),
    ("DataDependent", "the network cannot be written as a list of operations"),
])  # fmt: skip
def test_what_no_form_has_is_named(name, words):
    with pytest.raises(Unsupported, match=re.escape(words)):
        graph_of(getattr(own_networks, name)(), Samples((1, 8, 8)))


@pytest.mark.parametrize(("layer", "words"), [
    (torch.nn.GroupNorm(2, 4), "1 (GroupNorm): the operation 'group_norm' is not supported"),
    (torch.nn.MaxPool2d(3, ceil_mode=True), "1 (MaxPool2d): max_pool2d with ceil_mode=True is not supported"),
    (torch.nn.Conv2d(4, 4, 2, padding="same"), "1 (Conv2d): padding='same' with a kernel of [2, 2] is not"),
])  # fmt: skip
def test_a_layer_that_is_not_supported_is_named(layer, words):
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), layer, torch.nn.Flatten(), torch.nn.LazyLinear(3))
    net(torch.zeros(2, 1, 8, 8))
    with pytest.raises(Unsupported, match=re.escape(words)):
        graph_of(net, Samples((1, 8, 8)))


def test_weights_beyond_sixteen_bits_are_refused():
    graph, _ = case("own")
    graph.tensors["out.weight"][0, 0] = 1e6
    with pytest.raises(ValueError, match=r"out\.weight: it holds a number that is not finite in 16 bits"):
        graph.rounded(16)
    with pytest.raises(ValueError, match="bits: 8 is not allowed; it must be 16 or 32"):
        graph.rounded(8)


@pytest.mark.slow
def test_the_command_can_be_called(finished, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "feddip_core.export", finished[1], tmp_path / "m", "--bits", "32"],
        capture_output=True, encoding="utf-8", check=True,
    )  # fmt: skip
    assert "README.md" in done.stdout
    assert (
        json.loads((tmp_path / "m" / "model.js").read_text("utf-8").split("feddip.network(")[1].split(");\n")[0])[
            "bits"
        ]
        == 32
    )
