"""The model card: what a model was trained on, how, how good it is, where it ends, and how it is used."""

from collections.abc import Mapping
from pathlib import Path

from .graph import Graph
from .source import Finished

LOADER = (Path(__file__).parent / "loader.py").read_text("utf-8")
TRAINED = (
    "method", "dataset", "partition", "clients", "clients_per_round", "rounds", "local_epochs", "batch_size",
    "learning_rate", "sparsity_initial", "sparsity_target", "seed",
)  # fmt: skip
FORMS = {
    "model.safetensors": "kept weights and their positions; `loader.py` below reads it with PyTorch and safetensors",
    "model.c": "one C99 file without dependencies, which loops over the kept weights alone: `model_classify`",
    "model.js": "one JavaScript file without dependencies: `classifier.classify(sample)` in a page or in Node",
    "model.onnx": "for ONNX runtimes. It stores every zero: its size does not fall with sparsity, and a dense runtime "
    "is not faster for it",
}


TEXT = """---
license: mit
tags: [federated-learning, pruning, sparse]
---
# {model} on {dataset}, {sparsity:.1%} sparse

{clients} clients have trained this network together without sharing their data, with the method `{method}`.
{kept:,} of its {total:,} layer weights are kept.

- test accuracy: {test_accuracy:.4f}, on the test data of {dataset}, of the weights before they are rounded
- weights: {bits} bits each; biases and norms: 32 bits
- classes: {classes}
- run: {run_id}, code: {code}

## Files
{files}
All forms take raw samples ({shape}) and normalise them. All give the same logits up to rounding.

## Layers
{layers}
## How it was trained
{trained}

## Limits
- It knows the classes above and nothing else. Any other image gets one of them too.
- Logits are not calibrated: a large one does not mean that the answer is right.
- It was tested on data like those it was trained on. Robustness, fairness and privacy were not measured.
- Pruning may cost some classes more accuracy than others. Test on your own data before you rely on it.

## Licence
The model and its code: MIT. The data set has its own terms.

## Use it
This is `loader.py`. It needs PyTorch and safetensors, and nothing else:

```python
{loader}
```

```python
from loader import classify, load

about, tensors = load("model.safetensors")
logits = classify(about, tensors, samples)  # {shape}, as uint8 or float
name = about["classes"][logits[0].argmax()]
```

A file that you do not trust: `feddip_core.deploy.load` checks everything that it says before it takes memory.

In C: `cc -O3 -c model.c`, then `model_classify(sample, logits)`. In a page: `<script src="model.js"></script>`, then
`classifier.classify(sample)`.
"""


def card(done: Finished, graph: Graph, bits: int, sizes: Mapping[str, int]) -> str:
    """The card of a model that was written in these files, of so many bytes."""
    settings, names = done.settings, done.classes
    kept = {k: int(v.count_nonzero()) for k, v in graph.weights.items()}
    words = done.words | {"classes": ", ".join(names) if len(names) <= 20 else len(names)}
    return TEXT.format(
        **words, bits=bits, clients=settings["clients"], shape=_shape(graph), loader=LOADER.rstrip(),
        kept=sum(kept.values()), total=sum(v.numel() for v in graph.weights.values()),
        code=done.provenance.get("commit") or "an installed package", layers=_layers(graph, kept),
        files=_table(("file", "bytes", "what it is"), [(k, f"{v:,}", FORMS[k]) for k, v in sizes.items()]),
        trained="\n".join(f"- {k}: {settings[k]}" for k in TRAINED if settings.get(k) is not None),
    )  # fmt: skip


def _shape(graph: Graph) -> str:
    shape = " × ".join(["N", *map(str, graph.samples.shape)])
    return f"{shape}, pixels from 0 to 255" if graph.samples.scale == 255 else shape


def _layers(graph: Graph, kept: Mapping[str, int]) -> str:
    uses = graph.multiplications()
    rows = [
        (k.removesuffix(".weight"), " × ".join(map(str, v.shape)), f"{kept[k]:,} of {v.numel():,}",
         f"{1 - kept[k] / v.numel():.1%}", f"{uses[k]:,}")
        for k, v in graph.weights.items()
    ]  # fmt: skip
    return _table(("layer", "shape", "kept", "sparsity", "multiplications per sample"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
