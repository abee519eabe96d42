"""Table II of the paper, and two smaller scales. A method takes only the settings it has."""

from typing import Any

from .settings import choice

CLASSES = {"fashion_mnist": 10, "fashion_mini": 10, "cifar10": 10, "cifar100": 100}
MODEL_OF = {"fashion_mnist": "lenet5", "fashion_mini": "lenet5", "cifar10": "alexnet", "cifar100": "resnet18"}
PRESETS = ("paper", "narrow", "smoke")

# Table II, one row per data set; Section VI-B gives s_p.
TABLE_II: dict[str, dict[str, Any]] = {
    "fashion_mnist": dict(
        learning_rate=0.01, batch_size=64, sparsity_initial=0.5, sparsity_target=0.9, lambda_max=1e-3
    ),
    "cifar10": dict(learning_rate=0.1, batch_size=128, sparsity_initial=0.5, sparsity_target=0.9, lambda_max=1e-3),
    "cifar100": dict(learning_rate=0.1, batch_size=128, sparsity_initial=0.05, sparsity_target=0.8, lambda_max=5e-3),
}
PAPER = dict(clients=50, clients_per_round=5, rounds=1000, lambda_steps=10, local_epochs=5)
SELDOM: dict[str, Any] = dict(evaluate_every=10)  # for large networks, whose test takes a tenth of a round
Scale = dict[str, dict[str, Any]]
FULL: Scale = {"fashion_mnist": {}, "cifar10": SELDOM, "cifar100": SELDOM}
NARROW: Scale = {"cifar10": SELDOM | dict(width=0.125), "cifar100": SELDOM | dict(width=0.125, rounds=200)}
SMOKE: dict[str, Any] = dict(
    clients=10, clients_per_round=3, rounds=16, lambda_steps=4, local_epochs=2, batch_size=32, learning_rate=0.2,
    reconfigure_every=2,
)  # fmt: skip


def preset(name: str, dataset: str | None) -> dict[str, Any]:
    """The settings of a preset, including its data set."""
    choice(None, PRESETS, "").checked("preset", name)
    if name == "smoke":
        return dict(dataset="fashion_mini" if dataset is None else dataset) | PAPER | SMOKE
    changes = FULL if name == "paper" else NARROW
    dataset = next(iter(changes)) if dataset is None else dataset
    if not (isinstance(dataset, str) and dataset in changes):
        raise ValueError(f"dataset: {dataset!r} is not allowed; the {name} preset has {', '.join(changes)}")
    return dict(dataset=dataset) | PAPER | changes[dataset]
