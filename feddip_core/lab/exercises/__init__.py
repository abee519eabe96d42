"""Checked exercises: `check` gives a verdict that fits the mistake, `score` counts the right answers of a notebook.

No answer stands here in clear: the functions that the notebook has called compute each. To add one, put an `Exercise`
into a dict such as `course.COURSE` or `results.RESULTS`; its name begins with its notebook's number.
"""

from .checking import Exercise, solution, verdict
from .course import COURSE
from .explorer import EXPLORER
from .results import RESULTS
from .toys import averaging_fixed_point, quadratic, rounds_until_return

__all__ = [
    "EXERCISES", "Exercise", "averaging_fixed_point", "check", "quadratic", "rounds_until_return", "score", "solution",
]  # fmt: skip

EXERCISES: dict[str, Exercise] = COURSE | EXPLORER | RESULTS
_seen: dict[str, str] = {}  # the last verdict on each exercise of this kernel


def check(name: str, answer) -> str:
    """'Not answered yet: …', 'Right: …' or 'Not yet: …'."""
    if name not in EXERCISES:
        raise ValueError(f"name: {name!r} is not allowed; it must be one of {', '.join(EXERCISES)}")
    _seen[name] = verdict(EXERCISES[name], answer)
    return _seen[name]


def score() -> str:
    """How many of the exercises checked in this notebook are right, and which are still open."""
    left = [name[3:] for name, said in _seen.items() if not said.startswith("Right")]
    still = f" Still open: {', '.join(left)}." if left else " All done."
    return f"{len(_seen) - len(left)} of {len(_seen)} exercises are right.{still if _seen else ''}"
