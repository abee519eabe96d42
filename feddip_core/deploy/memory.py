"""Where each step of a C file writes: in one block of memory, in which what is no longer read makes room."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .folding import Fused

IN_PLACE = ("relu", "batch_norm", "add", "flatten")


@dataclass(frozen=True)
class Plan:
    """The first number of each value in the block, and of the padded copies that steps make."""

    start: dict[int, int]
    scratch: dict[int, int]
    floats: int  # of the whole block


def plan(shape: Sequence[int], steps: Sequence[Fused]) -> Plan:
    """Values that are read at the same time do not overlap. A value is the input, 0, or the output of step i."""
    last = {k: i for i, step in enumerate(steps, 1) for k in step.of} | {len(steps): len(steps) + 1}
    taken: list[tuple[int, int, int]] = [(0, math.prod(shape), last[0])]  # start, end, the step that reads it last
    start, scratch, floats = {0: 0}, {}, math.prod(shape)
    for i, step in enumerate(steps, 1):
        taken = [each for each in taken if each[2] >= i]
        size, first = math.prod(step.shape), step.of[0]
        if _renames(step) or (step.op in IN_PLACE and last[first] == i):
            start[i] = start[first]
            until = max(last.get(i, i), last[first])
            taken = [(a, b, max(until, c)) if a == start[first] else (a, b, c) for a, b, c in taken]
            last[first] = until
            continue
        if step.padded:
            c, (h, w), (py, px) = step.inputs[0][0], step.inputs[0][1:], step.options["padding"]
            area = c * (h + 2 * py) * (w + 2 * px)
            scratch[i] = _free(taken, area)
            taken.append((scratch[i], scratch[i] + area, i))
        start[i] = _free(taken, size)
        taken.append((start[i], start[i] + size, last.get(i, i)))
        floats = max(floats, *(b for _, b, _ in taken))
    return Plan(start, scratch, floats)


def _renames(step: Fused) -> bool:
    """Whether the output is the input under another name."""
    return step.op == "flatten" or (step.op == "adaptive_avg_pool2d" and step.shape == step.inputs[0])


def _free(taken: Sequence[tuple[int, int, int]], size: int) -> int:
    """The first gap of this size."""
    at = 0
    for a, b, _ in sorted(taken):
        if a - at >= size:
            break
        at = max(at, b)
    return at
