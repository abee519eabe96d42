"""A method: FedAvg's round, and every place where a method may do something else.

A subclass says all about itself: its label, its settings, what it changes, what it sends. `state` is what the server
knows, `clients` are the clients with their data and their network, `layout` says where each layer stands in the one
vector of weights.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from . import masks
from .client import Clients, Term
from .communication import KEPT, MASK, STATISTICS, Form, Payload
from .experiment import METHODS, Experiment
from .masks import Mask
from .schedules import reconfiguration_time, sparsity_at
from .settings import Setting
from .state import Average, State, Tensors, Upload
from .streams import stream

__all__ = ["METHODS", "Ask", "Method"]

# Asks some clients a question of the method before the first round: ask([0, 3], "sensitivity", w=w)[0]["g"].
Ask = Callable[..., dict[int, Tensors]]


class Method:
    """Every client trains all weights; the server averages them. A subclass changes what it needs to change."""

    name: ClassVar[str] = ""
    label: ClassVar[str] = "Method"
    colour: ClassVar[str] = ""  # of its curves, and how they are drawn; if empty, figures choose
    line: ClassVar[str] = ""
    settings: ClassVar[dict[str, Setting]] = {}  # those of its own; an experiment has them beside the common ones
    smoke: ClassVar[dict[str, Any]] = {}  # what the smoke preset gives to them
    switches: ClassVar[Mapping[str, Any]] = {}  # setting -> (note, value -> the mixin that changes the method, or None)
    released: ClassVar[type | None] = None  # what the FedDIP repository does instead, with rules="released"

    feedback = True  # whether a pruned weight keeps moving (Eq. 10) or is masked after every step (Eq. 7)
    mask_form: Form = MASK  # how a mask travels
    one_mask: ClassVar[bool] = True  # whether all clients of a round upload the same weights: else no median
    plan_is_a_bound: ClassVar[bool] = False  # whether training decides how much is sent, so that a plan says at most
    questions: ClassVar[dict[str, dict[str, Form]]] = {}  # to clients before the first round, and what each answers

    def __init_subclass__(cls, **kwargs: Any):
        """A class that does not say how it looks is called by its name."""
        super().__init_subclass__(**kwargs)
        for k, v in {"label": cls.__name__, "colour": "", "line": ""}.items():
            if k not in vars(cls):
                setattr(cls, k, v)

    @classmethod
    def defaults(cls, model: str, dataset: str, rounds: int) -> dict[str, Any]:
        """Defaults of its settings that depend on the network, the data or T."""
        return {}

    @classmethod
    def check(cls, exp: Experiment) -> None:
        """Whether its settings go together."""
        low, high = (getattr(exp, k, None) for k in ("sparsity_initial", "sparsity_target"))
        if low is not None and high is not None and low > high:
            raise ValueError(f"sparsity_initial: {low!r} is not allowed; it must be at most sparsity_target, {high}")

    def __init__(self, exp: Experiment, clients: Clients):
        self.exp, self.clients, self.layout = exp, clients, clients.layout

    # Before the first round.

    def start(self, w: Tensor, ask: Ask) -> tuple[Tensor, Mask | None, Tensors]:
        """Weights, mask and memory before the first round, from the initial weights; no mask is a dense model."""
        return w, self.first_mask(w), {}

    def sketch(self, w: Tensor) -> tuple[Tensor, Mask | None, Tensors]:
        """The same without asking a client, for a plan: the mask must have the right size, no more."""
        return self.start(w, lambda *_, **__: {})

    def first_mask(self, w: Tensor) -> Mask | None:
        """The mask before the first round."""
        return None

    # At a client.

    def client_mask(self, state: State, n: int) -> Mask | None:
        """The mask under which client n trains."""
        return state.m

    def feeds_back(self, state: State) -> bool:
        """Whether pruned weights move in this round, and so travel back."""
        return self.feedback

    def lam(self, t: int) -> float:
        """The weight of the penalty in round t."""
        return 0.0

    def terms(self, t: int, start: Tensor) -> list[Term]:
        """What a client that starts at these weights adds to its cross-entropy."""
        return []

    def finish(self, upload: Upload, terms: list[Term], m: Mask | None, state: State, n: int) -> Upload:
        """What client n does after its last step, to what it uploads."""
        return upload

    # At the server.

    def next(self, average: Average, state: State) -> tuple[Tensor, Mask | None, Tensors]:
        """Weights, mask and memory after the round, from the average of the uploads; the mask is yet to be applied."""
        w = average.mean["w"]
        return w, self.next_mask(self.layout.weights(w), state.m, state.t), {}

    def next_mask(self, w: Tensors, m: Mask | None, t: int) -> Mask | None:
        """The mask that follows round t, from the prunable weights of the average."""
        return m

    def remembered(self, w: Tensor, m: Mask | None) -> Tensor:
        """What of the average is there when the next round begins: ω′ = m ⊙ ω."""
        return self.layout.prune(w, m)

    # What travels.

    def download(self, state: State, n: int) -> Payload:
        """The kept weights, and the mask unless the client holds it."""
        parts = {"w": KEPT, "statistics": STATISTICS}
        if state.m is not None and state.client_mask_versions[n] != state.mask_version:
            parts["mask"] = self.mask_form
        return Payload(parts, state.kept)

    def upload(self, state: State, n: int) -> Payload:
        """With feedback all weights come back, without it the kept ones."""
        m = None if self.feeds_back(state) else self.client_mask(state, n)
        return Payload({"w": KEPT, "statistics": STATISTICS}, None if m is None else masks.kept(m))

    # For subclasses: what several methods share.

    def tau(self, t: int) -> int | None:
        """The τ whose s_τ the next mask must have, or None if round t keeps its mask."""
        return reconfiguration_time(t, R=self.exp.reconfigure_every)

    def sparsity(self, t: int) -> float:
        """s_t (Eq. 11)."""
        return sparsity_at(t, T=self.exp.rounds, s_0=self.exp.sparsity_initial, s_p=self.exp.sparsity_target)

    def erk_mask(self, sparsity: float, purpose: str = "initial mask", n: int = 0) -> Mask | None:
        """A random mask with ERK's share of zeros in each layer; none if nothing is to go."""
        if sparsity == 0:
            return None
        shapes = self.layout.prunable_shapes
        m = masks.random_mask(shapes, masks.erk_sparsities(shapes, sparsity), stream(self.exp.seed, purpose, n=n))
        return {k: v.to(self.clients.device) for k, v in m.items()}
