"""What a round costs in bits: counted exactly, as the authors' code counts it, and in a file that is really written.

A weight takes 32 bits. Of a pruned model only the kept weights travel, and their positions as a mask of
one bit for each prunable weight, to those clients that do not hold that mask already.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from .masks import Mask, Weights, kept

BITS_PER_WEIGHT = 32
MEBI = 2**20


def payload_bits(m: Mask | None, parameters: int, statistics: int = 0) -> int:
    """32 · (kept weights + parameters that are never pruned + batch-norm statistics); m = None is a dense model."""
    pruned = 0 if m is None else mask_bits(m) - kept(m)
    return BITS_PER_WEIGHT * (parameters - pruned + statistics)


def mask_bits(m: Mask | None) -> int:
    """n_w: one bit for each prunable weight; a dense model needs no mask."""
    return 0 if m is None else sum(v.numel() for v in m.values())


def authors_mebibits(zero_fraction: float, parameters: int) -> float:
    """32 (1 − s) n / 2²⁰: one model in the unit of the authors' code, which the paper prints as "MB".

    Zeros count as free even among parameters that are never pruned, and positions cost nothing.
    """
    return BITS_PER_WEIGHT * (1 - zero_fraction) * parameters / MEBI


def packed(m: Mask) -> Tensor:
    """The mask as bits, eight a byte."""
    bits = torch.cat([keep.flatten() for keep in m.values()]).cpu().numpy()
    return torch.from_numpy(np.packbits(bits))


def unpacked(bits: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The mask of these layers that `packed` made bits of."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    if bits.dtype != torch.uint8 or bits.shape != (-(-sum(sizes) // 8),):
        form = f"{bits.dtype} of shape {tuple(bits.shape)}"
        raise ValueError(f"mask: {form} is not allowed; it must be {-(-sum(sizes) // 8)} bytes, a bit a weight")
    flat = torch.from_numpy(np.unpackbits(bits.cpu().numpy(), count=sum(sizes))).bool()
    return {k: part.view(*shapes[k]) for k, part in zip(shapes, flat.split(sizes), strict=True)}


def pack(w: Weights, m: Mask) -> bytes:
    """The file that a sparse model really takes: mask bits, eight a byte, and the kept values, 32 bits each."""
    values = torch.cat([v[m[k]] if k in m else v.flatten() for k, v in w.items()])
    return save({"mask": packed(m), "values": values.detach().cpu()})


def unpack(file: bytes, shapes: Mapping[str, Sequence[int]], prunable: Iterable[str]) -> dict[str, Tensor]:
    """The model that `pack` made a file of, with zeros where its mask has none."""
    tensors = load(file)
    m = unpacked(tensors["mask"], {k: shapes[k] for k in prunable})
    keep = {k: m.get(k, torch.ones(*shape, dtype=torch.bool)) for k, shape in shapes.items()}
    parts = tensors["values"].split([int(v.sum()) for v in keep.values()])
    return {k: torch.zeros(v.shape).masked_scatter(v, part) for (k, v), part in zip(keep.items(), parts, strict=True)}
