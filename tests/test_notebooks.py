"""Notebooks keep their template, and every one runs headlessly; nbval compares their outputs in a step of its own."""

import ast
import itertools
import re
import shutil
from pathlib import Path

import nbformat
import pandas as pd
import papermill
import pytest
from grid import LocalGrid, run_on
from matplotlib import pyplot

from feddip_core import Experiment, flower
from feddip_core.engine.records import OWN_RECORDS, folder_of
from feddip_core.study import results, tables

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


def test_the_template_is_kept(notebook):
    assert faults(notebook) == []


# Papermill and nbclient hang on these at random.
FORBIDDEN = {"interact", "interactive", "interact_manual", "interactive_output", "Output"}


def faults(notebook) -> list[str]:
    """What in a notebook is not as the template wants it."""
    found = []
    if notebook.cells[0].cell_type != "markdown":
        found.append("no prose before the first cell")
    text = [line for cell in notebook.cells if cell.cell_type == "markdown" for line in cell.source.splitlines()]
    headings = ("# ", "## What we saw", "## Exercises")
    found += [f"no heading: {h}" for h in headings if not any(line.startswith(h) for line in text)]
    if not any("assert" in cell.source for cell in code(notebook)):
        found.append("no assertion")
    counts = [cell.execution_count for cell in code(notebook) if cell.source]
    if counts != list(range(1, len(counts) + 1)):
        found.append(f"execution counts are not in order: {counts}")
    return found + [fault for cell in code(notebook) for fault in (*source_faults(cell), *output_faults(cell))]


def source_faults(cell) -> list[str]:
    found = ["over 15 lines"] if len(cell.source.splitlines()) > 15 else []
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    for node in ast.walk(ast.parse(cell.source)):
        names = {getattr(node, "id", None), getattr(node, "attr", None)}
        names |= {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
        found += [f"makes papermill hang: {name}" for name in names & FORBIDDEN]
        if isinstance(node, functions) and node.end_lineno - node.lineno >= 5:
            found.append(f"a function of over five lines: {getattr(node, 'name', 'lambda')}")
    return [f"{fault}: {cell.source[:60]}" for fault in found]


def output_faults(cell) -> list[str]:
    found, pictures = [], 0
    for output in cell.outputs:
        data = output.get("data", {})
        words = output.get("text", "") + str(data.get("text/plain", "")) + str(data.get("text/html", ""))
        if output.output_type == "error" or "Traceback (most recent call last)" in words:
            found.append("a traceback")
        if output.get("name") == "stderr" or re.search(r"\w*Warning:", words):
            found.append("a warning")
        if "application/vnd.jupyter.widget-view+json" in data:
            found.append("made with progress bars on")
        if "image/png" in data:
            pictures += 1
            found += [] if output.metadata.get("image/png", {}).get("alt") else ["a figure without words"]
    # Whoever only looks at the page, without running it, sees every figure.
    shown = sum(getattr(node, "attr", None) == "show" for node in ast.walk(ast.parse(cell.source)))
    if shown and not pictures:
        found.append("a figure that is not shown")
    return [f"{fault}: {cell.source[:60]}" for fault in found]


UNEXPLAINED = set()  # notebooks whose assertions are still to be explained


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_every_assertion_says_what_it_means_if_it_fails(path):
    trees = [ast.parse(cell.source) for cell in code(nbformat.read(path, as_version=4))]
    bare = [ast.unparse(n) for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Assert) and n.msg is None]
    assert bool(bare) == (path.stem in UNEXPLAINED), bare


OWN = [path for path in NOTEBOOKS if re.match(r"0[0-79]|30|39", path.name)]


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_a_notebook_of_the_course_ends_with_where_to_go_next(path):
    last = nbformat.read(path, as_version=4).cells[-1].source
    links = re.findall(r"\]\(([\w-]+\.ipynb)\)", last)
    assert last.startswith("**Next:** ") and links and all((path.parent / link).exists() for link in links)


def good_notebook():
    cell = nbformat.v4.new_code_cell("assert figures.show(figure)", execution_count=1)
    picture = nbformat.v4.new_output("display_data", {"image/png": "…"}, metadata={"image/png": {"alt": "a curve"}})
    cell.outputs = [picture]
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A\n## What we saw\n## Exercises"), cell])


