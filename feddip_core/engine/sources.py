"""Load data from files, torchvision, or a function of your own.

A named data set is looked up in `data_dir`, then in the folder named by FEDDIP_DATA, then in the user's cache.
Each may hold `<name>.npz` or torchvision's layout. If none does, torchvision downloads the data set.
Your own data, which need not be images, come from a function `samples(client)`.
"""

import dataclasses
import gzip
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data import Dataset
from ..experiment import Experiment, imported, is_hook
from ..presets import CLASSES


class DataError(Exception):
    """A data set is missing or damaged; the message names the file and says what to do."""


MOST_CLASSES = 1_000_000  # a larger label is an identifier, not a class
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
MINI = Path(__file__).parent.parent / "assets" / "fashion_mini.npz"

# torchvision's class and the folder it keeps below its root.
TORCHVISION = {
    "fashion_mnist": ("FashionMNIST", "FashionMNIST/raw"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
}
FASHION_FILES = dict(zip(ARRAYS, (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
), strict=True))  # fmt: skip

# Checksums of the published arrays: images as N × C × H × W, labels as int64.
SHA256 = {
    "fashion_mnist": dict(
        x_train="2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        y_train="e3245b63f7c40d1c8b652835f19744d970c1613b40ddac6bcfc87b9c46e16a0b",
        x_test="c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        y_test="d51d859896c55775b9e9e219b77ff03bcec1b6ac322f313544dc3f9e7bc94fae",
    ),
    "cifar10": dict(
        x_train="9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
        y_train="f5cfe00b0f00968c0cc5ff3b1d2de51b10e33efa277c2986f4e0fa63e58c9f4f",
        x_test="177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
        y_test="cbb7365de8ed11f05cc4c3a1e7f78144127c5e851efd83762fb18202461230bb",
    ),
    "cifar100": dict(
        x_train="de64658905c6b161606e3649ddafce7cf86c7634a0cf9116d518e64ef46a33c5",
        y_train="8bf4935e7c77a3096270043c6f3b221b6ecb9c63d1a08608e9af66cff17e977a",
        x_test="83c56492b2c11211ad1bb2dbd4f2eef4170a0441e41a41f3039c3144b1f5a511",
        y_test="80031c23f8300724c6fbc588e4bccbe41c6392041782148727bb497b0132c4ad",
    ),
}

MEAN = {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4866, 0.4409)}
STD = {"cifar10": (0.2470, 0.2435, 0.2616), "cifar100": (0.2673, 0.2564, 0.2762)}
CROP_PADDING = {"cifar10": "zeros", "cifar100": "reflect"}


def function_of(hook: str, setting: str) -> Callable:
    """The function that a setting names."""
    function = imported(hook, setting)
    if not callable(function):
        raise ValueError(f"{setting}: {hook!r} is not allowed; it must be a function")
    return function


def of(exp: Experiment, data_dir: str | Path | None = None, clients: Iterable[int | None] | None = None) -> Dataset:
    """An experiment's data. Of data that clients bring, load only those of `clients`, where None is the server."""
    if is_hook(exp.dataset):
        return brought(exp.dataset, [None, *range(exp.clients)] if clients is None else clients)
    return load(exp.dataset, data_dir, exp.normalisation)


def load(name: str, data_dir: str | Path | None = None, normalisation: str = "standard") -> Dataset:
    """A data set by its name or .npz file; a DataError says what is missing or damaged, and where."""
    if is_hook(name):
        return brought(name, [None])
    if name == "fashion_mini":
        return _read_npz(MINI)
    if name not in CLASSES:
        return _read_npz(Path(name))
    dataset = _find(name, data_dir)
    if (statistics := mean_and_std(name, normalisation)) is None:
        return dataset
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in statistics)
    return dataclasses.replace(dataset, mean=mean, std=std, crop_padding=CROP_PADDING[name])


def mean_and_std(name: str, normalisation: str) -> tuple[list[float], list[float]] | None:
    """Mean and standard deviation per channel of pixels in [0, 1]; None if the data set is not standardised."""
    if name not in MEAN:
        return None
    # The statistics are those of x/255 already. The released code divides CIFAR-100's by 255 once more.
    scale = 255 if name == "cifar100" and normalisation == "released" else 1
    return tuple((torch.tensor(v[name]) / scale).tolist() for v in (MEAN, STD))


