"""LeNet-5's gradient as one compiled function (native.cpp), several times faster on a CPU than eager PyTorch.

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
from torch import Tensor, nn

from ..client import Gradient
from ..models import LeNet5
from .sources import user_cache

SOURCE = Path(__file__).with_name("native.cpp")
# Fixed instruction sets instead of -march=native: one cache in a shared home folder serves different machines.
# Any other machine needs no flags.
FLAGS = {"AVX2": ["-mavx2", "-mfma"], "AVX512": ["-mavx512f", "-mfma"]}

LAYERS = {"conv1": nn.Conv2d, "conv2": nn.Conv2d, "fc1": nn.Linear, "fc2": nn.Linear, "fc3": nn.Linear}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Unavailable(Exception):
    """Why this network has no native gradient."""


class CannotBuild(Unavailable):
    """What this machine lacks to compile the native gradient."""


class Kernel:
    """`gradient` and `logits` of one LeNet-5, on its flat parameter vector."""

    def __init__(self, net: nn.Module, image: dict[str, int], device: torch.device):
        if not _is_lenet5(net):
            raise Unavailable("it supports only lenet5, unmodified and without hooks")
        if device.type != "cpu" or next(net.parameters()).dtype != torch.float32:
            raise Unavailable("it needs float32 on a CPU")
        if image["size"] % 4:
            raise Unavailable(f"it needs an image size divisible by 4, not {image['size']}")
        layers = net.conv1.out_channels, net.conv2.out_channels, net.fc1.out_features, net.fc2.out_features
        names = ("CHANNELS", "SIZE", "C1", "C2", "H1", "H2", "CLASSES")
        sizes = (image["channels"], image["size"], *layers, net.fc3.out_features)
        self.library = _library(*(f"-D{k}={v}" for k, v in zip(names, sizes, strict=True)))
        self.workspace = torch.zeros(self.library.workspace_bytes(), dtype=torch.uint8)
        self.classes, self.parameters = net.fc3.out_features, sum(p.numel() for p in net.parameters())
        if self.parameters != self.library.parameters():
            raise Unavailable(f"it supports only lenet5, which has {self.library.parameters():,} parameters here")
        self.image = (image["channels"], image["size"], image["size"])

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
        g = torch.empty_like(u)
        loss = self.library.gradient(*_pointers(self.workspace, u, kept, x, y, g), len(x))
        if loss < 0:
            wrong = y[(y < 0) | (y >= self.classes)][0]
            raise ValueError(f"y: {wrong} is not allowed; a label must be at least 0 and below {self.classes}")
        return torch.tensor(loss), g

    def logits(self, u: Tensor, x: Tensor) -> Tensor:
        self._check(u=u, x=x)
        u, x, out = u.contiguous(), x.contiguous(), torch.empty(len(x), self.classes)
        self.library.logits(*_pointers(self.workspace, u, x, out), len(x))
        return out

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


def _is_lenet5(net: nn.Module) -> bool:
    """Whether the network computes what was compiled: no subclass, no replaced layer, no hook."""
    if type(net) is not LeNet5 or {k: type(v) for k, v in net.named_children()} != LAYERS:
        return False
    as_compiled = {net.conv1: "(5, 5), stride=(1, 1), padding=(2, 2))", net.conv2: "(5, 5), stride=(1, 1))"}
    hooks = (getattr(module, k) for module in net.modules() for k in HOOKS)
    same = all(str(layer).endswith(f"kernel_size={how}") for layer, how in as_compiled.items())
    return same and not any(hooks) and "forward" not in vars(net)


@cache
def _library(*sizes: str) -> ctypes.CDLL:
    capability = torch.backends.cpu.get_cpu_capability()
    command = ["-std=c++17", "-O3", "-w", "-shared", "-fPIC", *FLAGS.get(capability, []), *sizes]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    try:
        folder = _private(user_cache() / "native")
        library = ctypes.CDLL(str(_found(folder, key) or _compiled(folder, key, command)))
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
    for path in folder.glob(f"lenet5-{key}-*.so"):
        with suppress(FileNotFoundError):  # another process has just removed it
            if _own(path) and path.stem.endswith(_digest(path)):
                return path
            path.unlink()
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _compiled(folder: Path, key: str, command: list[str]) -> Path:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if compiler is None:
        raise CannotBuild("install a C++ compiler; c++, g++ and clang++ are not on the PATH")
    with tempfile.TemporaryDirectory(dir=folder) as room:
        part = Path(room) / "lenet5.so"
        order = [compiler, *command, str(SOURCE), "-o", str(part)]
        done = subprocess.run(order, capture_output=True, encoding="utf-8", errors="replace")
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
            raise CannotBuild(f"{compiler} failed ({reason})")
        return part.replace(folder / f"lenet5-{key}-{_digest(part)}.so")
