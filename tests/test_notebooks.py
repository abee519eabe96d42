"""Notebooks keep their template, and every one runs headlessly; nbval compares their outputs in a step of its own."""

import ast
from pathlib import Path

import nbformat
import papermill
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
ids = [path.stem for path in NOTEBOOKS]


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=ids)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_one_parameters_cell_that_papermill_understands(notebook, tmp_path):
    tagged = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == [1]
    lines = notebook.cells[1].source.splitlines()
    path = tmp_path / "notebook.ipynb"
    nbformat.write(notebook, path)
    known = papermill.inspect_notebook(str(path))
    assert len(known) == len(lines)
    assert all(p["inferred_type_name"] != "None" and p["help"] for p in known.values())
    assert "out" in known


def test_cells_are_short(notebook):
    for cell in code(notebook):
        assert len(cell.source.splitlines()) <= 15, cell.source
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 5, f"{node.name} belongs into feddip_core"


def test_prose_stands_first_and_the_sections_are_there(notebook):
    assert notebook.cells[0].cell_type == "markdown"
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for heading in ("# ", "## What we saw", "## Exercises"):
        assert any(line.startswith(heading) for line in text.splitlines()), heading
    assert any("assert" in cell.source for cell in code(notebook))


def test_outputs_are_kept_clean_and_in_order(notebook):
    cells = [cell for cell in code(notebook) if cell.source]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any(output.output_type != "stream" for output in outputs)
    for output in outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.get("text")
        assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {}), "made with progress bars on"


def test_no_widget_that_makes_papermill_hang(notebook):
    for cell in code(notebook):
        for word in ("interact(", "interactive(", "interact_manual(", "widgets.Output", "import Output"):
            assert word not in cell.source


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory):
    """One folder of records for all notebooks, as in `make reproduce`: a run that two of them need is run once."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_papermill_runs_it_and_it_leaves_its_results(path, tmp_path, shared_runs):
    out = tmp_path / "outputs"
    out.mkdir()
    for name in ("runs", "smoke"):
        (out / name).symlink_to(shared_runs)
    executed = papermill.execute_notebook(
        path, tmp_path / path.name, parameters={"out": str(out)}, cwd=path.parent,
        kernel_name="python3", execution_timeout=600, progress_bar=False,
    )  # fmt: skip
    assert not any(output.output_type == "error" for cell in code(executed) for output in cell.outputs)
    assert {".png", ".svg"} <= {p.suffix for p in (out / "figures").rglob("*")}
    assert {".json", ".csv"} <= {p.suffix for p in shared_runs.rglob("*")}
