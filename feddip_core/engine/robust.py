"""Robust aggregation, for federations where some clients may lie: the settings `aggregation` and `clip_norm`.

Trimmed mean and median (Yin et al., 2018) treat each weight separately. They count every client equally: a client could
lie about its number of samples too. They hold all uploads of a round in memory; a mean adds them up as they arrive.
Clipping shortens an update that is too long and keeps its direction. It bounds weights only.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..server import Federation
from ..state import Replies, State, Tensors, Upload

TRIMMED = 0.2  # fraction of the uploads dropped at each end; at least one
PART = 2**20  # numbers sorted at a time


def protect_(fed: Federation) -> None:
    """Install the aggregation that the experiment asks for."""
    exp = fed.exp
    chosen = {k: getattr(exp, k) for k in ("aggregation", "clip_norm") if getattr(exp, k) != exp.settings[k].default}
    for name, value in chosen.items():
        if not fed.method.one_mask:
            raise ValueError(f"{name}: {value!r} is not allowed; the clients of {exp.method} upload different weights")
    if "aggregation" in chosen:
        if exp.clients_per_round < 3:
            needs = f"{exp.aggregation} needs at least 3: it drops at least one at each end"
            raise ValueError(f"clients_per_round: {exp.clients_per_round} is not allowed; {needs}")
        fed.aggregate = median if exp.aggregation == "median" else trimmed_mean
    if "clip_norm" in chosen:
        collect = fed.collect
        fed.collect = lambda state, chosen: clipped(fed, state, collect(state, chosen))


def trimmed_mean(uploads: Iterable[Tensors], sizes: Sequence[int]) -> Tensors:
    """Per number, the mean without the largest and the smallest fifth: at least one each, if one remains."""
    return _inner_mean(list(uploads), min(max(1, int(TRIMMED * len(sizes))), (len(sizes) - 1) // 2))


def median(uploads: Iterable[Tensors], sizes: Sequence[int]) -> Tensors:
    """Per number, the middle value, or the mean of the middle two."""
    return _inner_mean(list(uploads), (len(sizes) - 1) // 2)


def _inner_mean(uploads: list[Tensors], cut: int) -> Tensors:
    """Per number, the mean of all but the `cut` smallest and the `cut` largest."""

    def of(values: Sequence[Tensor]) -> Tensor:
        ordered = torch.stack(tuple(values)).sort(0).values
        return ordered[cut : len(ordered) - cut].mean(0, dtype=torch.float64).to(ordered.dtype)

    def whole(name: str) -> Tensor:
        parts = [upload[name].flatten().split(PART) for upload in uploads]
        return torch.cat([of(part) for part in zip(*parts, strict=True)]).view_as(uploads[0][name])

    return {name: whole(name) for name in uploads[0]}


def clipped(fed: Federation, state: State, replies: Replies) -> Replies:
    """w_n ← w + min(1, C / ‖w_n − w‖) (w_n − w) for each upload, where w is client n's starting point."""

    def uploads() -> Iterator[Upload]:
        for n, upload in zip(replies.clients, replies.uploads, strict=True):
            start = fed.ready(state, n)[0]
            update = upload.values["w"] - start
            length = float(update.norm(dtype=torch.float64))
            yield (
                upload if length <= fed.exp.clip_norm else upload.plus(w=start + update * (fed.exp.clip_norm / length))
            )

    return Replies(replies.clients, replies.sizes, uploads())
