"""Right answers pass and wrong ones hear what was confused, for every exercise; the answers are worked out by hand."""

import json
import re
from pathlib import Path

import pytest

from feddip_core.lab import exercises
from feddip_core.lab.exercises import (
    EXERCISES,
    averaging_fixed_point,
    check,
    rounds_until_return,
    score,
    solution,
)  # fmt: skip


def half_line(t, T, s_0, s_p):
    return s_0 * (1 - t / T) + s_p * t / T


# Right answers, as exact or as rounded as is asked; then wrong ones with a word of the verdict on each.
ANSWERS = {
    "00 left": ([6147], {55_323: "zero", 0.1: "fraction", 6170.6: "Biases"}),
    "01 shares": ([3.1], {7 / 3: "plain mean", 2.3: "plain mean", 3100: "weighted sum", 5: "1,000 images"}),
    "01 drift": ([8.39, 0.99 * 10 / 1.18], {9: "joint minimum", 7.87: "E = 3", 5: "many", 8.4: "close"}),
    "01 megabytes": ([2468, 2468.24], {1234.12: "one way", 493.648: "Five", 2.468: "one round", 19746: "megabits",
                                       2354: "mebibytes"}),
    "02 global": ([{4, -3, 2}], {(4, 3, 2): "sign", (4, 2, 0.5): "by value", (4, -3, -1): "layers"}),
    "02 left": ([12_530], {12_294: "biases", 49_176: "zero", 12_341.2: "fifth of all"}),
    "02 erk": ([0.196, 0.1965], {0.804: "density", 0.803: "density", 0.9: "whole network", 0: "budget",
                                 19.6: "percentage"}),
    "03 memory": ([5], {4: "0.8", 3: "η = 0.1", 18: "local steps"}),
    "03 steps": ([9], {8: "0.8", 8.5: "halved", 10: "one step fewer"}),
    "03 upload": ([0.103, 6383 / 61706], {0.1: "biases", 0.897: "saving", 0.1346: "mask", 10.3: "percentage"}),
    "04 mean": ([0.7], {0.8: "straight line", 0.85: "mean itself", 0.5: "0.8"}),
    "04 one step": ([0, 0.0], {1e-3: "never reaches", 9e-4: "Q = 10", 0.5: "Which i"}),
    "04 linear": ([half_line], {lambda t, T, s_0, s_p: s_p * t / T: "starts at 0",
                                lambda t, T, s_0, s_p: s_p + (s_0 - s_p) * (1 - t / T) ** 3: "cubic",
                                lambda t, T, s_0, s_p: s_p + (s_0 - s_p) * t / T: "backwards",
                                lambda t, T, s_0, s_p: s_p: "straight line between"}),
    "05 again": ([991_040], {1_052_510: "mask", 983_488: "biases", 1_974_592: "dense", 123_880: "bytes"}),
    "05 break-even": ([0.031, 0.0313, 0.03125, 1 / 32], {31 / 32: "kept", 32: "ratio", 0.125: "32", 0.03: "close",
                                                         3.125: "percentage", 3.1: "percentage"}),
    "05 masks": ([142], {143: "rounded up", 142.857: "in part", 200: "R = 5"}),
    "06 floor": ([0.5], {0.1: "density", 0: "still there", 1: "two ways", 50: "percentage"}),
    "06 share": ([0.6], {0.2: "download alone", 0.55: "last round", 0.4: "saves", 0.8: "mean sparsity"}),
    "06 both ways": ([0.2], {0.6: "dense uploads", 0.1: "last round", 0.4: "two ways", 0.8: "sparsity"}),
    "07 statistics": ([1_967_040], {61_470: "one bit", 1_974_592: "biases", 393_408: "kept weights"}),
    "07 prox": ([1], {2: "μ = 1", 4: "own minimum", 1.33: "1 + μ"}),
    "08 never": ([0.5], {0.9: "target", 0: "dense", 50: "percentage"}),
    "08 too fast": ([5], {4: "0.88", 6: "late", 9: "straight line"}),
    "08 both ways": ([0.51], {0.386: "upload alone", 0.491: "saving", 0.318: "dense model"}),
    "09 variance": ([13], {4: "averaging gives", 9: "distance alone", 40: "whole distance", 17.333: "n − 1"}),
    "09 forgotten": ([0.12, 0.1216], {0.88: "replaced", 0.59: "five batches", 0: "what is left, not"}),
    "39 left": ([0], {60: "four parts", 10: "close"}),
    "11 highest": ([74], {66: "last five", 50: "last round", 63: "all seven", 0.74: "fraction"}),
    "11 interval": ([2.05, 2.054], {0.65: "standard error", 1.79: "n − 1", 4.11: "√n", 1.27: "normal"}),
    "12 uplink": ([0.81], {0.19: "download", 0.5: "FedAvg", 0.61: "total", 81: "percentage"}),
    "12 mask": ([0.23], {0.3: "against the weights", 0.77: "weights' share", 0.03: "dense"}),
    "15 left": ([5, 5.0], {1.04: "ratio of zeros", 10: "0.9 to 0.99", 0.2: "upside down"}),
    "15 late": ([0.125], {0.875: "behind you", 0.5: "straight", 0.25: "square"}),
    "30 step": ([6], {5.1: "hides", 3: "one step", 0: "without feedback"}),
    "30 schedule": ([0.929, 0.92875], {0.745: "straight line", 0.85: "0.9", 0.07125: "density"}),
    "30 upload": ([0.6], {0.2: "download alone", 1.2: "two ways", 0.4: "saving"}),
}  # fmt: skip
NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


