"""The JavaScript file gives PyTorch's logits."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from forms import CASES, case

from feddip_core.deploy.javascript import javascript

SCRIPT = """
const classifier = require(process.argv[2]);
const lines = require("fs").readFileSync(0, "utf8").trim().split("\\n").map(JSON.parse);
console.log(JSON.stringify({logits: lines.map((x) => Array.from(classifier.classify(x))),
  kept: classifier.layers.map((layer) => [layer.name, layer.kept, layer.multiplications])}));
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("node"), reason="Node is not installed")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bits", [16, 32])
def test_javascript_gives_pytorchs_logits(tmp_path, name, bits):
    graph, x = case(name)
    graph = graph.rounded(bits)
    (tmp_path / "model.js").write_text(javascript(graph, bits), "utf-8")
    samples = "\n".join(json.dumps(v.flatten().tolist()) for v in x)
    done = subprocess.run(
        ["node", "-e", SCRIPT, "-", tmp_path / "model.js"],
        input=samples,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    said = json.loads(done.stdout)
    assert np.abs(np.array(said["logits"]) - graph(x).numpy()).max() < 1e-4
    kept = [int(v.count_nonzero()) for v in graph.weights.values()]
    assert [count for _, count, _ in said["kept"]] == kept
    assert [count for *_, count in said["kept"]] == list(graph.multiplications().values())


def test_a_name_is_a_name():
    with pytest.raises(ValueError, match="name: 'a b' is not allowed"):
        javascript(case("own")[0], name="a b")


def test_a_model_cannot_end_the_script_of_a_page():
    assert "</script>" not in javascript(case("own")[0], note="</script>")
