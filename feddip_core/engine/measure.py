"""The metrics of a round, and a plan of what each round will cost before training starts."""

import math

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import masks
from ..methods.asking import Asking
from ..methods.released.billing import billed
from ..schedules import learning_rate_at
from ..server import Federation, Round
from ..state import Average, State
from .partitions import partition

EVALUATION_BATCH = 500
ALWAYS = 5  # last rounds that are evaluated whatever `evaluate_every` says: tables report their mean
TRIED = slice(0, 100)  # test images that show whether a model still gives finite losses


def row(federation: Federation, before: State, after: State, done: Round, seconds: float) -> dict:
    """The metrics of the round that led from one state to the next."""
    exp, method, clients = federation.exp, federation.method, done.average.clients
    old, new = federation.full_mask(before.m), federation.full_mask(after.m)
    regrown, dropped = masks.changes(old, new)
    trained = float(done.average.mean["loss"])
    accuracy, loss = tested(federation, after, trained)
    down, up = billed(method, before, done.average)
    # If the uploads omit pruned weights, nobody knows their mean, and δ is unknown too.
    known = method.feeds_back(before) or not method.feedback
    return {
        "round": after.t,
        "test_accuracy": accuracy,
        "test_loss": loss,
        "train_loss": trained,
        "sparsity": masks.sparsity_of(new),
        "delta": masks.pruning_error(method.layout.views(done.w), after.m or {}) if known else float("nan"),
        "lambda_": method.lam(before.t),
        "learning_rate": learning_rate_at(before.t, eta_0=exp.learning_rate, decay=exp.learning_rate_decay),
        **bits(federation, before, clients),
        "downlink_mebibits_released": down,
        "uplink_mebibits_released": up,
        "layer_zeros": " ".join(str(int((~keep).sum())) for keep in new.values()),
        "regrown": regrown,
        "dropped": dropped,
        "seconds": seconds,
    }


def bits(federation: Federation, state: State, clients: list[int]) -> dict[str, int]:
    """The bits that a round sends down and up: its clients' payloads, and in the first round what preceded it."""
    method = federation.method
    down, up = method.bits_before() if isinstance(method, Asking) and state.t == 0 else (0, 0)
    return {
        "downlink_bits": down + sum(method.download(state, n).bits(method.layout) for n in clients),
        "uplink_bits": up + sum(method.upload(state, n).bits(method.layout) for n in clients),
    }


def tested(federation: Federation, state: State, train_loss: float) -> tuple[float, float]:
    """Accuracy and loss if the round is to be evaluated, or if the run diverges in it; otherwise NaN."""
    exp = federation.exp
    due = state.t % exp.evaluate_every == 0 or state.t > exp.rounds - ALWAYS
    if due or not math.isfinite(train_loss + evaluate(federation, state, TRIED)[1]):
        return evaluate(federation, state)
    return math.nan, math.nan


@torch.no_grad()
def evaluate(federation: Federation, state: State, images: slice | Tensor = slice(None)) -> tuple[float, float]:
    """Top-1 accuracy and mean cross-entropy of ω′ on the test images, or on some of them."""
    data, u = federation.clients.data, federation.clients.layout.prune(state.w, state.m)
    logits_of, x, y = federation.clients.logits_of(u, state.statistics), data.x_test[images], data.y_test[images]
    correct = torch.zeros((), dtype=torch.int64, device=x.device)
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in range(0, len(x), EVALUATION_BATCH):
        batch = slice(part, part + EVALUATION_BATCH)
        logits = logits_of(data.normalise(x[batch]))
        correct += (logits.argmax(1) == y[batch]).sum()
        loss += F.cross_entropy(logits, y[batch], reduction="sum")
    return int(correct) / len(x), float(loss) / len(x)


def client_accuracies(federation: Federation, state: State) -> pd.Series:
    """Each client's accuracy with the shared model, on its own share of the test images.

    The test images are partitioned by the same rule and seed as the training images. So each client is tested on the
    kind of data it holds.
    """
    exp, data = federation.exp, federation.clients.data
    if exp.partition == "given":
        raise ValueError("partition: 'given' is not allowed; clients that bring their data bring no test data")
    shares = partition(data.y_test, exp.partition, exp.clients, exp.seed)
    accuracies = [evaluate(federation, state, share.to(data.y_test.device))[0] for share in shares]
    return pd.Series(accuracies, index=pd.RangeIndex(exp.clients, name="client"), name="test_accuracy")


def mean_and_worst_tenth(accuracies: pd.Series) -> tuple[float, float]:
    """The mean over all clients, and over the worst tenth of them: an average hides who loses."""
    return float(accuracies.mean()), float(accuracies.nsmallest(-(-len(accuracies) // 10)).mean())


def plan(federation: Federation) -> pd.DataFrame:
    """Sparsity, penalty and bits of every round, from the method's own rules applied to stand-in weights.

    The plan is exact if mask sizes do not depend on training. If they do, as in PruneTrain, the method sets
    `plan_is_a_bound` and the plan is an upper bound: no channel of stand-in weights is ever near zero. Every new mask
    counts as sent. Late in a long run one can turn out to be the old one, and then the plan is a little too high.
    """
    exp, method, layout = federation.exp, federation.method, federation.clients.layout
    dense = exp.clients_per_round * 32 * (layout.size + layout.statistics.size)
    state, rows = federation.start(sketch=True), []
    ramp = torch.linspace(1, 2, layout.size).to(state.w)
    ramps = [ramp, ramp.flip(0)]
    for t in range(exp.rounds):
        chosen = federation.select(t)
        counted = bits(federation, state, chosen)
        average = Average(_stand_in(federation, state, chosen[0], ramps), chosen)
        w, m, memory = method.next(average, state)
        old, new = federation.full_mask(state.m), federation.full_mask(m)
        changed = m is not state.m and not all(torch.equal(old[k], new[k]) for k in new)
        state = state.then(method.remembered(w, m) if changed else state.w, m, memory, average, changed)
        s = 1 - state.kept / layout.prunable_size if m else 0.0
        rows.append({"round": t + 1, "sparsity": s, "lambda_": method.lam(t), **counted, "dense_bits": dense})
    return pd.DataFrame(rows)


def _stand_in(federation: Federation, state: State, n: int, ramps: list[Tensor]) -> dict[str, Tensor]:
    """A stand-in for a round's average: a ramp, turned round whenever the mask has changed, so that it changes again.

    It has no two equal weights and none near zero. Its largest are found faster than those of random numbers: the
    explorer makes a plan whenever a slider moves.
    """
    sent = [k for k in federation.method.upload(state, n).parts if not k.startswith("own/")]
    turned = {k: ramps[(state.mask_version + i) % 2] for i, k in enumerate(sent)}
    turned |= {k: torch.ones_like(state.w) for k in sent if k == "mask"}
    return turned | {"statistics": state.statistics, "loss": torch.zeros(())}
