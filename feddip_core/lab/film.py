"""The film of a layer's mask: what `play.js` needs to show it, in JupyterLab and in the gallery.

For each round it holds the mask, the server's average before pruning, and the threshold: the smallest weight that a new
mask kept.
"""

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
from PIL import Image

from ..engine import records
from ..experiment import Experiment
from ..masks import Mask, Weights
from ..study.figures import Picture

ROWS, COLUMNS = 60, 100  # of a layer are kept and shown, at most
PALETTE = ("#F2F2F2", "#7A8B99", "#D55E00")  # pruned, kept all along, returned; as in `figures.mask_history`
MIME = "application/vnd.feddip.film+json"
HERE = Path(__file__).parent
# The frame becomes as high as what is in it, and never lower again: else the page below would jump while a film plays.
GROWING = """<script>if (frameElement) new ResizeObserver(() => { const need = document.body.scrollHeight;
if (need > frameElement.clientHeight) frameElement.style.height = need + "px"; }).observe(document.body)</script>"""


@dataclass(frozen=True)
class Frame:
    """One round: the part of each layer that is shown."""

    values: Mapping[str, np.ndarray]
    threshold: float | None  # None where the mask stays

    @classmethod
    def of(cls, w: Weights, m: Mask, chosen: bool) -> "Frame":
        """The average before pruning, and the mask that is then applied; it may be a new one."""
        kept = [w[k][m[k]].abs().min() for k in m if m[k].any()] if chosen else []
        return cls({k: part(v).float().cpu().numpy().copy() for k, v in w.items()}, float(min(kept)) if kept else None)


class Watched(Protocol):
    """A run that has a film; `background.Trained` is one."""

    name: str
    settings: Mapping[str, Any]
    metrics: pd.DataFrame
    masks: Sequence[Mask]
    frames: Sequence[Frame]


def part(layer):
    """The part of a layer that is shown, as outputs × inputs."""
    return layer.flatten(1)[:ROWS, :COLUMNS]


def shown_best(m: Mask) -> str:
    """The largest layer that is shown whole, or else the first."""
    whole = {k: keep.numel() for k, keep in m.items() if part(keep).numel() == keep.numel()}
    return max(whole, key=lambda k: whole[k]) if whole else next(iter(m))


def mask_states(masks: Sequence[Mask], layer: str) -> Iterator[np.ndarray]:
    """After each round, outputs × inputs: 0 pruned, 1 kept all along, 2 returned after it had been pruned."""
    was_pruned: Any = False
    for m in masks:
        now = m[layer].flatten(1).cpu().numpy()
        yield now.astype(np.uint8) + (now & was_pruned)
        was_pruned = was_pruned | ~now


def film(runs: Sequence[Watched], layer: str) -> dict:
    """The data of a film of one run, or of two side by side."""
    return {"layer": layer, "runs": [_reel(run, layer) for run in runs], "why": why(runs[0])}


def _reel(run: Watched, layer: str) -> dict:
    states = list(mask_states(run.masks, layer))
    values = np.stack([np.nan_to_num(frame.values[layer], posinf=0, neginf=0) for frame in run.frames])
    scale = float(abs(values).max()) / 32767 or 1.0
    seen = np.stack([state[:ROWS, :COLUMNS] for state in states])
    returned = np.flatnonzero((seen == 2).any(0))
    return {
        "name": run.name, "frames": len(states), "rows": seen.shape[1], "columns": seen.shape[2], "scale": scale,
        "values": b64encode((values / scale).round().astype("<i2").tobytes()).decode(),
        "kept": b64encode(np.packbits(seen > 0).tobytes()).decode(),
        "counts": [np.bincount(state.ravel(), minlength=3).tolist() for state in states],
        "thresholds": [frame.threshold for frame in run.frames],
        "interesting": int(returned[0]) if len(returned) else 0,
    }  # fmt: skip


