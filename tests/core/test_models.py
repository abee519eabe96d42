import pytest
import torch
import torch.nn.functional as F
from torch import nn

from feddip_core import Experiment, masks, models
from feddip_core.engine import networks
from feddip_core.layout import Layout

CASES = {  # parameters, prunable weights, prunable layers, kept at s_p, s_p
    "lenet5": (10, 61_706, 61_470, 5, 6_147, 0.9),
    "alexnet": (10, 23_272_266, 23_262_912, 8, 2_326_291, 0.9),
    "resnet18": (100, 11_220_132, 11_038_400, 18, 2_207_680, 0.8),
}


@pytest.mark.parametrize("name", ["lenet5", "resnet18", pytest.param("alexnet", marks=pytest.mark.slow)])
def test_parameters_are_the_papers(name):
    classes, n, n_w, layers, kept, s_p = CASES[name]
    with torch.device("meta"):  # which spares the draws
        layout = Layout.of(models.build(name, classes))
    assert layout.size == n
    assert len(layout.prunable) == layers
    weights = {k: torch.rand(shape) for k, shape in layout.prunable_shapes.items()}
    assert sum(v.numel() for v in weights.values()) == n_w
    assert masks.kept(masks.magnitude_mask(weights, s_p)) == kept


def test_layers_have_the_papers_sizes():
    layouts = {name: Layout.of(models.build(name, case[0])) for name, case in CASES.items()}
    sizes = {name: [s.numel() for s in layout.prunable_shapes.values()] for name, layout in layouts.items()}
    assert sizes["lenet5"] == [150, 2400, 48000, 10080, 840]
    assert sizes["alexnet"] == [1728, 110592, 663552, 884736, 589824, 4194304, 16777216, 40960]
    stages = [*[36864] * 4, 73728, *[147456] * 3, 294912, *[589824] * 3, 1179648, *[2359296] * 3]
    assert sizes["resnet18"] == [1728, *stages, 51200]


@pytest.mark.slow
def test_resnet_keeps_its_shortcuts_and_norms():
    with torch.device("meta"):
        net = models.build("resnet18", 100)
    shortcuts = {k: v.numel() for k, v in net.named_parameters() if "shortcut.0" in k}
    assert sorted(shortcuts.values()) == [8192, 32768, 131072]
    assert not set(shortcuts) & set(models.prunable(net))
    assert Layout.of(net).statistics.size == 9_600
    norms = [m for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) == 20
    assert sum(p.numel() for m in norms for p in m.parameters()) == 9_600
    # At s = 0.8 of the prunable weights 2.4 million parameters are left, not the 2.2 million of the paper's table.
    layout = Layout.of(net)
    m = masks.magnitude_mask({k: torch.rand(s) for k, s in layout.prunable_shapes.items()}, 0.8)
    assert int(layout.flat_mask(m, like=torch.empty(layout.size)).sum()) == 2_389_412


class Own(nn.Module):
    """A network of one's own, with a layer whose name has "shortcut" in it."""

    def __init__(self, *exempt):
        super().__init__()
        self.conv, self.shortcut = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 2)
        if exempt:
            self.exempt = exempt

    def forward(self, x):
        x = self.norm(self.conv(x) + self.shortcut(x)[..., 1:-1, 1:-1])
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_a_shortcut_of_ones_own_is_pruned_unless_the_network_says_otherwise():
    assert models.prunable(Own()) == ["conv.weight", "shortcut.weight", "head.weight"]
    assert models.prunable(Own("shortcut")) == ["conv.weight", "head.weight"]
    assert models.prunable(Own("shortcut", "head")) == ["conv.weight"]
    assert Layout.of(Own("shortcut")).prunable_size == 36 + 8


def test_a_class_may_name_what_is_exempt():
    class Spared(Own):
        exempt = ("head",)

    assert models.prunable(Spared()) == ["conv.weight", "shortcut.weight"]


