import os

# Progress bars of a notebook are output too, and would differ from run to run.
os.environ.setdefault("TQDM_DISABLE", "1")

import dataclasses
import gc
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from feddip_core import METHODS, Experiment
from feddip_core.engine import provenance, records, sources

gc.disable()  # until all tests are found: what is made until then stays
torch.set_num_threads(1)  # as `run` does: small convolutions only lose by more


@pytest.hookimpl(tryfirst=True)  # before the slow ones are left out
def pytest_collection_modifyitems(config, items):
    """Where tests are spread over cores, the slow ones begin: no core waits for another's last one."""
    for item in items:
        # Even a narrow ResNet-18 takes a second or two: it has 62 tensors of parameters.
        if "resnet18" in str(getattr(item, "callspec", SimpleNamespace(params="")).params):
            item.add_marker("slow")
        if {"site", "decks"} & set(getattr(item, "fixturenames", ())):  # built once, by the core with the browser
            item.add_marker(pytest.mark.xdist_group("browser"))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture
def tiny():
    """A narrow LeNet-5 on the embedded data: a run of a few rounds takes a second or two."""

    def make(method="feddip", **settings):
        defaults = dict(rounds=6, width=0.5, clients=40, clients_per_round=2, local_epochs=1, learning_rate=0.1)
        return Experiment.preset("smoke", method=method, **(defaults | settings))

    return make


@pytest.fixture(scope="session", autouse=True)
def read_once():
    """What is read often, and no test changes: the embedded data, our records, and which commit this is."""
    read, once, commit = sources._read_npz, cache(sources._read_npz), cache(provenance._commit)
    load, loaded = records.load_run, cache(records.load_run)

    def run_of(folder):
        return (loaded if Path(folder).is_relative_to(records.OWN_RECORDS) else load)(folder).copy(deep=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_read_npz", lambda path: (once if path == sources.MINI else read)(path))
        patch.setattr(provenance, "_commit", commit)
        patch.setattr(records, "load_run", run_of)
        yield


@pytest.fixture(scope="session")
def mini(read_once):
    """The embedded data; nothing changes them."""
    return sources.load("fashion_mini")


@pytest.fixture(scope="session")
def hardly_tested(mini):
    """The embedded data with few test images, where only what is trained is compared."""
    return dataclasses.replace(mini, x_test=mini.x_test[:20], y_test=mini.y_test[:20])


@pytest.fixture(scope="session")
def fashion_mnist():
    """The real data, where they are; nothing is downloaded for a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_download", lambda name, root: (_ for _ in ()).throw(OSError("not in a test")))
        try:
            return sources.load("fashion_mnist")
        except sources.DataError as error:
            if os.environ.get("DATA_REQUIRED"):
                raise
            pytest.skip(str(error))


@pytest.fixture(autouse=True)
def no_methods_of_other_tests():
    """A class that a test defines and uses is a known method; the next test does not know it."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The first page of the gallery, built once for all tests."""
    from feddip_core.lab import gallery  # its libraries are not needed by other tests

    notebooks = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
    return gallery.build(notebooks, tmp_path_factory.mktemp("site") / "site")


@pytest.fixture
def double_precision():
    """Training is chaotic: in single precision two right programs drift apart within a few rounds."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
