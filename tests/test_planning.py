import pytest

from feddip_core import Experiment, run
from feddip_core.planning import plan

KNOWN = ["sparsity", "lambda_", "downlink_bits", "uplink_bits"]


@pytest.mark.parametrize(
    "method, settings",
    [
        ("fedavg", {}),
        ("feddip", {}),
        ("feddip", dict(rules="authors")),
        ("feddip", dict(rules="authors", sparsity_initial=0.8, sparsity_target=0.8)),  # a mask that stays
        ("feddp", dict(regrowth="dense_memory", reconfigure_every=3)),
        ("dpf", {}),
        ("snip", {}),
        ("feddst", {}),
        ("prunefl", dict(sparsity_initial=0.2)),
    ],
)
def test_a_plan_is_what_the_run_then_does(tiny, method, settings):
    exp = tiny(method, clients=20, clients_per_round=4, **settings)
    metrics = run(exp).metrics
    assert plan(exp)[KNOWN].to_dict() == metrics[KNOWN].to_dict()


def test_a_dense_plan_by_hand():
    rows = plan(Experiment.preset("smoke", method="fedavg", rounds=2))
    assert rows["downlink_bits"].tolist() == rows["uplink_bits"].tolist() == [5_923_776] * 2  # 3 · 61,706 · 32
    assert rows["dense_bits"].tolist() == [5_923_776] * 2


def test_prunetrain_is_planned_at_most(tiny):
    exp = tiny("prunetrain", lambda_max=0.02, prunetrain_threshold=0.05, momentum=0.9)
    metrics = run(exp).metrics
    assert metrics["sparsity"].iloc[-1] > 0, "this setting no longer removes a channel"
    assert (plan(exp)["uplink_bits"] >= metrics["uplink_bits"]).all()
    assert plan(exp)["uplink_bits"].sum() > metrics["uplink_bits"].sum()


def test_a_version_of_the_authors_has_no_plan(tiny):
    with pytest.raises(ValueError, match="variant: 'authors' is not allowed"):
        plan(tiny("snip", variant="authors"))
