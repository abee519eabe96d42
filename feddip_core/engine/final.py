"""A run's final model, stored with its record: what a server would send, in one small file.

It holds the kept weights, the mask bits and the batch-norm statistics, each packed as it travels at 32 bits. LeNet-5
at 90 % sparsity takes 33 kB. Nothing is unpickled, and sizes are checked before memory is allocated.
"""

import json
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from .. import models
from ..communication import KEPT, MASK, STATISTICS, Payload
from ..experiment import is_hook
from ..layout import Layout
from ..server import Federation
from ..state import State
from . import measure
from .assembly import assemble
from .checkpoints import digest
from .computing import ambient, computing
from .records import experiment_of, write
from .sources import function_of

NAME = "model.safetensors"
DELETE = "delete it and run again to restore it"


def save(folder: Path, fed: Federation, state: State) -> None:
    """Write the pruned model of this state, unless the file already holds it."""
    layout, data = fed.clients.layout, fed.clients.data
    tensors = {"w": state.w, "statistics": state.statistics}
    if state.m is not None:
        tensors["mask"] = layout.flat_mask(state.m, like=state.w)
    arrays = _payload(tensors).pack(layout, tensors, state.m)
    plain = {"run_id": fed.exp.run_id, "round": state.t, "shapes": _shapes(layout)}
    if not is_hook(fed.exp.model):
        plain["network"] = {"num_classes": data.num_classes, **data.image}
    plain["sha256"] = digest(arrays, json.dumps(plain))
    # One entry: safetensors writes several in any order, and the same model must give the same file.
    content = to_bytes(arrays, {"model": json.dumps(plain)})
    if not (folder / NAME).exists() or (folder / NAME).read_bytes() != content:
        write(folder / NAME, content)


@ambient()
def load_model(folder: str | Path) -> nn.Module:
    """A record's network with its final weights, ready to classify normalised samples.

    Needs neither the data nor the method. The function of a network of your own must be importable.
    """
    folder = Path(folder)
    settings, kept = (json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("config", "provenance"))
    plain, arrays = _read(folder, kept["run_id"])
    net = _network(settings, plain, folder)
    state = _state(folder, plain, arrays, layout := Layout.of(net))
    # Batch-norm counters have no effect here, but a network on the meta device has no values for them.
    counters = {k: torch.zeros_like(v, device="cpu") for k, v in net.named_buffers() if v.is_meta}
    tensors = {k: v.clone() for k, v in (layout.views(state.w) | layout.statistics.views(state.statistics)).items()}
    net.load_state_dict(counters | tensors, strict=False, assign=True)
    return net.eval()


def about(folder: str | Path) -> dict:
    """What the file of a record's final model says of it."""
    return _read(Path(folder), json.loads((Path(folder) / "provenance.json").read_text("utf-8"))["run_id"])[0]


def load(folder: Path, fed: Federation) -> State:
    """The final state of a finished run: weights, mask and statistics."""
    state = _state(folder, *_read(folder, fed.exp.run_id), fed.clients.layout)
    device = fed.clients.device
    m = state.m and {k: v.to(device) for k, v in state.m.items()}
    return state.replace(w=state.w.to(device), m=m, statistics=state.statistics.to(device))


def tested(folder: str | Path, data_dir: str | Path | None = None) -> tuple[float, float]:
    """Accuracy and loss of a record's final model on the test data, as measured in its last round."""
    with _again(Path(folder), data_dir) as (fed, state):
        return measure.evaluate(fed, state)


def tested_per_client(folder: str | Path, data_dir: str | Path | None = None) -> pd.Series:
    """Each client's accuracy with a record's final model; see `measure.client_accuracies`."""
    with _again(Path(folder), data_dir) as (fed, state):
        return measure.client_accuracies(fed, state)


@contextmanager
def _again(folder: Path, data_dir: str | Path | None) -> Iterator[tuple[Federation, State]]:
    """A record's federation and its final state."""
    exp = experiment_of(folder)
    with computing(exp):
        fed = assemble(exp, data_dir=data_dir)
        yield fed, load(folder, fed)


def _shapes(layout: Layout) -> dict[str, list[int]]:
    """The shape of every parameter and every statistic."""
    return {k: list(shape) for k, shape in (layout.shapes | layout.statistics_shapes).items()}


def _payload(names: Container[str]) -> Payload:
    """The payload for a receiver that holds nothing yet; a dense model has no mask."""
    return Payload({k: form for k, form in {"mask": MASK, "w": KEPT, "statistics": STATISTICS}.items() if k in names})


def _read(folder: Path, run_id: str) -> tuple[dict, dict[str, Tensor]]:
    path = folder / NAME
    try:
        with safe_open(path, framework="pt") as file:  # allocates no more than the file's size
            plain = json.loads((file.metadata() or {})["model"])
            arrays = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118, not a dict
        sha256, known = plain.pop("sha256"), plain["run_id"]
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; a run writes it after its last round") from None
    except Exception as error:  # a damaged file fails in many ways
        raise ValueError(f"{path}: not a readable model ({type(error).__name__}: {error}); {DELETE}") from error
    if sha256 != digest(arrays, json.dumps(plain)):
        raise ValueError(f"{path}: its checksum does not match; {DELETE}")
    if known != run_id:
        raise ValueError(f"{path}: the model belongs to run {known}, not to {run_id}")
    return plain, arrays


def _network(settings: dict, plain: dict, folder: Path) -> nn.Module:
    """The network without weights. Ours is built on the meta device: a wrong size in the file allocates nothing."""
    if is_hook(settings["model"]):
        return function_of(settings["model"], "model")()
    try:
        with torch.device("meta"):
            return models.build(settings["model"], width=settings["width"], norm=settings["norm"], **plain["network"])
    except Exception as error:
        raise ValueError(f"{folder / NAME}: does not fit the network ({type(error).__name__}: {error})") from error


def _state(folder: Path, plain: dict, arrays: dict[str, Tensor], layout: Layout) -> State:
    """The arrays as a state, after checking that they fit the network."""
    try:
        if plain["shapes"] != _shapes(layout):
            raise ValueError("its layers have different names or shapes")
        tensors = _payload({"w", "statistics", *arrays}).unpack(layout, arrays, None)
        for name in ("w", "statistics"):
            if not tensors[name].isfinite().all():
                raise ValueError(f"{name} contains a number that is not finite")
    except ValueError as error:
        raise ValueError(f"{folder / NAME}: does not fit the network; {error}") from error
    m = layout.mask_of(tensors["mask"]) if "mask" in tensors else None
    return State(int(plain["round"]), tensors["w"], m, tensors["statistics"])
