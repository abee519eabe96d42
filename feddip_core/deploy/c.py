"""A model as one C file without dependencies: constant arrays, and loops over the kept weights alone.

Plain C99, no library, no allocation: one static block of memory holds what lies between the steps, so that two calls
may not run at once. Batch norms are folded into the layers before them.
"""

import ctypes
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .folding import Fused, fused
from .graph import Graph
from .memory import Plan, plan

TILE = 64  # numbers of an output that are summed up at once, about

HEADER = """/* {title}
 *
 * void {name}_classify(const float *sample, float *logits)
 *   sample: {inputs} raw numbers, {form}
 *   logits: {outputs} numbers, the largest of which is the class{classes}
 *
 * C99 without dependencies. Not reentrant: {ram:,} bytes of static memory are used by every call.
 * cc -O3 -c {name}.c
 */
#include <stdint.h>

static float memory[{floats}];
"""


def c_file(graph: Graph, name: str = "network", title: str = "A sparse network.", classes: Iterable[str] = ()) -> str:
    """The file; its weights are those of the graph, in 32 bits."""
    if not name.isidentifier():
        raise ValueError(f"name: {name!r} is not allowed; it must be a name such as network")
    steps = fused(graph)
    where = plan(graph.samples.shape, steps)
    shape = " × ".join(map(str, graph.samples.shape))
    form = f"{shape}, such as pixels from 0 to 255" if graph.samples.scale == 255 else shape
    names = ", ".join(f"{i} {word}" for i, word in enumerate(classes)).replace("*/", "")
    head = HEADER.format(
        title=title.replace("*/", ""), name=name, inputs=math.prod(graph.samples.shape), form=form,
        outputs=graph.outputs, classes=f": {names}" if names else "", ram=4 * where.floats, floats=where.floats,
    )  # fmt: skip
    functions = [_step(i, step, where) for i, step in enumerate(steps, 1)]
    calls = "\n".join(f"    step{i}();" for i in range(1, len(steps) + 1) if functions[i - 1])
    last = f"memory[{where.start[len(steps)]} + i]"
    return (
        f"{head}{''.join(functions)}{_normalise(graph, where)}\n"
        f"void {name}_classify(const float *sample, float *logits)\n{{\n    normalise(sample);\n{calls}\n"
        f"    for (int i = 0; i < {graph.outputs}; i++) logits[i] = {last};\n}}\n"
    )


def _normalise(graph: Graph, where: Plan) -> str:
    """The raw sample, normalised: the value 0."""
    samples, each = graph.samples, math.prod(graph.samples.shape[1:])
    lines = []
    for c in range(samples.shape[0] if samples.mean else 1):
        number = f"sample[i] / {_number(samples.scale)}" if samples.scale != 1 else "sample[i]"
        if samples.mean:
            number = f"({number} - {_number(samples.mean[c])}) / {_number(samples.std[c])}"
        begin, end = (c * each, (c + 1) * each) if samples.mean else (0, math.prod(samples.shape))
        lines.append(f"    for (int i = {begin}; i < {end}; i++) memory[{where.start[0]} + i] = {number};\n")
    return f"\nstatic void normalise(const float *sample)\n{{\n{''.join(lines)}}}\n"


def _step(i: int, step: Fused, where: Plan) -> str:
    """The function of one step, with its arrays; nothing if the step only renames its input."""
    if where.start[i] == where.start[step.of[0]] and step.op in ("flatten", "adaptive_avg_pool2d"):
        return ""
    body = BODIES[step.op](i, step)
    arrays, code = body if isinstance(body, tuple) else ("", body)
    reads = "".join(f"    const float *x{k or ''} = memory + {where.start[v]};\n" for k, v in enumerate(step.of))
    if step.padded:
        (c, h, w), (py, px) = step.inputs[0], step.options["padding"]
        reads += f"    float *padded = memory + {where.scratch[i]};\n" + _pad(c, h, w, py, px)
    writes = f"    float *y = memory + {where.start[i]};\n"
    title = f"\n/* {step.about} */\n" if step.about else "\n"
    return f"{title}{arrays}static void step{i}(void)\n{{\n{reads}{writes}{code}}}\n"


