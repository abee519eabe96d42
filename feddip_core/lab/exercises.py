"""The exercises of the teaching notebooks: `check` says whether an answer is right.

No answer stands here in clear: each is computed by the functions that the notebook has called. Reading them is a
way to solve an exercise, too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..client import error_feedback_step_, train_
from ..communication import BITS_PER_WEIGHT, KEPT, MASK, Payload
from ..experiment import Experiment
from ..layout import Layout
from ..masks import erk_sparsities, kept, magnitude_mask, random_mask
from ..models import LeNet5
from ..schedules import lambda_at, reconfiguration_time, sparsity_at
from ..state import aggregate


@dataclass(frozen=True)
class Exercise:
    """How to find the answer, what to say when it is right, and where to look when it is not."""

    solve: Callable[[], object]
    right: str
    look: str
    tolerance: float = 0.0  # relative, for answers that are rounded
    probes: tuple = ()  # for an answer that is a function: where it is compared


def check(name: str, answer) -> str:
    """'Not answered yet.', 'Right: …' or 'Not yet: …'."""
    if name not in EXERCISES:
        raise ValueError(f"name: {name!r} is not allowed; it must be one of {', '.join(EXERCISES)}")
    exercise = EXERCISES[name]
    if answer is None:
        return "Not answered yet."
    fault = _fault(exercise, answer)
    return f"Not yet: {fault}" if fault else f"Right: {exercise.right}"


def _fault(exercise: Exercise, answer) -> str | None:
    """What is wrong with the answer, or None."""
    expected = exercise.solve()
    try:
        if exercise.probes:
            good = all(_close(answer(*probe), expected(*probe), 1e-6) for probe in exercise.probes)
        elif isinstance(expected, set):
            good = {round(float(v), 6) for v in answer} == {round(v, 6) for v in expected}
        else:
            good = _close(answer, expected, exercise.tolerance)
    except Exception as error:  # whatever a student's answer may do
        form = "a function" if exercise.probes else "a set of numbers" if isinstance(expected, set) else "a number"
        return f"the answer should be {form} ({type(error).__name__}: {error})."
    return None if good else exercise.look


def _close(answer, expected, tolerance: float) -> bool:
    return abs(float(answer) - float(expected)) <= max(1e-9, tolerance * abs(float(expected)))


def quadratic(a, h=1.0):
    """The gradient of f(u) = h/2 · ‖u − a‖², in the form that `client.train_` wants."""
    a, h = torch.as_tensor(a), torch.as_tensor(h)
    return lambda u, x, y: ((h * (u - a).square()).sum() / 2, h * (u - a))


def averaging_fixed_point(steps: int, eta: float, targets: list[float], curvatures: list[float]) -> float:
    """Where federated averaging of one weight comes to rest, when client n minimises h_n/2 · (w − a_n)²."""
    w, nothing = torch.zeros(1, dtype=torch.float64), torch.zeros(1)
    at_rest = False
    while not at_rest:
        uploads = []
        for a, h in zip(targets, curvatures, strict=True):
            own = w.clone()
            train_(own, None, quadratic(a, h), [(nothing, nothing)] * steps, eta)
            uploads.append({"w": own})
        mean = aggregate(uploads, [1] * len(uploads))["w"]
        w, at_rest = mean, bool((mean - w).abs() < 1e-9)
    return float(w)


def rounds_until_return(rule: str, steps: int, eta: float, most: int = 50) -> int | None:
    """After which round a pruned weight that wants to be 1 displaces a kept one of 0.85; None is never."""
    gradient = quadratic([0.85, 1.0])
    w, m = torch.tensor([0.85, 0.0]), torch.tensor([True, False])
    for tau in range(1, most + 1):
        for _ in range(steps):
            error_feedback_step_(w, m.float(), gradient, None, None, eta)
        m = magnitude_mask({"w": w}, 0.5, within={"w": m} if rule == "released" else None)["w"]
        if m[1]:
            return tau
        if rule != "dense_memory":
            w *= m
    return None


def _lenet() -> Layout:
    return Layout.of(LeNet5())


def _model_bits(sparsity: float | None = None) -> int:
    """What LeNet-5 takes under its first mask of this sparsity, which the receiver holds; None is dense."""
    shapes, left = _lenet().prunable_shapes, None
    if sparsity is not None:
        left = kept(random_mask(shapes, erk_sparsities(shapes, sparsity), torch.Generator().manual_seed(0)))
    return Payload({"w": KEPT}, left).bits(_lenet())


def _mask_bits() -> int:
    """What a mask of LeNet-5 takes."""
    return Payload({"mask": MASK}).bits(_lenet())


def _at(sparsity: float) -> int:
    """The parameters of LeNet-5 that are left at this sparsity, biases included."""
    weights = {k: torch.rand(shape) for k, shape in _lenet().prunable_shapes.items()}
    return KEPT.count(_lenet(), kept(magnitude_mask(weights, sparsity)))


def _kept_values() -> set:
    a, b = torch.tensor([4.0, -3.0, 2.0]), torch.tensor([0.5, -1.0, 0.1])
    m = magnitude_mask({"a": a, "b": b}, 0.5)
    return {*a[m["a"]].tolist(), *b[m["b"]].tolist()}


def _mean_density(exp: Experiment) -> float:
    T = exp.rounds
    return 1 - sum(sparsity_at(t, T, exp.sparsity_initial, exp.sparsity_target) for t in range(T)) / T


def _first_sparsity_for_mean(mean: float, s_p: float, T: int = 100_000) -> float:
    """The s_0 whose schedule has this mean, which is linear in s_0."""
    low, high = (sum(sparsity_at(t, T, s_0, s_p) for t in range(T)) / T for s_0 in (0.0, s_p))
    return s_p * (mean - low) / (high - low)


def _megabytes_of_fedavg() -> float:
    exp = Experiment.preset("paper", method="fedavg")
    return 2 * exp.clients_per_round * exp.rounds * _model_bits() / 8e6


EXERCISES = {
    "01 shares": Exercise(
        lambda: float(aggregate([{"w": torch.tensor([v])} for v in (1.0, 2.0, 4.0)], [100, 300, 600])["w"]),
        "the client with most images pulls most.",
        "ρ_n = D_n / ΣD; the images are 1,000 in all.", tolerance=1e-6,
    ),
    "01 drift": Exercise(
        lambda: averaging_fixed_point(2, 0.1, [0.0, 10.0], [1.0, 9.0]),
        "two local steps have moved the meeting point away from 9.",
        "a step takes client n from w to w − 0.1 h_n (w − a_n). Do it twice for each, average, and ask when w stays.",
        tolerance=2e-3,
    ),
    "01 megabytes": Exercise(
        _megabytes_of_fedavg,
        "about 2.5 GB, for a network of a quarter of a megabyte.",
        "61,706 weights of 32 bits, to each of 5 clients and back, 1,000 times; a megabyte is 8,000,000 bits.",
        tolerance=5e-3,
    ),
    "02 global": Exercise(
        _kept_values,
        "the second layer is gone, and with it every path through the network.",
        "sort all six by magnitude, whatever their layer, and keep three.",
    ),
    "02 left": Exercise(
        lambda: _at(0.8),
        "the biases are never pruned.",
        "s counts zeros among the 61,470 prunable weights; the network has 61,706 parameters.",
    ),
    "02 erk": Exercise(
        lambda: erk_sparsities(_lenet().prunable_shapes, 0.9)["conv1.weight"],
        "at this sparsity no layer needs the fix, and even the smallest loses a fifth.",
        "ε = 0.1 · 61,470 / 867 in the first pass; is any density ε · raw above 1?", tolerance=5e-3,
    ),
    "03 memory": Exercise(
        lambda: rounds_until_return("dense_memory", steps=4, eta=0.05),
        "memory adds up what one round is too short for.",
        "four steps of 0.05 per round, and nothing is lost in between.",
    ),
    "03 steps": Exercise(
        lambda: next(steps for steps in range(1, 100) if rounds_until_return("paper", steps, eta=0.1)),
        "it must be done within one round, or the next begins from zero again.",
        "every step adds 0.1, and the weight must pass 0.85 before the round ends.",
    ),
    "03 upload": Exercise(
        lambda: _at(0.9) / _lenet().size,
        "nine tenths of that upload would be of no use to anybody.",
        "6,147 weights and 236 biases, out of 61,706.", tolerance=5e-3,
    ),
    "04 mean": Exercise(
        lambda: _first_sparsity_for_mean(0.85, s_p=0.9),
        "a quarter of the way from s_p to s_0 is the mean, whatever T is.",
        "the mean of (1 − x)³ over [0, 1] is 1/4.", tolerance=5e-3,
    ),
    "04 one step": Exercise(
        lambda: max(lambda_at(t, T=100, lambda_max=1e-3, Q=1) for t in range(100)),
        "with one step there is no penalty at all: Eq. 9 begins at zero and stops at (Q − 1)/Q.",
        "put i = Q = 1 into Eq. 9.",
    ),
    "04 linear": Exercise(
        lambda: lambda t, T, s_0, s_p: s_0 + (s_p - s_0) * t / T,
        "it prunes late, so it costs more: the mean is half-way instead of three quarters.",
        "it must be s_0 at t = 0, s_p at t = T, and a straight line between.",
        probes=((0, 10, 0.5, 0.9), (5, 10, 0.5, 0.9), (10, 10, 0.5, 0.9), (3, 7, 0.0, 0.8)),
    ),
    "05 again": Exercise(
        lambda: _model_bits(0.5),
        "it holds the mask already, so only weights travel.",
        "30,734 kept weights and 236 biases, 32 bits each, and no mask.",
    ),
    "05 break-even": Exercise(
        lambda: _mask_bits() / (BITS_PER_WEIGHT * _lenet().prunable_size),
        "beyond about three per cent of zeros, a mask pays for itself.",
        "a mask costs one bit for each prunable weight, a pruned weight saves 32.", tolerance=1e-3,
    ),
    "05 masks": Exercise(
        lambda: sum(reconfiguration_time(t, R=7) is not None for t in range(1000)),
        "the last is chosen in round 994, so that s_p is missed by a hair; with R = 5 it is met.",
        "τ = 7, 14, 21, … up to 1,000.",
    ),
    "06 floor": Exercise(
        lambda: _model_bits() / (2 * _model_bits()),
        "the dense upload is half of FedAvg's cost, and no sparsity touches it.",
        "let the download cost nothing at all.", tolerance=5e-3,
    ),
    "06 share": Exercise(
        lambda: (1 + _mean_density(Experiment.preset("paper"))) / 2,
        "three fifths, however many rounds.",
        "the mean sparsity of the schedule is 0.8 (notebook 04), and it is only worth something on the way down.",
        tolerance=1e-2,
    ),
    "06 both ways": Exercise(
        lambda: _mean_density(Experiment.preset("paper")),
        "a fifth: what the released order of masking could save, and error feedback costs.",
        "now the upload has the density of the download.", tolerance=1e-2,
    ),
}  # fmt: skip
