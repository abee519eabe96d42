"""The C file compiles without a warning and gives PyTorch's logits."""

import shutil

import pytest
import torch
from forms import CASES, case

from feddip_core.deploy.c import c_file, compiled

needs_cc = pytest.mark.skipif(not shutil.which("cc"), reason="a C compiler is not installed")


@needs_cc
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_c_gives_pytorchs_logits(name):
    graph, x = case(name)
    run = compiled(c_file(graph), flags=["-O1"])
    logits = run(x, graph.outputs)
    assert (logits - graph(x)).abs().max() < 1e-4
    assert torch.equal(run(x.flip(0), graph.outputs).flip(0), logits)  # no call changes the next
