"""FedDIP on Flower: the same experiment, to the same bits, with its clients in other processes or on other hosts.

`Server` is a Federation whose clients are Flower's nodes: it overrides who trains, and nothing else. A client answers
three messages with the functions that `run` uses too: who it is, a question of its method, a round of training.
`server_app` and `client_app` are what `flwr run` starts; `simulate` runs them on one machine, on Ray.
"""

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path

# Read when Flower and Ray are imported: nothing is reported to their makers unless the user says so, and Ray
# does not look for the variables of a GPU.
os.environ.update({
    "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
} | os.environ)  # fmt: skip

import httpx
import pandas as pd
import torch
import yaml
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from torch import Tensor

from . import data, wire
from .experiment import Experiment, is_hook
from .federation import Federation, Run, State, computing, run
from .methods import ANSWERS
from .records import write
from .wire import MaskMissing, Rejected

log = logging.getLogger(__name__)

ANSWER_WITHIN = 600.0  # seconds for a client to answer
PATIENCE = 120.0  # seconds for clients to be there at all
GRACE = 10.0  # seconds for a client that was away to say who it is before a round begins without it
PAUSES = (0.02, 1.0)  # seconds between two looks for answers, at first and at most
MOST_EXAMPLES = 10**6  # that a client may claim; where the server knows how many it has, exactly those
WHO, ASK, TRAIN = "query.who", "query.ask", "train"


class NobodyAnswered(RuntimeError):
    """A round without a single answer that can be used; the checkpoint stays, and the same run goes on from it."""


