"""A model in ONNX, written node by node, for runtimes that know this format. Its weights are dense."""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from .graph import Graph, Step

OPSET = 17
PLAIN = {"relu": "Relu", "flatten": "Flatten", "add": "Add"}


def onnx_bytes(graph: Graph, title: str = "") -> bytes:
    """The file: `samples`, raw numbers N × …, go in, and `logits` come out."""
    nodes, arrays = _normalise(graph)
    for i, step in enumerate(graph.steps, 1):
        made, used = _node(graph, step, [_value(graph, k) for k in step.of], _value(graph, i))
        nodes, arrays = nodes + made, arrays | used
    kinds = [numpy_helper.from_array(v, k) for k, v in arrays.items()]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *shape])
        for name, shape in (("samples", graph.samples.shape), ("logits", (graph.outputs,)))
    ]
    whole = helper.make_graph(nodes, "network", ends[:1], ends[1:], kinds, doc_string=title)
    model = helper.make_model(whole, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def _value(graph: Graph, i: int) -> str:
    return "logits" if i == len(graph.steps) else f"value{i}"


def _normalise(graph: Graph) -> tuple[list, dict[str, np.ndarray]]:
    samples = graph.samples
    plain = {k: np.asarray(samples.plain[k], np.float32) for k in ("scale", "mean", "std")}
    nodes = [
        helper.make_node("Div", ["samples", "scale"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "std"], ["value0"]),
    ]
    return nodes, plain


def _node(graph: Graph, step: Step, reads: list[str], writes: str) -> tuple[list, dict[str, np.ndarray]]:
    """The nodes of a step, and the arrays that they read."""
    o = step.options
    arrays = {k: _array(graph.tensors[k]) for k in step.names if k}
    if step.op in PLAIN:
        return [helper.make_node(PLAIN[step.op], reads, [writes])], {}
    if step.op == "linear":
        return [helper.make_node("Gemm", [*reads, *arrays], [writes], transB=1)], arrays
    if step.op == "conv2d":
        words = dict(strides=o["stride"], pads=o["padding"] * 2, dilations=o["dilation"], group=o["groups"])
        return [helper.make_node("Conv", [*reads, *arrays], [writes], **words)], arrays
    if step.op == "batch_norm":
        return _affine(graph, step, reads, writes)
    if step.op == "adaptive_avg_pool2d":
        return _adaptive(step, graph.shape_of(step.of[0]), reads, writes)
    words = dict(kernel_shape=o["kernel_size"], strides=o["stride"], pads=o["padding"] * 2)
    if step.op == "max_pool2d":
        return [helper.make_node("MaxPool", reads, [writes], **words)], {}
    return [helper.make_node("AveragePool", reads, [writes], count_include_pad=1, **words)], {}


def _affine(graph: Graph, step: Step, reads: list[str], writes: str) -> tuple[list, dict[str, np.ndarray]]:
    """A batch norm with fixed statistics: a product and a sum."""
    shape = (-1, *[1] * (len(step.shape) - 1))
    scale, shift = (_array(v.reshape(shape)) for v in graph.scale_and_shift(step))
    nodes = [
        helper.make_node("Mul", [*reads, f"{writes}.scale"], [f"{writes}.scaled"]),
        helper.make_node("Add", [f"{writes}.scaled", f"{writes}.shift"], [writes]),
    ]
    return nodes, {f"{writes}.scale": scale, f"{writes}.shift": shift}


def _adaptive(step: Step, shape: Sequence[int], reads: list[str], writes: str) -> tuple[list, dict[str, np.ndarray]]:
    """Means of stretches that may overlap: a matrix along each axis."""
    rows, columns = (_means(n, m) for n, m in zip(shape[1:], step.shape[1:], strict=True))
    nodes = [
        helper.make_node("MatMul", [f"{writes}.rows", *reads], [f"{writes}.half"]),
        helper.make_node("MatMul", [f"{writes}.half", f"{writes}.columns"], [writes]),
    ]
    return nodes, {f"{writes}.rows": rows, f"{writes}.columns": np.ascontiguousarray(columns.T)}


def _means(n: int, m: int) -> np.ndarray:
    """m means of n numbers, as PyTorch's adaptive pool cuts them."""
    matrix = np.zeros((m, n), np.float32)
    for i in range(m):
        begin, end = i * n // m, -(-(i + 1) * n // m)
        matrix[i, begin:end] = 1 / (end - begin)
    return matrix


def _array(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.numpy())
