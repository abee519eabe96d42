"""`make torture` works: one attempt of each kind but that on Flower, whose lies are in tests/flower."""

import pytest
import torture


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, 1, 3])
def test_an_attempt_breaks_no_promise(n):
    torture.attempt(1, n)
