"""LeNet-5's gradient as one compiled function (native.cpp), several times as fast on a CPU as eager PyTorch.

It is compiled on first use into the user's cache, and needs a C++ compiler. It is fastest with AVX-512, then AVX2;
elsewhere it uses vectors of four, which NEON and SSE2 have.
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
# Fixed sets instead of -march=native: a cache in a shared home folder then serves machines of different kinds.
# Every machine has what is not named here.
FLAGS = {"AVX2": ["-mavx2", "-mfma"], "AVX512": ["-mavx512f", "-mfma"]}

LAYERS = {"conv1": nn.Conv2d, "conv2": nn.Conv2d, "fc1": nn.Linear, "fc2": nn.Linear, "fc3": nn.Linear}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Unavailable(Exception):
    """Why this network has no native gradient."""


class CannotBuild(Unavailable):
    """What this machine lacks for it."""


class Kernel:
    """`gradient` and `logits` of one LeNet-5, on its flat parameter vector."""

    def __init__(self, net: nn.Module, image: dict[str, int], device: torch.device):
        if not _is_lenet5(net):
            raise Unavailable("it knows only lenet5, as it is and without hooks")
        if device.type != "cpu" or next(net.parameters()).dtype != torch.float32:
            raise Unavailable("it computes in single precision on a CPU")
        if image["size"] % 4:
            raise Unavailable(f"it needs a size of the image that 4 divides, not {image['size']}")
        layers = net.conv1.out_channels, net.conv2.out_channels, net.fc1.out_features, net.fc2.out_features
        names = ("CHANNELS", "SIZE", "C1", "C2", "H1", "H2", "CLASSES")
        sizes = (image["channels"], image["size"], *layers, net.fc3.out_features)
        self.library = _library(*(f"-D{k}={v}" for k, v in zip(names, sizes, strict=True)))
        self.workspace = torch.zeros(self.library.workspace_bytes(), dtype=torch.uint8)
        self.classes, self.parameters = net.fc3.out_features, sum(p.numel() for p in net.parameters())
        if self.parameters != self.library.parameters():
            raise Unavailable(f"it knows only lenet5, whose {self.library.parameters():,} parameters are other ones")
        self.image = (image["channels"], image["size"], image["size"])

    def gradient(self, u: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(u, x, y) -> cross-entropy of the network with parameters u, and its gradient."""
        return self._gradient(u, x, y)

    def gradient_of(self, kept: Tensor) -> Gradient:
        """The same where `kept` is 1, to the same bits and in less time; elsewhere it may be 0 instead."""
        self._check(kept=kept)
        return partial(self._gradient, kept=kept.contiguous())

    def _gradient(self, u: Tensor, x: Tensor, y: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check(u=u, x=x)
        if y.shape != x.shape[:1] or y.dtype != torch.int64:
            raise ValueError(f"y: {y.dtype} {tuple(y.shape)} is not allowed; it must be an int64 for each of x")
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
        # What the compiled function could only answer with a crash.
        for name, t in tensors.items():
            shape = (len(t), *self.image) if name == "x" else (self.parameters,)
            if t.dtype != torch.float32 or t.shape != shape:
                raise ValueError(f"{name}: {t.dtype} {tuple(t.shape)} is not allowed; it must be float32 {shape}")


def _pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p | None]:
    if not all(t is None or t.is_cpu for t in tensors):
        raise ValueError("the native gradient takes tensors on the CPU")
    return [None if t is None else ctypes.c_void_p(t.data_ptr()) for t in tensors]


def _is_lenet5(net: nn.Module) -> bool:
    """Whether it computes what was compiled: no subclass, no other layer in it, no hook."""
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
        raise CannotBuild(f"it could not be made or loaded ({error})") from error
    library.gradient.restype, library.workspace_bytes.restype = ctypes.c_float, ctypes.c_int64
    return library


def _private(folder: Path) -> Path:
    """The folder, made if need be: one that nobody else can put code into."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name == "posix" and not (_own(folder) and stat.S_IMODE(folder.lstat().st_mode) & 0o022 == 0):
        raise CannotBuild(f"others can write to {folder}; make it yours alone (chmod go-w), or remove it")
    return folder


def _own(path: Path) -> bool:
    """Whether it belongs to this user, and is no link to something that may not."""
    return os.name != "posix" or (path.lstat().st_uid == os.getuid() and not path.is_symlink())


def _found(folder: Path, key: str) -> Path | None:
    """A library that an earlier process has compiled; its name tells its content, so that none is loaded by half."""
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
        raise CannotBuild("there is no C++ compiler (c++, g++ or clang++) on the PATH")
    with tempfile.TemporaryDirectory(dir=folder) as room:
        part = Path(room) / "lenet5.so"
        done = subprocess.run([compiler, *command, str(SOURCE), "-o", str(part)], capture_output=True, text=True)
        if done.returncode:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
            raise CannotBuild(f"{compiler} failed ({reason})")
        return part.replace(folder / f"lenet5-{key}-{_digest(part)}.so")
