import numpy as np
import pytest

from feddip_core.engine.sources import MINI


@pytest.fixture(scope="session")
def few_images(tmp_path_factory):
    """240 images of the embedded data, as a file with a name that nobody should hear of."""
    file = tmp_path_factory.mktemp("data") / "patients.npz"
    with np.load(MINI) as mini:
        first = dict(x_train=240, y_train=240, x_test=40, y_test=40)
        np.savez(file, **{k: mini[k][:count] for k, count in first.items()})
    return file
