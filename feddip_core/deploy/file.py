"""A sparse model as one small file, read again without trust.

`values` are the kept weights of all layers, `positions` their coded gaps, `rest` biases and norms. The metadata say
what is where, which steps the network takes, and what it was trained on. Nothing is unpickled. What a file says of
itself is checked against what it holds before memory is taken.
"""

import json
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from . import coding
from .graph import Graph

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
