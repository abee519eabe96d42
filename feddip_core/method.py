"""A method: FedAvg's round, with a hook wherever a method may differ.

A subclass holds everything about itself: label, settings, what it changes, what it sends. `state` is what the server
knows, `clients` have data and network, and `layout` says where each layer is in the vector of weights.
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

# Asks some clients one of the method's questions before the first round: ask([0, 3], "sensitivity", w=w)[0]["g"].
Ask = Callable[..., dict[int, Tensors]]


class Method:
    """Every client trains all weights; the server averages them. A subclass overrides only what differs."""

    name: ClassVar[str] = ""
    label: ClassVar[str] = "Method"
    colour: ClassVar[str] = ""  # colour and style of its curves; if empty, figures choose
    line: ClassVar[str] = ""
    settings: ClassVar[dict[str, Setting]] = {}  # its own; an experiment has them in addition to the common ones
    smoke: ClassVar[dict[str, Any]] = {}  # their values in the smoke preset
    switches: ClassVar[Mapping[str, Any]] = {}  # setting -> (note, value -> the mixin that changes the method, or None)
    released: ClassVar[type | None] = None  # the FedDIP repository's version, used with rules="released"

    feedback = True  # whether a pruned weight keeps moving (Eq. 10) or is masked after every step (Eq. 7)
    mask_form: Form = MASK  # how a mask travels
    one_mask: ClassVar[bool] = True  # whether all clients of a round upload the same weights; a median needs it
    plan_is_a_bound: ClassVar[bool] = False  # whether training decides how much is sent: a plan is then an upper bound
    questions: ClassVar[dict[str, dict[str, Form]]] = {}  # asked before the first round, each with its answer's parts

    def __init_subclass__(cls, **kwargs: Any):
        """Give a class without a label its own name, and let figures choose its style."""
        super().__init_subclass__(**kwargs)
        for k, v in {"label": cls.__name__, "colour": "", "line": ""}.items():
            if k not in vars(cls):
                setattr(cls, k, v)

    @classmethod
    def defaults(cls, model: str, dataset: str, rounds: int) -> dict[str, Any]:
        """Defaults that depend on the network, the data or T."""
        return {}

    @classmethod
    def check(cls, exp: Experiment) -> None:
        """Check that its settings fit together."""
        low, high = (getattr(exp, k, None) for k in ("sparsity_initial", "sparsity_target"))
        if low is not None and high is not None and low > high:
            raise ValueError(f"sparsity_initial: {low!r} is not allowed; it must be at most sparsity_target, {high}")

    def __init__(self, exp: Experiment, clients: Clients):
        self.exp, self.clients, self.layout = exp, clients, clients.layout

    # Before the first round.

    def start(self, w: Tensor, ask: Ask) -> tuple[Tensor, Mask | None, Tensors]:
        """Weights, mask and memory before the first round, from the initial weights; None as mask is a dense model."""
        return w, self.first_mask(w), {}

    def sketch(self, w: Tensor) -> tuple[Tensor, Mask | None, Tensors]:
        """The same without asking clients, for a plan: only the size of the mask must be right."""
        return self.start(w, lambda *_, **__: {})

    def first_mask(self, w: Tensor) -> Mask | None:
        """The mask before the first round."""
        return None

    # At a client.

    def client_mask(self, state: State, n: int) -> Mask | None:
        """The mask that client n trains with."""
        return state.m

    def feeds_back(self, state: State) -> bool:
        """Whether pruned weights move in this round, and so are uploaded."""
        return self.feedback

    def lam(self, t: int) -> float:
        """The weight of the penalty in round t."""
        return 0.0

    def terms(self, t: int, start: Tensor) -> list[Term]:
        """The terms that a client starting at these weights adds to its cross-entropy."""
        return []

    def terms_of(self, state: State, n: int, start: Tensor) -> list[Term]:
        """The same, for a method whose terms depend on the client or on its mask too."""
        return self.terms(state.t, start)

    def finish(self, upload: Upload, terms: list[Term], m: Mask | None, state: State, n: int) -> Upload:
        """Client n's upload, after any changes it makes once its steps are done."""
        return upload

    # At the server.

    def next(self, average: Average, state: State) -> tuple[Tensor, Mask | None, Tensors]:
        """Weights, mask and memory after the round, from the averaged uploads; the mask is not yet applied."""
        w = average.mean["w"]
        return w, self.next_mask(self.layout.weights(w), state.m, state.t), {}

    def next_mask(self, w: Tensors, m: Mask | None, t: int) -> Mask | None:
        """The mask after round t, from the prunable weights of the average."""
        return m

    def remembered(self, w: Tensor, m: Mask | None) -> Tensor:
        """The part of the average that the next round starts from: ω′ = m ⊙ ω."""
        return self.layout.prune(w, m)

    # What travels.

    def download(self, state: State, n: int) -> Payload:
        """The kept weights, and the mask unless the client has it."""
        parts = {"w": KEPT, "statistics": STATISTICS}
        if state.m is not None and state.client_mask_versions[n] != state.mask_version:
            parts["mask"] = self.mask_form
        return Payload(parts, state.kept)

    def upload(self, state: State, n: int) -> Payload:
        """With feedback all weights are uploaded; without it, only the kept ones."""
        m = None if self.feeds_back(state) else self.client_mask(state, n)
        kept = None if m is None else state.kept if m is state.m else masks.kept(m)
        return Payload({"w": KEPT, "statistics": STATISTICS}, kept)

    # Shared by several subclasses.

    def tau(self, t: int) -> int | None:
        """The τ whose s_τ the next mask must have, or None if round t keeps its mask."""
        return reconfiguration_time(t, R=self.exp.reconfigure_every)

    def sparsity(self, t: int) -> float:
        """s_t (Eq. 11)."""
        return sparsity_at(t, T=self.exp.rounds, s_0=self.exp.sparsity_initial, s_p=self.exp.sparsity_target)

    def erk_mask(self, sparsity: float, purpose: str = "initial mask", n: int = 0) -> Mask | None:
        """A random mask with ERK's fraction of zeros in each layer; None if the sparsity is 0."""
        if sparsity == 0:
            return None
        shapes = self.layout.prunable_shapes
        m = masks.random_mask(shapes, masks.erk_sparsities(shapes, sparsity), stream(self.exp.seed, purpose, n=n))
        return {k: v.to(self.clients.device) for k, v in m.items()}