def warned(text, **kind):
    return lambda cell: cell.outputs.append(nbformat.v4.new_output("stream", text=text, **kind))


@pytest.mark.parametrize(
    "spoil, fault",
    [
        (lambda cell: cell.update(source=cell.source + "\n" * 15 + "1"), "over 15 lines"),
        (lambda cell: cell.update(source=cell.source + "\ndef f():\n" + "    1\n" * 5), "over five lines: f"),
        (lambda cell: cell.update(source=cell.source + "\nfrom ipywidgets import interact"), "hang: interact"),
        (lambda cell: cell.update(source=cell.source + "\nwidgets.Output()"), "hang: Output"),
        (lambda cell: cell.update(source="figures.show(figure)"), "no assertion"),
        (lambda cell: cell.update(execution_count=2), "not in order"),
        (lambda cell: cell.update(outputs=[]), "a figure that is not shown"),
        (lambda cell: cell.outputs[0].update(metadata={}), "a figure without words"),
        (warned("x.py:1: UserWarning: no"), "a warning"),
        (warned("anything", name="stderr"), "a warning"),
        (warned("Traceback (most recent call last):"), "a traceback"),
        (lambda cell: cell.outputs.append(nbformat.v4.new_output("error")), "a traceback"),
    ],
)
def test_what_breaks_the_template_is_found(spoil, fault):
    notebook = good_notebook()
    assert faults(notebook) == []
    spoil(notebook.cells[1])
    assert any(fault in found for found in faults(notebook)), faults(notebook)


def test_headings_and_prose_are_asked_for():
    notebook = good_notebook()
    notebook.cells[0].source = "# A"
    assert faults(notebook) == ["no heading: ## What we saw", "no heading: ## Exercises"]
    notebook.cells.reverse()
    assert "no prose before the first cell" in faults(notebook)


def one_run(exp, label):
    """What `results.find` reads of a run whose layers are all as sparse as the whole, but for one weight at the end."""
    sizes = results.layers(exp)["size"]
    s = getattr(exp, "sparsity_target", 0.0)
    zeros = [int(s * size) for size in sizes]
    zeros[-1] += round(s * sizes.sum()) - sum(zeros)
    columns = dict.fromkeys([*results.BITS, *results.RELEASED_MEBIBITS, "sparsity"], 1.0)
    columns["regrown"] = float(getattr(exp, "regrowth", "paper") != "released")
    columns |= dict(label=label, method=exp.method, seed=exp.seed, partition=exp.partition, diverged=None)
    columns |= {"layer_zeros": " ".join(map(str, zeros))}
    made = pd.DataFrame({"round": range(1, exp.rounds + 1)}).assign(**columns)
    tested = (made["round"] % exp.evaluate_every == 0) | (made["round"] > exp.rounds - 5)
    return made.assign(test_accuracy=tested.map({True: 0.5, False: float("nan")}))


def path_of(name):
    """The notebook of this name, whatever its number."""
    (path,) = NOTEBOOKS[0].parent.glob(f"[0-9][0-9]_{name}.ipynb")
    return path


def execute(name, given):
    """The cells of a notebook in this process, with parameters as Papermill would give them."""
    parameters, *cells = code(nbformat.read(path_of(name), as_version=4))
    exec(parameters.source, space := {"__name__": name})
    space |= given
    for cell in cells:
        exec(cell.source, space)
    pyplot.close("all")


RESULTS = ["accuracy", "communication", "non_iid", "layer_sparsity", "extreme_sparsity"]


