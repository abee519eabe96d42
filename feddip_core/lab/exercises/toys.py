"""Toys that a student can follow with a pencil, and the sums behind the exercises."""

from functools import cache

import torch

from ...client import error_feedback_step_, train_
from ...communication import KEPT, MASK, Payload
from ...experiment import Experiment
from ...layout import Layout
from ...masks import erk_sparsities, kept, magnitude_mask, random_mask
from ...models import LeNet5
from ...schedules import sparsity_at
from ...state import aggregate


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


@cache
def lenet() -> Layout:
    return Layout.of(LeNet5())


def model_bits(sparsity: float | None = None) -> int:
    """What LeNet-5 takes under its first mask of this sparsity, which the receiver holds; None is dense."""
    shapes, left = lenet().prunable_shapes, None
    if sparsity is not None:
        left = kept(random_mask(shapes, erk_sparsities(shapes, sparsity), torch.Generator().manual_seed(0)))
    return Payload({"w": KEPT}, left).bits(lenet())


def mask_bits() -> int:
    """What a mask of LeNet-5 takes."""
    return Payload({"mask": MASK}).bits(lenet())


def left_at(sparsity: float) -> int:
    """The parameters of LeNet-5 that are left at this sparsity, biases included."""
    weights = {k: torch.rand(shape) for k, shape in lenet().prunable_shapes.items()}
    return KEPT.count(lenet(), kept(magnitude_mask(weights, sparsity)))


def kept_values() -> set:
    a, b = torch.tensor([4.0, -3.0, 2.0]), torch.tensor([0.5, -1.0, 0.1])
    m = magnitude_mask({"a": a, "b": b}, 0.5)
    return {*a[m["a"]].tolist(), *b[m["b"]].tolist()}


def mean_density(exp: Experiment) -> float:
    T = exp.rounds
    return 1 - sum(sparsity_at(t, T, exp.sparsity_initial, exp.sparsity_target) for t in range(T)) / T


def first_sparsity_for_mean(mean: float, s_p: float, T: int = 10_000) -> float:
    """The s_0 whose schedule has this mean, which is linear in s_0."""
    low, high = (sum(sparsity_at(t, T, s_0, s_p) for t in range(T)) / T for s_0 in (0.0, s_p))
    return s_p * (mean - low) / (high - low)


def megabytes_of_fedavg() -> float:
    exp = Experiment.preset("paper", method="fedavg")
    return 2 * exp.clients_per_round * exp.rounds * model_bits() / 8e6
