"""What a fresh machine installs: bounds, one set of tested versions, and a wheel with everything in it."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement

import feddip_core

ROOT = Path(__file__).parent.parent
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def lock():
    lines = (ROOT / "constraints.txt").read_text("utf-8").split()
    return {normal(name): pin for name, pin in (line.split("==") for line in lines)}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def declared(project, *extras):
    """The requirements of the core and of these extras; of all of them if none is named."""
    optional = project["optional-dependencies"]
    groups = [project["dependencies"], *(optional[extra] for extra in extras or optional)]
    return [Requirement(line) for group in groups for line in group]


def names(requirements):
    return {normal(requirement.name) for requirement in requirements}


def imports(tree):
    """Every absolute import below this node, by its first name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


distributions = cache(packages_distributions)  # it reads what every installed package has: a second


@cache
def ours():
    return {"feddip_core", *(path.stem for folder in ("tests", ".ci") for path in (ROOT / folder).rglob("*.py"))}


def third_party(modules):
    """The distributions that these modules come from: yaml is from pyyaml. An unknown module is its own."""
    modules = set(modules) - ours() - sys.stdlib_module_names
    return {module: {normal(name) for name in distributions().get(module, [module])} for module in modules}


def sources(folder):
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in path.parts]


def test_every_dependency_has_a_lower_bound_that_its_pin_satisfies(project, lock):
    for requirement in declared(project):
        assert [clause.operator for clause in requirement.specifier] == [">="], requirement
        assert lock[normal(requirement.name)] in requirement.specifier, requirement
    assert not any("+" in pin for pin in lock.values()), "a local build's version cannot be installed elsewhere"


def test_a_dependency_of_two_groups_has_one_bound(project):
    bounds = {(normal(requirement.name), str(requirement.specifier)) for requirement in declared(project)}
    assert len(bounds) == len(names(declared(project)))


def test_what_is_installed_is_what_is_locked(project, lock):
    for name in names(declared(project)):
        assert version(name).split("+")[0] == lock[name], name


def test_every_version_but_pytorchs_is_locked_with_hashes(lock):
    hashed, hashes = {}, 0
    for line in (ROOT / "hashes.txt").read_text("utf-8").splitlines():
        if entry := re.match(r"(\S+)==(\S+) .*\\$", line):
            assert hashes or not hashed, f"no hash before {line}"
            hashed[normal(entry[1])], hashes = entry[2], 0
        else:
            hashes += bool(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line))
    assert lock.items() - hashed.items() == {(name, lock[name]) for name in ("torch", "torchvision")}
    assert not [name for name in hashed if name.startswith(("nvidia", "cuda", "triton"))]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["build-system"]["requires"]
    assert build == [f"setuptools=={lock['setuptools']}"]


def test_conda_users_get_the_same(project, lock):
    environment = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
    assert set(environment) == {"name", "channels", "dependencies"} and environment["channels"] == ["conda-forge"]
    python, *of_pytorch, _, pip = environment["dependencies"]
    assert of_pytorch == [f"pytorch-cpu={lock['torch']}", f"torchvision={lock['torchvision']}"]
    extras = ",".join(project["optional-dependencies"])
    assert python == "python=" + project["requires-python"].removeprefix(">=")
    assert pip["pip"] == ["-c constraints.txt", f"-e .[{extras}]"]
    assert f"-c constraints.txt -e '.[{extras}]'" in (ROOT / "Makefile").read_text("utf-8")


def test_one_version_everywhere(project):
    assert feddip_core.__version__ == version("feddip-core") == project["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == project["version"]
    newest = re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert newest[1] == project["version"]


def test_what_the_package_imports_is_declared(project):
    allowed = names(declared(project, "notebooks", "flower", "deploy"))  # a user need not install the tests' tools
    for path in sources("feddip_core"):
        for module, origins in third_party(imports(ast.parse(path.read_text("utf-8")))).items():
            assert origins & allowed, f"{path.relative_to(ROOT)} imports {module}"


def test_what_tests_and_notebooks_import_is_declared(project):
    allowed = names(declared(project))
    found = {path.name: path.read_text("utf-8") for folder in ("tests", ".ci") for path in sources(folder)}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        lines = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code").splitlines()
        found[path.name] = "\n".join(line for line in lines if not line.startswith(("%", "!")))
    for name, source in found.items():
        for module, origins in third_party(imports(ast.parse(source))).items():
            assert origins & allowed, f"{name} imports {module}"


@pytest.mark.slow
def test_the_core_alone_can_be_imported_without_an_extra(project):
    code = (
        "import sys, feddip_core\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'feddip_core'), sep='\\n')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    core = {normal(Requirement(line).name) for line in project["dependencies"]}
    for path in map(Path, result.stdout.splitlines()):
        # Imports inside a function happen only when it is called.
        outside = [node for node in ast.parse(path.read_text("utf-8")).body if not isinstance(node, DEFINITIONS)]
        for module, origins in third_party(imports(ast.Module(outside, []))).items():
            assert origins & core, f"{path.name} imports {module}"


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_package(tmp_path):
    """Built from a copy, by the setuptools that is installed: without a network, without traces in this folder."""
    copy, caches = tmp_path / "project", shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "feddip_core", copy / "feddip_core", ignore=caches)
    (copy / "notebooks").mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "notebooks/31_experiment.ipynb"):
        shutil.copy(ROOT / name, copy / name)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=copy, capture_output=True, encoding="utf-8"
    )
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(ZipFile(wheel).namelist())
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "feddip_core").rglob("*") if path.is_file()}
    assert {name for name in wanted if "__pycache__" not in name} - packed == set()
    assert "feddip_core/py.typed" in packed
    data = {"alexnet.cpp", "common.hpp", "lenet5.cpp", "fashion_mini.npz", "fashion_mini.LICENSE"}
    assert data <= {Path(name).name for name in packed}
    assert not any(name.startswith(("tests/", "notebooks/", "outputs/")) for name in packed)
    # A batch and a deployment find what a checkout has beside the package.
    ZipFile(wheel).extractall(tmp_path / "site")
    ask = "from feddip_core.batch.jobs import NOTEBOOK; from feddip_core.flower.deployment import APP; "
    ask += "print(NOTEBOOK, APP / 'pyproject.toml', APP / 'LICENSE')"
    installed = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    found = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, env=installed, capture_output=True, check=True)
    names = ("notebooks/31_experiment.ipynb", "pyproject.toml", "LICENSE")
    for path, name in zip(found.stdout.decode().split(), names, strict=True):
        assert path.startswith(str(tmp_path / "site")) and Path(path).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.slow
def test_torchvision_imports_beside_any_torch():
    code = (
        "from feddip_core.engine._torchvision import torchvision; import torchvision.transforms; "
        "print(torchvision.datasets)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_real_failure_of_torchvision_is_not_hidden(tmp_path):
    broken = tmp_path / "torchvision"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('the disk is on fire')", "utf-8")
    code = "import feddip_core.engine._torchvision"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", env={"PYTHONPATH": str(tmp_path)}
    )
    assert result.returncode == 1
    assert "the disk is on fire" in result.stderr


def test_the_core_neither_prints_nor_unpickles():
    for path in sources("feddip_core"):
        source = path.read_text("utf-8")
        command = path.parent.name in ("batch", "export", "reproduce") or "__main__" in source  # it says how it went
        printing = () if command else ("print(",)
        for word in (*printing, "import pickle", "torch.load(", "allow_pickle=True"):
            assert word not in source, f"{path.name}: {word}"
