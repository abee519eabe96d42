"""A network with sparse layers says what the dense one says, and replaces what it should."""

import pytest
import torch
from torch import nn

from feddip_core import models
from feddip_core.deploy import sparse as module
from feddip_core.deploy.sparse import sparse

IMAGE = {"lenet5": (1, 28), "alexnet": (3, 32), "resnet18": (3, 32)}


@pytest.fixture
def low_limits(monkeypatch):
    """Narrow networks, whose layers are replaced as wide ones are."""
    for name in ("LINEAR_WEIGHTS", "CONV_WEIGHTS"):
        monkeypatch.setattr(module, name, 100)


def masked(net, s, seed=0):
    """With random zeros in every prunable weight, and statistics of batch norms that are not trivial."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in models.prunable(net):
            w = net.get_parameter(name)
            w *= torch.rand(w.shape, generator=generator) >= s
        for v in net.buffers():
            if v.is_floating_point():
                v.uniform_(0.5, 1.5, generator=generator)
    return net.eval()


def same(net, fast, x):
    """In double precision, where rounding is far below what a wrong weight would change."""
    with torch.inference_mode():
        expected, found = net(x), fast(x)
    assert found.shape == expected.shape and found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", IMAGE)
@pytest.mark.parametrize("s", [0.92, 0.99])
def test_the_same_outputs_from_every_network(name, s, batch, low_limits, double_precision):
    channels, size = IMAGE[name]
    net = masked(models.build(name, 10, width=0.25, channels=channels, size=size), s)
    fast, report = sparse(net)
    assert report["now"].str.contains("CSR|shrunk").sum() >= 3
    same(net, fast, torch.randn(batch, channels, size, size))


def without_channels(net, share=0.6):
    """Whole channels set to zero, as PruneTrain leaves them: no weight into them, none out of them."""
    layers = [v for v in net.modules() if isinstance(v, nn.Linear | nn.Conv2d)]
    with torch.no_grad():
        for layer in layers[:-1]:
            layer.weight[: int(share * len(layer.weight))] = 0
        for layer in layers[1:]:
            layer.weight[:, : int(share * layer.weight.shape[1])] = 0
    return masked(net, 0)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", IMAGE)
def test_channels_that_are_zero_leave_smaller_layers(name, batch, low_limits, double_precision):
    channels, size = IMAGE[name]
    net = without_channels(models.build(name, 10, width=0.25, channels=channels, size=size))
    fast, report = sparse(net)
    shrunk = report["now"].str.startswith("shrunk")
    assert shrunk.sum() >= len(report) - 1 and not report["now"].str.contains("CSR").any()
    kept = [v.inner.weight.numel() for v in fast.modules() if isinstance(v, module.Shrunk)]
    assert sum(kept) < 0.3 * report["weights"][shrunk].sum()
    same(net, fast, torch.randn(batch, channels, size, size))


def test_only_large_layers_are_replaced_and_the_report_says_why():
    net = masked(models.build("alexnet", 10), 0.9)
    fast, report = sparse(net)
    assert report["now"].to_dict() == {
        "conv1": "as it was",
        **{f"conv{i}": "CSR for single images" for i in (2, 3, 4, 5)},
        "fc1": "CSR", "fc2": "CSR", "fc3": "as it was",
    }  # fmt: skip
    assert report.loc["fc3", "why"] == "40,960 weights are too few: it can pay from 500,000"
    assert report.loc["fc2", "sparsity"] == pytest.approx(0.9, abs=1e-3)
    assert fast.fc2.weight.values().numel() == net.fc2.weight.count_nonzero()
    assert isinstance(net.fc2, nn.Linear), "the network itself must not change"
    lenet = sparse(masked(models.build("lenet5", 10), 0.99))[1]
    assert (lenet["now"] == "as it was").all()


@pytest.mark.parametrize(("layer", "shape"), [
    (nn.Conv2d(4, 8, 3, padding="same", bias=False), (1, 4, 7, 6)),
    (nn.Conv2d(4, 8, (3, 2), stride=(2, 1), padding=(0, 1)), (1, 4, 9, 6)),
    (nn.Conv2d(4, 8, 3, dilation=2), (1, 4, 9, 9)),
    (nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (1, 4, 9, 9)),
    (nn.Conv2d(4, 8, 3, groups=2), (1, 4, 9, 9)),
    (nn.Conv2d(4, 8, 3), (4, 9, 9)),
    (nn.Linear(20, 30, bias=False), (20,)),
    (nn.Linear(20, 30), (2, 3, 20)),
    (nn.Linear(20, 30), (0, 20)),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("s", [0.95, 1.0], ids=["sparse", "empty"])
def test_every_kind_of_layer_and_input(layer, shape, s, low_limits):
    net = masked(nn.Sequential(layer), s).double()
    x = torch.randn(shape, dtype=torch.float64)
    same(net, sparse(net)[0], x)
    same(net[0], sparse(net[0])[0], x)


def test_a_layer_in_two_places_stays_one_and_others_are_left(low_limits, double_precision):
    layer = nn.Linear(16, 16)
    attention = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)  # it uses a weight without calling its layer
    net = masked(nn.Sequential(layer, attention, layer), 0.95)
    fast, report = sparse(net)
    assert fast[0] is fast[2] and isinstance(fast[0], module.LinearCSR | module.Shrunk)
    assert report.loc["1.linear1", "why"] == "its TransformerEncoderLayer reads its weight"
    assert "1.self_attn.out_proj" not in report.index
    same(net, fast, torch.randn(3, 4, 16))
