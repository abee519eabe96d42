"""Masks: which weights are kept (Section III-B), and the ERK rule for the first mask (Section IV).

A mask is a dict of boolean tensors, one per prunable layer, True where a weight is kept.
Weights are a dict of tensors that holds at least those layers. Sparsity is the fraction of zeros.
"""

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Mask = Mapping[str, Tensor]


def erk_sparsities(shapes: Mapping[str, Sequence[int]], sparsity: float) -> dict[str, float]:
    """s_l = 1 − ε · Σdims/Πdims: small layers stay denser; ε is set so that the whole network has this sparsity."""
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity: {sparsity!r} is not allowed; it must be a number in [0, 1)")
    if sparsity == 0:
        return dict.fromkeys(shapes, 0.0)
    size = {k: prod(s) for k, s in shapes.items()}
    raw = {k: sum(s) / size[k] for k, s in shapes.items()}
    dense: set[str] = set()
    # A layer whose density ε·raw would exceed 1 is kept whole; the others become sparser to compensate.
    while True:
        rest = [k for k in shapes if k not in dense]
        budget = (1 - sparsity) * sum(size[k] for k in rest) - sparsity * sum(size[k] for k in dense)
        eps = budget / sum(raw[k] * size[k] for k in rest)
        largest = max(raw[k] for k in rest)
        if eps * largest <= 1:
            return {k: 0.0 if k in dense else 1 - eps * raw[k] for k in shapes}
        dense |= {k for k in rest if raw[k] == largest}


def random_mask(
    shapes: Mapping[str, Sequence[int]], sparsities: Mapping[str, float], generator: torch.Generator
) -> Mask:
    """Keep ⌊(1 − s_l) N_l⌋ weights of each layer, at uniformly drawn positions."""
    m = {}
    for k, shape in shapes.items():
        size = prod(shape)
        keep = int((1 - sparsities[k]) * size + 1e-6)  # (1 − 0.9) · 10 is 0.9999999999999998
        m[k] = torch.zeros(*shape, dtype=torch.bool)
        m[k].view(-1)[torch.randperm(size, generator=generator)[:keep]] = True
    return m


def magnitude_mask(w: Weights, sparsity: float, within: Mask | None = None) -> Mask:
    """Drop the round(s · n_w) smallest |w| over all layers of `w` together; ties drop the first.

    Every entry of `w` counts as prunable, even a bias: pass only those of `models.prunable`. With `within`, only
    weights kept by that mask can stay.
    """
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity: {sparsity!r} is not allowed; it must be a number in [0, 1]")
    magnitude = flat(w).abs()
    keep = len(magnitude) - round(sparsity * len(magnitude))
    if within is not None:
        magnitude, keep = magnitude.masked_fill(~flat({k: within[k] for k in w}), -1), min(keep, kept(within))
    return unflat(largest(magnitude, keep), w)


def largest(score: Tensor, count: int, votes: Tensor | None = None) -> Tensor:
    """True at the `count` largest scores; a tie drops those with fewer votes, then the first."""
    if not 0 <= count <= (n := score.numel()):
        raise ValueError(f"count: {count} is not allowed; there are {n} weights")
    value = score.flatten()
    if value.is_cpu:  # ten times faster than a sort, but it reads a number, for which a GPU would wait
        numbers = value.detach().numpy()
        mask = ~(numbers < np.partition(numbers, min(n - count, n - 1))[min(n - count, n - 1)])
        if np.count_nonzero(mask) == count:  # no tie at the threshold; NaN counts as the largest
            return torch.from_numpy(mask).view(score.shape)
    order = torch.arange(n, device=value.device)
    for key in (value,) if votes is None else (votes.flatten(), value):  # the last key counts most: the sort is stable
        order = order[torch.argsort(key[order], stable=True)]
    return torch.zeros_like(value, dtype=torch.bool).index_fill_(0, order[n - count :], True).view(score.shape)


def flat(layers: Weights) -> Tensor:
    """The layers as one vector."""
    return torch.cat([v.detach().flatten() for v in layers.values()])


def unflat(flat: Tensor, like: Weights) -> dict[str, Tensor]:
    """The vector as layers of these shapes."""
    parts = flat.split([v.numel() for v in like.values()])
    return {k: part.view(v.shape) for (k, v), part in zip(like.items(), parts, strict=True)}


def sparsity_of(m: Mask) -> float:
    """s = 1 − kept / n_w, over all prunable weights."""
    return 1 - kept(m) / sum(v.numel() for v in m.values())


def layer_sparsities(m: Mask) -> dict[str, float]:
    """The sparsity of each layer."""
    return {k: sparsity_of({k: v}) for k, v in m.items()}


def kept(m: Mask) -> int:
    """How many weights the mask keeps."""
    _check(m)
    return int(sum(v.sum() for v in m.values()))


def pruning_error(w: Weights, m: Mask) -> float:
    """δ = ‖w − m ⊙ w‖² / ‖w‖², in [0, 1]: the share of the weights' energy that the mask removes (Definition 1)."""
    _check(m, w)
    lost = sum((v.double() * ~m[k]).square().sum() for k, v in w.items() if k in m)
    total = sum(v.double().square().sum() for v in w.values())
    return 0.0 if total == 0 else float(lost / total)


def changes(old: Mask, new: Mask) -> tuple[int, int]:
    """How many weights `new` brings back, and how many it removes."""
    _check(old, new)
    _check(new, old)
    return kept({k: new[k] & ~old[k] for k in new}), kept({k: old[k] & ~new[k] for k in new})


def _check(m: Mask, w: Weights | None = None) -> None:
    """Check that a mask is boolean, and that each entry matches a tensor by name and shape."""
    for k, v in m.items():
        if v.dtype != torch.bool:
            raise TypeError(f"mask {k}: {v.dtype} is not allowed; it must be torch.bool")
        if w is not None and (k not in w or w[k].shape != v.shape):
            raise ValueError(f"mask {k}: there is no tensor of that name and of shape {tuple(v.shape)}")
