import dataclasses
import gzip
import hashlib
import pickle
import socket

import numpy as np
import pytest
import torch

from feddip_core import Experiment, data, run
from feddip_core._torchvision import torchvision
from feddip_core.data import DataError


@pytest.fixture(scope="module")
def mini():
    return data.load("fashion_mini")


def labels(per_class, classes=10):
    return torch.arange(classes).repeat(per_class)


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
    assert data.MINI.stat().st_size < 4e6
    assert "Zalando" in data.MINI.with_name("fashion_mini.LICENSE").read_text()


def test_the_embedded_data_are_the_first_of_each_class(mini):
    try:
        full = data.load("fashion_mnist")
    except DataError:
        pytest.skip("the full Fashion-MNIST is not on this machine")
    first = torch.cat([torch.nonzero(full.y_train == c).flatten()[:600] for c in range(10)]).sort().values
    assert torch.equal(full.x_train[first], mini.x_train)


def test_normalisation_by_hand():
    x = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    plain = data.Dataset(x, x, x, x, {})
    assert plain.normalise(x).flatten().tolist() == pytest.approx([0, 0.2, 1])
    mean, std = torch.tensor([0.5, 0.2, 0.0]).view(3, 1, 1), torch.tensor([0.25, 0.1, 0.5]).view(3, 1, 1)
    scaled = data.Dataset(x, x, x, x, {}, mean, std)
    assert scaled.normalise(x).flatten().tolist() == pytest.approx([-2, 0, 2])


@pytest.mark.parametrize("padding", ["zeros", "reflect"])
def test_crops_and_flips_are_torchvisions(padding):
    v2 = torchvision.transforms.functional
    g = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, (20, 3, 32, 32), generator=g, dtype=torch.uint8)
    offsets, flips = torch.randint(0, 9, (2, 20), generator=g), torch.rand(20, generator=g) < 0.5
    ours = data.crop_and_flip(x, offsets, flips, padding)
    for i in range(20):
        padded = v2.pad(x[i].float(), [4], padding_mode="constant" if padding == "zeros" else "reflect")
        row, col = offsets[:, i].tolist()
        cut = v2.crop(padded, row, col, 32, 32)
        assert torch.equal(ours[i].float(), v2.hflip(cut) if flips[i] else cut)


def test_batches_cover_every_sample_once_an_epoch(mini):
    part = torch.arange(100, 200)
    seen = [(x, y) for x, y in data.batches(mini, part, 32, 2, torch.Generator().manual_seed(0))]
    assert [len(y) for _, y in seen] == [32, 32, 32, 4] * 2
    first = torch.cat([x for x, _ in seen[:4]])
    assert torch.equal(
        first.sum((1, 2, 3)).sort().values, mini.normalise(mini.x_train[part]).sum((1, 2, 3)).sort().values
    )
    assert not torch.equal(seen[0][1], seen[4][1])


def test_batches_are_cropped_and_flipped_anew_each_epoch(mini):
    augmented = dataclasses.replace(mini, crop_padding="zeros")
    part = torch.arange(50)
    first, second = (x for x, _ in data.batches(augmented, part, 50, 2, torch.Generator().manual_seed(0)))
    g = torch.Generator().manual_seed(0)
    order, offsets = torch.randperm(50, generator=g), torch.randint(0, 9, (2, 50), generator=g)
    flips = torch.rand(50, generator=g) < 0.5
    assert torch.equal(first, mini.normalise(data.crop_and_flip(mini.x_train[:50][order], offsets, flips, "zeros")))
    assert not torch.equal(first.sum((1, 2, 3)).sort().values, second.sum((1, 2, 3)).sort().values)


@pytest.mark.parametrize("rule", ["iid", "pathological", "shards", "dirichlet(0.3)", "dirichlet(0.001)"])
def test_partitions_are_disjoint_complete_and_seeded(rule):
    y = labels(120)
    parts = data.partition(y, rule, 20, seed=3)
    assert len(parts) == 20
    assert min(len(p) for p in parts) >= 1
    assert torch.cat(parts).sort().values.tolist() == list(range(1200))
    again, other = data.partition(y, rule, 20, seed=3), data.partition(y, rule, 20, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(parts, other, strict=True))


