"""Data as tensors, and batches made on the device. `engine.sources` loads them, `engine.partitions` splits them."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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
    # index_select is faster than x[indices]
    x, y = with_border(data.x_train.index_select(0, indices), data.crop_padding), data.y_train.index_select(0, indices)
    for _ in range(epochs):
        # Drawn on the CPU once per epoch: every device gets the same numbers, and the step loop never waits.
        order = torch.randperm(len(x), generator=generator).to(x.device, non_blocking=True)
        crops = _crops(len(x), generator, x.device) if data.crop_padding else ()
        for i in range(0, len(x), batch_size):
            part = slice(i, i + batch_size)
            batch, drawn = x.index_select(0, order[part]), [values[..., part] for values in crops]
            yield data.normalise(crop_and_flip(batch, *drawn) if crops else batch), y.index_select(0, order[part])


def _crops(n: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each of n images, the row and column at which it is cropped, and whether it is mirrored."""
    offsets = torch.randint(0, 9, (2, n), generator=generator)
    flips = torch.rand(n, generator=generator).lt_(0.5).bool()
    return offsets.to(device, non_blocking=True), flips.to(device, non_blocking=True)


def with_border(x: Tensor, padding: str | None) -> Tensor:
    """Images with a border of 4 pixels, zeros or the image's own reflection; None: without."""
    if padding != "reflect":
        return F.pad(x, (4, 4, 4, 4)) if padding else x
    last = x.shape[2] - 1
    places = last - (last - torch.arange(-4, last + 5, device=x.device).abs()).abs()
    return x.index_select(2, places).index_select(3, places)


def crop_and_flip(x: Tensor, offsets: Tensor, flips: Tensor) -> Tensor:
    """Crop each image with a border at its own (row, column) offset in 0 … 8, and mirror it where `flips` is True."""
    windows = x.unfold(2, x.shape[2] - 8, 1).unfold(3, x.shape[3] - 8, 1)
    cut = windows[torch.arange(len(x), device=x.device), :, offsets[0], offsets[1]]
    return torch.where(flips[:, None, None, None], cut.flip(3), cut)
