"""Four switches where FedDIP's released code differs from the paper's text; each is a mixin for FedDIP.

`rules="released"` turns on all four. Each also works alone, so that its effect can be measured. `regrowth` has a third
value, a dense memory, which neither the paper nor the released code has.
"""

from ... import masks
from ...communication import DENSE
from ...method import Method


class OwnFirstMasks(Method):
    """The server sends a dense first model, and each client of the first round draws its own ERK mask."""

    def first_mask(self, w):
        return None

    def client_mask(self, state, n):
        if state.t == 0:
            return self.erk_mask(self.exp.sparsity_initial, "client mask", n)
        return super().client_mask(state, n)

    def tau(self, t):
        return 0 if t == 0 else super().tau(t)  # one server mask replaces the clients' masks


class Nested(Method):
    """Apply the old mask to the average first, so that no pruned weight ever returns."""

    def choose(self, w, m, s):
        return None if s == 0 else masks.magnitude_mask(w, s, within=m)

    def reads_pruned(self, t):
        return False


class DenseMemory(Method):
    """The server keeps and sends the dense average."""

    def remembered(self, w, m):
        return w

    def reads_pruned(self, t):
        return True

    def download(self, state, n):
        # Weight decay changes pruned weights at the client too: the server could not restore the same bits.
        return super().download(state, n).plus({"w": DENSE})


class AtTheStart(Method):
    """Choose a mask after rounds 1, R + 1, 2R + 1, … with the sparsity at their start."""

    def tau(self, t):
        return t if t % self.exp.reconfigure_every == 0 else None


class TwentySteps(Method):
    """The penalty starts at 0, then grows from 5e-4 to λ_max, in 20 steps regardless of Q."""

    def lam(self, t):
        return lambda_in_twenty(t, T=self.exp.rounds, lambda_max=self.exp.lambda_max)


def lambda_in_twenty(t: int, T: int, lambda_max: float) -> float:
    """λ_t of the released code; with fewer than 20 rounds it is always the last step."""
    if lambda_max == 0:
        return 0.0
    step = min(t // (T // 20), 19) if T >= 20 else 19
    return 5e-4 + (lambda_max - 5e-4) * (step - 1) / 19 if step else 0.0


MASKS = {
    "initial_mask": ("one ERK mask from the server, or one per client of the first round", {
        "erk": None, "released": OwnFirstMasks,
    }),
    "regrowth": ("whether pruned weights can return, and from which values", {
        "paper": None, "released": Nested, "dense_memory": DenseMemory,
    }),
    "reconfigure_at": ("after rounds R, 2R, … or after rounds 1, R + 1, …", {"paper": None, "released": AtTheStart}),
}  # fmt: skip
ALL = MASKS | {
    "lambda_schedule": ("Eq. 9, or the 20 steps of the released code", {"paper": None, "released": TwentySteps})
}