class Server(Federation):
    """The server of Algorithm 1, whose clients are the nodes of a grid.

    A client that is away, late or wrong is left out of its round, and `faults` says so; the others' weights are
    renormalised. It is asked again as soon as it is there again. `out` keeps the bytes of every message.
    """

    def __init__(
        self, exp: Experiment, dataset: data.Dataset, grid: Grid, out: str | Path | None = None,
        answer_within: float = ANSWER_WITHIN, patience: float = PATIENCE, most_examples: int = MOST_EXAMPLES,
    ):  # fmt: skip
        super().__init__(exp, dataset)
        if exp.stacked:
            raise ValueError("stacked: True is not allowed; clients that are elsewhere are trained one by one")
        self.pace = math.inf  # every round is saved: those who train it are many, and may be slow
        self.settings = json.dumps({"dataset": exp.dataset, **exp.changed(), "gradient": self.gradient_name})
        self.answer_within, self.patience, self.most_examples = answer_within, patience, most_examples
        self.claims = {n: len(part) for n, part in enumerate(self.parts) if len(part)}  # samples of each client
        self.nodes = Nodes(grid, exp.clients, answer_within)
        self.holds: dict[int, int] = {}  # the version of the mask that each node was sent last
        self.begun = False
        self.file = out and Path(out) / exp.run_id / "messages.csv"
        self.bytes: list[dict] = []

    def start(self) -> State:
        if missing := self.nodes.wait(range(self.exp.clients), self.patience):
            names = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
            raise NobodyAnswered(f"clients {names} are not connected after {self.patience:g} s")
        return super().start()

    def ask(self, chosen, question, **tensors):
        self.nodes.wait(chosen, self.patience)
        order = _content(tensors, {"experiment": self.settings, "question": question})
        replies = self._send({n: order for n in chosen if n in self.nodes.of}, ASK, 0)
        names, answers = ANSWERS[question], {}
        for n in chosen:
            try:
                arrays = self._read(n, replies)[0]
                if set(arrays) != set(names):
                    raise Rejected(f"it holds {sorted(arrays)}, not {sorted(names)}")
                answers[n] = {k: wire.vector(self, k, arrays[k], self.layout.size) for k in names}
            except Rejected as reason:
                self._fault(0, n, str(reason))
        if not answers:
            raise NobodyAnswered(f"nobody answers the question {question!r}, without which training cannot begin")
        return answers

    def collect(self, state, chosen, train):
        # At first, also after a restart, everyone is waited for; later only those who are about to be back.
        self.nodes.wait(chosen, GRACE if self.begun else self.patience, only_asked=self.begun)
        if not self.begun and state.t and self.file and self.file.exists():
            self.bytes = pd.read_csv(self.file).query(f"round <= {state.t}").to_dict("records")
        self.begun = True
        answers = self._answers(state, chosen)
        if all(isinstance(a, str) for a in answers.values()):
            self.nodes.wait(chosen, self.patience)  # a network that is down may come back
            answers = self._answers(state, chosen)
        self._keep_bytes()
        good = {n: a for n, a in answers.items() if not isinstance(a, str)}
        if not good:
            reasons = "; ".join(f"client {n}: {reason}" for n, reason in answers.items())
            raise NobodyAnswered(f"round {state.t + 1}: nobody has given an answer that can be used ({reasons})")
        for n in chosen:
            if n not in good:
                self._fault(state.t + 1, n, answers[n])
        return list(good), [size for _, size in good.values()], [upload for upload, _ in good.values()]

    def _answers(self, state: State, chosen: list[int]) -> dict[int, tuple[dict, int] | str]:
        """Of each client its upload and its number of samples, or why there is none."""
        answers = dict.fromkeys(chosen, "it is not connected")
        chosen = [n for n in chosen if n in self.nodes.of]
        replies = self._send({n: self._order(state, n) for n in chosen}, TRAIN, state.t + 1)
        # A node that was started anew holds no mask, whatever it was sent before.
        again = [n for n, reply in replies.items() if _error(reply) == repr(MaskMissing.__name__)]
        replies |= self._send({n: self._order(state, n, with_mask=True) for n in again}, TRAIN, state.t + 1)
        for n in chosen:
            try:
                arrays, metrics = self._read(n, replies)
                size = self._size(n, metrics.get("num-examples"))
                answers[n] = wire.unpack_upload(self, state, n, arrays, metrics.get("loss")), size
                self.holds[self.nodes.of[n]] = state.mask_version
            except Rejected as reason:
                answers[n] = str(reason)
                self.nodes.forget(n)  # until it says again who it is
        return answers

    def _order(self, state: State, n: int, with_mask: bool = False) -> RecordDict:
        with_mask = with_mask or self.holds.get(self.nodes.of[n]) != state.mask_version
        plain = {"t": state.t, "mask_version": state.mask_version, "sparse": state.m is not None}
        plain["experiment"] = self.settings
        return _content(wire.download(self, state, n, with_mask), plain)

    def _read(self, n: int, replies: Mapping[int, Message]) -> tuple[dict[str, Tensor], dict]:
        """What client n has answered: its arrays and its metrics."""
        if n not in self.nodes.of:
            raise Rejected("it is not connected")
        if n not in replies:
            raise Rejected(f"no answer within {self.answer_within:g} s")
        if reason := _error(replies[n]):
            raise Rejected(reason)
        try:
            return _arrays(replies[n]), dict(replies[n].content.metric_records.get("metrics", {}))
        except Exception as error:  # a client may send anything
            raise Rejected(f"it cannot be read ({type(error).__name__})") from error

    def _size(self, n: int, claim) -> int:
        """The number of samples that a client claims, if it can be; it is the same in every round."""
        if type(claim) is not int or not 1 <= claim <= self.most_examples:
            raise Rejected(f"it claims {claim!r} samples; it must be a whole number from 1 to {self.most_examples}")
        if self.claims.setdefault(n, claim) != claim:
            raise Rejected(f"it claims {claim} samples, and has {self.claims[n]}")
        return claim

    def _send(self, orders: Mapping[int, RecordDict], kind: str, t: int) -> dict[int, Message]:
        """The replies of those clients that answer in time."""
        messages = {n: self.nodes.message(self.nodes.of[n], order, kind, t) for n, order in orders.items()}
        replies = self.nodes.exchange(messages)
        for n, message in messages.items():
            up = size_of(replies[n]) if n in replies else 0
            self.bytes.append({"round": t, "client": n, "kind": kind, "down_bytes": size_of(message), "up_bytes": up})
        return replies

    def _fault(self, t: int, n: int, reason: str) -> None:
        log.warning("%s goes on without client %d: %s", f"round {t}" if t else "the start", n, reason)
        self.faults.append({"round": t, "client": n, "reason": reason})

    def _keep_bytes(self) -> None:
        if self.file and self.file.parent.is_dir():
            write(self.file, pd.DataFrame(self.bytes).to_csv(index=False, lineterminator="\n"))


