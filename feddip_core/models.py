"""The paper's three networks (Section VI), written plainly, and their parameters as one flat vector.

`width` scales every hidden width; 1 is the paper's. Convolutions and linear layers are prunable,
but neither biases nor batch norms nor the 1×1 shortcuts of ResNet-18. A network of your own comes from a function.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .experiment import function_of, is_hook


class LeNet5(nn.Module):
    def __init__(self, num_classes=10, width=1.0, channels=1, size=28):
        super().__init__()
        c1, c2, h1, h2 = scaled(width, 6, 16, 120, 84)
        self.conv1 = nn.Conv2d(channels, c1, 5, padding=2)
        self.conv2 = nn.Conv2d(c1, c2, 5)
        self.fc1 = nn.Linear(c2 * ((size // 2 - 4) // 2) ** 2, h1)
        self.fc2 = nn.Linear(h1, h2)
        self.fc3 = nn.Linear(h2, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class AlexNet(nn.Module):
    def __init__(self, num_classes=10, width=1.0, channels=3, size=32):
        super().__init__()
        c1, c2, c3, c4, h = scaled(width, 64, 192, 384, 256, 4096)
        self.conv1 = nn.Conv2d(channels, c1, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(c1, c2, 3, padding=1)
        self.conv3 = nn.Conv2d(c2, c3, 3, padding=1)
        self.conv4 = nn.Conv2d(c3, c4, 3, padding=1)
        self.conv5 = nn.Conv2d(c4, c4, 3, padding=1)
        self.fc1 = nn.Linear(c4 * 2 * 2, h)
        self.fc2 = nn.Linear(h, h)
        self.fc3 = nn.Linear(h, num_classes)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.conv3(x))
        x = F.relu(self.conv4(x))
        x = F.max_pool2d(F.relu(self.conv5(x)), 2)
        x = F.adaptive_avg_pool2d(x, 2).flatten(1)
        x = F.relu(self.fc1(F.dropout(x, 0.5, self.training)))
        x = F.relu(self.fc2(F.dropout(x, 0.5, self.training)))
        return self.fc3(x)


def group_norm(channels: int) -> nn.Module:
    """Of a sample by itself, in up to eight groups of channels: nothing that clients could disagree about."""
    return nn.GroupNorm(math.gcd(8, channels), channels)


NORMS = {"batch": nn.BatchNorm2d, "group": group_norm}


class BasicBlock(nn.Module):
    def __init__(self, c_in, c_out, stride, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn2 = norm(c_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride=stride, bias=False), norm(c_out))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self, num_classes=100, width=1.0, channels=3, size=32, norm="batch"):
        super().__init__()
        norm, (c1, c2, c3, c4) = NORMS[norm], scaled(width, 64, 128, 256, 512)
        self.conv1 = nn.Conv2d(channels, c1, 3, padding=1, bias=False)
        self.bn1 = norm(c1)
        self.layer1 = nn.Sequential(BasicBlock(c1, c1, 1, norm), BasicBlock(c1, c1, 1, norm))
        self.layer2 = nn.Sequential(BasicBlock(c1, c2, 2, norm), BasicBlock(c2, c2, 1, norm))
        self.layer3 = nn.Sequential(BasicBlock(c2, c3, 2, norm), BasicBlock(c3, c3, 1, norm))
        self.layer4 = nn.Sequential(BasicBlock(c3, c4, 2, norm), BasicBlock(c4, c4, 1, norm))
        self.linear = nn.Linear(c4, num_classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


MODELS = {"lenet5": LeNet5, "alexnet": AlexNet, "resnet18": ResNet18}


def scaled(width: float, *channels: int) -> list[int]:
    return [max(1, round(width * c)) for c in channels]


def build(name: str, num_classes: int, width: float = 1.0, norm: str = "batch", **image) -> nn.Module:
    """A network with PyTorch's default initialisation; `channels` and `size` of the image default to the paper's."""
    if is_hook(name):
        return _own(name)
    if name not in MODELS:
        raise ValueError(f"model: {name!r} is not allowed; it must be one of {', '.join(MODELS)}")
    if image.get("size", 28) < 16:
        raise ValueError(f"size: {image['size']!r} is not allowed; the networks need images of at least 16 × 16")
    return MODELS[name](num_classes, width, **image, **({"norm": norm} if name == "resnet18" else {}))


def _own(hook: str) -> nn.Module:
    net = function_of(hook, "model")()
    if not isinstance(net, nn.Module) or not prunable(net):
        raise ValueError(f"model: {hook!r} is not allowed; it must give an nn.Module with a Conv2d or a Linear layer")
    names = dict(net.named_parameters())
    if missing := [k for k in prunable(net) if k not in names]:
        needs = "a layer must stand in a module, and two layers may not share their weights"
        raise ValueError(f"model: {hook!r} is not allowed; {missing[0]!r} has no name of its own: {needs}")
    if still := [k for k, v in names.items() if not v.requires_grad]:
        raise ValueError(f"model: {hook!r} is not allowed; {still[0]!r} is frozen, and here every parameter is trained")
    return net


def prunable(net: nn.Module) -> list[str]:
    """Names of the weights that a mask may remove, in the network's order."""
    layers = [(k, v) for k, v in net.named_modules() if isinstance(v, nn.Conv2d | nn.Linear)]
    return [f"{k}.weight" for k, _ in layers if "shortcut" not in k]


