"""Settings that check themselves: each has a default, the allowed values, and a one-line note.

The experiment and every method, yours too, declare their settings with the functions below.
A default of None is filled in later: by the data set (Table II), the rules or the method.
"""

import numbers
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 3.4e38  # beyond it, a single-precision weight is infinite


@dataclass(frozen=True)
class Setting:
    """`parse` returns the value in its own type, or None if it is not allowed."""

    default: Any
    parse: Callable[[Any], Any]
    allowed: str
    note: str

    def checked(self, name: str, value: Any) -> Any:
        """The value itself, or an error that names the field, the value and what is allowed."""
        parsed = self.parse(value)
        if parsed is None:
            raise ValueError(f"{name}: {value!r:.200} is not allowed; it must be {self.allowed}")
        return parsed


def whole(default: int | None, low: int, note: str) -> Setting:
    """A whole number of at least `low`."""

    def parse(value: Any) -> int | None:
        return int(value) if _is(value, numbers.Integral) and low <= value < 2**63 else None

    return Setting(default, parse, f"a whole number of at least {low}, below 2**63", note)


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def real(
    default: float | None, low: float, high: float, note: str, open_low: bool = False, open_high: bool = False
) -> Setting:
    """A finite number from `low` to `high`; the ends are included unless open."""
    low, high = max(low, -LARGEST), min(high, LARGEST)

    def parse(value: Any) -> float | None:
        good = _is(value, numbers.Real) and low <= value <= high
        good = good and not (open_low and value == low) and not (open_high and value == high)
        return float(value) + 0.0 if good else None  # -0.0 + 0.0 is 0.0: one experiment, one id

    ends = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    return Setting(default, parse, f"a number in {ends}", note)


def flag(default: bool, note: str) -> Setting:
    """True or False."""
    return Setting(default, lambda value: value if isinstance(value, bool) else None, "True or False", note)


def choice(default: str | None, options: Iterable[str], note: str) -> Setting:
    """One of a few words."""
    words = tuple(options)
    return matching(default, "|".join(map(re.escape, words)), f"one of {', '.join(words)}", note)


def matching(default: str | None, pattern: str, allowed: str, note: str) -> Setting:
    """A string that matches the pattern; paths are accepted as strings."""

    def parse(value: Any) -> str | None:
        if isinstance(value, os.PathLike):
            value = str(Path(value).expanduser())
        return str(value) if isinstance(value, str) and re.fullmatch(pattern, value) else None

    return Setting(default, parse, allowed, note)