def _pad(c: int, h: int, w: int, py: int, px: int) -> str:
    rows, columns = h + 2 * py, w + 2 * px
    return (
        f"    for (int i = 0; i < {c * rows * columns}; i++) padded[i] = 0;\n"
        f"    for (int c = 0; c < {c}; c++)\n        for (int r = 0; r < {h}; r++)\n"
        f"            for (int i = 0; i < {w}; i++)\n"
        f"                padded[(c * {rows} + r + {py}) * {columns} + i + {px}] = x[(c * {h} + r) * {w} + i];\n"
        "    x = padded;\n"
    )


def _relu(step: Fused, number: str) -> str:
    return f"{number} > 0 ? {number} : 0" if step.relu else number


def _conv2d(i: int, step: Fused) -> tuple[str, str]:
    weight, (_, h, w) = step.weight, step.inputs[0]
    (C, Y, X), o = step.shape, step.options
    H, W = h + 2 * o["padding"][0], w + 2 * o["padding"][1]
    sy, sx = o["stride"]
    c, k, ky, kx = np.nonzero(weight.numpy())
    channel = c // (C // o["groups"]) * weight.shape[1] + k
    at = (channel * H + ky * o["dilation"][0]) * W + kx * o["dilation"][1]
    rows = max(r for r in range(1, Y + 1) if Y % r == 0 and (r == 1 or r * X <= TILE))
    arrays = _sparse(i, weight, at, c, step.bias)
    code = f"""    for (int c = 0; c < {C}; c++)
        for (int r = 0; r < {Y}; r += {rows}) {{
            float sum[{rows}][{X}];
            for (int j = 0; j < {rows}; j++) for (int i = 0; i < {X}; i++) sum[j][i] = b{i}[c];
            for (int n = row{i}[c]; n < row{i}[c + 1]; n++) {{
                const float *from = x + at{i}[n] + r * {sy * W};
                const float v = w{i}[n];
                for (int j = 0; j < {rows}; j++)
                    for (int i = 0; i < {X}; i++) sum[j][i] += v * from[j * {sy * W} + i * {sx}];
            }}
            for (int j = 0; j < {rows}; j++) for (int i = 0; i < {X}; i++) {{
                const float s = sum[j][i];
                y[(c * {Y} + r + j) * {X} + i] = {_relu(step, "s")};
            }}
        }}
"""
    return arrays, code


def _linear(i: int, step: Fused) -> tuple[str, str]:
    row, at = np.nonzero(step.weight.numpy())
    code = f"""    for (int c = 0; c < {step.shape[0]}; c++) {{
        float s = b{i}[c], s1 = 0, s2 = 0, s3 = 0;
        int n = row{i}[c];
        for (; n + 4 <= row{i}[c + 1]; n += 4) {{
            s += w{i}[n] * x[at{i}[n]];
            s1 += w{i}[n + 1] * x[at{i}[n + 1]];
            s2 += w{i}[n + 2] * x[at{i}[n + 2]];
            s3 += w{i}[n + 3] * x[at{i}[n + 3]];
        }}
        for (; n < row{i}[c + 1]; n++) s += w{i}[n] * x[at{i}[n]];
        s += s1 + s2 + s3;
        y[c] = {_relu(step, "s")};
    }}
"""
    return _sparse(i, step.weight, at, row, step.bias), code


def _sparse(i: int, weight: Tensor, at: np.ndarray, row: np.ndarray, bias: Tensor) -> str:
    """The kept weights of a layer, where each is read, and where each row of them begins."""
    first = np.searchsorted(row, np.arange(len(weight) + 1))
    values = weight[weight != 0]
    return (
        _floats(f"w{i}", values) + _integers(f"at{i}", at) + _integers(f"row{i}", first) + _floats(f"b{i}", bias)
    )  # fmt: skip


def _batch_norm(i: int, step: Fused) -> tuple[str, str]:
    each = math.prod(step.shape[1:])
    code = f"""    for (int i = 0; i < {math.prod(step.shape)}; i++) {{
        const float s = x[i] * w{i}[i / {each}] + b{i}[i / {each}];
        y[i] = {_relu(step, "s")};
    }}
"""
    return _floats(f"w{i}", step.weight) + _floats(f"b{i}", step.bias), code


def _add(i: int, step: Fused) -> str:
    return f"""    for (int i = 0; i < {math.prod(step.shape)}; i++) {{
        const float s = x[i] + x1[i];
        y[i] = {_relu(step, "s")};
    }}
"""


def _plain_relu(i: int, step: Fused) -> str:
    return f"    for (int i = 0; i < {math.prod(step.shape)}; i++) y[i] = x[i] > 0 ? x[i] : 0;\n"