class Nodes:
    """Which node of the grid is which client: each is asked, and one that was away is asked again."""

    def __init__(self, grid: Grid, clients: int, answer_within: float):
        self.grid, self.clients, self.answer_within = grid, clients, answer_within
        self.of: dict[int, int] = {}  # client -> node
        self.asked: dict[str, tuple[int, float]] = {}  # message -> node, and when it is asked anew
        self.refused: dict[int, object] = {}  # node -> the client that it wants to be

    def wait(self, clients: Iterable[int], patience: float, only_asked: bool = False) -> list[int]:
        """Until these clients are there, and no longer than that; those who are not. `only_asked`: or nobody is new."""
        deadline, pause = time.monotonic() + patience, _pauses()
        self.look()
        while missing := [n for n in clients if n not in self.of]:
            if time.monotonic() > deadline or (only_asked and not self.asked):
                return missing
            time.sleep(next(pause))
            self.look()
        return []

    def look(self) -> None:
        """Ask nodes that are new who they are, and hear those that were asked."""
        here = set(self.grid.get_node_ids())
        for n in [n for n, node in self.of.items() if node not in here]:
            self.forget(n)
        for i, reply in self._pull(self.asked):
            node, _ = self.asked.pop(i)
            if node in here:
                self._hear(node, reply)
        now = time.monotonic()
        self.asked = {i: (node, until) for i, (node, until) in self.asked.items() if node in here and now < until}
        for node in sorted(here.difference(self.of.values(), self.refused, (node for node, _ in self.asked.values()))):
            for i in self._push(self.message(node, RecordDict(), WHO, 0)):
                self.asked[i] = (node, now + self.answer_within)

    def _push(self, message: Message) -> list[str]:
        """The number of the message; none if Flower could not take it."""
        return [i for i in self.grid.push_messages([message]) if i is not None]

    def _pull(self, waiting: Iterable[str]) -> Iterator[tuple[str, Message | None]]:
        """The replies that have come to these messages, one by one: None for one that is not to be read."""
        for i in list(waiting):
            try:
                for reply in self.grid.pull_messages([i]):
                    yield i, reply
            except httpx.HTTPError:  # the SuperLink itself is not to be reached
                raise
            except Exception:  # a client may send anything
                yield i, None

    def _hear(self, node: int, reply: Message | None) -> None:
        if reply is not None and reply.has_error():
            log.warning("node %d does not say who it is, and is asked again: %s", node, _error(reply))
            return
        try:
            n = reply.content["config"].get("client")
        except Exception:  # a client may send anything
            n = None
        if type(n) is int and 0 <= n < self.clients and n not in self.of:
            self.of[n] = node
            return
        taken = type(n) is int and n in self.of
        why = "and there is one already" if taken else f"and partition-id must be one of 0 to {self.clients - 1}"
        log.warning("node %d is refused: it calls itself client %.100r, %s", node, n, why)
        self.refused[node] = n

    def forget(self, n: int) -> None:
        """Until it says again who it is; or another, that has come in its place."""
        self.of.pop(n, None)
        self.refused = {node: wanted for node, wanted in self.refused.items() if wanted != n}

    def message(self, node: int, content: RecordDict, kind: str, t: int) -> Message:
        # It lives a little longer than it is waited for, so that it is we who say why there was no answer.
        return Message(content, node, kind, ttl=self.answer_within + 10, group_id=str(t))

    def exchange(self, messages: Mapping[int, Message]) -> dict[int, Message | None]:
        """The replies that come in time; None is one that is not to be read."""
        waiting = {i: n for n, message in messages.items() for i in self._push(message)}
        deadline, pause, replies = time.monotonic() + self.answer_within, _pauses(), {}
        while waiting and time.monotonic() < deadline:
            for i, reply in self._pull(waiting):
                replies[waiting.pop(i)] = reply
            if waiting:
                time.sleep(next(pause))
        return replies


def _pauses() -> Iterator[float]:
    pause, longest = PAUSES
    while True:
        yield pause
        pause = min(1.5 * pause, longest)


def clients(data_dir: str | None = None) -> ClientApp:
    """What a node runs: `partition-id` in its configuration is its number; it may name a `data-dir` and a `device`."""
    app = ClientApp()

    def answer(work: Callable[[Message, Context], RecordDict]) -> Callable[[Message, Context], Message]:
        def answered(message, context):
            try:
                content = work(message, context)
            except Exception as error:
                # What went wrong may tell of the data or of this machine: it stays here, and its kind is sent.
                if not isinstance(error, MaskMissing):
                    log.exception("client %s", context.node_config.get("partition-id"))
                content = _content({}, {"error": type(error).__name__})
            return Message(content, reply_to=message)

        return answered

    def site_of(message, context) -> tuple[Federation, int]:
        n = int(context.node_config["partition-id"])
        folder = data_dir or context.node_config.get("data-dir")
        settings = json.loads(message.content["config"]["experiment"])
        if "device" in context.node_config:
            settings |= {"device": context.node_config["device"], "gradient": "auto"}
        return _site(json.dumps(settings), n if is_hook(settings["dataset"]) else None, folder), n

    def who(message, context):
        return _content({}, {"client": int(context.node_config["partition-id"])})

    def ask(message, context):
        site, n = site_of(message, context)
        with computing(site.exp):
            tensors = {k: v.to(site.device) for k, v in _arrays(message).items()}
            return _content(site.ask([n], message.content["config"]["question"], **tensors)[n], {})

    def train(message, context):
        site, n = site_of(message, context)
        plain, arrays = message.content["config"], _arrays(message)
        version, sparse = plain["mask_version"], plain["sparse"]
        if "mask" not in arrays and "mask" in context.state and context.state["mask"]["version"] == version:
            arrays["mask"] = torch.frombuffer(bytearray(context.state["mask"]["bits"]), dtype=torch.uint8)
        with computing(site.exp):
            state, bits = wire.unpack_state(site, arrays, plain["t"], version, sparse, n)
            result = site.train_client(state, n)
            content = _content(wire.upload(site, state, n, result), {})
        if sparse:
            context.state["mask"] = ConfigRecord({"version": version, "bits": bits.numpy().tobytes()})
        content["metrics"] = MetricRecord({"num-examples": len(site.parts[n]), "loss": float(result["loss"])})
        return content

    app.query("who")(answer(who))
    app.query("ask")(answer(ask))
    app.train()(answer(train))
    return app


