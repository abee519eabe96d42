"""The runs from which our settings are chosen."""

from feddip_core.study import wanted


def test_the_choice_is_made_in_at_most_24_runs_with_a_seed_that_is_not_reported():
    runs = wanted.wanted("choices", "paper", "fashion_mnist")
    (seeds,) = {tuple(exp.seed for exp in own) for own in runs.values()}
    assert seeds == (10,) and 10 not in wanted.SEEDS["paper"]
    assert len(runs) <= 24 and len({own[0].run_id for own in runs.values()}) == len(runs)
    assert {exp.rounds for (exp,) in runs.values()} == {1000}
    assert {exp.sparsity_target for (exp,) in runs.values() if exp.method != "fedavg"} == {0.9, 0.95, 0.99}
