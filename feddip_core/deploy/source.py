"""What is exported: the network of a finished run or of its record, and the words that go with it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..engine import final
from ..engine.records import load_run
from ..engine.run import Run
from ..engine.sources import mean_and_std
from .graph import Graph, Samples, graph_of

CLASSES = {
    "fashion_mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"
    ),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
}  # fmt: skip
CLASSES["fashion_mini"] = CLASSES["fashion_mnist"]


@dataclass(frozen=True)
class Finished:
    """A finished run, as far as its model goes."""

    graph: Graph
    settings: Mapping
    metrics: pd.DataFrame
    provenance: Mapping

    @property
    def classes(self) -> list[str]:
        """Their names; numbers where there are none."""
        names = CLASSES.get(self.settings["dataset"], ())
        return list(names) if len(names) == self.graph.outputs else [str(i) for i in range(self.graph.outputs)]

    @property
    def words(self) -> dict:
        """What the metadata of every form say."""
        last = self.metrics.iloc[-1]
        kept = ("dataset", "partition", "method", "model", "rounds", "seed")
        return {
            "format": "feddip 1", "run_id": self.provenance["run_id"], **{k: self.settings[k] for k in kept},
            "test_accuracy": float(last["test_accuracy"]), "sparsity": float(last["sparsity"]), "classes": self.classes,
        }  # fmt: skip


def finished(source: Run | str | Path) -> Finished:
    """The model of a run, or of the folder of its record."""
    if isinstance(source, Run):
        if source.diverged or len(source.metrics) < source.experiment.rounds:
            raise ValueError("the run has not reached its last round; there is no final model to export")
        return _finished(source.network, source.experiment.to_dict(), source.metrics, source.provenance, {})
    folder = Path(source)
    net = final.load_model(folder)
    settings, provenance = (
        json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("config", "provenance")
    )
    return _finished(net, settings, load_run(folder), provenance, final.about(folder).get("network", {}))


def _finished(net, settings: dict, metrics: pd.DataFrame, provenance: dict, network: dict) -> Finished:
    form = provenance.get("samples")
    if form is None and network:  # a record of before samples were described
        form = {"shape": [network["channels"], network["size"], network["size"]], "dtype": "uint8"}
    if form is None:
        raise ValueError("provenance does not say what a sample is; run the experiment again in another folder")
    mean, std = mean_and_std(settings["dataset"], settings.get("normalisation", "standard")) or ((), ())
    samples = Samples(tuple(form["shape"]), 255.0 if form["dtype"] == "uint8" else 1.0, tuple(mean), tuple(std))
    return Finished(graph_of(net, samples), settings, metrics, provenance)
