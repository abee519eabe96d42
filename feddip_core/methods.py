"""The ten methods, as small variations of one round (Algorithm 1).

`FedAvg` is the round with nothing added. A method overrides what it does differently: where it starts, the mask
under which a client trains, what is added to the objective, what a client does last, what the server does with
the average, what is sent. `site` is the federation: its clients, their data and the layout of the weights.
"""

from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import communication, masks, models
from .experiment import Experiment
from .local import Term, add_channel_penalty_, add_group_penalty_, add_proximal_
from .masks import Mask
from .schedules import lambda_at, lambda_at_authors, reconfiguration_time, regrowth_fraction_at, sparsity_at
from .streams import global_stream, stream

Tensors = dict[str, Tensor]
# To each question that a method may have for a client before the first round, what is answered, as long as the weights.
ANSWERS = {"sensitivity": ("g",), "first_mask": ("w", "mask")}


class FedAvg:
    """Every client trains all weights; the server averages them."""

    feedback = True  # whether a pruned weight goes on moving (Eq. 10) or is masked after every step (Eq. 7)
    all_hold_first_mask = False  # whether it was sent to all clients before the first round
    questions: tuple[str, ...] = ()  # what a client may be asked before the first round

    def __init__(self, exp: Experiment, site):
        self.exp, self.site, self.layout = exp, site, site.layout
        self.authors = exp.variant == "authors"

    def start(self, w: Tensor) -> tuple[Tensor, Mask | None, Tensors]:
        """Weights, mask and memory before the first round, from the initial weights; no mask is a dense model."""
        return w, None, {}

    def client_mask(self, state, n: int) -> Mask | None:
        """The mask under which client n trains."""
        return state.m

    def lam(self, t: int) -> float:
        """The weight of the penalty in round t."""
        return 0.0

    def terms(self, t: int, start: Tensor) -> list[Term]:
        """What a client that starts at these weights adds to its cross-entropy."""
        return []

    def finish(self, upload: Tensors, terms: list[Term], m: Mask | None, state, n: int) -> Tensors:
        """What client n does after its last step, to what it uploads."""
        return upload

    def remembered_for(self, state, n: int) -> list[str]:
        """What of the memory client n needs for its round; each is a mask as a vector."""
        return []

    def sends(self, t: int, m: Mask | None) -> tuple[str, ...]:
        """What a client sends in round t beside its weights: a mask of its own, or another vector as long as those."""
        return ()

    def reconfigure(self, mean: Tensors, state, chosen: list[int], kept_back: dict[int, Tensor]) -> tuple:
        """The server's weights, mask and memory after the round, from the average of the uploads."""
        return mean["w"], self.next_mask(self.layout.weights(mean["w"]), state.m, state.t), {}

    def next_mask(self, w: Tensors, m: Mask | None, t: int) -> Mask | None:
        """The mask that follows round t, from the prunable weights of the average."""
        return m

    def downlink_bits(self, state, chosen: list[int]) -> int:
        """The kept weights for each client, and the mask for those that do not hold it."""
        without_mask = sum(state.held[n] != state.mask_version for n in chosen)
        return len(chosen) * self.site.payload_bits(state.m) + without_mask * self.mask_bits(state.m)

    def mask_bits(self, m: Mask | None) -> int:
        """What it takes to say which weights are kept."""
        return communication.mask_bits(m)

    def uplink_bits(self, state, chosen: list[int]) -> int:
        """With feedback all weights come back, without it the kept ones."""
        return len(chosen) * self.site.payload_bits(None if self.feedback else state.m)

    def billed_sparsity(self, state) -> float:
        """The sparsity of the download as the authors' code bills it."""
        return masks.sparsity_of(self.site.full_mask(state.m))

    def extra_bits_authors(self, state) -> tuple[float, float]:
        """What the authors' code adds to the models it bills, down and up, for the whole round."""
        return 0.0, 0.0

    def _tau(self, t: int) -> int | None:
        return reconfiguration_time(t, R=self.exp.reconfigure_every, rule=self.exp.reconfigure_at)

    def _sparsity(self, t: int) -> float:
        return sparsity_at(t, T=self.exp.rounds, s_0=self.exp.sparsity_initial, s_p=self.exp.sparsity_target)

    def _erk_mask(self, sparsity: float, purpose: str, n: int = 0) -> Mask | None:
        if sparsity == 0:
            return None
        shapes = self.layout.prunable_shapes
        m = masks.random_mask(shapes, masks.erk_sparsities(shapes, sparsity), stream(self.exp.seed, purpose, n=n))
        return {k: v.to(self.site.device) for k, v in m.items()}


