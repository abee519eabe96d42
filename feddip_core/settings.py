"""Settings that check themselves: a default, what is allowed, and one line on what it is for.

An experiment and every method declare theirs with the functions below; so does a method of your own.
A default of None is filled in later: by the data set (Table II), the rules or the method.
"""

import math
import numbers
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
            raise ValueError(f"{name}: {value!r} is not allowed; it must be {self.allowed}")
        return parsed


def whole(default: int | None, low: int, note: str) -> Setting:
    """A whole number of at least `low`."""

    def parse(value: Any) -> int | None:
        return int(value) if _is(value, numbers.Integral) and value >= low else None

    return Setting(default, parse, f"a whole number of at least {low}", note)


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def real(
    default: float | None, low: float, high: float, note: str, open_low: bool = False, open_high: bool = False
) -> Setting:
    """A finite number between `low` and `high`, ends included unless open."""

    def parse(value: Any) -> float | None:
        good = _is(value, numbers.Real) and math.isfinite(value) and low <= value <= high
        return float(value) if good and not (open_low and value == low) and not (open_high and value == high) else None

    left = f"{'(' if open_low else '['}{low:g}"
    right = "∞)" if high == math.inf else f"{high:g}{')' if open_high else ']'}"
    return Setting(default, parse, f"a number in {left}, {right}", note)


def flag(default: bool, note: str) -> Setting:
    """True or False."""
    return Setting(default, lambda value: value if isinstance(value, bool) else None, "True or False", note)


def choice(default: str | None, options: Iterable[str], note: str) -> Setting:
    """One of a few words."""
    words = tuple(options)
    return Setting(default, lambda value: value if value in words else None, f"one of {', '.join(words)}", note)


def matching(default: str | None, pattern: str, allowed: str, note: str) -> Setting:
    """A string of a certain form; a path may be given as one."""

    def parse(value: Any) -> str | None:
        if isinstance(value, os.PathLike):
            value = str(Path(value).expanduser())
        return value if isinstance(value, str) and re.fullmatch(pattern, value) else None

    return Setting(default, parse, allowed, note)
