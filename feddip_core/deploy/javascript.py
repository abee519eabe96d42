"""A model as one JavaScript file without dependencies, for pages and for Node."""

import base64
import json
from pathlib import Path
from typing import Any

from .file import pack
from .graph import Graph

RUNTIME = (Path(__file__).parent / "network.js").read_text("utf-8")


def model(graph: Graph, bits: int = 16, **words: Any) -> str:
    """The model as JSON: what its file says and holds, with arrays in base64. `feddip.network` takes it."""
    about, parts = pack(graph, bits)
    # A slash is escaped so that no word of the model can end the script of a page.
    text = {k: base64.b64encode(v.numpy().tobytes()).decode() for k, v in parts.items()}
    shapes = [list(step.shape) for step in graph.steps]
    return json.dumps({**words, **about, "shapes": shapes, "parts": text}).replace("</", "<\\/")


def javascript(graph: Graph, bits: int = 16, name: str = "classifier", **words: Any) -> str:
    """One file: a script defines the global `name`, and Node's `require` gives it.

    `name.classify(sample)` takes the raw numbers of one sample, such as 784 pixels from 0 to 255, channel by channel
    and row by row, and gives its logits. `name.run(sample)` also gives the output of every step. `name.layers` says of
    each layer how many weights are kept, and where.
    """
    if not name.isidentifier():
        raise ValueError(f"name: {name!r} is not allowed; it must be a name such as classifier")
    exported = f'if (typeof module !== "undefined") module.exports = {name};\n'
    return f"{RUNTIME}\nconst {name} = feddip.network({model(graph, bits, **words)});\n{exported}"