@dataclass(frozen=True)
class Layout:
    """Where each parameter stands in the one flat vector that clients train and the server averages."""

    shapes: Mapping[str, torch.Size]
    prunable: tuple[str, ...]

    @classmethod
    def of(cls, net: nn.Module) -> "Layout":
        return cls({k: v.shape for k, v in net.named_parameters()}, tuple(prunable(net)))

    @classmethod
    def of_statistics(cls, net: nn.Module) -> "Layout":
        """The batch-norm statistics. Their step counters have no effect at a fixed momentum and are left out."""
        return cls({k: v.shape for k, v in net.named_buffers() if v.is_floating_point()}, ())

    @cached_property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes.values()]

    @cached_property
    def size(self) -> int:
        return sum(self.sizes)

    @cached_property
    def layers(self) -> list[slice]:
        """The stretch of the flat vector that each prunable layer takes."""
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        spans = zip(self.shapes, starts, self.sizes, strict=True)
        return [slice(a, a + n) for k, a, n in spans if k in self.prunable]

    @cached_property
    def prunable_shapes(self) -> dict[str, torch.Size]:
        return {k: self.shapes[k] for k in self.prunable}

    def span(self, name: str) -> range:
        """Where a parameter stands in the flat vector."""
        i = list(self.shapes).index(name)
        start = sum(self.sizes[:i])
        return range(start, start + self.sizes[i])

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensors as one new vector."""
        return torch.cat([tensors[k].detach().flatten() for k in self.shapes]) if self.shapes else torch.empty(0)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The vector as named tensors that share its memory."""
        parts = zip(self.shapes.items(), flat.split(self.sizes), strict=True) if self.shapes else ()
        return {k: part.view(shape) for (k, shape), part in parts}

    def weights(self, flat: Tensor) -> dict[str, Tensor]:
        """The prunable tensors alone, as views."""
        views = self.views(flat)
        return {k: views[k] for k in self.prunable}

    def flat_mask(self, m: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The mask as a vector of zeros and ones that also covers, with ones, what is never pruned."""
        flat = torch.ones_like(like)
        for k, view in self.weights(flat).items():
            view.copy_(m[k])
        return flat


def residual_streams(layout: Layout) -> list[list[str]]:
    """Of ResNet-18, the prunable layers that write into the same sum, stage by stage; of a plain network, none."""
    if "layer1.0.conv2.weight" not in layout.shapes:
        return []
    stages = [[f"layer{i}.0.conv2.weight", f"layer{i}.1.conv2.weight"] for i in (1, 2, 3, 4)]
    # The 1×1 shortcuts write too, but are neither penalised nor pruned: with a say in it, no channel would ever go.
    return [["conv1.weight", *stages[0]], *stages[1:]]


def norm_names(net: nn.Module) -> list[str]:
    """The scales and shifts of the batch norms."""
    return [f"{k}.{part}" for k, v in batch_norms(net).items() if v.affine for part in ("weight", "bias")]


def batch_norms(net: nn.Module) -> dict[str, nn.Module]:
    return {k: module for k, module in net.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}


def flops(net: nn.Module, image: Mapping[str, int]) -> int:
    """Of one sample's forward pass: two for each use of a weight of a convolution or a linear layer, biases aside."""
    sizes = {k: v.numel() for k, v in net.named_parameters()}
    x = torch.zeros(1, image["channels"], image["size"], image["size"], device=next(net.parameters()).device)
    return 2 * sum(count * sizes[k] for k, count in _positions(net, x).items())


def classes(net: nn.Module, x: Tensor) -> int:
    """How many classes the network tells apart."""
    with torch.no_grad():
        logits = net.eval()(x)
    if logits.ndim != 2 or len(logits) != len(x):
        raise ValueError(f"model: {len(x)} samples give {tuple(logits.shape)}; it must be a row of logits for each")
    return logits.shape[1]


def uses(net: nn.Module, x: Tensor) -> dict[str, int]:
    """How often one sample's forward pass uses each prunable weight: the positions of its layer's output."""
    counts = _positions(net, x)
    return {k: counts.get(k, 0) for k in prunable(net)}


def _positions(net: nn.Module, x: Tensor) -> dict[str, int]:
    counts: dict[str, int] = {}
    names = {module: f"{k}.weight" for k, module in net.named_modules()}

    def count(module, _, output):
        counts[names[module]] = output[0].numel() // len(module.weight)

    hooks = [m.register_forward_hook(count) for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    with torch.no_grad():
        net.eval()(x)
    for hook in hooks:
        hook.remove()
    return counts
