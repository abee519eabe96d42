"""The FedDIP repository's versions of the baselines; they differ from the baselines' own papers."""

import math
from functools import partial
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ... import masks
from ...client import add_group_penalty_
from ...communication import MASK, Payload
from ...masks import Mask
from ...method import Method
from ...settings import Setting, real
from ...streams import global_stream
from ..feddip import SPARSITY_INITIAL, SPARSITY_TARGET
from ..feddst import FedDST, drop_and_regrow, layer_mask, regrowth_fraction_at
from ..prunefl import PRUNABLE, PruneFL, Summed, prunefl_mask
from ..prunetrain import PruneTrain
from ..snip import Snip


class ReleasedSnip(Snip):
    """Scores come from freshly drawn weights, at one client, with a loss that expects log-probabilities."""

    label, colour, line = Snip.label, Snip.colour, Snip.line
    loss_of = staticmethod(F.nll_loss)

    def score(self, w, ask):
        fresh = w.clone()
        with global_stream(self.clients.device, self.exp.seed, "snip"):
            for v in self.layout.weights(fresh).values():
                nn.init.xavier_normal_(v)
        return ask([0], "sensitivity", w=fresh)[0]["g"] * fresh

    def start(self, w, ask):
        # The server sends the first model dense, together with the mask; the clients prune it.
        return self._dense(*super().start(w, ask))

    def sketch(self, w):
        return self._dense(*super().sketch(w))

    def _dense(self, w: Tensor, m: Mask | None, memory: dict) -> tuple[Tensor, None, dict]:
        return w, None, {} if m is None else {"first mask": self.layout.flat_mask(m, like=w)}

    def client_mask(self, state, n):
        return self.layout.mask_of(state.memory["first mask"]) if "first mask" in state.memory else state.m

    def next(self, average, state):
        return average.mean["w"], self.client_mask(state, 0), {}

    def download(self, state, n):
        plain = super().download(state, n)
        return plain.plus({"first mask": MASK}) if "first mask" in state.memory else plain