@pytest.fixture(autouse=True)
def fresh_kernel(monkeypatch):
    monkeypatch.setattr(exercises, "_seen", {})


def test_every_exercise_is_tried_here():
    assert set(ANSWERS) == set(EXERCISES)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_right_answer_passes_and_a_wrong_one_hears_what_was_confused(name):
    right, wrong = ANSWERS[name]
    for answer in right:
        assert check(name, answer) == f"Right: {EXERCISES[name].right}"
    for answer, word in wrong.items():
        said = check(name, set(answer) if isinstance(answer, tuple) else answer)
        assert said.startswith("Not yet: ") and word in said, (answer, said)


@pytest.mark.parametrize("name", ANSWERS)
def test_unit_and_precision_are_named_before_anything_is_answered(name):
    exercise = EXERCISES[name]
    assert check(name, None) == f"Not answered yet: {exercise.asked}."
    precise = re.search(r"decimal|exact|whole|set|function|name", exercise.asked)
    assert precise, f"{name} does not say how precisely: {exercise.asked}"


@pytest.mark.parametrize("name", ANSWERS)
def test_every_mistake_is_a_mistake_and_is_told(name):
    exercise = EXERCISES[name]
    assert len(exercise.mistakes) >= 2
    for what, wrong in exercise.mistakes.items():
        answer = wrong if exercise.probes or not callable(wrong) else wrong()
        assert check(name, answer) == f"Not yet: {what}"


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_the_wrong_kind_is_told_so(name):
    assert check(name, object()).startswith("Not yet: the answer should be a")


def test_a_number_typed_as_text_is_shown_again():
    assert check("05 break-even", "3 %") == "Not yet: the answer should be a number (this is '3 %')."


@pytest.mark.parametrize("name", [name for name in ANSWERS if not EXERCISES[name].shown])
def test_the_solution_that_is_written_down_is_right(name):
    written = solution(EXERCISES[name]).replace(",", "" if "{" not in solution(EXERCISES[name]) else ",")
    answer = set(map(float, written[1:-1].split(","))) if "{" in written else written
    assert check(name, answer).startswith("Right: ")


def test_a_function_that_fails_is_no_accident_of_the_notebook():
    assert "ZeroDivisionError" in check("04 linear", lambda t, T, s_0, s_p: t / 0)


def test_an_unknown_exercise_is_named():
    with pytest.raises(ValueError, match="name: '99 none' is not allowed; it must be one of 00 left"):
        check("99 none", 1)


def test_the_score_counts_the_last_answer_to_each():
    assert score() == "0 of 0 exercises are right."
    for name, answer in (("01 shares", 3.1), ("01 drift", 9), ("01 megabytes", None)):
        check(name, answer)
    assert score() == "1 of 3 exercises are right. Still open: drift, megabytes."
    check("01 drift", 8.39)
    check("01 megabytes", 2468)
    assert score() == "3 of 3 exercises are right. All done."


def cells_of(number):
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    return ["".join(cell["source"]) for cell in json.loads(path.read_text("utf-8"))["cells"]]


@pytest.mark.parametrize("name", EXERCISES)
def test_each_stands_in_its_notebook_with_a_hint_and_without_an_answer(name):
    cells = cells_of(name[:2])
    asked = [i for i, cell in enumerate(cells) if f'check("{name}", answer)' in cell]
    assert len(asked) == 1
    assert cells[asked[0]].startswith("answer = None")
    assert re.search(r"<details>\s*<summary>Hint</summary>", cells[asked[0] - 1])


@pytest.mark.parametrize("number", sorted({name[:2] for name in EXERCISES}))
def test_the_last_cell_of_code_shows_the_score(number):
    assert [cell for cell in cells_of(number) if "score()" in cell or "check(" in cell][-1] == "print(score())"


def test_the_toys_behind_them():
    assert averaging_fixed_point(1, 0.1, [0.0, 10.0], [1.0, 9.0]) == pytest.approx(9.0)
    assert averaging_fixed_point(1, 0.1, [0.0, 10.0], [1.0, 1.0]) == pytest.approx(5.0)
    assert rounds_until_return("dense_memory", steps=4, eta=0.1) == 3  # 0.4, 0.8, 1.2
    assert rounds_until_return("paper", steps=4, eta=0.1) is None
    assert rounds_until_return("paper", steps=9, eta=0.1) == 1
    assert rounds_until_return("released", steps=40, eta=0.1) is None
