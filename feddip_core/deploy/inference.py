"""How large and how fast a model is in each of its forms: what a notebook shows in one table."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import onnxruntime
import torch
from torch import Tensor

from ..engine.final import load_model
from . import file
from .c import compiled
from .exporting import export
from .source import finished
from .sparse import sparse

SHORTEST = 0.01  # seconds of a measurement


def stored(record: str | Path, bits: int = 16) -> dict[str, int]:
    """The bytes of each array in the file of a record's model."""
    return {name: part.nbytes for name, part in file.pack(finished(record).graph, bits)[1].items()}


def one_thread(model: str | Path | bytes) -> onnxruntime.InferenceSession:
    """ONNX Runtime on one thread, with the file at this place or with this content."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@torch.inference_mode()
def seconds(work: Callable[[], object]) -> float:
    """CPU time of one call; as many calls as make it long enough to be measured."""
    calls, began = 0, time.process_time()
    while not calls or time.process_time() - began < SHORTEST:
        work()
        calls += 1
    return (time.process_time() - began) / calls


def turns(sides: Mapping[str, Callable[[], object]], repeat: int = 5) -> dict[str, float]:
    """Seconds of each side, which take turns: the medians, after a turn that does not count."""
    found = [{name: seconds(work) for name, work in sides.items()} for _ in range(repeat + 1)][1:]
    return {name: median(turn[name] for turn in found) for name in sides}


def measured(record: str | Path, x: Tensor, folder: str | Path) -> dict[str, float]:
    """Kilobytes and microseconds per sample of a record's model in each form, exported to this folder."""
    model, net = export(record, folder), load_model(record)
    graph, (fast, _) = finished(record).graph, sparse(net)
    onnx, raw, normal = one_thread(model / "model.onnx"), x.float().numpy(), graph.samples.normalise(x)
    of_c = compiled((model / "model.c").read_text(encoding="utf-8"), "model")
    sides = {
        "PyTorch": lambda: net(normal),
        "sparse PyTorch": lambda: fast(normal),
        "ONNX Runtime": lambda: onnx.run(None, {"samples": raw}),
        "C": lambda: of_c(x, graph.outputs),
    }
    bytes_of = {
        "our file": (model / "model.safetensors").stat().st_size,
        "its arrays": sum(stored(record).values()),
        "ONNX": (model / "model.onnx").stat().st_size,
    }
    sizes = {f"kB, {name}": count / 1000 for name, count in bytes_of.items()}
    return sizes | {f"µs, {name}": took / len(x) * 1e6 for name, took in turns(sides).items()}
