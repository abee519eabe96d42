"""Networks built and checked before anything is trained, a network of your own among them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

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
    num_classes = outputs(net, clients.data.sample)
    check_labels(clients.data, num_classes)
    if exp.batch_norm != "average" and not clients.layout.statistics.size:
        raise ValueError(f"batch_norm: {exp.batch_norm!r} is not allowed; {exp.model} has no batch norms")
    _check_batches_of_one(clients)


def _own(hook: str) -> nn.Module:
    net = function_of(hook, "model")()
    if not isinstance(net, nn.Module) or not prunable(net):
        raise ValueError(f"model: {hook!r} is not allowed; it must give an nn.Module with a Conv2d or a Linear layer")
    names = dict(net.named_parameters())
    if missing := [k for k in prunable(net) if k not in names]:
        needs = "a layer must stand in a module, and two layers may not share their weights"
        raise ValueError(f"model: {hook!r} is not allowed; {missing[0]!r} has no name of its own: {needs}")
    if still := [k for k, v in names.items() if not v.requires_grad]:
        raise ValueError(f"model: {hook!r} is not allowed; {still[0]!r} is frozen, and here every parameter is trained")
    return net


def check_labels(data: Dataset, num_classes: int) -> None:
    """Every label has an output of the network."""
    for y, whose in ((data.y_test, None), (data.y_train, data.owner)):
        if wrong := torch.nonzero(y >= num_classes).flatten().tolist():
            of = "the server's test data" if whose is None else f"client {int(whose[wrong[0]])}'s data"
            raise DataError(f"y: {of} hold the label {int(y[wrong[0]])}; the network has {num_classes} outputs")


def _check_batches_of_one(clients: Clients) -> None:
    """A batch norm over samples alone has no variance in a batch of one: better now than in the round it comes."""
    exp, B = clients.exp, clients.exp.batch_size
    n = next((n for n, part in enumerate(clients.parts) if len(part) and len(part) % B == 1 % B), None)
    if n is None:
        return
    buffers = {k: v.clone() for k, v in clients.net.named_buffers()}
    try:
        with torch.no_grad(), global_stream(clients.device, exp.seed, "batch of one"):
            functional_call(clients.net.train(), buffers, (clients.data.sample,))
    except ValueError as error:
        raise ValueError(
            f"batch_size: {B} is not allowed; of client {n}'s {len(clients.parts[n])} samples it leaves a batch of "
            f"one, which {exp.model} cannot take ({error})"
        ) from error


def outputs(net: nn.Module, x: Tensor) -> int:
    """How many classes the network tells apart."""
    with torch.no_grad():
        logits = net.eval()(x)
    if logits.ndim != 2 or len(logits) != len(x):
        raise ValueError(f"model: {len(x)} samples give {tuple(logits.shape)}; it must be a row of logits for each")
    return logits.shape[1]


def flops(net: nn.Module, image: Mapping[str, int]) -> int:
    """Of one sample's forward pass: two for each use of a weight of a convolution or a linear layer, biases aside."""
    sizes = {k: v.numel() for k, v in net.named_parameters()}
    x = torch.zeros(1, image["channels"], image["size"], image["size"], device=next(net.parameters()).device)
    return 2 * sum(count * sizes[k] for k, count in positions(net, x).items())