def _pool(i: int, step: Fused) -> str:
    """A pool, of the largest or of the mean; positions beyond the edge count as zeros of a mean."""
    (C, Y, X), (_, H, W), o = step.shape, step.inputs[0], step.options
    (ky, kx), (sy, sx), (py, px) = o["kernel_size"], o["stride"], o["padding"]
    largest = step.op == "max_pool2d"
    joined = "if (v > s) s = v;" if largest else "s += v;"
    inside = f"if (h < 0 || h >= {H} || w < 0 || w >= {W})\n{' ' * 28}continue;\n{' ' * 24}" if py or px else ""
    return f"""    for (int c = 0; c < {C}; c++)
        for (int r = 0; r < {Y}; r++)
            for (int i = 0; i < {X}; i++) {{
                float s = {"-3.4e38f" if largest else "0"};
                for (int j = 0; j < {ky}; j++)
                    for (int k = 0; k < {kx}; k++) {{
                        const int h = r * {sy} + j - {py}, w = i * {sx} + k - {px};
                        {inside}const float v = x[(c * {H} + h) * {W} + w];
                        {joined}
                    }}
                y[(c * {Y} + r) * {X} + i] = {_relu(step, "s") if largest else f"s / {ky * kx}"};
            }}
"""


def _adaptive(i: int, step: Fused) -> str:
    (C, Y, X), (_, H, W) = step.shape, step.inputs[0]
    return f"""    for (int c = 0; c < {C}; c++)
        for (int r = 0; r < {Y}; r++)
            for (int i = 0; i < {X}; i++) {{
                const int h0 = r * {H} / {Y}, h1 = ((r + 1) * {H} + {Y - 1}) / {Y};
                const int w0 = i * {W} / {X}, w1 = ((i + 1) * {W} + {X - 1}) / {X};
                float s = 0;
                for (int h = h0; h < h1; h++) for (int w = w0; w < w1; w++) s += x[(c * {H} + h) * {W} + w];
                y[(c * {Y} + r) * {X} + i] = s / ((h1 - h0) * (w1 - w0));
            }}
"""


BODIES: dict[str, Callable] = {
    "conv2d": _conv2d, "linear": _linear, "batch_norm": _batch_norm, "add": _add, "relu": _plain_relu,
    "max_pool2d": _pool, "avg_pool2d": _pool, "adaptive_avg_pool2d": _adaptive,
}  # fmt: skip


def _floats(name: str, numbers: Tensor) -> str:
    return _array("float", name, [_number(v) for v in numbers.flatten().tolist()])


def _integers(name: str, numbers: np.ndarray) -> str:
    wide = 32 if len(numbers) and numbers.max() >= 2**16 else 16
    return _array(f"uint{wide}_t", name, [str(v) for v in numbers.tolist()])


def _array(kind: str, name: str, words: list[str]) -> str:
    lines = [", ".join(words[i : i + 12]) for i in range(0, len(words), 12)] or ["0"]
    body = ",\n    ".join(lines)
    return f"static const {kind} {name}[{max(1, len(words))}] = {{\n    {body}\n}};\n"


def _number(value: float) -> str:
    """A float of 32 bits so that C reads the same one."""
    text = f"{value:.9g}"
    return f"{text}f" if any(mark in text for mark in ".e") else f"{text}.0f"


def compiled(
    text: str, name: str = "network", compiler: str = "cc", flags: Iterable[str] = ("-O3", "-march=native")
) -> Callable[[Tensor, int], Tensor]:
    """A function from raw samples, N × …, to their logits, made by the C compiler of this machine."""
    loop = (
        f"\nvoid {name}_many(const float *x, float *y, int n, int inputs, int outputs)\n"
        f"{{\n    for (int i = 0; i < n; i++) {name}_classify(x + (long)i * inputs, y + (long)i * outputs);\n}}\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / f"{name}.c", Path(folder) / f"{name}.so"
        source.write_text(text + loop, "utf-8")
        words = [compiler, "-std=c99", "-Wall", "-Werror", *flags, "-shared", "-fPIC", source, "-o", library]
        subprocess.run(list(map(os.fspath, words)), check=True, capture_output=True, encoding="utf-8")
        many = getattr(ctypes.CDLL(str(library)), f"{name}_many")

    def classify(x: Tensor, outputs: int) -> Tensor:
        x = x.float().contiguous()
        y = torch.empty(len(x), outputs)
        pointers = (ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()))
        many(*pointers, len(x), x[0].numel() if len(x) else 0, outputs)
        return y

    return classify