def test_iid_is_stratified_at_the_papers_scale():
    parts = data.iid(labels(6000), 50, seed=0)
    assert {tuple(labels(6000)[p].bincount().tolist()) for p in parts} == {(120,) * 10}


def test_pathological_is_the_authors_split():
    y = labels(6000)
    parts = data.pathological(y, 50, seed=0)
    held = [y[p].bincount(minlength=10) for p in parts]
    assert [h.nonzero().flatten().tolist() for h in held[::10]] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert [len(p) for p in parts[:10]] == [1198] * 9 + [1218]
    assert held[49].tolist() == [0] * 8 + [609, 609]
    parts = data.pathological(labels(5000), 50, seed=0)
    assert [len(p) for p in parts[:10]] == [998] * 9 + [1018]
    y = labels(500, classes=100)
    parts = data.pathological(y, 50, seed=0)
    assert y[parts[7]].unique().tolist() == [14, 15]
    assert {len(p) for p in parts} == {1000}


def test_shards_give_few_classes_each():
    y = labels(6000)
    parts = data.shards(y, 50, seed=0)
    assert {len(p) for p in parts} == {1200}
    assert max(len(y[p].unique()) for p in parts) <= 2


def test_dirichlet_goes_from_even_to_one_sided():
    y = labels(600)
    share = {
        a: np.mean([y[p].bincount().max() / len(p) for p in data.dirichlet(y, 10, a, seed=0)]) for a in (1000, 0.1)
    }
    assert share[1000] < 0.12
    assert share[0.1] > 0.4


def test_too_many_clients_are_refused(mini):
    with pytest.raises(ValueError, match="clients: 31 is not allowed; 60 training samples are enough for 30"):
        data.partition(labels(6), "iid", 31, seed=0)
    with pytest.raises(ValueError, match=r"clients: 7 is not allowed; the pathological partition"):
        data.partition(labels(60), "pathological", 7, seed=0)


def test_own_data_train(tmp_path):
    colour = np.random.default_rng(0).integers(0, 256, (40, 20, 20, 3), dtype=np.uint8)
    path = save_npz(tmp_path / "own.npz", x_train=colour, x_test=colour[:8])
    own = data.load(str(path))
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
        (dict(y_train=np.arange(39)), "y_train must hold one label"),
        (dict(y_train=np.full(40, -1)), "y_train must hold one label"),
        (dict(y_test=np.full(8, 9)), "y_test holds a label that y_train does not"),
        (dict(x_test=np.zeros((8, 32, 32), np.uint8)), "different shapes"),
        (dict(y_train=np.array([object()] * 40)), "own.npz"),
    ],
)
def test_bad_data_are_named(tmp_path, changes, problem):
    path = save_npz(tmp_path / "own.npz", **changes)
    with pytest.raises(DataError, match=problem) as caught:
        data.load(str(path))
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
        data.load(str(path))


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


@pytest.fixture
def fashion_root(tmp_path, monkeypatch):
    """A small Fashion-MNIST in torchvision's layout, published for the length of a test."""
    own = data.load(str(save_npz(tmp_path / "own.npz")))
    folder = tmp_path / "root" / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for key, file in data.FASHION_FILES.items():
        array = getattr(own, key).numpy().astype(np.uint8)
        (folder / file).write_bytes(idx(array[:, 0] if array.ndim == 4 else array))
    monkeypatch.setitem(data.SHA256, "fashion_mnist", own.sha256)
    return tmp_path / "root"