class FedProx(FedAvg):
    """FedAvg, with each client held near the model that it was sent."""

    def terms(self, t, start):
        return proximal(self.exp.prox_mu, start)


class FedDIP(FedAvg):
    """An ERK mask at first, then every R rounds the largest weights of the average; a penalty that grows.

    With λ = 0 it is FedDP, with s_0 = 0 as well it is DPF.
    """

    def start(self, w):
        # In the authors' code the first model goes out dense.
        first = self.exp.initial_mask == "erk"
        return w, self._erk_mask(self.exp.sparsity_initial, "initial mask") if first else None, {}

    def client_mask(self, state, n):
        # In the authors' code each client of the first round draws a mask of its own.
        if state.t == 0 and self.exp.initial_mask == "authors":
            return self._erk_mask(self.exp.sparsity_initial, "client mask", n)
        return state.m

    def lam(self, t):
        exp = self.exp
        if exp.lambda_schedule == "authors20":
            return lambda_at_authors(t, T=exp.rounds, lambda_max=exp.lambda_max)
        return lambda_at(t, T=exp.rounds, lambda_max=exp.lambda_max, Q=exp.lambda_steps)

    def terms(self, t, start):
        lam = self.lam(t)
        return [partial(add_group_penalty_, layers=self.layout.layers, lam=lam)] if lam else []

    def next_mask(self, w, m, t):
        tau = self._tau(t)
        if t == 0 and self.exp.initial_mask == "authors":
            tau = 0  # the clients' own masks go, and one of the server's comes
        if tau is None:
            return m
        s = self._sparsity(tau)
        if s == 0:
            return None
        # The authors' code masks the average with the old mask first, so that nothing pruned ever returns.
        return masks.magnitude_mask(w, s, within=m if self.exp.regrowth == "authors" else None)

    def billed_sparsity(self, state):
        return self._sparsity(state.t)


class FedDIPProx(FedDIP):
    """FedDIP, with each client held near the pruned model that it was sent."""

    def terms(self, t, start):
        return super().terms(t, start) + proximal(self.exp.prox_mu, start)


class Snip(FedAvg):
    """One mask before training, by how much the loss feels each weight; then FedAvg on what is left."""

    feedback = False
    questions = ("sensitivity",)

    def start(self, w):
        if self.exp.sparsity_target == 0:
            return w, None, {}
        score = self.layout.weights(self._authors_score(w) if self.authors else self._score(w))
        m = masks.magnitude_mask(score, self.exp.sparsity_target)
        # In the authors' code the first model goes out dense, and is pruned by the clients.
        return (w, None, {"mask": self.layout.flat_mask(m, like=w)}) if self.authors else (w, m, {})

    def client_mask(self, state, n):
        return self.site.mask_of(state.memory["mask"]) if "mask" in state.memory else state.m

    def reconfigure(self, mean, state, chosen, kept_back):
        return mean["w"], self.client_mask(state, chosen[0]), {}

    def uplink_bits(self, state, chosen):
        return len(chosen) * self.site.payload_bits(self.client_mask(state, chosen[0]))

    def remembered_for(self, state, n):
        return [k for k in ("mask",) if k in state.memory]

    def _score(self, w: Tensor) -> Tensor:
        """∂CE/∂c at c = 1 for weights c ⊙ w, that is g ⊙ w, on one batch of each of the first K clients."""
        answers = self.site.ask(self.site.select(0), "sensitivity", w=w)
        return sum(answer["g"] for answer in answers.values()) / len(answers) * w

    def _authors_score(self, w: Tensor) -> Tensor:
        """Of other weights than those that are trained, with a loss that expects probabilities, at one client."""
        fresh = w.clone()
        with global_stream(self.site.device, self.exp.seed, "snip"):
            for v in self.layout.weights(fresh).values():
                nn.init.xavier_normal_(v)
        return self.site.ask([0], "sensitivity", w=fresh)[0]["g"] * fresh

    def sensitivity(self, n: int, w: Tensor) -> Tensors:
        """At client n: the gradient at w on one batch."""
        return {"g": self.site.batch_gradient(w, n, 0, "snip", F.nll_loss if self.authors else F.cross_entropy)}