class ReleasedPruneFL(PruneFL):
    """Ranks weights by the squared gradient of the last batch, regardless of their cost and size."""

    label, colour, line = PruneFL.label, PruneFL.colour, PruneFL.line

    def found(self, n, w):
        """Train on half of the client's data until slightly better than chance; then use g² of one batch."""
        batches = list(self.clients.batches(n, 0, "prunefl"))
        batches, last = batches[: (len(batches) + 1) // 2], Summed(w, last_only=True)
        enough = 0.11 if self.outputs(batches[0][0]) <= 10 else 0.02
        for passes in range(1, 50):
            self.clients.train_(w, None, batches, terms=[last])
            if passes >= 6 and self.accuracy(w, batches) > enough:
                break
        ones = self.layout.full_mask(None, self.clients.device)
        m = self.adjusted(w, last.total.square(), ones, self.keep(self.exp.sparsity_initial), r=0)
        return self.layout.prune(w, m), m

    def terms(self, t, start):
        return [Summed(start, last_only=True)]

    def finish(self, upload, terms, m, state, n):
        return upload if self.tau(state.t) is None else super().finish(upload, terms, m, state, n)

    def next(self, average, state):
        w, m, tau = average.mean["w"], state.m, self.tau(state.t)
        if tau is None or m is None:
            return w, m, {}
        return w, self.adjusted(w, average.mean["g2"], m, self.keep(self.sparsity(tau)), r=state.t), {}

    def adjusted(self, w, g2, m, keep, r):
        keep = min(keep + 1, self.keep(0.0))
        return prunefl_mask(self.layout.weights(w), self.layout.weights(g2), m, keep, drop=1.0)

    def sketch(self, w):
        w, m, memory = super().sketch(w)
        if m is not None:
            m = self.adjusted(w, w, m, self.keep(self.exp.sparsity_initial), r=0)
        return w, m, memory

    def upload(self, state, n):
        plain = Method.upload(self, state, n)
        return plain if self.tau(state.t) is None or state.m is None else plain.plus({"g2": PRUNABLE})


class ReleasedPruneTrain(PruneTrain):
    """A penalty on whole layers, and magnitude pruning to s_t at every client and at the server, every round.

    The first and the last layer are never pruned.
    """

    label, colour, line = PruneTrain.label, PruneTrain.colour, PruneTrain.line
    settings: ClassVar[dict[str, Setting]] = dict(
        lambda_max=real(0.01, 0, math.inf, "the penalty's constant weight"),
        sparsity_initial=SPARSITY_INITIAL, sparsity_target=SPARSITY_TARGET,
    )  # fmt: skip
    smoke: ClassVar[dict[str, Any]] = {}
    plan_is_a_bound = False  # here the schedule gives the sparsity
    one_mask = False

    def __init__(self, exp, clients):
        Method.__init__(self, exp, clients)
        if len(self.layout.prunable) < 3:
            needs = "it never prunes the first and the last layer, so it needs at least three"
            raise ValueError(f"rules: 'released' is not allowed; {needs}, and {exp.model} has fewer")

    def terms(self, t, start):
        lam = self.lam(t)
        return [partial(add_group_penalty_, layers=self.layout.layers[1:-1], lam=lam)] if lam else []

    def client_mask(self, state, n):
        return None  # dense steps from the pruned model

    def finish(self, upload, terms, m, state, n):
        w = upload.values["w"]
        own = self._mask(w, state.t)
        return upload.plus(w=self.layout.prune(w, own), mask=self.layout.flat_mask(own, like=w))

    def _mask(self, w: Tensor, t: int) -> Mask:
        """Prune all layers except the first and the last to s_t, by magnitude."""
        inner = dict(list(self.layout.weights(w).items())[1:-1])
        return {**self.layout.full_mask(None, w.device), **masks.magnitude_mask(inner, self.sparsity(t))}

    def next(self, average, state):
        w = average.mean["w"]
        m = self._mask(w, state.t)
        return w, None if masks.sparsity_of(m) == 0 else m, {}

    def upload(self, state, n):
        plain = super().upload(state, n)
        sizes = [shape.numel() for shape in self.layout.prunable_shapes.values()]
        kept = sum(sizes) - round(self.sparsity(state.t) * sum(sizes[1:-1]))
        return Payload({**plain.parts, "mask": MASK}, kept)


class ReleasedFedDST(FedDST):
    """Each client keeps its own mask, whatever the server sends, and the server takes a plain average."""

    label, colour, line = FedDST.label, FedDST.colour, FedDST.line
    plan_is_a_bound = True  # the average's largest weights may change after any round

    def client_mask(self, state, n):
        own = state.own.get(n, {}).get("mask")
        return self.erk_mask(self.exp.sparsity_target) if own is None else self.layout.mask_of(own)

    def finish(self, upload, terms, m, state, n):
        """Choose a mask for the client's next round, ranked by the weights it received."""
        if not self.readjusts(state):
            return upload
        w, statistics = upload.values["w"], upload.values["statistics"].clone()
        g = self.clients.batch_gradient(w, n, state.t, "regrow", F.nll_loss, statistics)
        a = regrowth_fraction_at(state.t, T=self.exp.rounds, alpha=self.exp.adjust_alpha)
        _, own = drop_and_regrow(self.layout.weights(state.w), self.layout.weights(g), m, a)
        return type(upload)(upload.values, {"mask": self.layout.flat_mask(own, like=w)})

    def next(self, average, state):
        w, m = average.mean["w"], state.m
        if m is None:
            return w, m, {}
        # Prune to the layers' counts after every round.
        return w, layer_mask(self.layout.weights(w), {k: int(v.sum()) for k, v in m.items()}), {}

    def upload(self, state, n):
        plain = Method.upload(self, state, n)
        # The server must know where the values of later uploads belong.
        return plain.plus({"own/mask": MASK}) if self.readjusts(state) else plain