def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_torchvisions_layout_is_read(fashion_root, monkeypatch):
    assert data.load("fashion_mnist", fashion_root).x_train.shape == (40, 1, 28, 28)
    monkeypatch.setenv("FEDDIP_DATA", str(fashion_root))
    assert data.load("fashion_mnist").x_train.shape == (40, 1, 28, 28)
    packed = fashion_root / "FashionMNIST/raw/train-labels-idx1-ubyte"
    packed.with_name(packed.name + ".gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    assert data.load("fashion_mnist").y_train.shape == (40,)


def test_the_npz_comes_first_and_data_dir_before_the_variable(fashion_root, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDDIP_DATA", str(tmp_path / "root"))
    own = save_npz(tmp_path / "fashion_mnist.npz", y_train=np.zeros(40, int), y_test=np.zeros(8, int))
    with pytest.raises(DataError, match=f"{own}: y_train is not the published fashion_mnist's"):
        data.load("fashion_mnist", tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "flip"])
@pytest.mark.parametrize("file", data.FASHION_FILES.values())
def test_a_damaged_torchvision_file_is_named(fashion_root, file, damage):
    path = fashion_root / "FashionMNIST/raw" / file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content[:-5] if damage == "truncate" else content)
    with pytest.raises(DataError, match=f"{path}: "):
        data.load("fashion_mnist", fashion_root)


def test_a_damaged_cifar_file_is_named_and_never_unpickled(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(DataError, match=f"{folder / 'data_batch_1'}: missing or damaged"):
        data.load("cifar10", tmp_path)


@pytest.fixture(params=["cifar10", "cifar100"])
def cifar(request, tmp_path, monkeypatch):
    """A small CIFAR archive in torchvision's layout, with its checksums for the length of a test."""
    cls = getattr(torchvision.datasets, data.TORCHVISION[request.param][0])
    folder = tmp_path / data.TORCHVISION[request.param][1]
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
    monkeypatch.setitem(data.SHA256, request.param, data._read_torchvision(request.param, tmp_path).sha256)
    return request.param, tmp_path, cls, red


def test_a_cifar_archive_is_read_by_torchvision(cifar):
    name, root, cls, red = cifar
    ours, theirs = data.load(name, root), cls(root, train=True)
    assert ours.x_train.shape == (20 * len(cls.train_list), 3, 32, 32) and ours.x_test.shape == (20, 3, 32, 32)
    assert ours.x_train[0, 0, 0, 0] == red[0] and ours.x_test[0, 0, 0, 0] == red[-1]
    assert np.array_equal(ours.x_train.permute(0, 2, 3, 1).numpy(), theirs.data)
    assert ours.y_train.tolist() == theirs.targets


def test_a_damaged_cifar_archive_is_named(cifar):
    name, root, cls, _ = cifar
    path = root / data.TORCHVISION[name][1] / cls.test_list[0][0]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=f"{path}: missing or damaged; delete {path.parent}"):
        data.load(name, root)


@pytest.mark.parametrize("name", data.TORCHVISION)
def test_no_data_and_no_network_is_one_clear_error_every_time(tmp_path, monkeypatch, name):
    no_network(monkeypatch)
    monkeypatch.setenv("FEDDIP_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):  # a failed download leaves nothing that looks like data
        with pytest.raises(DataError, match=f"{name} is not on this machine") as caught:
            data.load(name, tmp_path / "argument")
    message = str(caught.value)
    for word in ("argument", "variable", "cache", "FEDDIP_DATA", "data_dir", "fashion_mini", f"{name}.npz"):
        assert word in message
    assert data.TORCHVISION[name][1] in message


def test_cifar_is_normalised_channel_by_channel(tmp_path, monkeypatch):
    colour = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    save_npz(tmp_path / "cifar100.npz", x_train=colour, x_test=colour[:8])
    monkeypatch.setitem(data.SHA256, "cifar100", data._read_npz(tmp_path / "cifar100.npz").sha256)
    standard = data.load("cifar100", tmp_path)
    white = torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)
    assert standard.normalise(white).flatten().tolist() == pytest.approx([1.8440, 2.0023, 2.0243], abs=1e-3)
    authors = data.load("cifar100", tmp_path, normalisation="authors")
    assert authors.normalise(white).flatten()[0] == pytest.approx(952.07, abs=0.1)  # (1 − 0.5071/255) / (0.2673/255)
    assert (standard.crop_padding, authors.crop_padding) == ("reflect", "reflect")
