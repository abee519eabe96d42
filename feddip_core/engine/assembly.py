"""Assemble an experiment: partition its data, build its network, create its method."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

from ..client import Clients
from ..data import Dataset
from ..experiment import Experiment, is_hook
from ..layout import Layout
from ..methods import method_of
from ..server import Federation
from . import computing, networks, robust, sources
from .partitions import partition


def assemble(
    exp: Experiment,
    dataset: Dataset | None = None,
    federation: Callable[..., Federation] = Federation,
    clients: Callable[..., Clients] = Clients,
    data_dir: str | Path | None = None,
) -> Federation:
    """The server and the clients of an experiment, ready for `start` and `round`."""
    dataset = sources.of(exp, data_dir) if dataset is None else dataset
    parts = partition(dataset.y_train, exp.partition, exp.clients, exp.seed, dataset.owner)
    dataset = dataclasses.replace(dataset, parts=tuple(parts))
    net = networks.network(exp, dataset)
    by_pixel = exp.channels_last or (exp.device == "cpu" and dataset.crop_padding is not None)  # a quarter faster there
    forward = computing.forward_of(net, Layout.of(net), exp.precision, by_pixel, exp.torch_compile)
    trained = clients(exp, dataset, net, computing.kernel(exp, net, dataset), forward)
    if is_hook(exp.model):
        networks.check_own(trained)
    made = federation(exp, trained, method_of(exp, trained))
    if exp.stacked:
        made.train = functools.partial(computing.stacked, made)
    robust.protect_(made)
    return made


def gradient_name(federation: Federation) -> str:
    """Which implementation computes the clients' gradients."""
    return "native" if federation.clients.kernel else "eager"
