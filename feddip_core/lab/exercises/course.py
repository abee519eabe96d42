"""The exercises of the course, 00 to 09, of the quickstart and of the teachers' plan."""

import torch

from ...client import error_feedback_step_
from ...communication import BITS_PER_WEIGHT
from ...experiment import Experiment
from ...masks import erk_sparsities
from ...schedules import lambda_at, reconfiguration_time, sparsity_at
from ...state import aggregate
from .checking import Exercise
from .toys import (
    averaging_fixed_point,
    first_sparsity_for_mean,
    kept_values,
    left_at,
    lenet,
    mask_bits,
    mean_density,
    megabytes_of_fedavg,
    model_bits,
    quadratic,
    rounds_until_return,
)


def _rests(steps: int) -> float:
    return averaging_fixed_point(steps, 0.1, [0.0, 10.0], [1.0, 9.0])


def _straight(t, T, s_0, s_p):
    return s_0 + (s_p - s_0) * t / T


def _pruned_weight(steps: int, feedback: bool = True) -> float:
    """The quickstart's second weight after some steps: pruned, and wanted at 10."""
    w, m = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])
    for _ in range(steps):
        error_feedback_step_(w, m, quadratic([2.0, 10.0]), None, None, eta=0.3, feedback=feedback)
    return float(w[1])


def _paper() -> float:
    return mean_density(Experiment.preset("paper"))


