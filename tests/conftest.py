import os

# Progress bars of a notebook are output too, and would differ from run to run.
os.environ.setdefault("TQDM_DISABLE", "1")

import importlib
from pathlib import Path

import pytest
import torch

from feddip_core import Experiment

torch.set_num_threads(1)  # as `run` does: small convolutions only lose by more


@pytest.fixture
def tiny():
    """A narrow LeNet-5 on the embedded data: a run of a few rounds takes a second or two."""

    def make(method="feddip", **settings):
        defaults = dict(rounds=6, width=0.5, clients=40, clients_per_round=2, local_epochs=1, learning_rate=0.1)
        return Experiment.preset("smoke", method=method, **(defaults | settings))

    return make


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The first page of the gallery, built once for all tests."""
    root = Path(__file__).parent.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / ".ci")
        gallery = importlib.import_module("gallery")
    return gallery.build(sorted((root / "notebooks").glob("*.ipynb")), tmp_path_factory.mktemp("site") / "site")


@pytest.fixture
def double_precision():
    """Training is chaotic: in single precision two right programs drift apart within a few rounds."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
