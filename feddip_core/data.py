"""Data as tensors, and batches made on the device. `engine.sources` loads them, `engine.partitions` splits them."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Images as uint8 N × C × H × W, or your own inputs as float N × …; labels as int64; how batches are made."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    sha256: dict[str, str]
    mean: Tensor | None = None  # per channel; None: pixels are only scaled to [0, 1]
    std: Tensor | None = None
    crop_padding: str | None = None  # "zeros" or "reflect": random crops and flips in training; None: neither
    owner: Tensor | None = None  # per training sample, the client that owns it
    parts: tuple[Tensor, ...] = ()  # the indices of each client's training samples

    @property
    def num_classes(self) -> int:
        return int(self.y_train.max()) + 1

    @property
    def sample(self) -> Tensor:
        """An input of the right shape, all zeros."""
        return self.normalise(torch.zeros_like(torch.cat([self.x_test[:1], self.x_train[:1]])[:1]))

    @property
    def image(self) -> dict[str, int]:
        """What `models.build` must know about the images."""
        return dict(zip(("channels", "size"), self.x_train.shape[1:3], strict=False))

    def to(self, device: torch.device | str) -> "Dataset":
        tensors: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **tensors)

    def normalise(self, x: Tensor) -> Tensor:
        """(x/255 − mean) / std, per channel; inputs that are not images stay as they are."""
        if x.is_floating_point():
            return x.to(torch.get_default_dtype())
        x = x.to(torch.get_default_dtype()).div_(255)
        return x if self.mean is None or self.std is None else x.sub_(self.mean).div_(self.std)


def batches(
    data: Dataset, indices: Tensor, batch_size: int, epochs: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """E passes over a client's samples, each with a new order, new crops and new flips."""
    x, y = data.x_train.index_select(0, indices), data.y_train.index_select(0, indices)  # faster than x[indices]
    for _ in range(epochs):
        # Drawn on the CPU once per epoch: every device gets the same numbers, and the step loop never waits.
        order = torch.randperm(len(x), generator=generator).to(x.device, non_blocking=True)
        augment = _augmentation(data, len(x), generator, x.device)
        for i in range(0, len(x), batch_size):
            batch = order[i : i + batch_size]
            yield data.normalise(augment(x.index_select(0, batch), i)), y.index_select(0, batch)


def _augmentation(
    data: Dataset, n: int, generator: torch.Generator, device: torch.device
) -> Callable[[Tensor, int], Tensor]:
    if (padding := data.crop_padding) is None:
        return lambda x, i: x
    offsets = torch.randint(0, 9, (2, n), generator=generator).to(device, non_blocking=True)
    flips = torch.rand(n, generator=generator).lt_(0.5).bool().to(device, non_blocking=True)

    def augment(x: Tensor, i: int) -> Tensor:
        part = slice(i, i + len(x))
        return crop_and_flip(x, offsets[:, part], flips[part], padding)

    return augment


def crop_and_flip(x: Tensor, offsets: Tensor, flips: Tensor, padding: str) -> Tensor:
    """Pad each image by 4, crop it at its own (row, column) offset in 0 … 8, and mirror it where `flips` is True."""
    size = x.shape[2]
    rows, cols = (offsets[axis, :, None] + torch.arange(size, device=x.device) - 4 for axis in (0, 1))
    cols = torch.where(flips[:, None], cols.flip(1), cols)
    image = torch.arange(len(x), device=x.device)[:, None, None]
    inside = ((rows >= 0) & (rows < size))[:, :, None] & ((cols >= 0) & (cols < size))[:, None, :]
    rows, cols = ((size - 1) - ((size - 1) - i.abs()).abs() for i in (rows, cols))
    cut = x[image, :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)
    return cut if padding == "reflect" else cut * inside[:, None]
