"""What passes from round to round, and what clients send back."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from . import masks
from .masks import Mask

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class State:
    """What the server knows after t rounds; immutable, so it is safe to keep."""

    t: int
    w: Tensor  # ω′, the pruned weights that the server sends
    m: Mask | None  # None: a dense model
    statistics: Tensor  # of the batch norms, averaged like weights
    mask_version: int = 0
    client_mask_versions: tuple[int, ...] = ()  # per client, the version of the last mask it received
    memory: Mapping[str, Tensor] = field(default_factory=dict)  # what a method keeps from round to round
    own: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)  # what each client keeps for itself

    @cached_property
    def kept(self) -> int | None:
        """How many prunable weights the mask keeps; None for a dense model."""
        return None if self.m is None else masks.kept(self.m)

    def then(self, w: Tensor, m: Mask | None, memory: Tensors, average: "Average", changed: bool) -> "State":
        """The state after a round that ends with these weights, this mask and this memory."""
        known = tuple(self.mask_version if n in average.clients else v for n, v in enumerate(self.client_mask_versions))
        own = {**self.own, **{n: {**self.own.get(n, {}), **new} for n, new in average.own.items() if new}}
        return State(self.t + 1, w, m, average.mean["statistics"], self.mask_version + changed, known, memory, own)

    def replace(self, **changes) -> "State":
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Upload:
    """A client's results after a round: what the server averages, and what the client keeps for itself."""

    values: Tensors
    own: Tensors = field(default_factory=dict)

    def plus(self, **values: Tensor) -> "Upload":
        """The same upload with values added or replaced."""
        return Upload(self.values | values, self.own)


@dataclass(frozen=True)
class Replies:
    """The chosen clients that answer, the number of samples each trained on, and their uploads in the same order."""

    clients: list[int]
    sizes: list[int]
    uploads: Iterable[Upload]


@dataclass(frozen=True)
class Average:
    """What the server has once it has all uploads of a round."""

    mean: Tensors  # w, statistics, loss, and anything else the method sends
    clients: list[int]
    own: dict[int, Tensors] = field(default_factory=dict)
    zeros: list[float] = field(default_factory=list)  # the fraction of zeros in each upload


def aggregate(uploads: Iterable[Mapping[str, Tensor]], sizes: Sequence[int]) -> Tensors:
    """w_G = Σ ρ_n w_n with ρ_n = D_n / Σ D_j, over the clients of the round (Eq. 12)."""
    total, sums, dtypes = sum(sizes), dict[str, Tensor](), dict[str, torch.dtype]()
    for upload, size in zip(uploads, sizes, strict=True):
        for k, v in upload.items():
            # Summed in double precision: equal models average to themselves, whatever the order of the clients.
            sums.setdefault(k, torch.zeros_like(v, dtype=torch.float64)).add_(v, alpha=size / total)
            dtypes[k] = v.dtype
    return {k: v.to(dtypes[k]) for k, v in sums.items()}
