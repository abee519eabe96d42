"""The server of Algorithm 1, whose clients are the nodes of Flower's grid."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from ..client import Clients
from ..communication import Payload
from ..engine.assembly import gradient_name
from ..engine.records import folder_of, write
from ..experiment import Experiment
from ..method import Method
from ..server import Federation
from ..state import Replies, State, Upload
from . import belief, wire
from .belief import LONGEST, Diverged, Rejected
from .messages import ASK, TRAIN, arrays_of, content, error_of, size_of
from .nodes import Nodes
from .wire import ClientCache, MaskMissing

log = logging.getLogger(__name__)

ANSWER_WITHIN = 600.0  # seconds for a client to answer
PATIENCE = 120.0  # seconds to wait for clients to connect at all
GRACE = 10.0  # seconds to wait for a returning client to say who it is, before a round starts without it
MOST_EXAMPLES = 10**6  # samples that a client may claim; if the server knows its number, exactly that

Answer = tuple[Upload, int]  # and the number of samples that it was trained on


class NobodyAnswered(RuntimeError):
    """A round has no usable answer. The checkpoint stays, and the same run resumes from it."""


class Server(Federation):
    """The server of Algorithm 1, whose clients are the nodes of a grid.

    A client that is away, late or wrong is left out of its round and listed in `faults`; the others' weights are
    renormalised. It is asked again as soon as it is back. `longest_step` bounds how far a client may be from the
    others: see `belief.too_far`. If all clients of a round diverge, the run has diverged; if only one does, it is left
    out. With `out`, the size of every message is kept beside the record, in messages.csv.
    """

    def __init__(
        self, exp: Experiment, clients: Clients, method: Method, grid: Grid, out: str | Path | None = None,
        answer_within: float = ANSWER_WITHIN, patience: float = PATIENCE, most_examples: int = MOST_EXAMPLES,
        longest_step: float = LONGEST,
    ):  # fmt: skip
        super().__init__(exp, clients, method)
        if exp.stacked:
            raise ValueError("stacked: True is not allowed; clients that are elsewhere are trained one by one")
        self.settings = json.dumps({"dataset": exp.dataset, **exp.changed(), "gradient": gradient_name(self)})
        self.answer_within, self.patience = answer_within, patience
        self.most_examples, self.longest_step = most_examples, longest_step
        self.claims = {n: len(part) for n, part in enumerate(clients.parts) if len(part)}  # samples per client
        self.nodes = Nodes(grid, exp.clients, answer_within)
        self.caches: dict[int, ClientCache] = {}  # what each node holds, as far as the server knows
        self.begun = False
        self.file = folder_of(exp, out) / "messages.csv" if out else None
        self.bytes: list[dict] = []

    def start(self, sketch: bool = False) -> State:
        """As in one process, once all clients are connected."""
        missing = [] if sketch else self.nodes.wait(range(self.exp.clients), self.patience)
        if missing:
            names = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
            raise NobodyAnswered(f"clients {names} are not connected after {self.patience:g} s")
        return super().start(sketch)

    def ask(self, chosen: list[int] | None, question: str, **tensors: Tensor) -> dict[int, dict[str, Tensor]]:
        """The answers of all reachable clients to a question of the method."""
        if question not in self.method.questions:
            return super().ask(chosen, question, **tensors)  # which says what there is to ask
        chosen = chosen or self.select(0)
        self.nodes.wait(chosen, self.patience)
        order = content(tensors, {"experiment": self.settings, "question": question})
        replies = self._send({n: order for n in chosen if n in self.nodes.of}, ASK, 0)
        form, answers = Payload(self.method.questions[question]), {}
        for n in chosen:
            try:
                answers[n] = wire.unpacked(self, form, self._read(n, replies)[0], None)
                belief.check_finite(answers[n])
            except Rejected as reason:
                answers.pop(n, None)
                self._fault(0, n, str(reason))
        steps = {n: belief.lengths(answer, tensors) for n, answer in answers.items()}
        for n, reason in belief.too_far(steps, self.longest_step).items():
            del answers[n]
            self._fault(0, n, reason)
        if not answers:
            raise NobodyAnswered(f"nobody answers the question {question!r}, without which training cannot begin")
        return answers

    def collect(self, state: State, chosen: list[int]) -> Replies:
        """The chosen clients with usable answers, and their uploads; if all clients diverge, all of them."""
        # At the start, and after a restart, wait for everyone; later only for clients that are about to return.
        self.nodes.wait(chosen, GRACE if self.begun else self.patience, only_asked=self.begun)
        if not self.begun and state.t and self.file and self.file.exists():
            self.bytes = pd.read_csv(self.file).query(f"round <= {state.t}").to_dict("records")
        self.begun = True
        answers = self._answers(state, chosen)
        if all(isinstance(a, Rejected) and not isinstance(a, Diverged) for a in answers.values()):
            self.nodes.wait(chosen, self.patience)  # a network that is down may come back
            answers = self._answers(state, chosen)
        self._keep_bytes()
        good = {n: a for n, a in answers.items() if not isinstance(a, Rejected)}
        # One client's word is not enough to end a run.
        diverged = {n: a.answer for n, a in answers.items() if isinstance(a, Diverged)}
        self.may_diverge = not good and len(diverged) > 1
        if self.may_diverge:
            good = diverged
        if not good:
            reasons = "; ".join(f"client {n}: {reason}" for n, reason in answers.items())
            raise NobodyAnswered(f"round {state.t + 1}: nobody has given an answer that can be used ({reasons})")
        for n in chosen:
            if n not in good:
                self._fault(state.t + 1, n, str(answers[n]))
        return Replies(list(good), [size for _, size in good.values()], [upload for upload, _ in good.values()])

    def _answers(self, state: State, chosen: list[int]) -> dict[int, Answer | Rejected]:
        """Each client's answer, or the reason why it cannot be used."""
        answers: dict[int, Answer | Rejected] = dict.fromkeys(chosen, Rejected("it is not connected"))
        chosen = [n for n in chosen if n in self.nodes.of]
        replies = self._send({n: self._order(state, n) for n in chosen}, TRAIN, state.t + 1)
        # A restarted node holds nothing, whatever it was sent before.
        again = [n for n, reply in replies.items() if error_of(reply) == repr(MaskMissing.__name__)]
        for n in again:
            self.caches.pop(self.nodes.of[n], None)
        replies |= self._send({n: self._order(state, n) for n in again}, TRAIN, state.t + 1)
        steps = {}
        for n in chosen:
            try:
                arrays, metrics = self._read(n, replies)
                size = self._size(n, metrics.get("num-examples"))
                answers[n] = wire.unpack_upload(self, state, n, arrays, metrics.get("loss")), size
                steps[n] = self._step(state, n, answers[n])
            except Rejected as reason:
                answers[n] = reason
        answers |= {n: Rejected(reason) for n, reason in belief.too_far(steps, self.longest_step).items()}
        for n in chosen:
            if isinstance(answers[n], Rejected):
                self.nodes.forget(n)  # until it says again who it is
            else:
                self.claims[n] = answers[n][1]
                self.caches[self.nodes.of[n]] = ClientCache(state.mask_version, state.t)
        return answers

    def _step(self, state: State, n: int, answer: Answer) -> belief.Lengths:
        """How far client n's step went, if its model is usable."""
        upload, _ = answer
        try:
            belief.check_finite(upload.values | upload.own)
            belief.check_model(self, state, upload)
        except Diverged as reason:
            reason.answer = answer
            raise
        w, statistics, *_ = self.ready(state, n)
        return belief.lengths(upload.values, {"w": w, "statistics": statistics})

    def _order(self, state: State, n: int) -> RecordDict:
        order, arrays = wire.download(self, state, n, self.caches.get(self.nodes.of[n], ClientCache()))
        return content(arrays, dataclasses.asdict(order) | {"experiment": self.settings})

    def _read(self, n: int, replies: Mapping[int, Message | None]) -> tuple[dict[str, Tensor], dict]:
        """What client n has answered: its arrays and its metrics."""
        if n not in self.nodes.of:
            raise Rejected("it is not connected")
        if n not in replies:
            raise Rejected(f"no answer within {self.answer_within:g} s")
        if reason := error_of(replies[n]):
            raise Rejected(reason)
        try:
            records = replies[n].content
            return arrays_of(records["arrays"]), dict(records.metric_records.get("metrics", {}))
        except Exception as error:  # a client may send anything
            raise Rejected(f"it cannot be read ({type(error).__name__})") from error

    def _size(self, n: int, claim: object) -> int:
        """The number of samples that a client claims, if it is possible and the same as in earlier rounds."""
        if type(claim) is not int or not 1 <= claim <= self.most_examples:
            raise Rejected(f"it claims {claim!r:.99} samples; it must be a whole number from 1 to {self.most_examples}")
        if self.claims.get(n, claim) != claim:
            raise Rejected(f"it claims {claim} samples, and has {self.claims[n]}")
        return claim

    def _send(self, orders: Mapping[int, RecordDict], kind: str, t: int) -> dict[int, Message | None]:
        """The replies of those clients that answer in time."""
        messages = {n: self.nodes.message(self.nodes.of[n], order, kind, t) for n, order in orders.items()}
        replies = self.nodes.exchange(messages)
        for n, message in messages.items():
            up = size_of(replies[n]) if n in replies else 0
            self.bytes.append({"round": t, "client": n, "kind": kind, "down_bytes": size_of(message), "up_bytes": up})
        return replies

    def _fault(self, t: int, n: int, reason: str) -> None:
        log.warning("%s continues without client %d: %s", f"round {t}" if t else "the start", n, reason)
        self.faults.append({"round": t, "client": n, "reason": reason})

    def _keep_bytes(self) -> None:
        if self.file and self.file.parent.is_dir():
            write(self.file, pd.DataFrame(self.bytes).to_csv(index=False, lineterminator="\n"))