def described(data: Dataset) -> dict:
    """Shape and type of a sample, for users who have the model without the data."""
    return {"shape": list(data.x_train.shape[1:]), "dtype": str(data.x_train.dtype).removeprefix("torch.")}


def brought(hook: str, clients: Iterable[int | None]) -> Dataset:
    """Data from your own function: samples(n) returns client n's data, samples(None) the server's test data.

    It is called only for `clients`; all other data stay empty.
    """
    samples = function_of(hook, "dataset")
    parts = {n: _samples(samples, hook, n) for n in clients}
    like_x, like_y = (v[:0] for v in next(iter(parts.values())))
    for n, (x, _) in parts.items():
        if x.shape[1:] != like_x.shape[1:] or x.dtype != like_x.dtype:
            one, other = (f"{v.dtype} of shape {tuple(v.shape[1:])}" for v in (like_x, x))
            who = ["the server" if i is None else f"client {i}" for i in (next(iter(parts)), n)]
            raise DataError(f"{hook}: a sample of {who[0]} is {one}, but of {who[1]} {other}; they must match")
    x_test, y_test = parts.pop(None, (like_x, like_y))
    tensors = {
        "x_train": torch.cat([like_x, *(x for x, _ in parts.values())]),
        "y_train": torch.cat([like_y, *(y for _, y in parts.values())]),
        "x_test": x_test,
        "y_test": y_test,
    }
    owner = torch.cat([like_y, *(torch.full_like(y, n) for n, (_, y) in parts.items())])
    return Dataset(**tensors, sha256=_sha256(tensors), owner=owner)


def _samples(samples: Callable, hook: str, client: int | None) -> tuple[Tensor, Tensor]:
    where = f"{hook}({client})"
    try:
        x, y = (torch.as_tensor(v).detach().cpu().contiguous() for v in samples(client))
        labels = y.numpy()
    except Exception as error:
        raise DataError(f"{where}: it must return a pair (x, y) of arrays ({type(error).__name__}: {error})") from error
    if x.is_floating_point():
        x = x.to(torch.float32)
    if x.dtype not in (torch.uint8, torch.float32) or x.ndim < 2 or len(x) == 0:
        needs = "uint8 or float, N × …, N > 0; pass word indices as float, and use .long() in the network"
        raise DataError(f"{where}: x is {x.dtype} of shape {tuple(x.shape)}; it must be {needs}")
    if x.is_floating_point() and not x.isfinite().all():
        raise DataError(f"{where}: x contains a number that is not finite")
    return x, _labels(f"{where}: y", labels, len(x))


def _labels(name: str, y: np.ndarray, count: int) -> Tensor:
    """The labels as int64, after checking that there is one class number, from 0 up, per sample."""
    whole = y.astype(np.int64) if y.dtype.kind in "iu" and y.shape == (count,) else None
    if whole is None or (whole < 0).any():  # also an unsigned number beyond int64
        form = f"{y.dtype} of shape {y.shape}"
        raise DataError(f"{name} is {form}; it must hold one label 0, 1, … per sample, {count} in all")
    if whole.max() >= MOST_CLASSES:
        advice = "number the classes from 0, as np.unique(y, return_inverse=True)[1] does"
        raise DataError(f"{name} contains the label {whole.max()}; it must be below {MOST_CLASSES:,}: {advice}")
    return torch.from_numpy(whole)


