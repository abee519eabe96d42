"""Networks and data of one's own, for tests that name them as own_networks:…"""

import torch
import torch.nn.functional as F
from torch import nn

from feddip_core.streams import stream


def samples(client):
    """Small images of three classes, told apart by where they are bright."""
    draws = stream(0, "images", n=0 if client is None else client + 1)
    y = torch.randint(0, 3, (60,), generator=draws)
    x = torch.randn(60, 1, 8, 8, generator=draws)
    for i, label in enumerate(y.tolist()):
        x[i, :, 2 * label : 2 * label + 3] += 1.5
    return x, y


class Residual(nn.Module):
    """Two sums, with names that say nothing: a, b and c write into one stream, d and e into the other."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.d, self.e, self.inner = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(6, 4, 1), nn.Conv2d(4, 4, 1)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.a(x))
        x = x + self.b(x)
        x = torch.add(x, self.c(F.relu(x)))
        x = self.d(x) + self.e(x)
        x = F.relu(self.inner(F.relu(x)))
        return self.out(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Methods(nn.Module):
    """Sums and gates that are methods of a tensor: x.add(y), x.add_(y), x.mul(y)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(i, 4, 3, padding=1) for i in (1, 4, 4, 4))
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        x = self.a(x)
        x = x.add(self.b(x))
        y = F.relu(self.c(x)).mul(torch.sigmoid(self.d(x)))
        return self.out(F.adaptive_avg_pool2d(y, 1).flatten(1))


class OutOfOrder(nn.Module):
    """Registered last to first."""

    def __init__(self):
        super().__init__()
        self.out, self.middle, self.into = nn.Linear(5, 3), nn.Linear(7, 5), nn.Linear(64, 7)

    def forward(self, x):
        return self.out(F.relu(self.middle(F.relu(self.into(x.flatten(1))))))


class TwoEnds(nn.Module):
    """Two layers read the input, and two write the output, as parts of it side by side."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 5), nn.Linear(64, 4)
        self.one, self.two = nn.Linear(9, 2), nn.Linear(9, 1)

    def forward(self, x):
        x = torch.cat([self.left(x.flatten(1)), self.right(x.flatten(1))], 1).relu()
        return torch.cat([self.one(x), self.two(x)], 1)


class DataDependent(OutOfOrder):
    """What it does depends on the numbers."""

    def forward(self, x):
        return super().forward(x if x.mean() > 0 else -x)


class Uneven(nn.Module):
    """One channel is added to four."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(64, 4), nn.Linear(64, 1), nn.Linear(4, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.out(F.relu(self.a(x) + self.b(x)))


class ChangedInPlace(Uneven):
    """A value has two names, and is changed under one of them."""

    def forward(self, x):
        x = self.a(x.flatten(1))
        F.dropout(x, 0.5, self.training).relu_()
        return self.out(x)


def two_layers():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))


class Sequence(nn.Module):
    """Every kind of layer that can be pruned, and some that cannot, on eight rows of eight numbers."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(8, 6))
        self.words = nn.Embedding(5, 6)
        self.conv = nn.Conv1d(8, 6, 3, padding=1)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm((8, 6))
        self.up = nn.ConvTranspose1d(6, 4, 2, stride=2)
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        x = self.conv(x[:, 0]).transpose(1, 2) + self.position + self.words(torch.zeros_like(x[:, 0, :, 0]).long())
        x = self.norm(x + self.attention(x, x, x)[0])
        x = self.up(x.transpose(1, 2)).transpose(1, 2)
        return self.out(self.lstm(x)[0][:, -1])


class Gated(OutOfOrder):
    """The same layers as OutOfOrder, put to another use."""

    def forward(self, x):
        return self.out(torch.sigmoid(self.middle(F.relu(self.into(x.flatten(1))))))


class Pair(OutOfOrder):
    """Logits, and something beside them, but only in training."""

    def forward(self, x):
        return (super().forward(x), x) if self.training else super().forward(x)


class Detached(OutOfOrder):
    """Nothing that it gives has a gradient."""

    def forward(self, x):
        return super().forward(x).detach()


def half():
    return OutOfOrder().half()


def double_statistics():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    net[2].running_mean = net[2].running_mean.double()
    return net


def complex_numbers():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5, dtype=torch.complex64), nn.Linear(5, 3))


def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(5), nn.ReLU(), nn.Linear(5, 3))


def too_narrow():
    return nn.Sequential(nn.Flatten(), nn.Linear(63, 3))


def with_an_argument(size):
    return nn.Linear(size, 3)
