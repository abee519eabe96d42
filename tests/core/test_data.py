import dataclasses

import pytest
import torch

from feddip_core import data


def test_normalisation_by_hand():
    x = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    plain = data.Dataset(x, x, x, x, {})
    assert plain.normalise(x).flatten().tolist() == pytest.approx([0, 0.2, 1])
    mean, std = torch.tensor([0.5, 0.2, 0.0]).view(3, 1, 1), torch.tensor([0.25, 0.1, 0.5]).view(3, 1, 1)
    scaled = data.Dataset(x, x, x, x, {}, mean, std)
    assert scaled.normalise(x).flatten().tolist() == pytest.approx([-2, 0, 2])


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["zeros", "reflect"])
def test_crops_and_flips_are_torchvisions(padding):
    from feddip_core.engine._torchvision import torchvision  # brings torch's compiler: seconds

    v2 = torchvision.transforms.functional
    g = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (20, 3, 32, 32), generator=g, dtype=torch.uint8)
    offsets, flips = torch.randint(0, 9, (2, 20), generator=g), torch.rand(20, generator=g) < 0.5
    ours = data.crop_and_flip(data.with_border(x, padding), offsets, flips)
    for i in range(20):
        padded = v2.pad(x[i].float(), [4], padding_mode="constant" if padding == "zeros" else "reflect")
        row, col = offsets[:, i].tolist()
        cut = v2.crop(padded, row, col, 32, 32)
        assert torch.equal(ours[i].float(), v2.hflip(cut) if flips[i] else cut)


def test_batches_cover_every_sample_once_an_epoch(mini):
    part = torch.arange(100, 200)
    seen = [(x, y) for x, y in data.batches(mini, part, 32, 2, torch.Generator().manual_seed(0))]
    assert [len(y) for _, y in seen] == [32, 32, 32, 4] * 2
    first = torch.cat([x for x, _ in seen[:4]])
    assert torch.equal(
        first.sum((1, 2, 3)).sort().values, mini.normalise(mini.x_train[part]).sum((1, 2, 3)).sort().values
    )
    assert not torch.equal(seen[0][1], seen[4][1])


def test_batches_are_cropped_and_flipped_anew_each_epoch(mini):
    augmented = dataclasses.replace(mini, crop_padding="zeros")
    part = torch.arange(50)
    first, second = (x for x, _ in data.batches(augmented, part, 50, 2, torch.Generator().manual_seed(0)))
    g = torch.Generator().manual_seed(0)
    order, offsets = torch.randperm(50, generator=g), torch.randint(0, 9, (2, 50), generator=g)
    flips = torch.rand(50, generator=g) < 0.5
    bordered = data.with_border(mini.x_train[:50][order], "zeros")
    assert torch.equal(first, mini.normalise(data.crop_and_flip(bordered, offsets, flips)))
    assert not torch.equal(first.sum((1, 2, 3)).sort().values, second.sum((1, 2, 3)).sort().values)
