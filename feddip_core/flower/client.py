"""What a Flower node runs: it says who it is, answers a question of the method, and trains for a round."""

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
from .wire import ClientCache, MaskMissing, Order

log = logging.getLogger(__name__)

Work = Callable[[Message, Context], RecordDict]


def clients(data_dir: str | None = None) -> ClientApp:
    """What a node runs: `partition-id` in its configuration is its number; it may name a `data-dir` and a `device`."""
    app = ClientApp()

    def asked_of(message: Message, context: Context) -> tuple[Federation, int]:
        n = int(context.node_config["partition-id"])
        folder = data_dir or context.node_config.get("data-dir")
        settings = json.loads(message.content["config"]["experiment"])
        if "device" in context.node_config:
            settings |= {"device": context.node_config["device"], "gradient": "auto"}
        return federation_of(json.dumps(settings), n if is_hook(settings["dataset"]) else None, folder), n

    def ask(message: Message, context: Context) -> RecordDict:
        fed, n = asked_of(message, context)
        question = message.content["config"]["question"]
        with computing(fed.exp):
            tensors = {k: v.to(fed.clients.device) for k, v in arrays_of(message.content["arrays"]).items()}
            answer = fed.ask([n], question, **tensors)[n]
            return content(Payload(fed.method.questions[question]).pack(fed.clients.layout, answer, None), {})

    def train(message: Message, context: Context) -> RecordDict:
        fed, n = asked_of(message, context)
        plain = message.content["config"]
        order = Order(**{field.name: plain[field.name] for field in fields(Order)})
        with computing(fed.exp):
            state = wire.begin(fed, order, arrays_of(message.content["arrays"]), n, cache_of(context))
            result = fed.train_client(state, n)
            sent = content(wire.upload(fed, state, n, result), {})
            loss = float(result.values["loss"])
        remember(context, ClientCache(order.mask_version, order.t, wire.kept_arrays(fed, state, n, result)))
        sent["metrics"] = MetricRecord({"num-examples": len(fed.clients.parts[n]), "loss": loss})
        return sent

    app.query("who")(answering(lambda _, context: content({}, {"client": int(context.node_config["partition-id"])})))
    app.query("ask")(answering(ask))
    app.train()(answering(train))
    return app


def answering(work: Work) -> Callable[[Message, Context], Message]:
    """A message handler that always answers; if it fails, it sends only the kind of error."""

    def answered(message: Message, context: Context) -> Message:
        try:
            done = work(message, context)
        except Exception as error:
            # The text of an error may reveal data or this machine: it stays here, and only its kind is sent.
            if not isinstance(error, MaskMissing):
                log.exception("client %s", context.node_config.get("partition-id"))
            done = content({}, {"error": type(error).__name__})
        return Message(done, reply_to=message)

    return answered


def cache_of(context: Context) -> ClientCache:
    """What this node holds of its last round."""
    if "cache" not in context.state:
        return ClientCache()
    cache = context.state["cache"]
    return ClientCache(cache["version"], cache["t"], arrays_of(context.state["cached arrays"]))


def remember(context: Context, cache: ClientCache) -> None:
    """Keep it on this node until its next round."""
    context.state["cache"] = ConfigRecord({"version": cache.version, "t": cache.t})
    context.state["cached arrays"] = array_record(cache.arrays)


@lru_cache(maxsize=4)
def federation_of(settings: str, client: int | None, data_dir: str | None) -> Federation:
    """A client's federation, cached between messages. If clients bring their data, it holds only this client's."""
    exp = Experiment(**json.loads(settings))
    with computing(exp):
        return assemble(exp, sources.of(exp, data_dir, None if client is None else [client]))
