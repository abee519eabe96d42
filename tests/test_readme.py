"""README: one page, whose numbers come from records and whose links lead somewhere."""

import json
import re
from pathlib import Path

import pytest

from feddip_core import Experiment
from feddip_core.study.readme import renewed

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def by_hand(text):
    """What is typed: without the parts that are made from records, without code and link targets."""
    text = re.sub(r"(?s)<!-- (\w+) -->.*?<!-- end of \1 -->|```.*?```|`[^`]*`", "", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def test_it_is_one_page():
    assert len(README.splitlines()) <= 200
    assert len(README.split()) <= 1500  # under six minutes, read at 250 words per minute


def test_its_sentences_are_short():
    prose = "\n".join(line for line in by_hand(README).splitlines() if not line.startswith(("|", "#", "!")))
    sentences = [s.split() for s in re.split(r"(?<=[.:?!*])\s+", prose) if len(s.split()) > 2]
    assert len(sentences) > 40
    assert sum(map(len, sentences)) / len(sentences) < 18 and max(map(len, sentences)) <= 40


def test_the_first_command_and_the_first_python_come_early():
    assert len(README[: README.index("```sh\nmake ")].split()) < 200
    assert len(README[: README.index("```python")].split()) < 260


@pytest.mark.slow
def test_its_tables_are_those_of_the_records():
    assert renewed(README) == README


def test_no_result_is_typed_by_hand():
    """Each number that is typed is a setting of Table II, a size of the project, or an estimate that says so."""
    exp = Experiment.preset("paper")
    table_ii = {exp.clients, exp.clients_per_round, exp.local_epochs, exp.rounds}
    others = {"2023", "2017", "3.11", "1.4", "12", "95", "0", "1", "10", "100", "1,600", "64", "0.2", "1.0"}
    others |= {f"{n:02}" for n in range(40)}  # notebooks
    typed = set(re.findall(r"(?<![\w-])\d[\d,.]*\d|(?<![\w-])\d(?!\w)", by_hand(README)))
    assert typed <= others | {f"{n:,}" for n in table_ii}, typed


def anchors(text):
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def links(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return text, re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize(
    "path", [*ROOT.glob("*.md"), *sorted((ROOT / "notebooks").glob("*.ipynb"))], ids=lambda p: p.name
)
def test_every_link_leads_somewhere(path):
    text, targets = links(path)
    for target in targets:
        file, _, anchor = target.partition("#")
        if re.match(r"https?:|data:|attachment:", target):
            continue
        assert not file or (path.parent / file).exists(), target
        if anchor and not file:
            assert anchor.lower() in anchors(text), target
