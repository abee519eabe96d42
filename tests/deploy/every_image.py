"""Every form against PyTorch on 10,000 test images: python tests/deploy/every_image.py [RECORD …]

Of the records' LeNet-5, and of a narrow AlexNet, a narrow ResNet-18 and a network of one's own with random sparse
weights. Prints, of each form, the largest difference of a logit, how many classes differ, and how many of PyTorch's two
largest logits are closer than 2e-4: there another class would be no fault. Exit code 1 if a form is wrong.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import onnxruntime
import torch
from forms import case

from feddip_core import deploy
from feddip_core.deploy import file, source
from feddip_core.deploy.c import c_file, compiled
from feddip_core.deploy.javascript import javascript
from feddip_core.deploy.onnx_file import onnx_bytes
from feddip_core.engine import sources

IMAGES, CLOSE, FAR = 10_000, 2e-4, 1e-4
SCRIPT = """
const classifier = require(process.argv[1]), bytes = require("fs").readFileSync(process.argv[2]);
const x = new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4), size = classifier.size, all = [];
for (let i = 0; i < x.length; i += size) all.push(...classifier.classify(x.subarray(i, i + size)));
require("fs").writeFileSync(process.argv[3], Buffer.from(Float32Array.from(all).buffer));
"""


def in_node(graph, bits, x, folder):
    """The logits that the JavaScript file gives."""
    (folder / "model.js").write_text(javascript(graph, bits), "utf-8")
    (folder / "x").write_bytes(x.float().numpy().tobytes())
    subprocess.run(["node", "-e", SCRIPT, folder / "model.js", folder / "x", folder / "y"], check=True)
    return torch.frombuffer(bytearray((folder / "y").read_bytes()), dtype=torch.float32).view(len(x), -1)


def in_file(graph, bits, x, folder):
    (folder / "model.safetensors").write_bytes(file.to_bytes(graph, bits))
    return deploy.load(folder / "model.safetensors")[1](x)


def in_onnx(graph, bits, x, folder):
    session = onnxruntime.InferenceSession(onnx_bytes(graph), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"samples": x.float().numpy()})[0])


def in_c(graph, bits, x, folder):
    return compiled(c_file(graph))(x, graph.outputs)


FORMS = {"safetensors": in_file, "onnx": in_onnx, "c": in_c, "javascript": in_node}


def models(records):
    """Of each model its name, its graph and 10,000 raw samples."""
    for record in records:
        done = source.finished(record)
        yield Path(record).name, done.graph, sources.load(done.settings["dataset"]).x_test[:IMAGES]
    images = {"alexnet": "cifar10", "resnet18": "cifar100"}
    for name in ("lenet5", "alexnet", "resnet18", "own")[bool(records) :]:
        graph, x = case(name, IMAGES if name not in images else 1)
        yield f"{name}, random", graph, sources.load(images[name]).x_test[:IMAGES] if name in images else x


def main(records):
    wrong = False
    for name, graph, x in models(records):
        for bits in (16, 32):
            rounded = graph.rounded(bits)
            with torch.no_grad():
                right = torch.cat([rounded(part) for part in x.split(500)])
            top = right.topk(2).values
            close = top[:, 0] - top[:, 1] < CLOSE
            for form, run in FORMS.items():
                with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                    logits = run(rounded, bits, x, Path(folder))
                differs = logits.argmax(1) != right.argmax(1)
                far = (logits - right).abs().max().item()
                fault = far >= FAR or bool((differs & ~close).any())
                wrong |= fault
                said = dict(model=name, bits=bits, form=form, images=len(x), largest_difference=f"{far:.1e}")
                said |= dict(classes_that_differ=int(differs.sum()), near_ties=int(close.sum()), wrong=fault)
                print(json.dumps(said), flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
