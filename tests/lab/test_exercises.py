"""Right answers pass and wrong ones do not, for every exercise; the answers here are worked out by hand."""

import json
import re
from pathlib import Path

import pytest

from feddip_core.lab.exercises import EXERCISES, averaging_fixed_point, check, rounds_until_return

ANSWERS = {
    "01 shares": (3.1, 7 / 3),  # 0.1 + 0.6 + 2.4; not the plain mean
    "01 drift": (8.39, 9.0),  # 0.99 · 10 / (0.19 + 0.99)
    "01 megabytes": (2468.24, 1234.12),  # both ways
    "02 global": ({4.0, -3.0, 2.0}, {4.0, -3.0, -1.0}),
    "02 left": (12_530, 12_294),  # 236 biases
    "02 erk": (0.1965, 0.9),
    "03 memory": (5, 4),
    "03 steps": (9, 8),
    "03 upload": (0.1034, 0.1),
    "04 mean": (0.7, 0.8),
    "04 one step": (0, 1e-3),
    "04 linear": (lambda t, T, s_0, s_p: s_0 * (1 - t / T) + s_p * t / T, lambda t, T, s_0, s_p: s_p * t / T),
    "05 again": (991_040, 1_052_510),
    "05 break-even": (0.03125, 0.5),
    "05 masks": (142, 143),
    "06 floor": (0.5, 0.1),
    "06 share": (0.6, 0.2),
    "06 both ways": (0.2, 0.6),
}
NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


def test_every_exercise_is_tried_here():
    assert set(ANSWERS) == set(EXERCISES)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_right_answer_passes_and_a_wrong_one_does_not(name):
    right, wrong = ANSWERS[name]
    assert check(name, None) == "Not answered yet."
    assert check(name, right).startswith("Right: ")
    assert check(name, wrong).startswith("Not yet: ")


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_the_wrong_kind_is_told_so(name):
    assert check(name, "forty").startswith("Not yet: the answer should be a")


def test_a_function_that_fails_is_no_accident_of_the_notebook():
    assert "ZeroDivisionError" in check("04 linear", lambda t, T, s_0, s_p: t / 0)


def test_an_unknown_exercise_is_named():
    with pytest.raises(ValueError, match="name: '09 none' is not allowed; it must be one of 01 shares"):
        check("09 none", 1)


def test_each_stands_in_its_notebook_with_a_hint_and_without_an_answer():
    for name in EXERCISES:
        (path,) = NOTEBOOKS.glob(f"{name[:2]}_*.ipynb")
        cells = json.loads(path.read_text())["cells"]
        asked = [i for i, cell in enumerate(cells) if f'check("{name}", answer)' in "".join(cell["source"])]
        assert len(asked) == 1, name
        assert "".join(cells[asked[0]]["source"]).startswith("answer = None")
        assert re.search(r"<details>\s*<summary>Hint</summary>", "".join(cells[asked[0] - 1]["source"])), name


def test_the_toys_behind_them():
    assert averaging_fixed_point(1, 0.1, [0.0, 10.0], [1.0, 9.0]) == pytest.approx(9.0)
    assert averaging_fixed_point(1, 0.1, [0.0, 10.0], [1.0, 1.0]) == pytest.approx(5.0)
    assert rounds_until_return("dense_memory", steps=4, eta=0.1) == 3  # 0.4, 0.8, 1.2
    assert rounds_until_return("paper", steps=4, eta=0.1) is None
    assert rounds_until_return("paper", steps=9, eta=0.1) == 1
    assert rounds_until_return("released", steps=40, eta=0.1) is None
