"""Where the released code of FedDIP differs from the paper's text: four switches, each a class to put before FedDIP.

`rules="released"` turns all four; each also stands alone, so that its worth can be measured. A dense memory, which
neither the paper nor the released code has, is a third value of `regrowth`.
"""

from ... import masks
from ...communication import DENSE
from ...method import Method


class OwnFirstMasks(Method):
    """The first model goes out dense, and each client of the first round draws an ERK mask of its own."""

    def first_mask(self, w):
        return None

    def client_mask(self, state, n):
        if state.t == 0:
            return self.erk_mask(self.exp.sparsity_initial, "client mask", n)
        return super().client_mask(state, n)

    def tau(self, t):
        return 0 if t == 0 else super().tau(t)  # the clients' own masks go, and one of the server's comes


class Nested(Method):
    """The average is masked with the old mask first, so that nothing pruned ever returns."""

    def choose(self, w, m, s):
        return None if s == 0 else masks.magnitude_mask(w, s, within=m)

    def reads_pruned(self, t):
        return False


class DenseMemory(Method):
    """The server keeps the dense average, and sends it."""

    def remembered(self, w, m):
        return w

    def reads_pruned(self, t):
        return True

    def download(self, state, n):
        # A pruned weight decays at the client too: the server could not add that to the upload, to the same bits.
        return super().download(state, n).plus({"w": DENSE})


class AtTheStart(Method):
    """A mask is chosen after rounds 1, R + 1, 2R + 1, … with the sparsity of their beginning."""

    def tau(self, t):
        return t if t % self.exp.reconfigure_every == 0 else None


class TwentySteps(Method):
    """The penalty is 0 at first, then grows from 5e-4 towards λ_max, in 20 steps whatever Q is."""

    def lam(self, t):
        return lambda_in_twenty(t, T=self.exp.rounds, lambda_max=self.exp.lambda_max)


def lambda_in_twenty(t: int, T: int, lambda_max: float) -> float:
    """λ_t of the released code; of fewer than 20 rounds always the last of its steps."""
    if lambda_max == 0:
        return 0.0
    step = min(t // (T // 20), 19) if T >= 20 else 19
    return 5e-4 + (lambda_max - 5e-4) * (step - 1) / 19 if step else 0.0


MASKS = {
    "initial_mask": ("one ERK mask of the server, or each first client's own", {
        "erk": None, "released": OwnFirstMasks,
    }),
    "regrowth": ("what of a pruned weight the next mask sees", {
        "paper": None, "released": Nested, "dense_memory": DenseMemory,
    }),
    "reconfigure_at": ("after rounds R, 2R, … or after rounds 1, R + 1, …", {"paper": None, "released": AtTheStart}),
}  # fmt: skip
ALL = MASKS | {
    "lambda_schedule": ("Eq. 9, or the 20 steps of the released code", {"paper": None, "released": TwentySteps})
}
