"""The exercises of the notebooks of results, 10 to 21, and of those that follow the quickstart."""

from .checking import Exercise

RESULTS: dict[str, Exercise] = {}
