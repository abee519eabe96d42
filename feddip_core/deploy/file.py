"""A sparse model as one small file, read again without trust.

`values` are the kept weights of all layers, `positions` their coded gaps, `rest` biases and norms. The metadata say
what is where, which steps the network takes, and what it was trained on. Nothing is unpickled. What a file says of
itself is checked against what it holds before memory is taken.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from . import coding
from .graph import OPTIONS, PAIRS, PARAMETERS, Graph, Samples, Step
from .loader import OPERATIONS, positions

MOST_NUMBERS = 2**28  # of a model that is loaded, and of any step of it: a gigabyte
DTYPES = {16: torch.float16, 32: torch.float32}


def pack(graph: Graph, bits: int = 16) -> tuple[dict, dict[str, Tensor]]:
    """What a file says of a model, and the three arrays that it holds."""
    graph = graph.rounded(bits)
    about: dict[str, Any] = {"bits": bits, **graph.plain, "tensors": {}}
    values, codes, rest = [], [], []
    for name, tensor in graph.tensors.items():
        if name in graph.weights:
            width, code = coding.encode(tensor)
            values.append(tensor[tensor != 0] if width else tensor.flatten())
            codes.append(code)
            about["tensors"][name] = ["values", list(tensor.shape), len(values[-1]), width, len(code)]
        else:
            rest.append(tensor.flatten())
            about["tensors"][name] = ["rest", list(tensor.shape), tensor.numel(), 0, 0]
    parts = {
        "values": torch.cat([torch.empty(0), *values]).to(DTYPES[bits]),
        "positions": torch.from_numpy(np.frombuffer(b"".join(codes), np.uint8).copy()),
        "rest": torch.cat([torch.empty(0), *rest]),
    }
    return about, parts


def to_bytes(graph: Graph, bits: int = 16, **words: Any) -> bytes:
    """The file of a model; `words` are what else its metadata say."""
    about, parts = pack(graph, bits)
    return save(parts, {"model": json.dumps({**words, **about}, ensure_ascii=False)})


def load(path: str | Path) -> tuple[dict, Graph]:
    """What a file says of its model, and the model, which can be called; ValueError if it cannot be trusted."""
    try:
        with safe_open(path, "pt") as file:  # which takes no more memory than the file has bytes
            about = json.loads((file.metadata() or {})["model"])
            parts = {k: file.get_tensor(k) for k in ("values", "positions", "rest")}
        return about, _graph(about, parts)
    except FileNotFoundError:
        raise ValueError(f"{path} is not there") from None
    except Exception as error:  # a file from elsewhere may say anything
        why = f"{error}" if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: it cannot be trusted; {why}") from error


class Refused(ValueError):
    """What a file says does not fit what it holds."""


def _graph(about: Mapping, parts: dict[str, Tensor]) -> Graph:
    """The model, once everything that is said of it fits."""
    forms = {"values": DTYPES[about["bits"]], "positions": torch.uint8, "rest": torch.float32}
    for k, v in parts.items():
        _hold(
            v.ndim == 1 and v.dtype == forms[k], f"{k} is {v.dtype} of shape {tuple(v.shape)}, not a row of {forms[k]}"
        )
        _hold(not v.is_floating_point() or v.isfinite().all(), f"{k} holds a number that is not finite")
    where = _places(about["tensors"], parts)
    samples = _samples(about["samples"])
    meta = {k: torch.empty(torch.Size(about["tensors"][k][1]), device="meta") for k in where}
    steps = _steps(about["steps"], samples, meta)
    tensors = {}
    for name, (values, at) in where.items():
        shape = about["tensors"][name][1]
        values = values.float() if at is None else torch.zeros(math.prod(shape)).index_put_((at,), values.float())
        tensors[name] = values.view(shape)
    return Graph(samples, steps, tensors)


def _places(forms: Mapping, parts: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Of each tensor its values, and where they are; together they take what the file holds, no more and no less."""
    start, total, found = dict.fromkeys(parts, 0), 0, {}
    for name, (part, shape, kept, width, size) in forms.items():
        numbers = [*shape, kept, width, size]
        _hold(part in ("values", "rest") and all(type(v) is int and v >= 0 for v in numbers), f"{name}: no such form")
        _hold(width <= coding.WIDEST and len(shape) <= 4, f"{name}: no such form")
        count = math.prod(shape)
        total += count
        _hold(total <= MOST_NUMBERS, f"{name}: {total:,} numbers are too many; at most {MOST_NUMBERS:,} are allowed")
        _hold(
            size <= count // 8 + 1,
            f"{name}: {size:,} bytes of positions are more than a mask of its shape {shape} takes",
        )
        values = parts[part][start[part] : start[part] + kept]
        code = parts["positions"][start["positions"] : start["positions"] + size]
        _hold(len(values) == kept and len(code) == size, f"{name}: the file ends before its values do")
        start[part], start["positions"] = start[part] + kept, start["positions"] + size
        at = positions(code, width, count) if width else torch.arange(0)
        fits = len(at) == kept + 1 and int(at[-1]) == count and bool(values.all()) if width else kept == count
        _hold(fits, f"{name}: its positions do not match its shape {shape} and its {kept:,} values")
        found[name] = (values, at[:-1] if width else None)
    for k, v in parts.items():
        _hold(len(v) == start[k], f"{k}: it holds {len(v):,} numbers, and {start[k]:,} are said to be there")
    return found


