"""LeNet-5's and AlexNet's gradients, each as one compiled function (kernels/), faster on a CPU than eager PyTorch.

It is compiled into the user's cache on first use, which needs a C++ compiler. It is fastest with AVX-512, then AVX2.
Other machines use vectors of four, which NEON and SSE2 have.
"""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..client import Gradient
from ..models import AlexNet, LeNet5
from .sources import user_cache

FOLDER = Path(__file__).with_name("kernels")
# Fixed instruction sets instead of -march=native: one cache in a shared home folder serves different machines.
# Any other machine needs no flags.
FLAGS = {"AVX2": ["-mavx2", "-mfma"], "AVX512": ["-mavx512f", "-mfma"]}

CONV5, CONV3 = (nn.Conv2d, "(5, 5), stride=(1, 1))"), (nn.Conv2d, "(3, 3), stride=(1, 1), padding=(1, 1))")
FC = nn.Linear, "bias=True)"
# Each network's layers, with how its source computes them.
LAYERS = {
    LeNet5: dict(
        conv1=(nn.Conv2d, "(5, 5), stride=(1, 1), padding=(2, 2))"), conv2=CONV5, fc1=FC, fc2=FC, fc3=FC
    ),
    AlexNet: dict(
        conv1=(nn.Conv2d, "(3, 3), stride=(2, 2), padding=(1, 1))"),
        conv2=CONV3, conv3=CONV3, conv4=CONV3, conv5=CONV3, fc1=FC, fc2=FC, fc3=FC,
    ),
}  # fmt: skip
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Unavailable(Exception):
    """Why this network has no native gradient."""


class CannotBuild(Unavailable):
    """What this machine lacks to compile the native gradient."""


