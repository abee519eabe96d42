"""The table of contents, the links to services, and the teachers' page of solutions."""

import json
from pathlib import Path

import pytest

from feddip_core.lab import contents, solutions
from feddip_core.lab.exercises import EXERCISES

NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


def test_the_start_page_shows_every_notebook():
    """It fails if a notebook was added after the start page was executed: run 00_start_here again."""
    cells = json.loads((NOTEBOOKS / contents.START).read_text("utf-8"))["cells"]
    outputs = [output["data"] for cell in cells for output in cell.get("outputs", []) if "data" in output]
    shown = "".join("".join(data.get("text/markdown", "")) for data in outputs)
    others = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb") if path.name != contents.START)
    assert [name for name in others if f"]({name})" not in shown] == []


def test_a_first_cell_is_read():
    text = "# A title\n*b*\n\n**Question.** Why?\n\nIn seconds, says he. Runs in about two minutes on a CPU."
    assert contents.told(text) == {"title": "A title", "subtitle": "b", "question": "Why?", "time": "about two minutes"}


def test_an_unknown_door_is_named():
    with pytest.raises(ValueError, match="door: 'out' is not allowed; it must be one of learn, reproduce, use"):
        contents.behind("out")


@pytest.mark.parametrize("address", ["https://github.com/a/b", "https://github.com/a/b.git", "git@github.com/a/b/"])
def test_links_to_services_follow_from_the_address_and_say_that_nobody_tried_them(address):
    text = contents.launch("00_start_here", address).text
    assert "colab.research.google.com/github/a/b/blob/main/notebooks/00_start_here.ipynb" in text
    assert "mybinder.org/v2/gh/a/b/main?" in text and text.count("(untried)") == 2


def test_without_an_address_there_are_no_links():
    assert "](" not in contents.launch("00_start_here").text


@pytest.fixture
def installing(monkeypatch, tmp_path):
    """The start page's cell that installs the package: run it with an address, and see what it calls."""
    cells = json.loads((NOTEBOOKS / contents.START).read_text("utf-8"))["cells"]
    (source,) = ["".join(c["source"]) for c in cells if "install" in c["metadata"].get("tags", [])]
    calls = []

    def called(command, check):
        calls.append(command)
        (tmp_path / "feddip" / "notebooks").mkdir(parents=True, exist_ok=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", called)
    return lambda address: exec(source, {"address": address}) or [" ".join(call) for call in calls]


def test_where_the_package_is_installed_nothing_is(installing, tmp_path):
    assert installing("https://github.com/a/b") == [] and Path.cwd() == tmp_path


def test_elsewhere_the_package_is_installed_and_the_notebooks_are_beside_it(installing, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    clone, install = installing("https://github.com/a/b")
    assert clone.startswith("git clone") and "https://github.com/a/b" in clone
    assert install.endswith("-m pip install ./feddip[notebooks]")
    assert Path.cwd() == tmp_path / "feddip" / "notebooks"


def test_elsewhere_an_address_is_asked_for(installing, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AssertionError, match="Set `address` above"):
        installing("")


def test_the_solutions_have_every_exercise_with_its_question_and_answer():
    page = solutions.page(NOTEBOOKS)
    asked = solutions.questions(NOTEBOOKS)
    assert set(asked) == set(EXERCISES)
    for name, exercise in EXERCISES.items():
        assert f"## {name}\n" in page and f"**Answer:** {solutions.solution(exercise)} (" in page
    assert "<details>" not in page and "Who has more say?" in page and "**Answer:** 3.1 (" in page


def test_no_notebook_for_students_links_to_the_solutions():
    for path in NOTEBOOKS.glob("[0-2]*.ipynb"):
        assert "solutions" not in path.read_text("utf-8"), path.name
