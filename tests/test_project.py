"""What a fresh machine installs: one lock, and everything else in step with it."""

import importlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from feddip_core import load_runs
from feddip_core.plots import NAMES

ROOT = Path(__file__).parent.parent


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def lock():
    lines = (ROOT / ".ci/lock.txt").read_text().split()
    return {normal(name): pin for name, pin in (line.split("==") for line in lines)}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def direct(project):
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return {normal(name) for group in groups for name in group}


def test_every_dependency_is_pinned_in_the_lock_alone(project, lock):
    assert direct(project) <= set(lock)
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in direct(project)), "a version outside the lock"
    assert not any("+" in pin for pin in lock.values()), "a local build's version cannot be installed elsewhere"


def test_what_is_installed_is_what_is_locked(project, lock):
    for name in direct(project):
        assert version(name).split("+")[0] == lock[name], name


def test_conda_users_get_the_same(project, lock):
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, _, pip = environment["dependencies"]
    assert python == "python=" + project["requires-python"].removeprefix(">=")
    assert pip["pip"] == ["-c .ci/lock.txt", f"-e .[{','.join(project['optional-dependencies'])}]"]
    assert f"-c .ci/lock.txt -e '.[{','.join(project['optional-dependencies'])}]'" in (ROOT / "Makefile").read_text()


def test_torchvision_imports_beside_any_torch():
    code = (
        "from feddip_core._torchvision import torchvision; import torchvision.transforms; print(torchvision.datasets)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_real_failure_of_torchvision_is_not_hidden(tmp_path):
    broken = tmp_path / "torchvision"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('the disk is on fire')")
    code = "import feddip_core._torchvision"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}
    )
    assert result.returncode == 1
    assert "the disk is on fire" in result.stderr


def test_the_core_neither_prints_nor_unpickles():
    for path in (ROOT / "feddip_core").glob("*.py"):
        source = path.read_text()
        printing = () if path.name == "batch.py" else ("print(",)  # a command, which has to say how it went
        for word in (*printing, "import pickle", "torch.load(", "allow_pickle=True"):
            assert word not in source, f"{path.name}: {word}"


def test_importing_the_core_needs_neither_torchvision_nor_widgets_nor_flower():
    others = ("torchvision", "ipywidgets", "jupyterlab", "flwr", "ray", "matplotlib")
    code = f"import sys, feddip_core; sys.exit(any(m in sys.modules for m in {others}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_readmes_tables_are_those_of_the_records(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    text = (ROOT / "README.md").read_text()
    assert importlib.import_module("readme").renewed(text) == text


def test_every_number_of_the_thirty_rounds_comes_from_its_record():
    records = load_runs(ROOT / "outputs" / "runs")
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| `(\w{12})` \|$", text, re.M)
    assert len(rows) == 10
    for name, accuracy, sparsity, megabytes, run_id in rows:
        run = records[records["run_id"] == run_id]
        last, sent = run.iloc[-1], (run["downlink_bits"] + run["uplink_bits"]).sum() / 8e6
        assert NAMES[last["method"]] == name
        assert last["round"] == last["rounds"] == 30
        assert (accuracy, sparsity, megabytes) == (f"{last.test_accuracy:.3f}", f"{last.sparsity:.3f}", f"{sent:.1f}")
    one_sided = records[(records["partition"] == "pathological") & (records["dataset"] == "fashion_mnist")]
    ends = (
        one_sided[(one_sided["round"] == 30) & (one_sided["rounds"] == 30)]
        .set_index("method")["test_accuracy"]
        .round(3)
    )
    assert ends.to_dict() == {"fedavg": 0.367, "fedprox": 0.366, "feddip_prox": 0.464}
