"""A network as a short list of plain operations, from which every form is written.

`torch.export` says what a network computes, however it is written: layers, functions or methods of tensors. Its
operations carry the names and the options of `torch.nn.functional`, so that the list itself can be run.
"""

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from .loader import OPERATIONS, classify

NOTHING = (
    "dropout",
    "feature_dropout",
    "contiguous",
    "clone",
    "detach",
    "alias",
)  # without effect on a trained network
FLATTEN = ("flatten", "view", "reshape")
# Of each operation its parameters, in the order of `torch.nn.functional`, and the options that are kept.
PARAMETERS = {
    "conv2d": ("weight", "bias"),
    "linear": ("weight", "bias"),
    "batch_norm": ("running_mean", "running_var", "weight", "bias"),
}
OPTIONS = {
    "conv2d": ("stride", "padding", "dilation", "groups"),
    "batch_norm": ("eps",),
    "max_pool2d": ("kernel_size", "stride", "padding"),
    "avg_pool2d": ("kernel_size", "stride", "padding"),
    "adaptive_avg_pool2d": ("output_size",),
}
PAIRS = ("stride", "padding", "dilation", "kernel_size", "output_size")  # options with a number for each axis
# The one value that other options may have.
FIXED: dict[str, dict[str, Any]] = {
    "max_pool2d": {"dilation": [1, 1], "ceil_mode": False},
    "avg_pool2d": {"ceil_mode": False, "count_include_pad": True, "divisor_override": None},
    "dropout": {"train": False},
    "feature_dropout": {"train": False},
    "batch_norm": {"training": False},
    "add": {"alpha": 1},
}


class Unsupported(ValueError):
    """A network has a layer that cannot be exported; the message names it."""