class Kernel:
    """`gradient` and `logits` of one LeNet-5 or AlexNet, on its flat parameter vector."""

    def __init__(self, net: nn.Module, image: dict[str, int], device: torch.device):
        if not _is_as_compiled(net):
            raise Unavailable("it supports only lenet5 and alexnet, unmodified and without hooks")
        if device.type != "cpu" or next(net.parameters()).dtype != torch.float32:
            raise Unavailable("it needs float32 on a CPU")
        name, sizes = _lenet5(net, image) if type(net) is LeNet5 else _alexnet(net, image)
        self.classes, self.parameters = net.fc3.out_features, sum(p.numel() for p in net.parameters())
        macros = sizes | {"CHANNELS": image["channels"], "CLASSES": self.classes}
        self.library = _library(name, *(f"-D{k}={v}" for k, v in macros.items()))
        if self.parameters != self.library.parameters():
            raise Unavailable(f"it supports only {name} with {self.library.parameters():,} parameters here")
        self.workspace = torch.zeros(self.library.workspace_bytes(), dtype=torch.uint8)
        self.image = (image["channels"], image["size"], image["size"])
        self.dropped = [net.fc1.in_features, net.fc2.in_features] if type(net) is AlexNet else []  # by a dropout

    def gradient(self, u: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(u, x, y) -> cross-entropy of the network with parameters u, and its gradient."""
        return self._gradient(u, x, y)

    def gradient_of(self, kept: Tensor) -> Gradient:
        """A faster gradient with the same bits where `kept` is 1; elsewhere it may be 0."""
        self._check(kept=kept)
        return partial(self._gradient, kept=kept.contiguous())

    def _gradient(self, u: Tensor, x: Tensor, y: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check(u=u, x=x)
        if y.shape != x.shape[:1] or y.dtype != torch.int64:
            raise ValueError(f"y: {y.dtype} {tuple(y.shape)} is not allowed; it must be one int64 per image")
        u, x, y = u.contiguous(), x.contiguous(), y.contiguous()  # crops and flips come as views
        g, dropouts = torch.empty_like(u), self._dropouts(len(x))
        loss = self.library.gradient(*_pointers(self.workspace, u, kept, x, y, g, *dropouts), len(x))
        if loss < 0:
            wrong = y[(y < 0) | (y >= self.classes)][0]
            raise ValueError(f"y: {wrong} is not allowed; a label must be at least 0 and below {self.classes}")
        return torch.tensor(loss), g

    def logits(self, u: Tensor, x: Tensor, training: bool = False) -> Tensor:
        """x -> logits of the network with parameters u; in training mode with dropout, as gradients have it."""
        self._check(u=u, x=x)
        u, x, out = u.contiguous(), x.contiguous(), torch.empty(len(x), self.classes)
        dropouts = self._dropouts(len(x)) if training else [None for _ in self.dropped]
        self.library.logits(*_pointers(self.workspace, u, x, out, *dropouts), len(x))
        return out

    def _dropouts(self, samples: int) -> list[Tensor]:
        """What each dropout multiplies its input by: the numbers that PyTorch would draw."""
        return [F.dropout(torch.ones(samples, units), 0.5) for units in self.dropped]

    def _check(self, **tensors: Tensor) -> None:
        # The compiled function would crash on these.
        for name, t in tensors.items():
            shape = (len(t), *self.image) if name == "x" else (self.parameters,)
            if t.dtype != torch.float32 or t.shape != shape:
                raise ValueError(f"{name}: {t.dtype} {tuple(t.shape)} is not allowed; it must be float32 {shape}")


def _pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p | None]:
    if not all(t is None or t.is_cpu for t in tensors):
        raise ValueError("the native gradient needs tensors on the CPU")
    return [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in tensors]


def _is_as_compiled(net: nn.Module) -> bool:
    """Whether the network computes what was compiled: no subclass, no replaced layer, no hook."""
    layers = LAYERS.get(type(net), {})
    if not layers or {k: type(v) for k, v in net.named_children()} != {k: kind for k, (kind, _) in layers.items()}:
        return False
    hooks = (getattr(module, k) for module in net.modules() for k in HOOKS)
    same = all(str(getattr(net, k)).endswith(how) for k, (_, how) in layers.items())
    return same and not any(hooks) and "forward" not in vars(net)


def _lenet5(net: LeNet5, image: dict[str, int]) -> tuple[str, dict[str, int]]:
    """Its source, and the shapes that it is compiled for."""
    if image["size"] % 4:
        raise Unavailable(f"it needs an image size divisible by 4, not {image['size']}")
    c, h = (net.conv1.out_channels, net.conv2.out_channels), (net.fc1.out_features, net.fc2.out_features)
    return "lenet5", {"SIZE": image["size"], "C1": c[0], "C2": c[1], "H1": h[0], "H2": h[1]}


def _alexnet(net: AlexNet, image: dict[str, int]) -> tuple[str, dict[str, int]]:
    if image["size"] != 32:
        raise Unavailable(f"for alexnet it needs an image size of 32, not {image['size']}")
    c = [layer.out_channels for layer in (net.conv1, net.conv2, net.conv3, net.conv4)]
    return "alexnet", {"C1": c[0], "C2": c[1], "C3": c[2], "C4": c[3], "H": net.fc1.out_features}


@cache
def _library(name: str, *sizes: str) -> ctypes.CDLL:
    capability = torch.backends.cpu.get_cpu_capability()
    command = ["-std=c++17", "-O3", "-w", "-shared", "-fPIC", *FLAGS.get(capability, []), *sizes]
    source = FOLDER / f"{name}.cpp"
    text = b"".join(path.read_bytes() for path in [source, *sorted(FOLDER.glob("*.hpp"))])
    key = f"{name}-{hashlib.sha256(text + ' '.join(command).encode()).hexdigest()[:16]}"
    try:
        folder = _private(user_cache() / "native")
        library = ctypes.CDLL(str(_found(folder, key) or _compiled(folder, key, command, source)))
    except OSError as error:
        raise CannotBuild(f"it could not be compiled or loaded ({error})") from error
    library.gradient.restype, library.workspace_bytes.restype = ctypes.c_float, ctypes.c_int64
    return library


def _private(folder: Path) -> Path:
    """Create the folder if needed; nobody else may put code into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name == "posix" and not (_own(folder) and stat.S_IMODE(folder.lstat().st_mode) & 0o022 == 0):
        raise CannotBuild(f"others can write to {folder}; restrict it with chmod go-w, or remove it")
    return folder


def _own(path: Path) -> bool:
    """Whether the path belongs to this user and is not a link."""
    return os.name != "posix" or (path.lstat().st_uid == os.getuid() and not path.is_symlink())


def _found(folder: Path, key: str) -> Path | None:
    """A library that an earlier process compiled. Its name holds its checksum, so a partial file is never loaded."""
    for path in folder.glob(f"{key}-*.so"):
        with suppress(FileNotFoundError):  # another process has just removed it
            if _own(path) and path.stem.endswith(_digest(path)):
                return path
            path.unlink()
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _compiled(folder: Path, key: str, command: list[str], source: Path) -> Path:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        raise CannotBuild("install a C++ compiler; c++, g++ and clang++ are not on the PATH")
    with tempfile.TemporaryDirectory(dir=folder) as room:
        part = Path(room) / "library.so"
        order = [compiler, *command, str(source), "-o", str(part)]
        done = subprocess.run(order, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
            raise CannotBuild(f"{compiler} failed ({reason})")
        return part.replace(folder / f"{key}-{_digest(part)}.so")
