"""The house: how long its parts are, and that imports point one way."""

import ast
import itertools
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "feddip_core"
PARTS = (
    "core",
    "methods",
    "methods/released",
    "engine",
    "study",
    "lab",
    "flower",
    "batch",
    "reproduce",
    "deploy",
    "export",
)
MOST_LINES = 1_650  # of the core, which is to be read in one sitting
MOST_LINES_OF_A_FUNCTION = 50

# What each part may import beside itself. `methods` and its folder `released` register each other.
BELOW = {
    "core": set(),
    "methods": {"core", "methods/released"},
    "methods/released": {"core", "methods"},
    "engine": {"core", "methods", "methods/released"},
    "study": {"core", "methods", "methods/released", "engine"},
    "lab": {"core", "methods", "methods/released", "engine", "study", "deploy"},
    "batch": {"core", "methods", "methods/released", "engine", "study"},
    "flower": {"core", "methods", "methods/released", "engine", "deploy"},
    "deploy": {"core", "methods", "methods/released", "engine"},
    "export": {"core", "methods", "methods/released", "engine", "deploy"},
    "reproduce": {"core", "methods", "methods/released", "engine", "study"},
}
THIRD_PARTY_OF_THE_CORE = {"torch", "numpy", "pandas"}
# An import inside a function, and why it is there.
LATE = {
    ("__init__.py", "_curves", "feddip_core.lab.live"): "the facade shows curves in notebooks alone",
    ("engine/sources.py", "_download", "feddip_core.engine._torchvision"): "slow to load, and needed for a download",
    ("engine/sources.py", "_read_torchvision", "feddip_core.engine._torchvision"): "the same",
    ("deploy/exporting.py", "_onnx", "onnxruntime"): "optional: the extra `deploy` brings it",
    ("deploy/exporting.py", "_onnx", "feddip_core.deploy.onnx_file"): "the same",
    ("flower/apps.py", "simulate", "flwr.simulation"): "brings Ray, which only a simulation needs",
    ("flower/apps.py", "start_ray", "ray"): "takes seconds, and only a simulation needs it",
    ("flower/apps.py", "start_ray", "ray._private.node"): "takes seconds, and only a simulation needs it",
    ("lab/live.py", "in_notebook", "IPython"): "optional: a script has no notebook",
    ("lab/live.py", "_draw", "IPython.display"): "optional: a script has no notebook",
}


def part_of(path):
    """The part of the house that a file, given by its path in the package, belongs to."""
    folder = path.parent.as_posix()
    return (
        "core" if folder == "." else next(p for p in sorted(PARTS, key=len, reverse=True) if f"{folder}/".startswith(p))
    )


@cache
def files():
    paths = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return {path: (PACKAGE / path).read_text("utf-8") for path in paths}


@cache
def trees():
    return {path: ast.parse(text) for path, text in files().items()}


@cache
def nodes():
    return {path: list(ast.walk(tree)) for path, tree in trees().items()}