def _samples(form: Mapping) -> Samples:
    shape = form["shape"]
    _hold(all(type(v) is int and v > 0 for v in shape) and math.prod(shape) <= MOST_NUMBERS, f"samples: shape {shape}")
    mean, std = ([v for ((v,),) in form[k]] if isinstance(form[k], list) else [] for k in ("mean", "std"))
    numbers = [form["scale"], *mean, *std]
    _hold(all(isinstance(v, int | float) and math.isfinite(v) for v in numbers), "samples: a number is not finite")
    _hold(form["scale"] > 0 and all(v > 0 for v in std), "samples: scale and std must be positive")
    _hold(len(mean) == len(std) and len(mean) in (0, shape[0]), "samples: one mean and one std per channel")
    return Samples(tuple(shape), float(form["scale"]), tuple(mean), tuple(std))


def _steps(steps: list, samples: Samples, tensors: Mapping[str, Tensor]) -> tuple[Step, ...]:
    """The steps, tried on tensors that take no memory."""
    values, found = [torch.empty(1, *samples.shape, device="meta")], []
    for i, (op, of, names, options) in enumerate(steps, 1):
        _hold(op in OPERATIONS, f"step {i}: the operation {str(op)[:40]!r} is not known")
        _hold(len(names) == len(PARAMETERS.get(op, ())), f"step {i}: {op} has other parameters")
        _hold(all(k is None or k in tensors for k in names), f"step {i}: {op} reads a tensor that is not there")
        _hold(all(type(k) is int and 0 <= k < i for k in of), f"step {i}: {op} reads a step that comes later")
        allowed = {"start_dim"} if op == "flatten" else set(OPTIONS.get(op, ()))
        good = all(_is_option(k, v) for k, v in options.items())
        _hold(set(options) == allowed and good, f"step {i}: {op} has other options")
        if "padding" in options:  # before a shape is computed that no memory has
            size = math.prod(v + 2 * max(options["padding"]) for v in values[of[0]].shape[1:])
            _hold(size <= MOST_NUMBERS, f"step {i}: {op} would take {size:,} numbers")
        values.append(OPERATIONS[op](*(values[k] for k in of), *(tensors.get(k) for k in names), **options))
        _hold(values[-1].numel() <= MOST_NUMBERS, f"step {i}: {op} would give {values[-1].numel():,} numbers")
        found.append(Step(op, tuple(of), tuple(values[-1].shape[1:]), tuple(names), dict(options)))
    _hold(bool(found) and len(found[-1].shape) == 1, "the last step does not give a row of logits")
    return tuple(found)


def _is_option(name: str, value: object) -> bool:
    """Whether a value has the form that an export gives it."""
    if name == "eps":
        return type(value) is float and 0 <= value < math.inf
    numbers = value if name in PAIRS else [value]
    return (
        isinstance(numbers, list)
        and len(numbers) == (2 if name in PAIRS else 1)
        and all(type(v) is int and (name != "padding") <= v <= MOST_NUMBERS for v in numbers)
    )


def _hold(good: object, otherwise: str) -> None:
    if not good:
        raise Refused(otherwise)
