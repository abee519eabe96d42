"""The paper's three networks (Section VI). `width` scales every hidden width; 1 is the paper's."""

import math

import torch.nn.functional as F
from torch import nn


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
    """Normalises each sample by itself, in up to eight groups of channels, so there are no statistics to average."""
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
        # The 1×1 shortcuts have few weights and are the only path around their blocks: the paper never prunes them.
        self.exempt = tuple(k for k, v in self.named_modules() if "shortcut" in k and isinstance(v, nn.Conv2d))

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


MODELS = {"lenet5": LeNet5, "alexnet": AlexNet, "resnet18": ResNet18}


def scaled(width: float, *channels: int) -> list[int]:
    return [max(1, round(width * c)) for c in channels]


def build(name: str, num_classes: int, width: float = 1.0, norm: str = "batch", **image: int) -> nn.Module:
    """A network with PyTorch's default initialisation; image `channels` and `size` default to the paper's."""
    if image.get("size", 28) < 16:
        raise ValueError(f"size: {image['size']!r} is not allowed; the networks need images of at least 16 × 16")
    return MODELS[name](num_classes, width, **image, **({"norm": norm} if name == "resnet18" else {}))


LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def prunable(net: nn.Module) -> list[str]:
    """Names of the weights that a mask may remove, in the network's order.

    These multiply a layer's input: in convolutions, transposed or not, linear layers, attention, LSTM and GRU. Biases,
    norms and bare parameters are never pruned. Nor are embeddings: they start with σ = 1, so a comparison of magnitudes
    would always keep them. A network can list more layers in `exempt`.
    """
    exempt, layers = getattr(net, "exempt", ()), {k: v for k, v in net.named_modules() if isinstance(v, LAYERS)}
    if unknown := set(exempt) - set(layers):
        raise ValueError(f"exempt: {sorted(unknown)[0]!r} is not allowed; the network's layers are {', '.join(layers)}")
    return [f"{k}.{name}" for k, v in layers.items() if k not in exempt for name in weights_of(v)]


def weights_of(layer: nn.Module) -> list[str]:
    """The names of a layer's own weights; for an LSTM `weight_ih_l0` and so on."""
    several = [k for k, _ in layer.named_parameters(recurse=False) if "weight" in k]
    return ["weight"] if hasattr(layer, "weight") else several


def norm_names(net: nn.Module) -> list[str]:
    """The scales and shifts of the batch norms."""
    return [f"{k}.{part}" for k, v in batch_norms(net).items() if v.affine for part in ("weight", "bias")]


def batch_norms(net: nn.Module) -> dict[str, nn.Module]:
    return {k: module for k, module in net.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
