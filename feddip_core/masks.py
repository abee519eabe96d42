"""Masks: which weights live (Section III-B, and the ERK rule for the first mask, Section IV).

A mask is a dict of boolean tensors, one for each prunable layer, True where a weight is kept.
Weights are a dict of tensors that holds at least those layers. Sparsity is the fraction of zeros.
"""

import math
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Mask = Mapping[str, Tensor]


def erk_sparsities(shapes: Mapping[str, Sequence[int]], sparsity: float) -> dict[str, float]:
    """s_l = 1 − ε · Σdims/Πdims: small layers stay denser; ε makes the whole net `sparsity` sparse."""
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity: {sparsity!r} is not allowed; it must be a number in [0, 1)")
    if sparsity == 0:
        return dict.fromkeys(shapes, 0.0)
    size = {k: prod(s) for k, s in shapes.items()}
    raw = {k: sum(s) / size[k] for k, s in shapes.items()}
    dense: set[str] = set()
    # A layer whose density ε·raw would pass 1 is kept whole, and the others pay for it.
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
    """Keep ⌊(1 − s_l) N_l⌋ weights of each layer, at positions drawn uniformly."""
    m = {}
    for k, shape in shapes.items():
        size = prod(shape)
        keep = int((1 - sparsities[k]) * size)
        m[k] = torch.zeros(size, dtype=torch.bool)
        m[k][torch.randperm(size, generator=generator)[:keep]] = True
        m[k] = m[k].view(*shape)
    return m


def magnitude_mask(w: Weights, sparsity: float, within: Mask | None = None) -> Mask:
    """Drop the round(s · n_w) smallest |w| over all layers of `w` together; among equals the first go.

    Every entry of `w` counts as prunable, biases too: hand in those of `models.prunable` alone. With `within`, only
    weights of that mask can stay.
    """
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity: {sparsity!r} is not allowed; it must be a number in [0, 1]")
    magnitude = _flat(w).abs()
    keep = len(magnitude) - round(sparsity * len(magnitude))
    if within is not None:
        magnitude, keep = magnitude.masked_fill(~_flat({k: within[k] for k in w}), -1), min(keep, kept(within))
    return _unflat(_largest(magnitude, keep), w)


def layer_mask(w: Weights, keep: Mapping[str, int], votes: Weights | None = None) -> Mask:
    """Keep the `keep[l]` largest |w| of each layer l; among equals those with fewer votes go, then the first."""
    return {k: _largest(v.abs(), keep[k], None if votes is None else votes[k]) for k, v in w.items()}


def drop_and_regrow(w: Weights, g: Weights, m: Mask, fraction: float) -> tuple[Mask, Mask]:
    """FedDST: drop ⌈a · active⌉ smallest |w| of each layer, and bring back as many where |g| is largest.

    Returns what stays, and what stays or is new. A weight may be dropped and be new at once: it starts from zero.
    """
    stays, new = {}, {}
    for k, v in w.items():
        active = int(m[k].sum())
        dropped = math.ceil(fraction * active)
        # What is not active cannot be among the largest, nor what stays active among the regrown.
        stays[k] = _largest(v.abs().masked_fill(~m[k], -1), active - dropped)
        new[k] = stays[k] | _largest(g[k].abs().masked_fill(stays[k], -1), dropped)
    return stays, new


def prunefl_mask(w: Weights, value: Weights, m: Mask, keep: int, drop: float) -> Mask:
    """PruneFL: each layer keeps the largest (1 − d) of its active |w|; the rest of `keep` goes to the largest value."""
    safe = {}
    for k, v in w.items():
        active = int(m[k].sum())
        safe[k] = _largest(v.abs().masked_fill(~m[k], -1), active - int(drop * active))
    # `keep` has the last word: a keep-set that is too large loses its smallest weights, whatever their layer.
    safe_flat = _flat(safe)
    order = torch.where(safe_flat, torch.inf, _flat(value))
    if int(safe_flat.sum()) > keep:
        order = torch.where(safe_flat, _flat(w).abs(), -torch.inf)
    return _unflat(_largest(order, keep), w)


def channel_mask(w: Weights, m: Mask, threshold: float, streams: Sequence[Sequence[str]] = ()) -> Mask:
    """PruneTrain: a channel whose largest |w| is below the threshold goes, but no output of the last layer and no
    input of the first. Layers that write into one residual stream lose an output channel together or not at all.
    """
    first, last = next(iter(m)), next(reversed(m))
    rows = {k: v.flatten(1).abs().amax(1) >= threshold for k, v in w.items() if v.ndim > 1}
    for stream in streams:
        rows |= dict.fromkeys(stream, torch.stack([rows[k] for k in stream]).any(0))
    new = {}
    for k, keep in m.items():
        new[k] = keep.clone()
        if k != last:
            new[k][~rows[k]] = False
        if k != first:
            new[k][:, w[k].transpose(0, 1).flatten(1).abs().amax(1) < threshold] = False
    return new


def _largest(score: Tensor, count: int, votes: Tensor | None = None) -> Tensor:
    """True at the `count` largest scores; among equals those with fewer votes lose, then the first."""
    if not 0 <= count <= score.numel():
        raise ValueError(f"count: {count} is not allowed; there are {score.numel()} weights")
    order = torch.arange(score.numel(), device=score.device)
    for key in (votes, score):  # the last key counts most, since sorting keeps the order of equals
        if key is not None:
            order = order[torch.argsort(key.flatten()[order], stable=True)]
    mask = torch.zeros(score.numel(), dtype=torch.bool, device=score.device)
    mask[order[score.numel() - count :]] = True
    return mask.view(score.shape)


def _flat(layers: Weights) -> Tensor:
    return torch.cat([v.detach().flatten() for v in layers.values()])


def _unflat(flat: Tensor, like: Weights) -> dict[str, Tensor]:
    parts = flat.split([v.numel() for v in like.values()])
    return {k: part.view(v.shape) for (k, v), part in zip(like.items(), parts, strict=True)}


def apply_mask(w: Weights, m: Mask) -> dict[str, Tensor]:
    """w′ = m ⊙ w; what the mask does not name stays as it is."""
    _check(m, w)
    return {k: v * m[k] if k in m else v for k, v in w.items()}


def sparsity_of(m: Mask) -> float:
    """s = 1 − kept / n_w, over all prunable weights."""
    return 1 - kept(m) / sum(v.numel() for v in m.values())


def layer_sparsities(m: Mask) -> dict[str, float]:
    """The sparsity of each layer by itself."""
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
    """How many weights `new` brings back and how many it takes out."""
    _check(old, new)
    _check(new, old)
    regrown = sum((new[k] & ~old[k]).sum() for k in new)
    dropped = sum((old[k] & ~new[k]).sum() for k in new)
    return int(regrown), int(dropped)


def _check(m: Mask, w: Weights | None = None) -> None:
    """A mask is boolean, and names tensors that are there, in their shapes."""
    for k, v in m.items():
        if v.dtype != torch.bool:
            raise TypeError(f"mask {k}: {v.dtype} is not allowed; it must be torch.bool")
        if w is not None and (k not in w or w[k].shape != v.shape):
            raise ValueError(f"mask {k}: there is no tensor of that name and of shape {tuple(v.shape)}")