@pytest.mark.parametrize("name", ["shortcuts", "norm", "head.weight", ""])
def test_an_unknown_name_in_exempt_is_refused(name):
    with pytest.raises(
        ValueError, match=f"exempt: {name!r} is not allowed; the network's layers are conv, shortcut, head"
    ):
        models.prunable(Own(name))


def test_resnets_exempt_layers_are_its_three_shortcuts():
    net = models.build("resnet18", 10, width=0.1)
    assert net.exempt == tuple(f"layer{i}.0.shortcut.0" for i in (2, 3, 4))
    assert len(models.prunable(net)) == 18


def test_a_narrow_net_has_the_same_layers():
    layout = Layout.of(models.build("resnet18", 10, width=0.125))
    assert layout.shapes["layer4.1.conv2.weight"] == (64, 64, 3, 3)
    assert len(layout.prunable) == 18
    assert Layout.of(models.build("lenet5", 10, width=1e-9)).shapes["conv2.weight"] == (1, 1, 5, 5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("image", [dict(channels=1, size=28), dict(channels=3, size=32), dict(channels=3, size=17)])
def test_every_net_takes_every_image(name, image):
    net = models.build(name, 7, width=0.05, **image).eval()
    assert net(torch.zeros(2, image["channels"], image["size"], image["size"])).shape == (2, 7)


def test_unknown_model_and_small_images_are_refused():
    with pytest.raises(ValueError, match=r"model: 'vgg' is not allowed; it must be one of lenet5, alexnet, resnet18"):
        Experiment(model="vgg")
    with pytest.raises(ValueError, match="size: 8 is not allowed"):
        models.build("lenet5", 10, size=8)


def test_flops_of_a_forward_pass():
    """By hand: 2 · positions · weights, layer by layer; of LeNet-5 28² · 150, 10² · 2400, and the three last ones."""
    flops = {name: networks.flops(models.build(name, n), image) for name, n, image in (
        ("lenet5", 10, dict(channels=1, size=28)), ("alexnet", 10, dict(channels=3, size=32)),
    )}  # fmt: skip
    assert flops["lenet5"] == 2 * (784 * 150 + 100 * 2400 + 48_000 + 10_080 + 840) == 833_040
    convolutions = 256 * 1728 + 64 * 110_592 + 16 * (663_552 + 884_736 + 589_824)
    assert flops["alexnet"] == 2 * (convolutions + 4_194_304 + 16_777_216 + 40_960)
    resnet = networks.flops(models.build("resnet18", 100), dict(channels=3, size=32))
    assert 1.10e9 < resnet < 1.12e9  # 0.56 G multiply-adds, as is commonly given for this form


def test_views_share_the_flat_vectors_memory():
    net = models.build("lenet5", 10)
    layout = Layout.of(net)
    flat = layout.flat(dict(net.named_parameters()))
    views = layout.views(flat)
    assert all(torch.equal(views[k], v) for k, v in net.named_parameters())
    views["fc3.bias"].fill_(7)
    assert flat[-10:].tolist() == [7.0] * 10
    assert [flat[z].numel() for z in layout.layers] == [150, 2400, 48000, 10080, 840]
    assert torch.equal(flat[layout.layers[2]], views["fc1.weight"].flatten())


def test_flat_mask_keeps_what_is_never_pruned():
    net = models.build("lenet5", 10)
    layout = Layout.of(net)
    w = layout.flat(dict(net.named_parameters()))
    m = masks.magnitude_mask(layout.weights(w), 0.9)
    flat = layout.flat_mask(m, like=w)
    assert int(flat.sum()) == 6_147 + 236
    pruned = layout.views(layout.prune(w, m))
    assert torch.equal(pruned["fc1.weight"], layout.views(w)["fc1.weight"] * m["fc1.weight"])
    assert torch.equal(pruned["fc1.bias"], layout.views(w)["fc1.bias"])
