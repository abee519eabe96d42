"""Flower's grid in one process: every message goes through Flower's own serialisation, and faults are made to order."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pandas as pd
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from feddip_core import Experiment, flower
from feddip_core.engine.records import folder_of
from feddip_core.flower import nodes


def through_the_wire(message: Message) -> Message:
    """The message as its receiver has it."""
    message.metadata.__dict__["_message_id"] = message.object_id
    contents = {k: v.deflate() for k, v in get_all_nested_objects(message).items()}
    received = inflate_object_from_contents(message.object_id, contents)
    received.metadata.__dict__["_message_id"] = message.object_id
    return received


class LocalGrid(Grid):
    """A node per client, 100 + its number. `fault(n, message, reply)` may change a reply, or return None: no answer."""

    def __init__(self, clients: int, app: ClientApp | None = None, fault: Callable | None = None):
        self.app, self.fault = app or flower.client_app, fault or (lambda n, message, reply: reply)
        self.contexts = {100 + n: self.context(100 + n, n) for n in range(clients)}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # which Flower's runtime sets
        self.waiting: dict[str, Message] = {}
        self.sent: list[Message] = []
        self.answered: list[Message] = []

    @staticmethod
    def context(node: int, n, **config) -> Context:
        config |= {"partition-id": n}
        return Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})

    def push_messages(self, messages):
        for message in messages:
            received = through_the_wire(message)
            self.sent.append(received)
            self.waiting[received.metadata.message_id] = received
            yield received.metadata.message_id

    def pull_messages(self, message_ids):
        for i in message_ids:
            message = self.waiting.pop(i, None)
            context = message and self.contexts.get(message.metadata.dst_node_id)
            if not context:
                continue
            reply = self.fault(context.node_config["partition-id"], message, self.app(message, context))
            if reply is not None:
                self.answered.append(through_the_wire(reply))
                yield self.answered[-1]

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        return list(self.pull_messages(list(self.push_messages(messages))))

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError


class Clock:
    """Time that passes where the server waits, and nowhere else: no machine is too busy to answer."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run_on(grid: Grid, exp, out=None, answer_within: float = 1.0, patience: float = 1.0, **options):
    """The run of an experiment whose clients are the nodes of this grid."""
    runs = []
    app = flower.servers(exp, out, answer_within=answer_within, patience=patience, done=runs.append, **options)
    with mock.patch.object(nodes, "time", Clock()):
        app(grid, LocalGrid.context(1, 0))
    return runs[0]


def kept(exp: Experiment, out: Path, file: str) -> Path:
    """A file of a record."""
    return folder_of(exp, out) / file


def metrics(exp: Experiment, out: Path) -> pd.DataFrame:
    return pd.read_csv(kept(exp, out, "metrics.csv")).drop(columns="seconds")


def assert_same_bits(exp: Experiment, here: Path, there: Path) -> None:
    """Every number of the record but the seconds, and all of the state that the run ends with."""
    pd.testing.assert_frame_equal(metrics(exp, here), metrics(exp, there), check_exact=True)
    ours, theirs = (load_file(kept(exp, out, "checkpoint.safetensors")) for out in (here, there))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(v, theirs[k]) for k, v in ours.items())
