"""Algorithm 1: select, download, train, aggregate, choose the mask, prune.

A round is a step from one immutable state to the next. Uploads are summed as they arrive.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import masks
from .client import Clients, Term
from .experiment import Experiment
from .masks import Mask
from .method import Method
from .state import Average, Replies, State, Tensors, Upload, aggregate
from .streams import global_stream, stream


@dataclass(frozen=True)
class Round:
    """What a round returns besides its state, for its row of metrics and for observers."""

    average: Average
    w: Tensor  # the average before pruning


class Federation:
    """One experiment's server with its clients. A subclass may override `collect` and `ask` to train elsewhere."""

    def __init__(self, exp: Experiment, clients: Clients, method: Method):
        self.exp, self.clients, self.method = exp, clients, method
        self.train, self.aggregate = self.train_here, aggregate  # `engine.robust` has robust averages
        self.faults: list[dict] = []  # clients left out of a round; always empty in one process
        self.may_diverge = True  # whether a non-finite loss ends the run; otherwise such a round is discarded

    def start(self, sketch: bool = False) -> State:
        """Default initialisation, pruned with the method's first mask; a sketch asks no client."""
        w, statistics, method = self.clients.first_weights, self.clients.first_statistics, self.method
        w, m, memory = method.sketch(w) if sketch else method.start(w, self.ask)
        own = {n: norms for n in range(self.exp.clients) if (norms := self.clients.norms_of(w, statistics))}
        versions = (-1,) * self.exp.clients
        return State(0, method.remembered(w, m), m, statistics.clone(), 0, versions, memory, own)

    def round(self, state: State) -> tuple[State, Round]:
        """One pass of Algorithm 1: select, download, train, aggregate, choose the mask, prune."""
        chosen = self.select(state.t)
        replies = self.collect(state, chosen)  # each downloads ω′, takes its local steps, and uploads
        average = self.averaged(replies)  # Eq. 12
        w, m, memory = self.method.next(average, state)  # every R rounds the largest weights: Eq. 11
        changed = any(masks.changes(self.full_mask(state.m), self.full_mask(m)))
        after = state.then(self.method.remembered(w, m), m, memory, average, changed)  # ω′ = m ⊙ ω
        return after, Round(average, w)

    def select(self, t: int) -> list[int]:
        """K of the N clients, uniformly and without replacement."""
        order = torch.randperm(self.exp.clients, generator=stream(self.exp.seed, "select", t))
        return sorted(order[: self.exp.clients_per_round].tolist())

    def collect(self, state: State, chosen: list[int]) -> Replies:
        """The chosen clients that answer (here all of them), with their uploads."""
        return Replies(chosen, [len(self.clients.parts[n]) for n in chosen], self.train(state, chosen))

    def averaged(self, replies: Replies) -> Average:
        """The mean of the uploads, weighted by samples, and what each client keeps for itself."""
        own, zeros = dict[int, Tensors](), list[Tensor]()

        def values() -> Iterator[Tensors]:
            for n, upload in zip(replies.clients, replies.uploads, strict=True):
                w, statistics = upload.values["w"], upload.values["statistics"]
                # A client's own batch norms stay with it. The average includes them only for the server's test.
                own[n] = upload.own | self.clients.norms_of(w, statistics)
                zeros.append((w == 0).double().mean())
                yield upload.values

        mean = self.aggregate(values(), replies.sizes)
        return Average(mean, replies.clients, own, [float(z) for z in zeros])

    def ask(self, chosen: list[int] | None, question: str, **tensors: Tensor) -> dict[int, Tensors]:
        """The clients' answers to one of the method's questions before the first round; None asks the first round's."""
        if question not in self.method.questions:
            known = ", ".join(self.method.questions) or "none"
            raise ValueError(f"question: {question!r} is not allowed; {self.exp.method} has {known}")
        return {n: getattr(self.method, question)(n, **tensors) for n in chosen or self.select(0)}

    def train_here(self, state: State, chosen: list[int]) -> Iterable[Upload]:
        """One client after the other."""
        return (self.train_client(state, n) for n in chosen)

    def train_client(self, state: State, n: int) -> Upload:
        """Client n's round: from ω′, E epochs of steps on dense weights with gradients at the pruned ones."""
        t, exp, clients, method = state.t, self.exp, self.clients, self.method
        w, statistics, m, terms = self.ready(state, n)
        samples = clients.batches(n, t, "batches", exp.local_epochs)
        with global_stream(clients.device, exp.seed, "dropout", t, n):
            loss = clients.train_(w, m, samples, t, statistics, terms=terms, feedback=method.feeds_back(state))
        return method.finish(Upload({"w": w, "statistics": statistics, "loss": loss}), terms, m, state, n)

    def ready(self, state: State, n: int) -> tuple[Tensor, Tensor, Mask | None, list[Term]]:
        """What client n starts a round with: weights and statistics to change in place, its mask, its terms."""
        method, m = self.method, self.method.client_mask(state, n)
        w, statistics = self.clients.with_norms(state.w, state.statistics, state.own.get(n, {}))
        start = self.clients.layout.prune(w, m)
        # Copies: the steps change them in place, while a proximal term still needs the start.
        return (w if method.feeds_back(state) else start).clone(), statistics, m, method.terms_of(state, n, start)

    def full_mask(self, m: Mask | None) -> Mask:
        """The mask itself, or one that keeps everything if the model is dense."""
        return self.clients.layout.full_mask(m, self.clients.device)
