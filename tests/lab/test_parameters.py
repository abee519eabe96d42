"""What a notebook says to a parameter that it does not have, or that does not fit."""

import ast
from pathlib import Path

import nbformat
import papermill
import pytest

from feddip_core.lab.parameters import fault

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "notebooks").glob("*.ipynb"))
CELL = """rounds: int = 16  # T
target: float = 0.9
settings: dict = {}
preset: str = "smoke"
runs: str = ""
deploy: bool = True
"""


def told(given="", R=1, cell=CELL):
    """What is said of a notebook with this parameters cell, and these lines in Papermill's."""
    values, cells = {}, ["", cell, *(["# Parameters\n" + given] if given else []), "import math\ncheck_parameters()"]
    for text in cells[:-1]:
        exec(text, values)
    return fault(cells, values, R)


@pytest.mark.parametrize(
    "given", ["", "rounds = 4\ntarget = 1", "settings = {'rounds': 4}\ndeploy = False", "preset = 'paper'"]
)
def test_what_fits_passes(given):
    assert told(given, R=2) is None


@pytest.mark.parametrize(("given", "message"), [
    ("round = 30", "round: 30 is not allowed; this notebook has no such parameter; it has rounds, target, settings, "),
    ("rounds = '30'", "rounds: '30' is not allowed; it must be a whole number"),
    ("rounds = 30.0", "rounds: 30.0 is not allowed; it must be a whole number"),
    ("rounds = True", "rounds: True is not allowed; it must be a whole number"),
    ("target = '0.9'", "target: '0.9' is not allowed; it must be a number"),
    ("deploy = 'true'", "deploy: 'true' is not allowed; it must be true or false"),
    ("settings = '{rounds: 4}'", "settings: '{rounds: 4}' is not allowed; it must be names with values, as in"),
    ("preset = 'huge'", "preset: 'huge' is not allowed; it must be one of paper, narrow, smoke"),
    ("runs = 'nowhere'", "runs: 'nowhere' is not allowed; there is no record below /"),
    ("rounds = 15", "rounds: 15 is not allowed; it must be a multiple of R = 2 to end exactly at the target"),
])  # fmt: skip
def test_a_mistake_is_one_line_with_name_value_and_what_is_allowed(given, message):
    said = told(given, R=2)
    assert said.startswith(message) and "\n" not in said


def test_a_preset_without_the_data_set_is_told():
    cell = 'preset: str = "smoke"\ndataset: str = ""\n'
    assert told("preset = 'paper'\ndataset = 'fashion_mini'", cell=cell).startswith(
        "dataset: 'fashion_mini' is not allowed; "
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_checks_its_parameters_before_anything_else(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    notebook = nbformat.read(path, as_version=4)
    body = ast.parse(next(c for c in notebook.cells[2:] if "install" not in c.metadata.get("tags", [])).source).body
    first = next(node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)).value
    assert first.func.id == "check_parameters" and not first.args
    cells, values = ["", notebook.cells[1].source], {}
    exec(cells[1], values)
    assert fault(cells, values, **{k.arg: k.value.value for k in first.keywords}) is None  # its own are good


@pytest.mark.slow
def test_papermill_ends_at_an_unknown_parameter_with_that_line(tmp_path):
    path = next(path for path in NOTEBOOKS if path.stem == "30_quickstart")
    with pytest.raises(papermill.PapermillExecutionError) as caught:
        papermill.execute_notebook(
            path, tmp_path / "out.ipynb", parameters={"round": 30}, cwd=path.parent, kernel_name="python3",
            progress_bar=False, execution_timeout=300,
        )  # fmt: skip
    assert "round: 30 is not allowed; this notebook has no such parameter" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    ran = [cell.get("execution_count") for cell in nbformat.read(tmp_path / "out.ipynb", 4).cells]
    assert [count for count in ran if count] == [1, 2, 3]
