"""What a node of Flower runs: it says who it is, answers a question of the method, trains for a round."""

import json
import logging
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from ..communication import Payload
from ..engine import sources
from ..engine.assembly import assemble
from ..engine.computing import computing
from ..experiment import Experiment, is_hook
from ..server import Federation
from . import wire
from .messages import array_record, arrays_of, content
from .wire import Held, MaskMissing, Order

log = logging.getLogger(__name__)

Work = Callable[[Message, Context], RecordDict]


def clients(data_dir: str | None = None) -> ClientApp:
    """What a node runs: `partition-id` in its configuration is its number; it may name a `data-dir` and a `device`."""
    app = ClientApp()

    def site_of(message: Message, context: Context) -> tuple[Federation, int]:
        n = int(context.node_config["partition-id"])
        folder = data_dir or context.node_config.get("data-dir")
        settings = json.loads(message.content["config"]["experiment"])
        if "device" in context.node_config:
            settings |= {"device": context.node_config["device"], "gradient": "auto"}
        return federation_of(json.dumps(settings), n if is_hook(settings["dataset"]) else None, folder), n

    def ask(message: Message, context: Context) -> RecordDict:
        site, n = site_of(message, context)
        question = message.content["config"]["question"]
        with computing(site.exp):
            tensors = {k: v.to(site.clients.device) for k, v in arrays_of(message.content["arrays"]).items()}
            answer = site.ask([n], question, **tensors)[n]
            return content(Payload(site.method.questions[question]).pack(site.clients.layout, answer, None), {})

    def train(message: Message, context: Context) -> RecordDict:
        site, n = site_of(message, context)
        plain = message.content["config"]
        order = Order(**{field.name: plain[field.name] for field in fields(Order)})
        with computing(site.exp):
            state = wire.begin(site, order, arrays_of(message.content["arrays"]), n, held_by(context))
            result = site.train_client(state, n)
            sent = content(wire.upload(site, state, n, result), {})
            loss = float(result.values["loss"])
        hold(context, Held(order.mask_version, order.t, wire.kept_arrays(site, state, n, result)))
        sent["metrics"] = MetricRecord({"num-examples": len(site.clients.parts[n]), "loss": loss})
        return sent

    app.query("who")(answering(lambda _, context: content({}, {"client": int(context.node_config["partition-id"])})))
    app.query("ask")(answering(ask))
    app.train()(answering(train))
    return app


def answering(work: Work) -> Callable[[Message, Context], Message]:
    """A handler of messages that always answers; of an error it sends the kind alone."""

    def answered(message: Message, context: Context) -> Message:
        try:
            done = work(message, context)
        except Exception as error:
            # What went wrong may tell of the data or of this machine: it stays here, and its kind is sent.
            if not isinstance(error, MaskMissing):
                log.exception("client %s", context.node_config.get("partition-id"))
            done = content({}, {"error": type(error).__name__})
        return Message(done, reply_to=message)

    return answered


def held_by(context: Context) -> Held:
    """What this node holds of its last round."""
    if "held" not in context.state:
        return Held()
    held = context.state["held"]
    return Held(held["version"], held["t"], arrays_of(context.state["held arrays"]))


def hold(context: Context, held: Held) -> None:
    """Keep it on this node until its next round."""
    context.state["held"] = ConfigRecord({"version": held.version, "t": held.t})
    context.state["held arrays"] = array_record(held.arrays)


@lru_cache(maxsize=4)
def federation_of(settings: str, client: int | None, data_dir: str | None) -> Federation:
    """A client's federation, kept from message to message. Of data that clients bring it has this client's alone."""
    exp = Experiment(**json.loads(settings))
    with computing(exp):
        return assemble(exp, sources.of(exp, data_dir, None if client is None else [client]))
