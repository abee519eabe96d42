"""The runs from which our settings are chosen, and those that are reported."""

import pytest

from feddip_core.study import beyond, choosing, gains, league, wanted


def test_the_choice_is_made_in_at_most_24_runs_with_a_seed_that_is_not_reported():
    runs = wanted.wanted("choices", "paper", "fashion_mnist")
    (seeds,) = {tuple(exp.seed for exp in own) for own in runs.values()}
    assert seeds == (10,) and 10 not in wanted.SEEDS["paper"] and 10 not in beyond.SEEDS
    assert len(runs) <= 24 and len({own[0].run_id for own in runs.values()}) == len(runs)
    assert {exp.rounds for (exp,) in runs.values()} == {1000}
    assert {exp.sparsity_target for (exp,) in runs.values()} == {0.9, 0.95, 0.99}


@pytest.mark.parametrize("result", ["choices", "league_choices"])
def test_the_runs_of_a_choice_are_those_that_it_looks_for(result):
    """They are seldom tested, which changes no model; those that are reported are tested in every round."""
    made = wanted.wanted(result, "paper", "fashion_mnist")
    tried = {**beyond.choices(), **league.choices()}
    assert all(exp == choosing.experiment("fashion_mnist", tried[name], 10) for name, (exp,) in made.items())
    assert {exp.evaluate_every for (exp,) in made.values()} == {50}
    reported = wanted.wanted("beyond", "paper", "fashion_mnist") | wanted.wanted("league", "paper", "fashion_mnist")
    assert {exp.evaluate_every for own in reported.values() for exp in own} == {1}
    assert {choosing.experiment("fashion_mnist", own).evaluate_every for own in tried.values()} == {1}


def ids(*results, **options):
    found = [wanted.wanted(name, "paper", "fashion_mnist", **options) for name in results]
    return {exp.run_id for table in found for own in table.values() for exp in own}


def test_before_the_choice_only_what_is_known_is_wanted(tmp_path):
    runs = wanted.wanted("beyond", "paper", "fashion_mnist", folder=tmp_path)
    assert not any("best" in name or "decay" in name or "alone" in name for name in runs)
    assert {tuple(exp.seed for exp in own) for own in runs.values()} == {(1, 2, 3)}
    own, league = ids("beyond", folder=tmp_path), ids("league", folder=tmp_path)
    assert len(own) == 48 and len(own & league) == 21
    assert len(own - league - ids(*wanted.RESULTS)) == 19


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """Makes these candidates end with the highest accuracy; all have a record unless one is missing."""

    def chosen(*names, missing=()):
        made = {name: 0.9 if name in names else 0.8 for name in beyond.choices() if name not in missing}
        by_id = {choosing.experiment("fashion_mnist", c, choosing.SEED): n for n, c in beyond.choices().items()}
        monkeypatch.setattr(choosing, "_last_five", lambda exp, folder: made.get(by_id[exp]))
        return beyond.reported(folder=tmp_path)

    return chosen


def test_the_best_of_all_candidates_is_reported_once_all_have_a_record(choose):
    swaps, gradual = "99%, steps of 0.02", "90%, steps of 0.02, decay 0.999"
    runs = choose(swaps, gradual, missing=["95%"])
    assert runs["best, 99%"] == beyond.choices()[swaps] and runs["best, 90%"] == beyond.choices()[gradual]
    assert "best, 95%" not in runs
    assert runs["best, 90%, pathological"] == runs["best, 90%"] | dict(partition="pathological")
    assert next(iter(runs)) == "best, 99%"
    assert "best, 99%" not in choose(swaps, missing=["99%"])


def test_the_best_is_paired_with_fedavg_and_both_feddips_at_its_steps(choose):
    runs = choose("99%, steps of 0.03, decay 0.999", "90%, pruned by 600")
    for at_99, at_90 in (
        ("FedDIP, 99%", "FedDIP, 90%"),
        ("FedDIP, released, 99%", "FedDIP, released, 90%"),
        ("FedAvg",) * 2,
    ):
        assert beyond.steps(0.03, 0.999).items() <= runs[f"{at_99}, steps of 0.03, decay 0.999"].items()
        assert beyond.steps().items() <= runs[f"{at_90}, steps of 0.01, decay 0.9995"].items()
    steps = beyond.steps() | dict(partition="pathological")
    assert steps.items() <= runs["FedAvg, steps of 0.01, decay 0.9995, pathological"].items()
    assert len(runs) == 32
    experiments = {name: [choosing.experiment("fashion_mnist", own)] for name, own in runs.items()}
    ends = [f"{name}, 99%, steps of 0.03, decay 0.999" for name in ("FedDIP", "FedDIP, released")]
    assert gains.opponents(experiments, 0.99) == ends


def test_each_ingredient_stands_alone(choose):
    runs = choose("99%, steps of 0.05, decay 0.999, half swapped", "90%")
    alone = {name: own for name, own in runs.items() if "alone" in name}
    assert alone["FedGMP, 99%, swaps alone"] == dict(sparsity_target=0.99, method="feddip_swap", adjust_alpha=0.5)
    assert alone["FedGMP, 99%, LAMP alone"]["mask_score"] == "lamp" and len(alone) == 5
    without = {name for name in choose("99%, steps of 0.05, decay 0.999, no swaps") if "alone" in name}
    assert len(without) == 4 and "FedGMP, 99%, swaps alone" not in without


def test_the_choice_never_makes_a_run_twice(choose):
    for name in beyond.candidates(0.99):
        made = [choosing.experiment("fashion_mnist", own) for own in choose(name, "90%, pruned by 700, swaps").values()]
        assert len(made) == len({exp.run_id for exp in made}) <= 33