@lru_cache(maxsize=4)
def _site(settings: str, client: int | None, data_dir: str | None) -> Federation:
    """A client's federation; kept from message to message. Of data that clients bring it has this client's alone."""
    exp = Experiment(**json.loads(settings))
    with computing(exp):
        return Federation(exp, data.of(exp, data_dir, None if client is None else [client]))


def _content(tensors: Mapping[str, Tensor], plain: dict) -> RecordDict:
    arrays = ArrayRecord({k: Array(v.detach().cpu().contiguous().numpy()) for k, v in tensors.items()})
    return RecordDict({"arrays": arrays, "config": ConfigRecord(plain)})


def _arrays(message: Message) -> dict[str, Tensor]:
    """The arrays of a message; Flower reads them without unpickling."""
    return {k: torch.from_numpy(v.numpy().copy()) for k, v in message.content["arrays"].items()}


def _error(reply: Message | None) -> str | None:
    """What kept a client from answering."""
    if reply is None:
        return "it cannot be read"
    if reply.has_error():
        return f"Flower says: {reply.error.reason:.200}"
    config = reply.content.config_records.get("config", {})
    return f"{config['error']!r:.200}" if "error" in config else None


def size_of(message: Message | None) -> int:
    """The bytes of a message as Flower sends it over the network, object by object."""
    if message is None or not message.has_content():
        return 0
    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())


def servers(
    exp: Experiment, out: str | Path | None = None, data_dir: str | Path | None = None,
    answer_within: float = ANSWER_WITHIN, patience: float = PATIENCE, most_examples: int = MOST_EXAMPLES,
    done: Callable[[Run], None] = lambda _: None, **options,
) -> ServerApp:  # fmt: skip
    """An app that runs this experiment with the grid's nodes as its clients; `options` are those of `run`."""
    server = dict(out=out, answer_within=answer_within, patience=patience, most_examples=most_examples)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        done(run(exp, out, data_dir=data_dir, federation=partial(Server, grid=grid, **server), **options))

    return app


def simulate(
    exp: Experiment, out: str | Path | None = None, *, data_dir: str | Path | None = None, processes: int = 2, **options
) -> Run:
    """`run`, with the clients in Flower's simulation: N virtual nodes on `processes` actors of Ray."""
    from flwr.simulation import run_simulation

    finished: list[Run] = []
    app = servers(exp, out, data_dir, done=finished.append, **options)
    folder = data_dir and str(Path(data_dir).expanduser().resolve())
    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": processes, "include_dashboard": False}}
    run_simulation(app, clients(folder), num_supernodes=exp.clients, backend_config=backend)
    return finished[0]


class Loader(yaml.SafeLoader):
    """YAML, in which 1e-5 is a number, as JSON writes it."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def configured(config: Mapping) -> Experiment:
    """The experiment that a run configuration of `flwr run` names."""
    settings = yaml.load(config["settings"] or "{}", Loader)
    if not isinstance(settings, dict):
        raise ValueError(f"settings: {config['settings']!r} is not allowed; it must be YAML such as {{rounds: 4}}")
    named = {k: config[k] for k in ("dataset", "method") if config[k]}
    if is_hook(named.get("dataset", "")) or not config["preset"]:
        return Experiment(**named, **settings)
    return Experiment.preset(config["preset"], **named, **settings)


server_app = ServerApp()
client_app = clients()


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    config = context.run_config
    limits = dict(answer_within=float(config["answer-within"]), patience=float(config["patience"]))
    options = limits | dict(most_examples=int(config["most-examples"]))
    app = servers(configured(config), config["out"], config["data-dir"] or None, **options, progress=False)
    app(grid, context)
