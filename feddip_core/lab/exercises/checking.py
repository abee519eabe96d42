"""What an exercise is, and the verdict on an answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

SLACK = 1e-9  # floating point alone
# A right number in the wrong unit, by the first word of the unit that was asked: factor, and what was confused.
UNITS = {
    "fraction": ((100, "that is a percentage. A fraction between 0 and 1 is asked."),),
    "bits": ((1 / 8, "that is in bytes. A byte has 8 bits."),),
    "megabytes": (
        (8, "that is in megabits. A byte has 8 bits."),
        (1e6 / 2**20, "that is in mebibytes of 1,048,576 bytes. A megabyte here has 1,000,000."),
    ),
}


@dataclass(frozen=True)
class Exercise:
    """How to find the answer, in which unit and to how many decimals, and what to say to it.

    `mistakes` maps what was confused to the answer that it leads to: a value, or a function that computes it.
    """

    solve: Callable[[], Any]
    unit: str  # "fraction", "bits", "rounds", …; of a set or a function, what it is
    right: str
    hint: str  # for a wrong answer that no mistake explains
    mistakes: Mapping[str, Any]
    places: int | None = None  # decimals that are asked; None is exactly
    probes: tuple = ()  # for an answer that is a function: where it is compared
    shown: str = ""  # the solution in words, for an answer that cannot be printed

    @property
    def asked(self) -> str:
        """Unit and precision."""
        if self.places is None:
            return self.unit
        return f"{self.unit}, {'to the nearest whole' if not self.places else _decimals(self.places)}"

    def same(self, answer, other) -> bool:
        """Whether two answers agree, to the precision that is asked."""
        if self.probes:
            return all(abs(float(answer(*at)) - float(other(*at))) <= 1e-6 for at in self.probes)
        if isinstance(other, set):
            return {round(float(v), 6) for v in answer} == {round(float(v), 6) for v in other}
        if isinstance(other, str):
            return answer.strip().lower() == other.lower()
        return abs(float(answer) - float(other)) <= self.tolerance

    @property
    def tolerance(self) -> float:
        return (0.5 * 10**-self.places if self.places is not None else 0) + SLACK


def verdict(exercise: Exercise, answer) -> str:
    """'Not answered yet: …', 'Right: …' or 'Not yet: …'."""
    if answer is None:
        return f"Not answered yet: {exercise.asked}."
    try:
        right = exercise.solve()
        if exercise.same(answer, right):
            return f"Right: {exercise.right}"
        return f"Not yet: {_confused(exercise, answer, right)}"
    except Exception as error:  # whatever a student's answer may do
        fault = f"{type(error).__name__}: {error}" if exercise.probes else f"this is {answer!r:.40}"
        return f"Not yet: the answer should be {_form(exercise)} ({fault})."


def _confused(exercise: Exercise, answer, right) -> str:
    """What was confused, if one can tell."""
    for what, wrong in exercise.mistakes.items():
        value = wrong if exercise.probes or not callable(wrong) else wrong()
        near = max(2 * exercise.tolerance, 1e-4 * abs(value)) if _number(value) else 0  # perhaps cut off, not rounded
        if exercise.same(answer, value) or (near and abs(float(answer) - value) <= near):
            return what
    if exercise.probes or isinstance(right, set | str):
        return exercise.hint
    for factor, what in UNITS.get(exercise.unit.split()[0].strip(","), ()):
        if abs(float(answer) - factor * right) <= 0.01 * abs(factor * right):
            return what
    if right and abs(float(answer) - right) <= 0.05 * abs(right):
        return f"that is close, but not close enough. Asked: {exercise.asked}."
    return exercise.hint


def _number(value) -> bool:
    return isinstance(value, int | float)


def _form(exercise: Exercise) -> str:
    if exercise.probes:
        return "a function"
    right = exercise.solve()
    return "a set of numbers" if isinstance(right, set) else "a text" if isinstance(right, str) else "a number"


def _decimals(places: int) -> str:
    return f"to {('one', 'two', 'three', 'four')[places - 1]} decimal{'s' if places > 1 else ''}"


def solution(exercise: Exercise) -> str:
    """The answer, as one would write it down."""
    if exercise.shown:
        return exercise.shown
    right = exercise.solve()
    if isinstance(right, set):
        return "{" + ", ".join(f"{v:g}" for v in sorted(right, reverse=True)) + "}"
    if isinstance(right, str):
        return right
    return f"{right:,.{exercise.places}f}" if exercise.places is not None else f"{right:,}"