def modules(path, node):
    """The full names of what an import names: of `from . import a, b` the modules a and b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not node.level:
        return [node.module]
    here = ["feddip_core", *path.parent.parts]
    base = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
    base = [word for word in base if word]
    inside = PACKAGE.joinpath(*base[1:])
    return [
        ".".join([*base, alias.name])
        if inside.is_dir() and ((inside / f"{alias.name}.py").exists() or (inside / alias.name).is_dir())
        else ".".join(base)
        for alias in node.names
    ]


@cache
def imports():
    """(file, the function around it or None, the module) of every import in the package."""
    return list(_imports())


def _imports():
    for path, found in nodes().items():
        inside = {}
        for function in found:
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                inside |= {id(node): function.name for node in ast.walk(function)}
        for node in found:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for module in modules(path, node):
                    yield path, inside.get(id(node)), module


def part_of_module(module):
    """The part that a module of ours belongs to."""
    path = Path(*module.split(".")[1:])
    if (PACKAGE / path).is_dir():
        path = path / "__init__"
    return part_of(path.with_suffix(".py"))


def lines(part):
    return sum(text.count("\n") for path, text in files().items() if part_of(path) == part)


def test_the_core_is_thin(capsys):
    counts = {part: lines(part) for part in PARTS}
    with capsys.disabled():
        print("\nlines:", ", ".join(f"{part} {count:,}" for part, count in counts.items()))
    assert all(counts.values()) and sum(counts.values()) == sum(text.count("\n") for text in files().values())
    assert counts["core"] <= MOST_LINES


def test_every_folder_is_a_part_of_the_house():
    folders = {path.parent.as_posix() for path in files()} - {"."}
    assert {folder for folder in folders if folder not in PARTS} <= {"study/figures", "lab/exercises"}


def test_imports_point_one_way():
    wrong = []
    for path, _, module in imports():
        if module.split(".")[0] != "feddip_core" or path == Path("__init__.py"):  # which is the facade
            continue
        here, there = part_of(path), part_of_module(module)
        if there != here and there not in BELOW[here]:
            wrong.append(f"{path} imports {module}")
        if module == "feddip_core" and path != Path("lab/api.py"):  # which describes it
            wrong.append(f"{path} imports the facade")
    assert not wrong


def test_nothing_is_imported_upwards_by_any_detour():
    """What may be imported is closed: whoever may import a part may import all that it does."""
    for part, below in BELOW.items():
        for other in below - {"methods", "methods/released"}:
            assert BELOW[other] <= below | {part}
    order = ["core", "methods", "engine", "study", "lab"]
    for low, high in itertools.combinations(order, 2):
        assert high not in BELOW[low]


def test_the_core_needs_three_libraries():
    top = {m.split(".")[0] for path, _, m in imports() if part_of(path) == "core" and path != Path("__init__.py")}
    assert top - set(sys.stdlib_module_names) - {"feddip_core"} <= THIRD_PARTY_OF_THE_CORE
    facade = {m.split(".")[0] for path, _, m in imports() if path == Path("__init__.py")}
    assert facade - set(sys.stdlib_module_names) <= {"feddip_core"}


def test_no_import_hides_in_a_function():
    found = {(path.as_posix(), function, module) for path, function, module in imports() if function}
    assert found <= set(LATE), "an import inside a function may hide a cycle"
    assert set(LATE) <= found, "this is no longer there"


@pytest.mark.parametrize("part", PARTS)
def test_no_function_is_long(part):
    functions = [
        (path, node)
        for path, found in nodes().items()
        if part_of(path) == part
        for node in found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {f"{path}:{node.name}": node.end_lineno - node.lineno + 1 for path, node in functions}
    assert functions and {k: v for k, v in long.items() if v > MOST_LINES_OF_A_FUNCTION} == {}


def texts_without_encoding(tree):
    """The lines that read or write text in whatever encoding the machine has: they break where it is not UTF-8."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", None))
        if name not in ("read_text", "write_text", "open") and "text" not in {word.arg for word in call.keywords}:
            continue
        words = {word.arg: ast.unparse(word.value) for word in call.keywords}
        arguments = [ast.unparse(argument) for argument in call.args]
        mode = words.get("mode", arguments[1] if len(arguments) > 1 else "'r'")
        if "encoding" not in words and (
            (name in ("read_text", "write_text") and arguments[-1:] != ["'utf-8'"])
            or (isinstance(call.func, ast.Name) and name == "open" and "b" not in mode)
            or words.get("text") == "True"
        ):
            yield call.lineno


def test_every_text_is_read_and_written_in_utf_8():
    tests = {path: ast.parse(path.read_text("utf-8")) for path in Path(__file__).parent.parent.rglob("*.py")}
    bare = {f"{path}:{line}" for path, tree in (trees() | tests).items() for line in texts_without_encoding(tree)}
    assert not bare


def test_a_text_without_encoding_is_found():
    bare = ["p.read_text()", "p.write_text(x)", "open(p)", "open(p, 'w')", "run(x, text=True)", "p.read_text('ascii')"]
    good = ["p.read_text('utf-8')", "p.write_text(x, 'utf-8')", "open(p, 'rb')", "open(p, 'w', encoding='utf-8')"]
    assert [list(texts_without_encoding(ast.parse(line))) for line in bare + good] == [[1]] * 6 + [[]] * 4


@pytest.mark.parametrize(("path", "text", "module", "part"), [
    ("engine/run.py", "from ..study import tables", "feddip_core.study.tables", "study"),
    ("engine/run.py", "from ..study.tables import accuracy", "feddip_core.study.tables", "study"),
    ("engine/run.py", "from . import records", "feddip_core.engine.records", "engine"),
    ("engine/run.py", "from .. import masks", "feddip_core.masks", "core"),
    ("methods/released/baselines.py", "from ...method import Method", "feddip_core.method", "core"),
    ("methods/released/baselines.py", "from ..snip import Snip", "feddip_core.methods.snip", "methods"),
    ("study/figures/run.py", "from ...engine.run import run", "feddip_core.engine.run", "engine"),
    ("server.py", "from .lab import live", "feddip_core.lab.live", "lab"),
    ("server.py", "import feddip_core.flower.wire", "feddip_core.flower.wire", "flower"),
])  # fmt: skip
def test_an_import_is_traced_to_its_part(path, text, module, part):
    (node,) = ast.parse(text).body
    assert modules(Path(path), node) == [module]
    assert part_of_module(module) == part
