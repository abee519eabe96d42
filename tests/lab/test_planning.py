"""A plan is what the run then does: for every method, its released version, its switches, and a method of one's own."""

import pytest

from feddip_core import Experiment, Method, real, run
from feddip_core.engine.assembly import assemble
from feddip_core.engine.measure import plan
from feddip_core.masks import magnitude_mask
from feddip_core.methods import METHODS

KNOWN = ["sparsity", "lambda_", "downlink_bits", "uplink_bits"]
RELEASED = dict(rules="released")
# Of the sizes of masks, what training decides: see `plan_is_a_bound`.
BOUNDS = [("prunetrain", {}), ("sparsyfed", {}), ("feddst", RELEASED)]
CASES = [
    *((method, {}) for method in METHODS),
    *((method, RELEASED) for method, cls in METHODS.items() if cls.released or cls.switches),
    ("feddip", RELEASED | dict(sparsity_initial=0.8, sparsity_target=0.8)),  # a mask that stays
    ("feddip", dict(regrowth="dense_memory", reconfigure_every=3)),
    ("feddip", dict(sparsity_initial=0.0)),
    ("feddip", dict(sparse_uplink=True)),
    ("feddip", RELEASED | dict(sparse_uplink=True)),
    ("feddip_swap", dict(swap_every=2, mask_score="lamp")),
    ("fedtiny", dict(reconfigure_every=2, adjust_until=5)),
    ("fedrts", dict(reconfigure_every=2, adjust_until=5)),
    ("prunefl", dict(sparsity_initial=0.2)),
    ("prunefl", dict(sparsity_target=0.0, sparsity_initial=0.0)),
    ("snip", dict(sparsity_target=0.0)),
    ("feddst", dict(sparsity_target=0.0)),
]


class Halves(Method):
    """Half of what is left goes after every second round, down to a floor; the mask travels both ways."""

    feedback = False
    settings = dict(floor=real(0.1, 0, 1, "share of the weights that stay"))  # noqa: RUF012

    def next_mask(self, w, m, t):
        return m if t % 2 else magnitude_mask(w, 1 - max(self.exp.floor, 0.5 ** (t / 2 + 1)), within=m)

    def upload(self, state, n):
        plain = super().upload(state, n)
        return type(plain)(plain.parts | ({"mask": self.mask_form} if state.m else {}), plain.kept)

    def finish(self, upload, terms, m, state, n):
        w = upload.values["w"]
        return upload.plus(mask=self.layout.flat_mask(m, like=w)) if m else upload


def small(tiny, method, settings, batch_size=100):
    return tiny(method, clients=20, clients_per_round=4, batch_size=batch_size, **settings)


@pytest.mark.parametrize("method, settings", [case for case in CASES if case not in BOUNDS])
def test_a_plan_is_what_the_run_then_does(tiny, method, settings):
    exp = small(tiny, method, settings)
    federation = assemble(exp)
    assert not federation.method.plan_is_a_bound
    assert plan(federation)[KNOWN].to_dict() == run(exp).metrics[KNOWN].to_dict()


def test_a_method_of_ones_own_is_planned_like_ours(tiny):
    exp = small(tiny, Halves, dict(floor=0.2))
    planned = plan(assemble(exp))
    assert planned[KNOWN].to_dict() == run(exp).metrics[KNOWN].to_dict()
    assert planned["sparsity"].round(3).tolist() == [0.5, 0.5, 0.75, 0.75, 0.8, 0.8]


@pytest.mark.parametrize("method, settings", BOUNDS)
def test_where_training_decides_a_plan_is_the_most_that_is_sent(tiny, method, settings):
    if method == "prunetrain":
        settings = settings | dict(lambda_max=0.02, prunetrain_threshold=0.05, momentum=0.9)
    exp = small(tiny, method, settings, batch_size=32)
    federation, metrics = assemble(exp), run(exp).metrics
    assert federation.method.plan_is_a_bound
    planned = plan(federation)
    for column in ("downlink_bits", "uplink_bits"):
        assert (planned[column] >= metrics[column]).all()
    assert planned[["downlink_bits", "uplink_bits"]].sum().sum() > metrics[["downlink_bits", "uplink_bits"]].sum().sum()


def test_a_dense_plan_by_hand():
    rows = plan(assemble(Experiment.preset("smoke", method="fedavg", rounds=2)))
    assert rows["downlink_bits"].tolist() == rows["uplink_bits"].tolist() == [5_923_776] * 2  # 3 · 61,706 · 32
    assert rows["dense_bits"].tolist() == [5_923_776] * 2