def why(run: Watched) -> str:
    """How many weights returned in the whole network, and why their share differs at the paper's scale."""
    n, rounds = sum(keep.numel() for keep in run.masks[0].values()), len(run.metrics)
    back = run.metrics["regrown"].sum()
    here = f"All layers together: {back:,} returns among {n:,} weights in {rounds} rounds ({back / n:.1%})."
    if not (full := full_scale()):
        return here
    paper = Experiment.preset("paper")
    return (
        f"{here} At the paper's scale: {full['back']:,} among {full['n']:,} in {full['rounds']:,} rounds "
        f"({full['back'] / full['n']:.1%}, seed 0), {full['early']:,} of them in the first 50. A pruned weight starts "
        "each round at zero and must pass the threshold before the round ends. The size of its steps decides: "
        f"{_steps(run.settings)} here; {_steps(paper.to_dict())} there."
    )


def _steps(settings: Mapping[str, Any]) -> str:
    return f"η {settings['learning_rate']:g}, momentum {settings['momentum']:g}, epochs {settings['local_epochs']}"


@lru_cache(maxsize=1)
def full_scale() -> dict[str, Any] | None:
    """Returns in the record of FedDIP on Fashion-MNIST at the paper's scale; None where there is no record."""
    try:
        metrics = records.load_run(records.folder_of(Experiment.preset("paper"), records.OWN_RECORDS))
    except (ValueError, OSError):
        return None
    regrown, zeros = metrics["regrown"], sum(map(int, metrics["layer_zeros"].iloc[-1].split()))
    n = round(zeros / metrics["sparsity"].iloc[-1])
    early = regrown[metrics["round"] <= 50].sum()
    return {"back": int(regrown.sum()), "n": n, "rounds": len(metrics), "early": int(early)}


def block(kind: str, data: dict | None = None) -> str:
    """An element that `play.js` fills."""
    inside = json.dumps(data).replace("<", "\\u003c") if data else "null"
    return f'<div class="play" data-play="{kind}"><script type="application/json">{inside}</script></div>'


def scripted(page: str) -> str:
    """The page with the script and style of its blocks, if it has any; the script must come after them."""
    if 'data-play="' not in page:
        return page
    style, script = ((HERE / f"play.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return f"<style>{style}</style>{page}<script>{script}</script>"


def frame(data: dict) -> str:
    """The film in a page of its own: a widget's HTML runs no script, that of an <iframe> does."""
    start = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Film</title><body style="margin: 0">'
    page, look = start + scripted(block("film", data)) + GROWING, "width: 100%; height: 560px; border: 0"
    return f'<iframe title="Film of {escape(data["layer"])}" style="{look}" srcdoc="{escape(page)}"></iframe>'


class Film(Picture):
    """In a notebook, the layer after the last round; from the same data the gallery makes a film."""

    def __init__(self, run: Watched, layer: str):
        *_, last = mask_states(run.masks, layer)
        pruned, stayed, back = np.bincount(last.ravel(), minlength=3).tolist()
        words = f"{pruned:,} weights pruned, {stayed:,} kept all along, {back:,} returned"
        super().__init__(mask_png(last), f"{layer} after round {len(run.masks) - 1}: {words}")
        self.data = film([run], layer)

    def _repr_mimebundle_(self, include=None, exclude=None):
        picture, metadata = super()._repr_mimebundle_(include, exclude)
        return picture | {MIME: self.data}, metadata


def mask_png(states: np.ndarray) -> bytes:
    """One square per weight, at most about 800 × 320 points in all."""
    rows, columns = states.shape
    side = max(1, min(800 // columns, 320 // rows))
    picture = Image.fromarray(states.astype(np.uint8).repeat(side, 0).repeat(side, 1), mode="P")
    picture.putpalette([int(shade[i : i + 2], 16) for shade in PALETTE for i in (1, 3, 5)])
    file = BytesIO()
    picture.save(file, format="png")
    return file.getvalue()


def blocks_of(cell: Mapping[str, Any]) -> str:
    """What the gallery shows after a cell: films among its outputs, and what its tags `play-…` ask for."""
    tags = [tag.removeprefix("play-") for tag in cell.get("metadata", {}).get("tags", []) if tag.startswith("play-")]
    films = [output["data"][MIME] for output in cell.get("outputs", []) if MIME in output.get("data", {})]
    return "".join([*map(block, tags), *(block("film", data) for data in films)])
