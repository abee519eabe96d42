"""The table of contents: what each notebook answers and how long it runs, read from its first cell."""

import json
import re
from importlib.metadata import metadata
from pathlib import Path

TIME = r"(?:(?:about|under) )?(?:half a minute|a minute(?: or two)?|\w+ minutes|seconds)"
START = "00_start_here.ipynb"  # which shows the table
# The doors of the collection, by the first digit of the notebooks behind them.
DOORS = {"learn": "0", "reproduce": "12", "use": "3"}


class Table:
    """Markdown in a notebook, with working links."""

    def __init__(self, text: str):
        self.text = text

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/markdown": self.text, "text/plain": self.text}


def told(text: str) -> dict[str, str]:
    """Title, subtitle, question and time, as a notebook's first cell has them."""
    patterns = {"title": r"^# (.+)$", "subtitle": r"^\*([^*].*)\*$", "question": r"^\*\*Question\.\*\* (.+)$"}
    found = {key: re.search(pattern, text, re.M) for key, pattern in patterns.items()}
    times = re.findall(TIME, text, re.I)
    return {key: match[1] if match else "" for key, match in found.items()} | {"time": times[-1] if times else ""}


def first_cell(path: Path) -> str:
    source = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
    return source if isinstance(source, str) else "".join(source)


def behind(door: str, folder: str | Path = ".") -> Table:
    """The notebooks behind a door: a link, the question, and the time on a CPU."""
    if door not in DOORS:
        raise ValueError(f"door: {door!r} is not allowed; it must be one of {', '.join(DOORS)}")
    rows = ["| notebook | what it answers | time |", "|---|---|---|"]
    for path in sorted(set(Path(folder).glob(f"[{DOORS[door]}]?_*.ipynb")) - {Path(folder) / START}):
        said = told(first_cell(path))
        rows.append(f"| [{path.stem[:2]} {said['title']}]({path.name}) | {said['question']} | {said['time'].lower()} |")
    return Table("\n".join(rows))


def launch(stem: str, address: str = "") -> Table:
    """Links that open a notebook in Colab and Binder, if the project has an address on GitHub.

    The address is the one in the package's metadata, unless another is given. Untried: both services need a network.
    """
    urls = [line.split(", ")[1] for line in metadata("feddip-core").get_all("Project-URL") or ()]
    place = re.search(r"github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?$", address or next(iter(urls), ""))
    if not place:
        return Table("No address on GitHub is set, so there are no links to Colab and Binder.")
    path = f"notebooks/{stem}.ipynb"
    colab = f"https://colab.research.google.com/github/{place[1]}/blob/main/{path}"
    binder = f"https://mybinder.org/v2/gh/{place[1]}/main?urlpath=lab/tree/{path}"
    return Table(f"[Open in Colab]({colab}) (untried) · [Open in Binder]({binder}) (untried)")