@pytest.mark.parametrize(("name", "there"), [
    ("accuracy", 0), ("layer_sparsity", 1),
    *(pytest.param(name, there, marks=pytest.mark.slow) for name, there in itertools.product(RESULTS, (0, 1))
      if (name, there) not in (("accuracy", 0), ("layer_sparsity", 1))),
])  # fmt: skip
def test_a_result_says_which_records_are_missing(name, there, tmp_path, monkeypatch, capsys):
    find, dataset, preset = results.find, "cifar10", "narrow"

    def found(wanted, folder):
        (label, exps), (empty, states) = next(iter(wanted.items())), find(wanted, folder)
        states.loc[: there - 1, "state"] = "finished"
        return (one_run(exps[0], label) if there else empty), states

    for module in (results, tables):  # what a notebook calls, and what `searched` calls for it
        monkeypatch.setattr(module, "find", found)
    given = {"dataset": dataset, "preset": preset, "runs": str(tmp_path / "runs"), "out": str(tmp_path)}
    execute(name, given)
    text = capsys.readouterr().out
    assert re.search(rf"^{there} of \d+ runs are finished", text, re.M) and "no record for seed" in text
    assert "reduced: width" in text
    assert (tmp_path / "figures" / f"{name}-{dataset}-{preset}.svg").exists()


@pytest.mark.slow
def test_the_page_of_all_results_goes_on_without_a_record(tmp_path, capsys):
    """Without FedDIP's first run, on which most comparisons rest."""
    shutil.copytree(OWN_RECORDS, tmp_path / "runs")
    shutil.rmtree(folder_of(Experiment.preset("paper"), tmp_path / "runs"))
    execute("reproduction", {"runs": str(tmp_path / "runs"), "out": str(tmp_path)})
    assert re.search(r"^  feddip: no record for seeds? 0\b", capsys.readouterr().out, re.M)
    assert (tmp_path / "figures" / "reproduction.svg").exists()


# nbval runs every notebook with its default parameters, those of results on the records at the paper's scale. Papermill
# runs two of them once more, and in this process, which saves a kernel's start, the rest of those that have another way
# through: the records of narrow networks, and no deployment.
REDUCED = dict(preset="narrow", dataset="cifar10")
OTHER_WAYS = dict.fromkeys(
    ("communication", "non_iid", "layer_sparsity", "extreme_sparsity", "paper_vs_code"), REDUCED
) | {"flower": dict(rounds=2, deploy=False)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "given"), [("quickstart", {}), ("accuracy", REDUCED)], ids=["toy", "records"])
def test_papermill_runs_it_and_it_leaves_its_results(name, given, tmp_path):
    path = path_of(name)
    executed = papermill.execute_notebook(
        path, tmp_path / path.name, parameters={"out": str(tmp_path)} | given, cwd=path.parent,
        kernel_name="python3", execution_timeout=1800, progress_bar=False,
    )  # fmt: skip
    assert not any(output.output_type == "error" for cell in code(executed) for output in cell.outputs)
    assert {".png", ".svg"} <= {p.suffix for p in (tmp_path / "figures").rglob("*")}
    assert given or {".json", ".csv"} <= {p.suffix for p in (tmp_path / "runs").rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_WAYS)
def test_with_other_parameters_it_leaves_its_results_too(name, tmp_path, monkeypatch):
    monkeypatch.chdir(NOTEBOOKS[0].parent)
    monkeypatch.setattr(flower, "simulate", lambda exp, out, **_: run_on(LocalGrid(exp.clients), exp, out))
    execute(name, OTHER_WAYS[name] | {"out": str(tmp_path)})
    assert {".png", ".svg"} <= {p.suffix for p in (tmp_path / "figures").rglob("*")}


def test_figures_and_records_go_where_they_are_asked_for(notebook):
    """Every figure to `out`, under a name; of the runs at least one to a folder that follows from it."""
    calls = [n for cell in code(notebook) for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.Call)]
    shown = [call for call in calls if getattr(call.func, "attr", None) == "show"]
    given = [dict(zip(("figure", "alt", "out", "name"), call.args, strict=False)) for call in shown]
    given = [own | {k.arg: k.value for k in call.keywords} for own, call in zip(given, shown, strict=True)]
    assert given and all("name" in own and ast.unparse(own["out"]) == "out" for own in given)
    runs = [call for call in calls if getattr(call.func, "id", None) == "run"]
    kept = [
        ast.unparse(given) for c in runs for given in (*c.args[1:], *(k.value for k in c.keywords if k.arg == "out"))
    ]
    assert not runs or any(re.match(r"records|folder|f'{out}/runs'", place) for place in kept)
