"""The first call of every notebook: check the parameters from Papermill, or say in one line which is wrong.

Papermill itself accepts a parameter that the notebook does not have, and passes text where a number was meant.
"""

import ast
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..engine.records import record_folders
from ..presets import preset

PAPERMILLS = "# Parameters\n"  # the first line of the cell that Papermill adds after the notebook's own
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a text"),
    "bool": ((bool,), "true or false"),
    "dict": ((dict,), "names with values, as in papermill -y 'settings: {rounds: 4}'"),
}


class WrongParameter(ValueError):
    """Shown as one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def check_parameters(R: int = 1) -> None:
    """Parameters are known and have their type, a preset exists, a folder has records, and R divides the rounds."""
    ipython = sys.modules.get("IPython")  # a script has no notebook
    shell = ipython.get_ipython() if ipython else None
    if shell and (wrong := fault(shell.user_ns["In"], shell.user_ns, R)):
        raise WrongParameter(wrong)


def fault(cells: Sequence[str], values: Mapping[str, Any], R: int = 1) -> str | None:
    """What is wrong with the parameters after these cells, or None."""
    known = declared(cells)
    for name in handed_over(cells):
        if name not in known:
            there = f"this notebook has no such parameter; it has {', '.join(known)}"
            return f"{name}: {values[name]!r:.200} is not allowed; {there}"
    for name, kind in known.items():
        types, what = KINDS[kind]
        if not isinstance(values[name], types) or (kind != "bool" and isinstance(values[name], bool)):
            return f"{name}: {values[name]!r:.200} is not allowed; it must be {what}"
    return _unfit({name: values[name] for name in known}, R)


def _unfit(values: Mapping[str, Any], R: int) -> str | None:
    try:
        if "preset" in values:
            preset(values["preset"], values.get("dataset") or None)
    except ValueError as error:
        return str(error)
    if values.get("runs") and not record_folders(values["runs"]):
        return f"runs: {values['runs']!r} is not allowed; there is no record below {Path(values['runs']).resolve()}"
    if values.get("rounds", R) % R:
        return (
            f"rounds: {values['rounds']} is not allowed; it must be a multiple of R = {R} to end exactly at the target"
        )
    return None


def declared(cells: Sequence[str]) -> dict[str, str]:
    """The parameters with their types, from the cell that holds only these."""
    for cell in reversed(cells):
        body = ast.parse(cell).body
        found = {n.target.id: ast.unparse(n.annotation) for n in body
                 if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}  # fmt: skip
        if body and len(found) == len(body):
            return found
    return {}


def handed_over(cells: Sequence[str]) -> list[str]:
    """The names in Papermill's cell, if there is one."""
    cell = next((cell for cell in reversed(cells) if cell.startswith(PAPERMILLS)), "")
    return [
        node.id for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
