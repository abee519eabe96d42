"""For teachers: every exercise with its answer and the mistakes it knows: python -m feddip_core.lab.solutions [file]

The checks themselves compute the answers. No notebook links to the page, so students do not stumble on it.
"""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path

from ..engine.records import write
from .exercises import EXERCISES, Exercise, solution

ROOT = Path(__file__).parent.parent.parent  # of the checkout: an installed package has no notebooks beside it


def questions(folder: Path) -> dict[str, str]:
    """The text above each exercise, without its hint."""
    found = {}
    for path in sorted(folder.glob("*.ipynb")):
        cells = ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
        for before, cell in pairwise(cells):
            if asked := re.search(r'check\("(.+?)", answer\)', cell):
                found[asked[1]] = re.sub(r"\s*<details>.*</details>", "", before, flags=re.S)
    return found


def entry(name: str, exercise: Exercise, question: str) -> str:
    mistakes = "\n".join(f"- {what}" for what in exercise.mistakes)
    return (
        f"## {name}\n\n{question.replace('### ', '**', 1).replace(chr(10), '**' + chr(10), 1)}\n\n"
        f"**Answer:** {solution(exercise)} ({exercise.asked}): {exercise.right}\n\n"
        f"**Mistakes that the check explains:**\n\n{mistakes}\n"
    )


def page(folder: Path) -> str:
    asked = questions(folder)
    entries = [entry(name, exercise, asked.get(name, "")) for name, exercise in EXERCISES.items()]
    return "# Solutions of all exercises\n\nFor teachers.\n\n" + "\n".join(entries)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "outputs" / "solutions.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    write(target, page(ROOT / "notebooks"))
    print(f"The solutions are in {target}.")