def _sha256(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {k: hashlib.sha256(v.numpy().data if v.numel() else b"").hexdigest() for k, v in tensors.items()}


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "feddip"


def _find(name: str, data_dir: str | Path | None) -> Dataset:
    roots = [Path(p).expanduser() for p in (data_dir, os.environ.get("FEDDIP_DATA"), user_cache()) if p]
    folder = TORCHVISION[name][1]
    for root in roots:
        if (root / f"{name}.npz").is_file():
            return _published(name, root / f"{name}.npz", _read_npz(root / f"{name}.npz"))
        # A failed download leaves an empty folder.
        if (root / folder).is_dir() and any((root / folder).iterdir()):
            return _published(name, root / folder, _read_torchvision(name, root))
    try:
        _download(name, roots[0])
    except Exception as error:
        tried = ", ".join(str(root) for root in roots)
        raise DataError(
            f"{name} is not on this machine (looked for {name}.npz and {folder}/ in {tried}) and could not be "
            f"downloaded ({error}). Put it into one of these folders, or name another with data_dir or the variable "
            "FEDDIP_DATA. The data set fashion_mini is embedded and needs no download."
        ) from error
    return _published(name, roots[0] / folder, _read_torchvision(name, roots[0]))


def _download(name: str, root: Path) -> None:
    from ._torchvision import torchvision

    root.mkdir(parents=True, exist_ok=True)
    getattr(torchvision.datasets, TORCHVISION[name][0])(root, download=True)


def _published(name: str, path: Path, dataset: Dataset) -> Dataset:
    for key in ARRAYS:
        if dataset.sha256[key] != SHA256[name][key]:
            file = path / FASHION_FILES[key] if path.is_dir() and name == "fashion_mnist" else path
            raise DataError(f"{file}: {key} differs from the published {name}; delete {path} to download it again")
    return dataset


def _read_torchvision(name: str, root: Path) -> Dataset:
    folder = root / TORCHVISION[name][1]
    if name == "fashion_mnist":
        return _checked(folder, {key: _read_idx(folder / file) for key, file in FASHION_FILES.items()})
    from ._torchvision import torchvision

    cls = getattr(torchvision.datasets, TORCHVISION[name][0])
    # These archives contain pickles: read nothing whose checksum differs from torchvision's.
    for file, md5 in [*cls.train_list, *cls.test_list]:
        if not torchvision.datasets.utils.check_integrity(folder / file, md5):
            raise DataError(f"{folder / file}: missing or damaged; delete {folder} to download it again")
    parts = [cls(root, train=train) for train in (True, False)]
    return _checked(folder, dict(zip(ARRAYS, (v for p in parts for v in (p.data, np.array(p.targets))), strict=True)))


def _read_idx(path: Path) -> np.ndarray:
    packed = path.with_name(path.name + ".gz")
    try:
        if not path.exists() and packed.exists():
            part = path.with_name(path.name + ".part")
            part.write_bytes(gzip.decompress(packed.read_bytes()))
            part.replace(path)
        content = bytearray(path.read_bytes())
        shape = np.frombuffer(content, ">u4", content[3], offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + shape.nbytes).reshape(shape)
    except Exception as error:
        advice = f"delete {path.parent} to download it again"
        raise DataError(f"{path}: missing or damaged ({error}); {advice}") from error


def _read_npz(path: Path) -> Dataset:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in ARRAYS}
    except Exception as error:  # a damaged archive fails in many ways
        raise DataError(f"{path}: not a readable .npz with {', '.join(ARRAYS)} ({error})") from error
    return _checked(path, arrays)


def _checked(path: Path, arrays: dict[str, np.ndarray]) -> Dataset:
    tensors = {}
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.dtype != np.uint8 or x.ndim not in (3, 4):
            form = f"{x.dtype} with shape {x.shape}"
            raise DataError(f"{path}: x_{part} is {form}; it must be uint8, N × H × W or N × H × W × C")
        if x.ndim == 3:
            x = x[:, None]
        elif x.shape[-1] in (1, 3):
            x = x.transpose(0, 3, 1, 2)
        elif x.shape[1] not in (1, 3):
            raise DataError(f"{path}: x_{part} has shape {x.shape}; its images must have one or three channels")
        if x.shape[2] != x.shape[3]:
            raise DataError(f"{path}: the images of x_{part} are {x.shape[2]} × {x.shape[3]}; they must be square")
        if len(x) == 0:
            raise DataError(f"{path}: x_{part} contains no images")
        tensors[f"x_{part}"] = torch.from_numpy(np.ascontiguousarray(x))
        tensors[f"y_{part}"] = _labels(f"{path}: y_{part}", y, len(x))
    if tensors["x_train"].shape[1:] != tensors["x_test"].shape[1:]:
        raise DataError(f"{path}: x_train and x_test contain images of different shapes")
    if tensors["y_test"].max() > tensors["y_train"].max():
        raise DataError(f"{path}: y_test contains a label that y_train does not")
    return Dataset(**tensors, sha256=_sha256(tensors))
