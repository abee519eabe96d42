"""The exercises of the result notebooks: answers from the paper's schedule and from the committed records."""

from functools import cache

from ...engine.records import OWN_RECORDS
from ...experiment import Experiment
from ...study import results
from ...study.verdicts import judged
from .checking import Exercise
from .toys import lenet, mask_bits, model_bits

HAND = (0.9, 0.2, 0.7, 0.8, 0.6, 0.7, 0.5)  # accuracies of a made-up run


def _reading(name: str) -> float:
    return float(results.of_runs(results.one_run(HAND))[name].iloc[0])


def _half(differences: list[float]) -> float:
    """How far the paired interval reaches to either side."""
    row = judged(differences)
    return row["high"] - row["mean"]


@cache
def _megabytes(method: str) -> tuple[float, float]:
    """Down and up, of the whole run of a method with seed 0, in the committed records."""
    wanted = results.wanted("communication", "paper", "fashion_mnist")
    rounds, _ = results.find({method: wanted[method][:1]}, OWN_RECORDS)
    down, up = rounds[results.BITS].sum() / 8e6
    return float(down), float(up)


def _left(sparsity: float) -> int:
    size = results.layers(Experiment.preset("paper"))["size"].sum()
    return int(size) - round(sparsity * int(size))


RESULTS: dict[str, Exercise] = {
    "11 highest": Exercise(
        lambda: _reading("highest five"), "percent", places=0,
        right="the two lowest rounds never count, so this reading can only flatter.",
        hint="sort the seven accuracies and average the five largest.",
        mistakes={
            "that is the last five. Take the largest of all seven, wherever they are.": lambda: _reading("last five"),
            "that is the last round alone.": lambda: _reading("last round"),
            "that is the mean of all seven.": lambda: 100 * sum(HAND) / len(HAND),
            "that is a fraction. Percent is asked.": lambda: _reading("highest five") / 100,
        },
    ),
    "11 interval": Exercise(
        lambda: _half([1.0, 2.0, 3.0, 4.0]), "points", places=2,
        right="with 3 degrees of freedom, t is 3.182. The interval has no 0 inside: this would be a verdict.",
        hint="s = 1.291, n = 4, and t for 3 degrees of freedom is 3.182: half the width is t · s / √n.",
        mistakes={
            "that is the standard error. Multiply it by t.": 1.2909944487 / 2,
            "that uses t for 4 degrees of freedom. Four seeds have n − 1 = 3.": 2.7764451052 * 1.2909944487 / 2,
            "that divides by nothing. The standard error is s / √n.": 3.1824463053 * 1.2909944487,
            "that uses 1.96, the normal value. With four seeds take t = 3.182.": 1.96 * 1.2909944487 / 2,
        },
    ),
    "12 uplink": Exercise(
        lambda: _megabytes("feddip")[1] / sum(_megabytes("feddip")), "fraction", places=2,
        right="four fifths of FedDIP's traffic is the upload, which no sparsity touches.",
        hint="sum `uplink_bits` of FedDIP with seed 0 over all rounds, and divide by both ways together.",
        mistakes={
            "that is the download's share.": lambda: _megabytes("feddip")[0] / sum(_megabytes("feddip")),
            "that is FedAvg, whose ways cost the same.": 0.5,
            "that is FedDIP's total as a share of FedAvg's.":
                lambda: sum(_megabytes("feddip")) / sum(_megabytes("fedavg")),
        },
    ),
    "12 mask": Exercise(
        lambda: mask_bits() / (mask_bits() + model_bits(0.9)), "fraction", places=2,
        right="a quarter of such a download is the mask. Better coding could halve it.",
        hint="61,470 bits for the mask; 32 bits for each of 6,147 weights and 236 biases.",
        mistakes={
            "that is the mask against the weights. Divide by both together.": lambda: mask_bits() / model_bits(0.9),
            "that is the weights' share.": lambda: model_bits(0.9) / (mask_bits() + model_bits(0.9)),
            "that compares with a dense model.": lambda: mask_bits() / (32 * lenet().size),
        },
    ),
    "15 left": Exercise(
        lambda: _left(0.95) / _left(0.99), "a number", places=1,
        right="from 0.95 to 0.99 the zeros grow by four percent, and the weights left fall to a fifth.",
        hint="of 61,470 weights 3,074 are left at 0.95, and 615 at 0.99.",
        mistakes={
            "that is the ratio of zeros. Count the weights that are left.": lambda: 0.99 / 0.95,
            "that is from 0.9 to 0.99.": lambda: _left(0.9) / _left(0.99),
            "that is upside down: how many times as many are left at 0.95?": lambda: _left(0.99) / _left(0.95),
        },
    ),
    "15 late": Exercise(
        lambda: 0.5**3, "fraction", places=3,
        right="after half of the rounds seven eighths of the way is behind you: FedDIP prunes early.",
        hint="the share of the way still to go is (1 − t/T)³, whatever s_0 and s_p are.",
        mistakes={
            "that is the share behind you. The share still to go is asked.": 7 / 8,
            "that is a straight line. The schedule is cubic.": 0.5,
            "that is a square. The schedule is cubic.": 0.25,
        },
    ),
}  # fmt: skip
