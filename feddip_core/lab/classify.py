"""The page of the gallery that runs the network: four models of finished runs, and a hundred garments to try them on.

Everything is in the page, models and pictures too, so it opens from disk and loads nothing.
"""

from base64 import b64encode
from collections.abc import Mapping
from html import escape
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ..deploy import file, javascript
from ..deploy.source import finished
from ..engine import final, sources
from ..engine.records import folder_of
from ..experiment import Experiment

HERE = Path(__file__).parent
TITLE = "How few weights does it take?"
BITS = 16  # of a weight
EACH = 10  # garments of a class
# The stops of the slider: the share of zeros, and the run that ends with it.
STOPS = {
    0.0: Experiment.preset("paper", method="fedavg"),
    **{s: Experiment.preset("paper", method="feddip", sparsity_target=s) for s in (0.9, 0.95, 0.99)},
}


def garments() -> tuple[Tensor, Tensor]:
    """The first test images of each class, N × 1 × 28 × 28 as bytes, and their classes."""
    data = sources.load("fashion_mini")
    first = torch.cat([(data.y_test == c).nonzero()[:EACH, 0] for c in range(data.num_classes)])
    return data.x_test[first], data.y_test[first]


def models(runs: str | Path, stops: Mapping[float, Experiment] = STOPS) -> dict[float, str]:
    """For each stop whose run has left its final model here, that model as JSON."""
    found = {}
    for s, exp in stops.items():
        folder = folder_of(exp, runs)
        if not (folder / final.NAME).exists():
            continue
        run = finished(folder)
        _, parts = file.pack(run.graph, BITS)
        size = sum(part.nbytes for part in parts.values())
        found[s] = javascript.model(run.graph, BITS, **run.words, stop=s, bytes=size)
    return found


def page(runs: str | Path, stops: Mapping[float, Experiment] = STOPS) -> str:
    """The body of the page; it says which of the models are not here."""
    found = models(runs, stops)
    x, y = garments()
    pictures = f'{{"pixels": "{b64encode(x.numpy().tobytes()).decode()}", "labels": {y.tolist()}}}'
    missing = [shown(s) for s in stops if s not in found]
    note = f"Not here yet, since their runs have not left a model: {', '.join(missing)}." if missing else ""
    body = (HERE / "classify.html").read_text(encoding="utf-8")
    body = body.replace("{{missing}}", escape(note)).replace("{{hidden}}", "" if note else "hidden")
    data = {"pictures": pictures, "models": f"[{', '.join(found.values())}]"}
    scripts = [f'<script type="application/json" id="{name}">{text}</script>' for name, text in data.items()]
    code = javascript.RUNTIME + (HERE / "classify.js").read_text(encoding="utf-8")
    return f"{body}{''.join(scripts)}<script>{code}</script>"


def shown(s: float) -> str:
    """A stop of the slider in words."""
    return f"{100 * s:g} % zeros" if s else "all weights"


def thumbnail() -> bytes:
    """One garment of each of eight classes, in two rows, dark on light."""
    x = garments()[0][::EACH][:8, 0]
    rows = torch.cat([torch.cat(list(row), 1) for row in x.split(4)])
    picture, png = Image.fromarray((255 - rows).numpy()), BytesIO()
    picture.resize((picture.width * 2, picture.height * 2), Image.Resampling.LANCZOS).save(
        png, format="png", optimize=True
    )
    return png.getvalue()


def link() -> str:
    """The link from the first page to this one."""
    words = "Pick a garment or draw one, and take weights away: the network runs in your browser."
    return f'<a class="try" href="classify.html"><img src="classify.png" alt=""><span><b>{TITLE}</b>{words}</span></a>'
