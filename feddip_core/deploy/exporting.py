"""`export`: a finished run as files that others can use."""

from pathlib import Path

import torch

from ..engine.records import write
from ..engine.run import Run
from . import file
from .c import c_file
from .card import LOADER, card
from .graph import Graph
from .javascript import javascript
from .source import finished


def export(source: Run | str | Path, folder: str | Path, bits: int = 16) -> Path:
    """Write the final model of a run, or of the folder of its record, in every form; returns the folder.

    `model.safetensors` with a loader, `model.c`, `model.js`, `model.onnx` if the extra `deploy` is installed, and the
    model card README.md. Kept weights have `bits` bits, 16 or 32.
    """
    done = finished(source)
    graph = done.graph.rounded(bits)
    words, out = done.words, Path(folder)
    title = f"{words['model']} on {words['dataset']}, run {words['run_id']}"
    forms: dict[str, str | bytes | None] = {
        "model.safetensors": file.to_bytes(graph, bits, **words),
        "model.c": c_file(graph, "model", title, done.classes),
        "model.js": javascript(graph, bits, **words),
        "model.onnx": _onnx(graph, title),
    }
    found = {k: v.encode() if isinstance(v, str) else v for k, v in forms.items() if v is not None}
    out.mkdir(parents=True, exist_ok=True)
    for name, content in found.items():
        write(out / name, content)
    write(out / "loader.py", LOADER)
    write(out / "README.md", card(done, graph, bits, {k: len(v) for k, v in found.items()}))
    return out


def _onnx(graph: Graph, title: str) -> bytes | None:
    """The ONNX file, checked by running it; nothing where its packages are not installed."""
    try:
        import onnxruntime

        from .onnx_file import onnx_bytes
    except ImportError:
        return None
    content = onnx_bytes(graph, title)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    x = torch.linspace(0, graph.samples.scale, 3 * torch.Size(graph.samples.shape).numel()).view(
        3, *graph.samples.shape
    )
    (logits,), expected = session.run(None, {"samples": x.numpy()}), graph(x)
    if (torch.from_numpy(logits) - expected).abs().max() > 1e-4 * max(1, expected.abs().max()):
        raise RuntimeError("onnxruntime does not give PyTorch's logits; the model is not exported")
    return content
