import gzip
import hashlib
import pickle
import socket

import numpy as np
import pytest
import torch

from feddip_core import Experiment, run
from feddip_core.engine import sources
from feddip_core.engine.sources import DataError


def save_npz(path, n=40, **changes):
    rng = np.random.default_rng(0)
    arrays = dict(
        x_train=rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), y_train=np.arange(n) % 4,
        x_test=rng.integers(0, 256, (8, 28, 28), dtype=np.uint8), y_test=np.arange(8) % 4,
    )  # fmt: skip
    arrays |= changes
    np.savez_compressed(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


def test_the_embedded_data(mini):
    assert mini.x_train.shape == (6000, 1, 28, 28)
    assert mini.x_test.shape == (1000, 1, 28, 28)
    assert mini.x_train.dtype == torch.uint8
    assert mini.y_train.bincount().tolist() == [600] * 10
    assert mini.y_test.bincount().tolist() == [100] * 10
    assert sources.MINI.stat().st_size < 4e6
    assert "Zalando" in sources.MINI.with_name("fashion_mini.LICENSE").read_text("utf-8")


def test_the_embedded_data_are_the_first_of_each_class(mini):
    try:
        full = sources.load("fashion_mnist")
    except DataError:
        pytest.skip("the full Fashion-MNIST is not on this machine")
    first = torch.cat([torch.nonzero(full.y_train == c).flatten()[:600] for c in range(10)]).sort().values
    assert torch.equal(full.x_train[first], mini.x_train)


def test_own_data_train(tmp_path):
    colour = np.random.default_rng(0).integers(0, 256, (40, 20, 20, 3), dtype=np.uint8)
    path = save_npz(tmp_path / "own.npz", x_train=colour, x_test=colour[:8])
    own = sources.load(str(path))
    assert own.x_train.shape == (40, 3, 20, 20)
    assert own.num_classes == 4
    assert own.x_train[5, 2, 3, 4] == colour[5, 3, 4, 2]
    e = Experiment.preset(
        "smoke", dataset=str(path), model="lenet5", width=0.2, rounds=2, clients=4, clients_per_round=2
    )
    assert len(run(e).metrics) == 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (dict(y_test=None), "y_test"),
        (dict(x_train=np.zeros((40, 28, 28))), "x_train is float64 with shape"),
        (dict(x_train=np.zeros((40, 28, 20), np.uint8)), "28 × 20; they must be square"),
        (dict(x_train=np.zeros((40, 28, 28, 4), np.uint8)), "one or three channels"),
        (dict(y_train=np.arange(39)), "y_train is .* it must hold one label"),
        (dict(y_train=np.full(40, -1)), "y_train is .* it must hold one label"),
        (
            dict(y_train=np.full(40, 10**12)),
            "y_train contains the label 1000000000000; it must be below 1,000,000: number",
        ),
        (dict(y_train=np.full(40, 2**63 + 5, np.uint64)), "y_train is uint64 .* it must hold one label"),
        (dict(y_test=np.full(8, 9)), "y_test contains a label that y_train does not"),
        (dict(x_test=np.zeros((8, 32, 32), np.uint8)), "different shapes"),
        (dict(y_train=np.array([object()] * 40)), "own.npz"),
    ],
)
def test_bad_data_are_named(tmp_path, changes, problem):
    path = save_npz(tmp_path / "own.npz", **changes)
    with pytest.raises(DataError, match=problem) as caught:
        sources.load(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", ["truncate", "flip", "method", "npy", "empty"])
def test_a_damaged_npz_is_named(tmp_path, damage):
    path = save_npz(tmp_path / "own.npz")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[2000] ^= 0xFF
    if damage == "method":  # in the central directory: a compression that zip does not know
        content[content.rindex(b"PK\x01\x02") + 10] ^= 0x40
    path.write_bytes({"truncate": content[:4000], "empty": b""}.get(damage, content))
    if damage == "npy":
        with open(path, "wb") as file:
            np.save(file, np.arange(3))
    with pytest.raises(DataError, match=r"own\.npz: not a readable \.npz"):
        sources.load(str(path))


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


@pytest.fixture
def fashion_root(tmp_path, monkeypatch):
    """A small Fashion-MNIST in torchvision's layout, published for the length of a test."""
    own = sources.load(str(save_npz(tmp_path / "own.npz")))
    folder = tmp_path / "root" / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for key, file in sources.FASHION_FILES.items():
        array = getattr(own, key).numpy().astype(np.uint8)
        (folder / file).write_bytes(idx(array[:, 0] if array.ndim == 4 else array))
    monkeypatch.setitem(sources.SHA256, "fashion_mnist", own.sha256)
    return tmp_path / "root"


def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_torchvisions_layout_is_read(fashion_root, monkeypatch):
    assert sources.load("fashion_mnist", fashion_root).x_train.shape == (40, 1, 28, 28)
    monkeypatch.setenv("FEDDIP_DATA", str(fashion_root))
    assert sources.load("fashion_mnist").x_train.shape == (40, 1, 28, 28)
    packed = fashion_root / "FashionMNIST/raw/train-labels-idx1-ubyte"
    packed.with_name(packed.name + ".gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    assert sources.load("fashion_mnist").y_train.shape == (40,)


def test_the_npz_comes_first_and_data_dir_before_the_variable(fashion_root, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDDIP_DATA", str(tmp_path / "root"))
    own = save_npz(tmp_path / "fashion_mnist.npz", y_train=np.zeros(40, int), y_test=np.zeros(8, int))
    with pytest.raises(DataError, match=f"{own}: y_train differs from the published fashion_mnist"):
        sources.load("fashion_mnist", tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "flip"])
@pytest.mark.parametrize("file", sources.FASHION_FILES.values())
def test_a_damaged_torchvision_file_is_named(fashion_root, file, damage):
    path = fashion_root / "FashionMNIST/raw" / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content[:-5] if damage == "truncate" else content)
    with pytest.raises(DataError, match=f"{path}: "):
        sources.load("fashion_mnist", fashion_root)


def test_a_damaged_cifar_file_is_named_and_never_unpickled(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(DataError, match=f"{folder / 'data_batch_1'}: missing or damaged"):
        sources.load("cifar10", tmp_path)


@pytest.fixture(params=["cifar10", "cifar100"])
def cifar(request, tmp_path, monkeypatch):
    """A small CIFAR archive in torchvision's layout, with its checksums for the length of a test."""
    from feddip_core.engine._torchvision import torchvision  # brings torch's compiler: seconds

    cls = getattr(torchvision.datasets, sources.TORCHVISION[request.param][0])
    folder = tmp_path / sources.TORCHVISION[request.param][1]
    folder.mkdir()
    rng, key, red = np.random.default_rng(0), cls.meta["key"], []

    def written(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    def batch(name):
        pixels = rng.integers(0, 256, (20, 3 * 32 * 32), dtype=np.uint8)  # a row an image: all red, green, then blue
        red.append(pixels[0, 0])
        return written(name, {"data": pixels, "labels" if key == "label_names" else "fine_labels": [*range(10)] * 2})

    monkeypatch.setattr(cls, "train_list", [batch(name) for name, _ in cls.train_list])
    monkeypatch.setattr(cls, "test_list", [batch(name) for name, _ in cls.test_list])
    names = {key: [str(i) for i in range(10)]}
    monkeypatch.setattr(cls, "meta", cls.meta | {"md5": written(cls.meta["filename"], names)[1]})
    monkeypatch.setitem(sources.SHA256, request.param, sources._read_torchvision(request.param, tmp_path).sha256)
    return request.param, tmp_path, cls, red


def test_a_cifar_archive_is_read_by_torchvision(cifar):
    name, root, cls, red = cifar
    ours, theirs = sources.load(name, root), cls(root, train=True)
    assert ours.x_train.shape == (20 * len(cls.train_list), 3, 32, 32) and ours.x_test.shape == (20, 3, 32, 32)
    assert ours.x_train[0, 0, 0, 0] == red[0] and ours.x_test[0, 0, 0, 0] == red[-1]
    assert np.array_equal(ours.x_train.permute(0, 2, 3, 1).numpy(), theirs.data)
    assert ours.y_train.tolist() == theirs.targets


def test_a_damaged_cifar_archive_is_named(cifar):
    name, root, cls, _ = cifar
    path = root / sources.TORCHVISION[name][1] / cls.test_list[0][0]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=f"{path}: missing or damaged; delete {path.parent}"):
        sources.load(name, root)


@pytest.mark.parametrize("name", sources.TORCHVISION)
def test_no_data_and_no_network_is_one_clear_error_every_time(tmp_path, monkeypatch, name):
    no_network(monkeypatch)
    monkeypatch.setenv("FEDDIP_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):  # a failed download leaves nothing that looks like data
        with pytest.raises(DataError, match=f"{name} is not on this machine") as caught:
            sources.load(name, tmp_path / "argument")
    message = str(caught.value)
    for word in ("argument", "variable", "cache", "FEDDIP_DATA", "data_dir", "fashion_mini", f"{name}.npz"):
        assert word in message
    assert sources.TORCHVISION[name][1] in message


def test_cifar_is_normalised_channel_by_channel(tmp_path, monkeypatch):
    colour = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    save_npz(tmp_path / "cifar100.npz", x_train=colour, x_test=colour[:8])
    monkeypatch.setitem(sources.SHA256, "cifar100", sources._read_npz(tmp_path / "cifar100.npz").sha256)
    standard = sources.load("cifar100", tmp_path)
    white = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    assert standard.normalise(white).flatten().tolist() == pytest.approx([1.8440, 2.0023, 2.0243], abs=1e-3)
    released = sources.load("cifar100", tmp_path, normalisation="released")
    assert released.normalise(white).flatten()[0] == pytest.approx(952.07, abs=0.1)  # (1 − 0.5071/255) / (0.2673/255)
    assert (standard.crop_padding, released.crop_padding) == ("reflect", "reflect")