class PruneFL(FedAvg):
    """Weights earn their place by squared gradient for the time they cost; one client finds the first mask."""

    feedback = False
    all_hold_first_mask = True
    questions = ("first_mask",)
    SECONDS_PER_USE = 1e-3  # of a multiply-add, where sending a weight takes 1: a slow link
    PASSES, MOST_PASSES, BATCHES = 50, 1000, 10  # of the one client that finds the first mask

    def start(self, w):
        if self.exp.sparsity_target == 0:
            return w, None, {}
        found = self.site.ask([0], "first_mask", w=w)[0]
        return found["w"], self.site.mask_of(found["mask"]), {}

    def first_mask(self, n: int, w: Tensor) -> Tensors:
        """At client n: weights that it has trained by itself, and the mask that it has found."""
        with global_stream(self.site.device, self.exp.seed, "prunefl"):
            w, m = (self._authors_start if self.authors else self._start)(n, w.clone())
        return {"w": w, "mask": self.layout.flat_mask(m, like=w)}

    def _start(self, n: int, w: Tensor) -> tuple[Tensor, Mask]:
        """The client trains on ten batches and prunes every 50 passes, by at most 30 %, until s_0 is reached."""
        # Differs from PruneFL, which stops when five densities in a row change little: here the density is given.
        batches = list(islice(self.site.batches(n, 0, "prunefl"), self.BATCHES))
        m, goal, passes = self.site.full_mask(None), self._keep(self.exp.sparsity_initial), 0
        while masks.kept(m) > goal or passes == 0:
            summed = Summed(w)
            for _ in range(self.PASSES):
                loss = self.site.train_(w, m, batches, terms=[summed], feedback=False)
            passes += self.PASSES
            trained = self.site.accuracy(w, batches) >= 1.5 / self.site.num_classes
            if trained or passes >= self.MOST_PASSES or not loss.isfinite():
                keep = max(goal, masks.kept(m) - max(1, int(0.3 * masks.kept(m))))
                m = self._mask(w, summed.total.square(), m, keep, r=0)
                w = self.site.pruned(w, m)
        return w, m

    def _authors_start(self, n: int, w: Tensor) -> tuple[Tensor, Mask]:
        """Passes over half of the client's data until it is a little better than chance; g² of one batch."""
        enough = 0.11 if self.site.num_classes <= 10 else 0.02
        batches = list(self.site.batches(n, 0, "prunefl"))
        batches, last = batches[: (len(batches) + 1) // 2], Summed(w, last_only=True)
        for passes in range(1, 50):
            self.site.train_(w, None, batches, terms=[last])
            if passes >= 6 and self.site.accuracy(w, batches) > enough:
                break
        m = self._mask(w, last.total.square(), self.site.full_mask(None), self._keep(self.exp.sparsity_initial), r=0)
        return self.site.pruned(w, m), m

    def terms(self, t, start):
        return [Summed(start, last_only=self.authors)]

    def sends(self, t, m):
        return ("g2",)

    def finish(self, upload, terms, m, state, n):
        return upload | {"g2": terms[0].total.square()}

    def reconfigure(self, mean, state, chosen, kept_back):
        w, m = mean["w"], state.m
        g2 = mean["g2"] if self.authors else state.memory.get("g2", 0) + mean["g2"]
        since = self._since(state, chosen)
        tau = self._tau(state.t)
        if tau is None or m is None:
            return w, m, {"g2": g2, "since": since}
        return w, self._mask(w, g2, m, self._keep(self._sparsity(tau)), r=state.t), {}

    def _mask(self, w: Tensor, g2: Tensor, m: Mask, keep: int, r: int) -> Mask:
        weights, g2 = self.layout.weights(w), self.layout.weights(g2)
        if self.authors:
            return masks.prunefl_mask(weights, g2, m, min(keep + 1, self._keep(0.0)), drop=1.0)
        value = {k: g2[k] / (1 + self.SECONDS_PER_USE * self.site.uses[k]) for k in g2}
        return masks.prunefl_mask(weights, value, m, keep, drop=0.3 * 2 ** (-r / 10_000))

    def _keep(self, s: float) -> int:
        n_w = sum(shape.numel() for shape in self.layout.prunable_shapes.values())
        return n_w - round(s * n_w)

    def _since(self, state, chosen: list[int]) -> Tensor:
        """Who has taken part since the last reconfiguration, and so holds squared gradients."""
        since = state.memory.get("since", torch.zeros(self.exp.clients, dtype=torch.bool)).clone()
        since[chosen] = True
        return since

    def downlink_bits(self, state, chosen):
        """The first model and its mask go to all N clients."""
        first = self.site.payload_bits(state.m) + communication.mask_bits(state.m)
        return super().downlink_bits(state, chosen) + (self.exp.clients * first if state.t == 0 else 0)

    def uplink_bits(self, state, chosen):
        """At a reconfiguration everyone who took part since the last one sends its g², a number for each weight."""
        told = 0
        if self._tau(state.t) is not None:
            told = len(chosen) if self.authors else int(self._since(state, chosen).sum())
        return super().uplink_bits(state, chosen) + told * communication.BITS_PER_WEIGHT * self.mask_bits(state.m)

    def extra_bits_authors(self, state):
        """At a reconfiguration a mask, 4 bits for each kept weight, and a dense g²; before the first round all of N."""
        n, K, density = self.layout.size, self.exp.clients_per_round, 1 - self.billed_sparsity(state)
        model, mask = communication.BITS_PER_WEIGHT * density * n, 4 * density * n
        first = self.exp.clients * (model + mask) if state.t == 0 else 0
        again = self._tau(state.t) is not None
        return first + again * K * mask, again * K * communication.BITS_PER_WEIGHT * n


class PruneTrain(FedAvg):
    """A penalty on the norm of every channel; channels that it has pushed to zero are removed for good."""

    feedback = False

    def __init__(self, exp, site):
        super().__init__(exp, site)
        if self.authors and len(self.layout.prunable) < 3:
            needs = "it spares the first and the last layer, and so needs three"
            raise ValueError(f"variant: 'authors' is not allowed; {needs}, and {exp.model} has fewer")

    def lam(self, t):
        return self.exp.lambda_max

    def terms(self, t, start):
        lam = self.lam(t)
        if not lam:
            return []
        if self.authors:  # of whole layers, but the first and the last
            return [partial(add_group_penalty_, layers=self.layout.layers[1:-1], lam=lam)]
        return [partial(add_channel_penalty_, layout=self.layout, lam=lam)]

    def client_mask(self, state, n):
        return None if self.authors else state.m  # in the authors' code the steps are dense, from the pruned model

    def finish(self, upload, terms, m, state, n):
        if not self.authors:
            return upload
        return upload | {"w": self.site.pruned(upload["w"], self._authors_mask(upload["w"], state.t))}

    def sends(self, t, m):
        return ("mask",) if self.authors else ()

    def _authors_mask(self, w: Tensor, t: int) -> Mask:
        """By magnitude, at every client and at the server: all layers but the first and the last, to s_t."""
        inner = dict(list(self.layout.weights(w).items())[1:-1])
        return self.site.full_mask(None) | masks.magnitude_mask(inner, self._sparsity(t))

    def reconfigure(self, mean, state, chosen, kept_back):
        w, m, t = mean["w"], state.m, state.t
        if self.authors:
            m = self._authors_mask(w, t)
        elif self._tau(t) is not None:
            streams = models.residual_streams(self.layout)
            m = masks.channel_mask(self.layout.views(w), self.site.full_mask(m), self.exp.prunetrain_threshold, streams)
        return w, None if m is None or masks.sparsity_of(m) == 0 else m, {}

    def mask_bits(self, m):
        """A bit for each channel that can go: outputs of all layers but the last, inputs of all but the first."""
        if self.authors or m is None:
            return communication.mask_bits(m)
        shapes = list(self.layout.prunable_shapes.values())
        return sum(shape[0] for shape in shapes[:-1]) + sum(shape[1] for shape in shapes[1:])

    def uplink_bits(self, state, chosen):
        if not self.authors:
            return super().uplink_bits(state, chosen)
        sizes = [shape.numel() for shape in self.layout.prunable_shapes.values()]
        pruned = round(self._sparsity(state.t) * sum(sizes[1:-1]))
        return len(chosen) * (self.site.payload_bits(None) - communication.BITS_PER_WEIGHT * pruned + sum(sizes))


class FedDST(FedAvg):
    """A sparse model from the start, whose clients now and then drop their smallest weights and try others."""

    feedback = False

    def start(self, w):
        return w, self._erk_mask(self.exp.sparsity_target, "initial mask"), {}

    def client_mask(self, state, n):
        if not self.authors:
            return state.m
        # In the authors' code a client goes on with the first mask, or with its own, whatever the server sends.
        own = state.memory.get(f"mask {n}")
        return self._erk_mask(self.exp.sparsity_target, "initial mask") if own is None else self.site.mask_of(own)

    def remembered_for(self, state, n):
        return [k for k in (f"mask {n}",) if k in state.memory]

    def sends(self, t, m):
        if self._tau(t) is None or m is None:
            return ()
        return ("kept back",) if self.authors else ("mask",)

    def finish(self, upload, terms, m, state, n):
        t = state.t
        if not self.sends(t, m):
            return upload
        loss_of = F.nll_loss if self.authors else F.cross_entropy
        g = self.site.batch_gradient(upload["w"], n, t, "regrow", loss_of, upload["statistics"].clone())
        ranked = self.layout.weights(state.w if self.authors else upload["w"])
        a = regrowth_fraction_at(t, T=self.exp.rounds, alpha=self.exp.feddst_alpha)
        stays, own = masks.drop_and_regrow(ranked, self.layout.weights(g), m, a)
        flat = self.layout.flat_mask(own, like=upload["w"])
        if self.authors:
            return upload | {"kept back": flat}
        return upload | {"w": self.site.pruned(upload["w"], stays), "mask": flat}

    def reconfigure(self, mean, state, chosen, kept_back):
        w, m = mean["w"], state.m
        memory = state.memory | {f"mask {n}": own.bool() for n, own in kept_back.items()}
        if "mask" in mean:  # each weight averaged over the clients that hold it
            w = torch.where(mean["mask"] > 0, w / mean["mask"].clamp_min(torch.finfo(w.dtype).tiny), 0)
        # The authors' code prunes to the layers' counts after every round.
        if m is not None and (self.authors or self._tau(state.t) is not None):
            # A weight that has just been brought back is 0 like one that nobody holds: the votes tell them apart.
            votes = self.layout.weights(mean["mask"]) if "mask" in mean else None
            m = masks.layer_mask(self.layout.weights(w), {k: int(v.sum()) for k, v in m.items()}, votes)
        return w, m, memory

    def uplink_bits(self, state, chosen):
        changed = self._tau(state.t) is not None
        return super().uplink_bits(state, chosen) + changed * len(chosen) * communication.mask_bits(state.m)


class Summed:
    """A term that adds nothing and sums the gradients that pass, or keeps the last."""

    def __init__(self, like: Tensor, last_only: bool = False):
        self.total, self.keep = torch.zeros_like(like), 0.0 if last_only else 1.0

    def __call__(self, g: Tensor, u: Tensor) -> None:
        self.total.mul_(self.keep).add_(g)


def proximal(mu: float, start: Tensor) -> list[Term]:
    return [partial(add_proximal_, anchor=start, mu=mu)] if mu else []


METHODS = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "feddp": FedDIP,
    "dpf": FedDIP,
    "feddip": FedDIP,
    "feddip_prox": FedDIPProx,
    "prunefl": PruneFL,
    "snip": Snip,
    "prunetrain": PruneTrain,
    "feddst": FedDST,
}
