"""Build the network, ours or your own, and check it before training."""

import copy
import hashlib
import re
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from .. import models
from ..client import Clients
from ..data import Dataset
from ..experiment import Experiment, is_hook
from ..methods.prunefl import positions
from ..models import prunable
from ..streams import global_stream
from .sources import DataError, function_of


def network(exp: Experiment, dataset: Dataset) -> nn.Module:
    """The experiment's network with its initial weights."""
    with global_stream(torch.device("cpu"), exp.seed, "initial weights"):
        if is_hook(exp.model):
            return _own(exp.model)
        return models.build(exp.model, dataset.num_classes, exp.width, exp.norm, **dataset.image)


def check_own(clients: Clients) -> None:
    """A network of your own fits the data and the settings."""
    exp, net = clients.exp, clients.net
    num_classes = outputs(net, clients.data.sample, exp.model)
    check_labels(clients.data, num_classes)
    if exp.batch_norm != "average" and not clients.layout.statistics.size:
        raise ValueError(f"batch_norm: {exp.batch_norm!r} is not allowed; {exp.model} has no batch norms")
    _check_batches_of_one(clients)
    _check_step(clients)


def _own(hook: str) -> nn.Module:
    def refuse(why: str) -> ValueError:
        return ValueError(f"model: {hook!r} is not allowed; {why}")

    function = function_of(hook, "model")
    try:
        net = copy.deepcopy(function())  # it may return the same object every time, and a run changes it
    except Exception as error:
        raise refuse(f"calling it failed ({type(error).__name__}: {error})") from error
    if not isinstance(net, nn.Module) or not prunable(net):
        raise refuse("it must return an nn.Module with a prunable layer, such as Conv2d or Linear")
    tensors = dict(net.named_parameters())
    if missing := [k for k in prunable(net) if k not in tensors]:
        needs = "a layer must be part of a module, and two layers must not share weights"
        raise refuse(f"{missing[0]!r} has no unique name: {needs}")
    if empty := [k for k, v in tensors.items() if is_lazy(v) or v.is_meta or not v.numel()]:
        raise refuse(f"{empty[0]!r} has no values; give every layer its sizes and build it on the CPU")
    if still := [k for k, v in tensors.items() if not v.requires_grad]:
        raise refuse(f"{still[0]!r} is frozen; every parameter must require a gradient")
    tensors |= {k: v for k, v in net.named_buffers() if v.is_floating_point()}
    if other := [k for k, v in tensors.items() if v.dtype != torch.get_default_dtype()]:
        raise refuse(f"{other[0]!r} is {tensors[other[0]].dtype}; it must be {torch.get_default_dtype()}")
    return net


def check_labels(data: Dataset, num_classes: int) -> None:
    """Every label has an output of the network."""
    for y, part in ((data.y_test, "test"), (data.y_train, "training")):
        for i in torch.nonzero(y >= num_classes).flatten().tolist():
            brought = part == "training" and data.owner is not None
            whose = f"client {int(data.owner[i])}'s data" if brought else f"the {part} data"
            raise DataError(f"y: {whose} contain the label {int(y[i])}; the network has {num_classes} outputs")


def _check_batches_of_one(clients: Clients) -> None:
    """No client leaves a batch of one if the network cannot train on it, as a batch norm over samples cannot."""
    exp, B = clients.exp, clients.exp.batch_size
    n = next((n for n, part in enumerate(clients.parts) if len(part) and len(part) % B == 1 % B), None)
    if n is None:
        return
    try:
        _trained(clients, clients.data.sample)
    except ValueError as error:
        raise ValueError(
            f"batch_size: {B} is not allowed; client {n}'s {len(clients.parts[n])} samples leave a batch of one, "
            f"which {exp.model} cannot train on ({error})"
        ) from error


def _check_step(clients: Clients) -> None:
    """In training mode, too, the network returns logits, and they have a gradient."""
    model, x = clients.exp.model, clients.data.sample.repeat_interleave(2, 0)
    try:
        logits = _trained(clients, x)
        if isinstance(logits, Tensor):
            torch.autograd.grad(logits.sum(), list(clients.net.parameters()), allow_unused=True)
    except Exception as error:
        raise ValueError(f"model: {model!r} is not allowed; it cannot be trained ({_line(error)})") from error
    _check_logits(logits, x, model)


def _trained(clients: Clients, x: Tensor) -> Tensor:
    """The network's output in training mode; its buffers stay unchanged."""
    buffers = {k: v.clone() for k, v in clients.net.named_buffers()}
    with global_stream(clients.device, clients.exp.seed, "trial"):
        return functional_call(clients.net.train(), buffers, (x,))


def outputs(net: nn.Module, x: Tensor, model: str) -> int:
    """The network's number of classes."""
    try:
        with torch.no_grad():
            logits = net.eval()(x)
    except Exception as error:
        takes = f"it fails on a sample, {x.dtype} of shape {tuple(x.shape[1:])}"
        raise ValueError(f"model: {model!r} is not allowed; {takes} ({_line(error)})") from error
    _check_logits(logits, x, model)
    return logits.shape[1]


def _check_logits(logits: object, x: Tensor, model: str) -> None:
    given = f"a {type(logits).__name__}"
    if isinstance(logits, Tensor):
        given = f"{logits.dtype} of shape {tuple(logits.shape)}"
        if logits.is_floating_point() and logits.ndim == 2 and len(logits) == len(x):
            return
    needs = "it must return one tensor with a row of logits per sample"
    raise ValueError(f"model: {model!r} is not allowed; for {len(x)} samples it returns {given}; {needs}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def described(clients: Clients) -> dict[str, str]:
    """For a network of your own: a hash that reveals changes, and a summary of its prunable parameters."""
    net = clients.net
    if not is_hook(clients.exp.model):
        return {}
    shapes = [(k, tuple(v.shape)) for k, v in (*net.named_parameters(), *net.named_buffers())]
    try:
        with torch.random.fork_rng([]):
            graph = str(fx.symbolic_trace(net).graph)
    except Exception:  # its control flow depends on values
        graph = ""
    text = re.sub(" at 0x[0-9a-f]+", "", f"{net}\n{shapes}\n{prunable(net)}\n{graph}")
    return {"network_sha256": hashlib.sha256(text.encode()).hexdigest(), "parameters": parameters(net)}


def parameters(net: nn.Module) -> str:
    """How many parameters are prunable and how many are not, per kind of layer."""
    pruned, kept = Counter[str](), Counter[str]()
    modules, can = dict(net.named_modules()), set(prunable(net))
    for k, v in net.named_parameters():
        layer, _, name = k.rpartition(".")
        kind = next(c.__name__ for c in type(modules[layer]).__mro__ if hasattr(nn, c.__name__))
        kind = "biases" if "bias" in name else name if kind == "Module" else kind  # list a bare parameter by its name
        (pruned if k in can else kept)[kind] += v.numel()
    can_go, stay = (", ".join(f"{kind} {count:,}" for kind, count in part.items()) for part in (pruned, kept))
    line = f"{pruned.total():,} of {pruned.total() + kept.total():,} parameters are prunable: {can_go}"
    return f"{line}; never pruned: {stay}" if kept else line


def flops(net: nn.Module, image: Mapping[str, int]) -> int:
    """FLOPs of one sample's forward pass: two per use of a weight, without biases."""
    sizes = {k: v.numel() for k, v in net.named_parameters()}
    x = torch.zeros(1, image["channels"], image["size"], image["size"], device=next(net.parameters()).device)
    return 2 * sum(count * sizes[k] for k, count in positions(net, x).items() if "bias" not in k)