COURSE = {
    "00 left": Exercise(
        lambda: left_at(0.9) - (lenet().size - lenet().prunable_size), "weights, a whole number",
        right="one in ten. At sparsity 1 nothing would be left.",
        hint="sparsity 0.9 means that nine tenths are zero.",
        mistakes={
            "that is how many are zero. Sparsity counts zeros, and asked is what is left.": 55_323,
            "that is a fraction. Asked is a number of weights.": 0.1,
            "that is a tenth of all 61,706 parameters. Biases cannot be pruned and do not count here.": 6_170.6,
        },
    ),
    "01 shares": Exercise(
        lambda: float(aggregate([{"w": torch.tensor([v])} for v in (1.0, 2.0, 4.0)], [100, 300, 600])["w"]),
        "a number", places=1,
        right="the client with most images pulls most.",
        hint="ρ_n = D_n / ΣD, and there are 1,000 images in all.",
        mistakes={
            "that is the plain mean. Each upload counts by its client's share of the images.": 7 / 3,
            "that is the weighted sum. Divide it by the 1,000 images.": 3100,
        },
    ),
    "01 drift": Exercise(
        lambda: _rests(2), "a number", places=2,
        right="two local steps have moved the meeting point away from 9.",
        hint="a step takes client n from w to w − 0.1 h_n (w − a_n). Two steps each, then average: when does w stay?",
        mistakes={
            "that is the joint minimum. Averaging rests there after one local step, not after two.": lambda: _rests(1),
            "that is where E = 3 rests.": lambda: _rests(3),
            "that is where many local steps end: half-way between the two clients' own minima.": 5,
        },
    ),
    "01 megabytes": Exercise(
        megabytes_of_fedavg, "megabytes of 8,000,000 bits", places=0,
        right="about 2.5 GB, for a network of a quarter of a megabyte.",
        hint="61,706 weights of 32 bits, to each of 5 clients and back, 1,000 times.",
        mistakes={
            "that is one way only. Clients download and upload.": lambda: megabytes_of_fedavg() / 2,
            "that is one client's bill. Five take part in each round.": lambda: megabytes_of_fedavg() / 5,
            "that is the bill of one round. There are 1,000.": lambda: megabytes_of_fedavg() / 1000,
        },
    ),
    "02 global": Exercise(
        kept_values, "a set of three numbers with their signs",
        right="the second layer is gone, and with it every path through the network.",
        hint="write down all six magnitudes, whatever their layer, and keep the three largest.",
        mistakes={
            "the magnitudes are right and a sign is not. A mask keeps a weight as it is, sign included.": {4, 3, 2},
            "that ranks by value. A magnitude mask compares |w|, so −3 comes before 2.": {4, 2, 0.5},
            "those are the three that go.": {0.5, -1, 0.1},
            "that keeps some of each layer. A global mask does not look at layers.": {4, -3, -1},
        },
    ),
    "02 left": Exercise(
        lambda: left_at(0.8), "parameters, the exact number",
        right="the biases are never pruned.",
        hint="s counts zeros among the 61,470 prunable weights, and the network has 61,706 parameters.",
        mistakes={
            "those are the weights alone. The 236 biases are never pruned and count too.": 12_294,
            "that is how many become zero. Asked is how many are left.": 49_176,
            "that is a fifth of all parameters. Only weights are pruned, so all 236 biases stay.": 12_341,
        },
    ),
    "02 erk": Exercise(
        lambda: erk_sparsities(lenet().prunable_shapes, 0.9)["conv1.weight"], "fraction of zeros", places=3,
        right="at this sparsity no layer needs the fix, and even the smallest loses a fifth.",
        hint="ε = 0.1 · 61,470 / 867 in the first pass. Is any density ε · sum / product above 1?",
        mistakes={
            "that is the density, the share that is kept. Sparsity is one minus it.":
                lambda: 1 - erk_sparsities(lenet().prunable_shapes, 0.9)["conv1.weight"],
            "that is the sparsity of the whole network. ERK gives small layers less.": 0.9,
            "dense would be right if ε · 17 / 150 passed 1. At s = 0.9 the budget is 0.1 · 61,470.": 0,
        },
    ),
    "03 memory": Exercise(
        lambda: rounds_until_return("dense_memory", steps=4, eta=0.05), "rounds, a whole number",
        right="memory adds up what one round is too short for.",
        hint="four steps of 0.05 per round, and nothing is lost in between.",
        mistakes={
            "after four rounds it stands at 0.8. It must pass 0.85.": 4,
            "that is the answer for η = 0.1, as in the figure.":
                lambda: rounds_until_return("dense_memory", steps=4, eta=0.1),
            "that counts local steps. A round has four of them.": 18,
        },
    ),
    "03 steps": Exercise(
        lambda: next(steps for steps in range(1, 100) if rounds_until_return("paper", steps, eta=0.1)),
        "local steps, a whole number",
        right="it must be done within one round, or the next begins from zero again.",
        hint="every step adds 0.1, and the weight must pass 0.85 before the round ends.",
        mistakes={
            "after eight steps it stands at 0.8. It must pass 0.85.": 8,
            "a step cannot be halved. Take the next whole number.": 8.5,
            "that is enough, but one step fewer is enough too.": 10,
        },
    ),
    "03 upload": Exercise(
        lambda: left_at(0.9) / lenet().size, "fraction of a dense upload", places=3,
        right="nine tenths of that upload would be of no use to anybody.",
        hint="6,147 weights and 236 biases, out of 61,706.",
        mistakes={
            "the biases are missing. All 236 of them travel too.": 0.1,
            "that is the saving. Asked is what is left.": lambda: 1 - left_at(0.9) / lenet().size,
            "that counts a mask too. Count weights and biases alone.":
                lambda: (left_at(0.9) * BITS_PER_WEIGHT + mask_bits()) / (BITS_PER_WEIGHT * lenet().size),
        },
    ),
    "04 mean": Exercise(
        lambda: first_sparsity_for_mean(0.85, s_p=0.9), "fraction of zeros", places=2,
        right="a quarter of the way from s_p to s_0 is the mean, whatever T is.",
        hint="the mean of (1 − x)³ over [0, 1] is 1/4.",
        mistakes={
            "that would be right for a straight line, whose mean is half-way. The cubic's is a quarter.": 0.8,
            "that is the mean itself. Asked is where the schedule starts.": 0.85,
            "that start has the mean 0.8, which is FedDIP's now.": 0.5,
        },
    ),
    "04 one step": Exercise(
        lambda: max(lambda_at(t, T=100, lambda_max=1e-3, Q=1) for t in range(100)), "a number, exactly",
        right="with one stretch there is no penalty at all. Eq. 9 begins at zero and stops at (Q − 1)/Q of λ_max.",
        hint="the i-th of Q stretches has i/Q of λ_max, and i runs from 0 to Q − 1. Which i are there for Q = 1?",
        mistakes={
            "that is λ_max itself, a bound that Eq. 9 never reaches. i stops at Q − 1, and here Q − 1 is 0.": 1e-3,
            "that is where Q = 10 ends. Here Q is 1.":
                lambda: max(lambda_at(t, T=100, lambda_max=1e-3, Q=10) for t in range(100)),
        },
    ),
    "04 linear": Exercise(
        lambda: _straight, "a function of t, T, s_0 and s_p", shown="lambda t, T, s_0, s_p: s_0 + (s_p - s_0) * t / T",
        right="it prunes late, so it costs more: the mean is half-way instead of three quarters.",
        hint="it must be s_0 at t = 0, s_p at t = T, and a straight line between.",
        probes=((0, 10, 0.5, 0.9), (5, 10, 0.5, 0.9), (10, 10, 0.5, 0.9), (3, 7, 0.0, 0.8)),
        mistakes={
            "that is the cubic curve of Eq. 11 again.": sparsity_at,
            "it starts at 0. It must be s_0 at t = 0.": lambda t, T, s_0, s_p: s_p * t / T,
            "it runs backwards: s_p comes first. Swap the two.": lambda t, T, s_0, s_p: s_p + (s_0 - s_p) * t / T,
        },
    ),
    "05 again": Exercise(
        lambda: model_bits(0.5), "bits, the exact number",
        right="it holds the mask already, so only weights travel.",
        hint="30,734 kept weights and 236 biases, 32 bits each, and no mask.",
        mistakes={
            "that counts the mask. The client holds it since round 1.": lambda: model_bits(0.5) + mask_bits(),
            "that counts weights alone. The 236 biases travel too.": lambda: model_bits(0.5) - 236 * BITS_PER_WEIGHT,
            "that is the dense model. Half of its weights are pruned.": model_bits,
        },
    ),
    "05 break-even": Exercise(
        lambda: mask_bits() / (BITS_PER_WEIGHT * lenet().prunable_size), "fraction of zeros", places=3,
        right="beyond one zero in 32, about three per cent, a mask pays for itself.",
        hint="a mask costs one bit for each prunable weight, a pruned weight saves 32.",
        mistakes={
            "that is the share that is kept. Asked is the sparsity, the share of zeros.": 1 - 1 / 32,
            "that is the ratio of bits per weight to bits per position. Which share of zeros does it lead to?": 32,
            "that takes a weight for 8 bits. It has 32.": 1 / 8,
        },
    ),
    "05 masks": Exercise(
        lambda: sum(reconfiguration_time(t, R=7) is not None for t in range(1000)), "masks, a whole number",
        right="the last is chosen in round 994, so that s_p is missed by a hair. With R = 5 it is met.",
        hint="τ = 7, 14, 21, … up to 1,000.",
        mistakes={
            "that is 1000 / 7 rounded up. The 143rd mask would be due in round 1,001.": 143,
            "that is the number for R = 5.": 200,
            "a mask cannot be chosen in part. Take whole masks alone.": 1000 / 7,
        },
    ),
    "06 floor": Exercise(
        lambda: model_bits() / (2 * model_bits()), "fraction of FedAvg's bits", places=2,
        right="the dense upload is half of FedAvg's cost, and no sparsity touches it.",
        hint="let the download cost nothing at all.",
        mistakes={
            "that is the density at the end. Only downloads have it, uploads stay dense.": 0.1,
            "the uploads are still there, all of them.": 0,
            "FedAvg pays for two ways. The dense upload is one of them.": 1,
        },
    ),
    "06 share": Exercise(
        lambda: (1 + _paper()) / 2, "fraction of FedAvg's bits", places=2,
        right="three fifths, however many rounds.",
        hint="the mean sparsity of the schedule is 0.8 (notebook 04), and it saves on the way down alone.",
        mistakes={
            "that is the download alone. The upload stays dense.": _paper,
            "that uses the sparsity of the last round. Take the mean over the run, 0.8.": 0.55,
            "that is what FedDIP saves. Asked is what it sends.": lambda: (1 - _paper()) / 2,
            "that is the mean sparsity. Asked is a share of the bits.": 0.8,
        },
    ),
    "06 both ways": Exercise(
        _paper, "fraction of FedAvg's bits", places=2,
        right="a fifth: what the released order of masking could save, and error feedback costs.",
        hint="now the upload has the density of the download.",
        mistakes={
            "that is with dense uploads, as in exercise 2.": lambda: (1 + _paper()) / 2,
            "that uses the density of the last round. Take the mean over the run.": 0.1,
            "that adds the two ways up. FedAvg's bits are two ways as well.": lambda: 2 * _paper(),
            "that is the sparsity. Bits follow the density, one minus it.": 0.8,
        },
    ),
    "07 statistics": Exercise(
        lambda: BITS_PER_WEIGHT * lenet().prunable_size, "bits, the exact number",
        right="as much as the dense weights: PruneFL's upload can be larger than FedAvg's.",
        hint="one squared gradient of 32 bits for every prunable weight, kept or not.",
        mistakes={
            "that is one bit per weight, as for a mask. A squared gradient is a number of 32 bits.":
                lambda: lenet().prunable_size,
            "that counts the biases too. They are never pruned, so nobody asks for their gradients.": model_bits,
            "that counts kept weights alone. PruneFL needs the pruned ones most, to know which to bring back.":
                lambda: BITS_PER_WEIGHT * lenet().prunable_size // 5,
        },
    ),
    "07 prox": Exercise(
        lambda: 4 / (1 + 3), "a number", places=1,
        right="the larger μ is, the nearer the client stays to what it was sent.",
        hint="at rest the two forces cancel: (w − 4) + μ (w − 0) = 0.",
        mistakes={
            "that is for μ = 1, as above.": 2,
            "that is the client's own minimum, which it reaches for μ = 0.": 4,
            "that divides by μ. The client's own pull counts as well: divide by 1 + μ.": 4 / 3,
        },
    ),
    "09 variance": Exercise(
        lambda: float(torch.tensor([-2.0, 2.0, 4.0, 8.0]).var(correction=0)), "a number, exactly",
        right="most of the variance lies between the clients, and averaging never sees it.",
        hint="the mean of all is 3. Add the mean of (μ_n − 3)² to the mean of the σ_n².",
        mistakes={
            "that is what averaging gives. The distance between the means is missing.": 4,
            "that is the distance alone. Each client has a variance of its own.": 9,
            "that squares the whole distance of 6. Each mean is only 3 away from the common one.": 40,
            "that divides by n − 1. Batch norm's variance divides by n.": 52 / 3,
        },
    ),
    "09 forgotten": Exercise(
        lambda: 0.9**20, "fraction of the initial value", places=2,
        right="twenty batches are enough to forget most of it.",
        hint="each batch leaves nine tenths of what was there.",
        mistakes={
            "that is what has been replaced. Asked is what is left.": 1 - 0.9**20,
            "that is after five batches, as above.": 0.9**5,
            "each batch takes a tenth of what is left, not a tenth of the beginning.": 0,
        },
    ),
    "30 step": Exercise(
        lambda: _pruned_weight(2), "a number", places=1,
        right="the network never sees the weight, so its gradient stays −10 and it gains 3 per step.",
        hint="the gradient is taken at the pruned point (2, 0), in the second step as in the first.",
        mistakes={
            "that takes the second gradient at 3. The mask still hides the weight: the gradient is taken at 0.": 5.1,
            "that is after one step.": lambda: _pruned_weight(1),
            "that is without feedback. Here a pruned weight moves.": lambda: _pruned_weight(2, feedback=False),
        },
    ),
    "30 schedule": Exercise(
        lambda: sparsity_at(8, T=16, s_0=0.5, s_p=0.99), "fraction of zeros", places=3,
        right="half of the time, and seven eighths of the pruning is done.",
        hint="s_t = s_p + (s_0 − s_p)(1 − t/T)³, and half cubed is an eighth.",
        mistakes={
            "that is a straight line. Eq. 11 is cubic.": lambda: _straight(8, 16, 0.5, 0.99),
            "that is for the target 0.9, as in the run above.": lambda: sparsity_at(8, T=16, s_0=0.5, s_p=0.9),
            "that is the density. Sparsity is one minus it.": lambda: 1 - sparsity_at(8, T=16, s_0=0.5, s_p=0.99),
        },
    ),
    "30 upload": Exercise(
        lambda: (1 + 0.2) / 2, "fraction of FedAvg's bits", places=2,
        right="the upload alone is half of FedAvg's bill. That is why the whole run still costs more than half.",
        hint="FedAvg pays 1 down and 1 up. Here it is 0.2 down and 1 up.",
        mistakes={
            "that is the download alone. The upload stays dense.": 0.2,
            "that adds the two ways up. Divide by FedAvg's two.": 1.2,
            "that is the saving. Asked is what is sent.": 0.4,
        },
    ),
    "39 left": Exercise(
        lambda: 60 - (10 + 20 + 20 + 10), "minutes, a whole number",
        right="nothing is left over: the hour is full.",
        hint="add up the four parts and subtract them from 60.",
        mistakes={
            "that is what the four parts take. Asked is what is left of the hour.": 60,
            "that forgets the close.": 10,
        },
    ),
}  # fmt: skip
