"""The final model of a run, beside its record: what a server would send, in one small file.

The kept weights, the mask's bits and the statistics of batch norms, each in the form in which it travels at 32 bits.
LeNet-5 with nine of ten weights pruned takes 33 kB. Nothing is unpickled, and sizes are checked before memory is taken.
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
DELETE = "delete it, and the run makes it again"


def save(folder: Path, fed: Federation, state: State) -> None:
    """Keep the pruned model of this state; a file that holds it already is not touched."""
    layout, data = fed.clients.layout, fed.clients.data
    tensors = {"w": state.w, "statistics": state.statistics}
    if state.m is not None:
        tensors["mask"] = layout.flat_mask(state.m, like=state.w)
    arrays = _payload(tensors).pack(layout, tensors, state.m)
    plain = {"run_id": fed.exp.run_id, "round": state.t, "shapes": _shapes(layout)}
    if not is_hook(fed.exp.model):
        plain["network"] = {"num_classes": data.num_classes, **data.image}
    plain["sha256"] = digest(arrays, json.dumps(plain))
    # One entry, since safetensors writes several in any order: the same model is the same file.
    content = to_bytes(arrays, {"model": json.dumps(plain)})
    if not (folder / NAME).exists() or (folder / NAME).read_bytes() != content:
        write(folder / NAME, content)


@ambient()
def load_model(folder: str | Path) -> nn.Module:
    """The network of a record with its final weights, ready to classify normalised samples.

    Neither the data nor the method are needed; of a network of your own its function is.
    """
    folder = Path(folder)
    settings, kept = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "provenance"))
    plain, arrays = _read(folder, kept["run_id"])
    net = _network(settings, plain, folder)
    state = _state(folder, plain, arrays, layout := Layout.of(net))
    # The counters of batch norms have no effect here, and a network that takes no memory yet has none for them.
    counters = {k: torch.zeros_like(v, device="cpu") for k, v in net.named_buffers() if v.is_meta}
    tensors = {k: v.clone() for k, v in (layout.views(state.w) | layout.statistics.views(state.statistics)).items()}
    net.load_state_dict(counters | tensors, strict=False, assign=True)
    return net.eval()


def about(folder: str | Path) -> dict:
    """What the file of a record's final model says of it."""
    return _read(Path(folder), json.loads((Path(folder) / "provenance.json").read_text())["run_id"])[0]


def load(folder: Path, fed: Federation) -> State:
    """The last state of a finished run, as far as its model goes."""
    state = _state(folder, *_read(folder, fed.exp.run_id), fed.clients.layout)
    device = fed.clients.device
    m = state.m and {k: v.to(device) for k, v in state.m.items()}
    return state.replace(w=state.w.to(device), m=m, statistics=state.statistics.to(device))


def tested(folder: str | Path, data_dir: str | Path | None = None) -> tuple[float, float]:
    """Accuracy and loss of a record's final model on the test data, as its last round has measured them."""
    with _again(Path(folder), data_dir) as (fed, state):
        return measure.evaluate(fed, state)


def tested_per_client(folder: str | Path, data_dir: str | Path | None = None) -> pd.Series:
    """Of a record's final model, each client's accuracy; see `measure.client_accuracies`."""
    with _again(Path(folder), data_dir) as (fed, state):
        return measure.client_accuracies(fed, state)


@contextmanager
def _again(folder: Path, data_dir: str | Path | None) -> Iterator[tuple[Federation, State]]:
    """The federation of a record, and the state that it ended with."""
    exp = experiment_of(folder)
    with computing(exp):
        fed = assemble(exp, data_dir=data_dir)
        yield fed, load(folder, fed)


def _shapes(layout: Layout) -> dict[str, list[int]]:
    """Of every parameter and every statistic."""
    return {k: list(shape) for k, shape in (layout.shapes | layout.statistics_shapes).items()}


def _payload(names: Container[str]) -> Payload:
    """A model on its way to one who holds nothing; a dense one has no mask."""
    return Payload({k: form for k, form in {"mask": MASK, "w": KEPT, "statistics": STATISTICS}.items() if k in names})


def _read(folder: Path, run_id: str) -> tuple[dict, dict[str, Tensor]]:
    path = folder / NAME
    try:
        with safe_open(path, framework="pt") as file:  # which takes no more memory than the file has bytes
            plain = json.loads((file.metadata() or {})["model"])
            arrays = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118, not a dict
        sha256, known = plain.pop("sha256"), plain["run_id"]
    except FileNotFoundError:
        raise ValueError(f"{path} is not there; a run that reaches its last round keeps its model") from None
    except Exception as error:  # a damaged file fails in many ways
        raise ValueError(f"{path}: not a readable model ({type(error).__name__}: {error}); {DELETE}") from error
    if sha256 != digest(arrays, json.dumps(plain)):
        raise ValueError(f"{path}: its checksum does not match; {DELETE}")
    if known != run_id:
        raise ValueError(f"{path}: it is the model of the run {known}, not of {run_id}")
    return plain, arrays


def _network(settings: dict, plain: dict, folder: Path) -> nn.Module:
    """The network without its weights; one of ours takes no memory yet, whatever the file says of its size."""
    if is_hook(settings["model"]):
        return function_of(settings["model"], "model")()
    try:
        with torch.device("meta"):
            return models.build(settings["model"], width=settings["width"], norm=settings["norm"], **plain["network"])
    except Exception as error:
        raise ValueError(f"{folder / NAME}: it does not fit the network ({type(error).__name__}: {error})") from error


def _state(folder: Path, plain: dict, arrays: dict[str, Tensor], layout: Layout) -> State:
    """The arrays as the model that they are, if they fit the network."""
    try:
        if plain["shapes"] != _shapes(layout):
            raise ValueError("its layers have other names or shapes")
        tensors = _payload({"w", "statistics", *arrays}).unpack(layout, arrays, None)
        for name in ("w", "statistics"):
            if not tensors[name].isfinite().all():
                raise ValueError(f"{name} holds a number that is not finite")
    except ValueError as error:
        raise ValueError(f"{folder / NAME}: it does not fit the network; {error}") from error
    m = layout.mask_of(tensors["mask"]) if "mask" in tensors else None
    return State(int(plain["round"]), tensors["w"], m, tensors["statistics"])