@dataclass(frozen=True)
class Step:
    """One operation: which values it reads (0 is the input, i the output of step i), its parameters, its options."""

    op: str
    of: tuple[int, ...]
    shape: tuple[int, ...]  # of one sample's output
    names: tuple[str | None, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layer(self) -> str:
        """The name of the layer, without that of the parameter."""
        named = [name for name in self.names if name]
        return named[0].rpartition(".")[0] if named else ""


@dataclass(frozen=True)
class Samples:
    """What goes in: raw samples of a shape, and how they are normalised: (x / scale − mean) / std per channel."""

    shape: tuple[int, ...]
    scale: float = 1.0
    mean: tuple[float, ...] = ()  # empty: neither mean nor standard deviation
    std: tuple[float, ...] = ()

    @property
    def plain(self) -> dict:
        """In the words of JSON; mean and standard deviation so nested that they fit C × H × W."""
        mean, std = ([[[v]] for v in each] for each in (self.mean, self.std))
        return {"shape": list(self.shape), "scale": self.scale, "mean": mean or 0.0, "std": std or 1.0}

    def normalise(self, x: Tensor) -> Tensor:
        """What the network gets for raw samples."""
        scale, mean, std = (torch.tensor(self.plain[k]) for k in ("scale", "mean", "std"))
        return (x.float() / scale - mean) / std


@dataclass(frozen=True)
class Graph:
    """The steps of a network in order, its parameters and statistics by name, and what goes in."""

    samples: Samples
    steps: tuple[Step, ...]
    tensors: Mapping[str, Tensor]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights of convolutions and linear layers, in order: those that may hold zeros."""
        return {k: self.tensors[k] for step in self.steps if step.op in ("conv2d", "linear") for k in step.names[:1]}

    @property
    def outputs(self) -> int:
        return math.prod(self.steps[-1].shape)

    def shape_of(self, value: int) -> tuple[int, ...]:
        """Of one sample: 0 is the input, i the output of step i."""
        return self.steps[value - 1].shape if value else self.samples.shape

    def rounded(self, bits: int) -> "Graph":
        """The same with its weights rounded to so many bits; everything else keeps 32."""
        if bits not in (16, 32):
            raise ValueError(f"bits: {bits!r} is not allowed; it must be 16 or 32")
        rounded = {k: v.half().float() for k, v in self.weights.items()} if bits == 16 else {}
        for k, v in {**self.tensors, **rounded}.items():
            if not v.isfinite().all():
                raise ValueError(f"{k}: it holds a number that is not finite in {bits if k in rounded else 32} bits")
        return replace(self, tensors={**self.tensors, **rounded})

    def multiplications(self) -> dict[str, int]:
        """Of each layer, how many products of a kept weight and a number one sample takes."""
        kept = {k: int(v.count_nonzero()) for k, v in self.weights.items()}
        return {
            step.names[0]: kept[step.names[0]] * math.prod(step.shape[1:])
            for step in self.steps if step.op in ("conv2d", "linear")
        }  # fmt: skip

    @property
    def plain(self) -> dict:
        """Steps and samples in the words of JSON."""
        steps = [[step.op, list(step.of), list(step.names), dict(step.options)] for step in self.steps]
        return {"samples": self.samples.plain, "steps": steps}

    def __call__(self, x: Tensor) -> Tensor:
        """The logits of raw samples, computed by PyTorch step by step."""
        return classify(self.plain, self.tensors, x)

    def scale_and_shift(self, step: Step) -> tuple[Tensor, Tensor]:
        """A batch norm with fixed statistics, as x · scale + shift of each channel."""
        mean, var, weight, bias = (None if k is None else self.tensors[k].double() for k in step.names)
        scale = (1 if weight is None else weight) / (var + step.options["eps"]).sqrt()
        return scale.float(), ((0 if bias is None else bias) - mean * scale).float()


def graph_of(net: nn.Module, samples: Samples) -> Graph:
    """The steps of a network, as it classifies; Unsupported names a layer that no form has."""
    net = net.eval()
    example = torch.zeros(2, *samples.shape)
    try:
        with torch.no_grad(), _silent():
            program = torch.export.export(net, (example,), strict=False)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Unsupported(f"the network cannot be written as a list of operations ({why})") from error
    signature = program.graph_signature
    named = dict(signature.inputs_to_parameters) | dict(signature.inputs_to_buffers)
    values: dict[str, int] = dict.fromkeys(signature.user_inputs, 0)
    steps: list[Step] = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            _append(node, steps, values, named)
    (output,) = program.graph_signature.user_outputs
    if not steps or values.get(output) != len(steps) or len(steps[-1].shape) != 1:
        raise Unsupported("the network's last operation does not give one row of logits")
    tensors = {k: v.detach().float() for k, v in net.state_dict(keep_vars=True).items()}
    used = {name for step in steps for name in step.names if name}
    graph = Graph(samples, tuple(steps), {k: v for k, v in tensors.items() if k in used})
    _compare(graph, net, example.dtype)
    return graph


@torch.no_grad()
def _compare(graph: Graph, net: nn.Module, dtype: torch.dtype) -> None:
    """Random samples must get the network's logits: else a wrong model would be written without a word."""
    x = torch.rand(2, *graph.samples.shape, generator=torch.Generator().manual_seed(0)) * graph.samples.scale
    found, expected = graph(x), net(graph.samples.normalise(x).to(dtype)).float()
    if not torch.allclose(found, expected, 1e-3, 1e-3 * float(expected.abs().max()), equal_nan=True):
        raise Unsupported(
            "the list of operations does not give the network's logits; a value may be changed in place under two names"
        )


@contextmanager
def _silent() -> Iterator[None]:
    """Without PyTorch's own words about what it cannot export: the error says it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _append(node: fx.Node, steps: list[Step], values: dict[str, int], named: Mapping[str, str]) -> None:
    """Add a node of the program as a step, or note that it changes nothing."""
    target = getattr(node.target, "_schema", None)
    op = target.name.removeprefix("aten::") if target else str(node.target)
    inplace, op = op.endswith("_"), op.removesuffix("_")
    if op in FLATTEN and _is_flatten(node):
        op = "flatten"
    where = _layer(node)
    if op not in NOTHING and op not in OPERATIONS:
        raise Unsupported(f"{where}: the operation {op!r} is not supported; there are {', '.join(OPERATIONS)}")
    arguments = _arguments(node)
    for k, v in FIXED.get(op, {}).items():
        if arguments.get(k, v) != v:
            raise Unsupported(f"{where}: {op} with {k}={arguments[k]!r} is not supported; it must be {v!r}")
    inputs = [v for v in arguments.values() if isinstance(v, fx.Node) and v.name not in named]
    if unknown := [v for v in inputs if v.name not in values]:
        raise Unsupported(f"{where}: {op} reads {unknown[0].name!r}, which does not come from the samples")
    if op in NOTHING:
        values[node.name] = values[inputs[0].name]
        return
    of = tuple(values[v.name] for v in inputs)
    names = tuple(_name(arguments.get(k), named) for k in PARAMETERS.get(op, ()))
    step = Step(op, of, tuple(node.meta["val"].shape[1:]), names, _options(op, arguments))
    if step.options.get("padding") == "same":
        step = _same(step, where, arguments["weight"].meta["val"].shape[2:])
    _check(step, where, inputs)
    steps.append(step)
    values[node.name] = len(steps)
    if inplace:
        values[inputs[0].name] = len(steps)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """What an operation is called with, by name, defaults included."""
    known = node.target._schema.arguments
    given = dict(zip((a.name for a in known), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in known}


def _options(op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    options = {k: arguments[k] for k in OPTIONS.get(op, ())}
    if op.endswith("pool2d") and not options.get("stride", True):
        options["stride"] = options["kernel_size"]
    if options.get("padding") == "valid":
        options["padding"] = [0, 0]
    options = {k: _pair(v) if k in PAIRS and v != "same" else v for k, v in options.items()}
    return options | ({"start_dim": 1} if op == "flatten" else {})


def _pair(value: Sequence[int]) -> list[int]:
    return [int(v) for v in value] * (2 if len(value) == 1 else 1)


def _same(step: Step, where: str, kernel: Sequence[int]) -> Step:
    """padding="same" as a number, where both sides get as much."""
    spans = [d * (k - 1) for d, k in zip(step.options["dilation"], kernel, strict=True)]
    if any(span % 2 for span in spans):
        raise Unsupported(f"{where}: padding='same' with a kernel of {list(kernel)} is not supported; give a number")
    return replace(step, options={**step.options, "padding": [span // 2 for span in spans]})


def _check(step: Step, where: str, inputs: Sequence[fx.Node]) -> None:
    """What the schema leaves open."""
    shapes = [tuple(v.meta["val"].shape[1:]) for v in inputs]
    if step.op == "add" and (len(shapes) != 2 or shapes[0] != shapes[1]):
        raise Unsupported(f"{where}: add is supported for two values of one shape, and here it gets {shapes}")
    if step.op == "linear" and len(shapes[0]) != 1:
        raise Unsupported(f"{where}: linear is supported after flatten, and here it gets the shape {shapes[0]}")


def _name(value: object, named: Mapping[str, str]) -> str | None:
    """The name of a parameter in the network."""
    if value is None:
        return None
    if not isinstance(value, fx.Node) or value.name not in named:
        raise Unsupported(f"{value}: it is computed, and only parameters of the network can be exported")
    return named[value.name]


def _is_flatten(node: fx.Node) -> bool:
    """Whether a sample becomes one row."""
    shape = node.meta["val"].shape
    return len(shape) == 2 and shape[0] == 2


def _layer(node: fx.Node) -> str:
    """The layer of a node, as a reader knows it: its name and its kind."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    name, kind = stack[-1] if stack else ("", "network")
    kind = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
    return f"{name} ({kind})" if name else kind
