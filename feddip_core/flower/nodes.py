"""The nodes of Flower's grid: which of them is which client, and how they are asked."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from .messages import WHO, error_of

log = logging.getLogger(__name__)

PAUSES = (0.02, 1.0)  # seconds between two looks for answers, at first and at most


class Nodes:
    """Which node of the grid is which client. Each node is asked; one that was away is asked again."""

    def __init__(self, grid: Grid, clients: int, answer_within: float):
        self.grid, self.clients, self.answer_within = grid, clients, answer_within
        self.of: dict[int, int] = {}  # client -> node
        self.asked: dict[str, tuple[int, float]] = {}  # message -> node, and when to ask it again
        self.refused: dict[int, int | None] = {}  # node -> the client that it wants to be

    def wait(self, clients: Iterable[int], patience: float, only_asked: bool = False) -> list[int]:
        """Wait until these clients are connected, and return those that are still missing after `patience` seconds.

        With `only_asked` the wait also ends when every node that was asked has answered.
        """
        deadline, pause = time.monotonic() + patience, _pauses()
        self.look()
        while missing := [n for n in clients if n not in self.of]:
            if time.monotonic() > deadline or (only_asked and not self.asked):
                return missing
            time.sleep(next(pause))
            self.look()
        return []

    def look(self) -> None:
        """Ask new nodes who they are, and read the answers that have come."""
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
        """The replies to these messages so far, one by one; None for one that cannot be read."""
        for i in list(waiting):
            try:
                for reply in self.grid.pull_messages([i]):
                    yield i, reply
            except httpx.HTTPError:  # the SuperLink itself cannot be reached
                raise
            except Exception:  # a client may send anything
                yield i, None

    def _hear(self, node: int, reply: Message | None) -> None:
        if reply is not None and reply.has_error():
            log.warning("node %d does not say who it is, and is asked again: %s", node, error_of(reply))
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
        self.refused[node] = n if type(n) is int else None

    def forget(self, n: int) -> None:
        """Until it says again who it is; or another that has come in its place."""
        self.of.pop(n, None)
        self.refused = {node: wanted for node, wanted in self.refused.items() if wanted != n}

    def message(self, node: int, content: RecordDict, kind: str, t: int) -> Message:
        """A message to a node."""
        # It lives a little longer than the server waits, so that the server can say why there was no answer.
        return Message(content, node, kind, ttl=self.answer_within + 10, group_id=str(t))

    def exchange(self, messages: Mapping[int, Message]) -> dict[int, Message | None]:
        """The replies that come in time; None is one that cannot be read."""
        waiting = {i: n for n, message in messages.items() for i in self._push(message)}
        deadline, pause = time.monotonic() + self.answer_within, _pauses()
        replies: dict[int, Message | None] = {}
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
